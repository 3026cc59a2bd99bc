"""What is refused by its name alone is what building the model would refuse, in the same words."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from privlab.base import PrivlabError
from privlab.experiments.training.classifier_names import CLASSIFIERS, check_classifier_name, classifier_names
from privlab.victims import ARCHITECTURES, COMPACT, check_img_size, check_victim_name, victim
from privlab.victims.names import folder_of, victim_names
from privlab.victims.zoo import NOT_ATTACKED


@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if architecture not in COMPACT])
def test_the_patches_are_those_that_timm_builds(name: str) -> None:
    with torch.device("meta"):
        vit = timm.create_model(ARCHITECTURES[name])
    assert isinstance(vit, VisionTransformer)
    side = vit.patch_embed.patch_size[0]
    check_img_size(name, 3 * side)
    check_img_size(f"{name}_mjp", None)
    with pytest.raises(PrivlabError, match=f"patches of {side}×{side} pixels, so give a multiple, such as {2 * side}"):
        check_img_size(f"{name}_nope", 3 * side - 1)


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(("name", "size"), [("vit_ti", 40), ("cifar_vit_early", 34), ("tiny_vit_mjp", 60)])
def test_a_size_is_refused_as_the_victim_refuses_it(name: str, size: int) -> None:
    said = []
    for refuse in (check_img_size, lambda name, size: victim(name, weights="random", img_size=size)):
        with pytest.raises(PrivlabError) as refused:
            refuse(name, size)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_size_of_what_timm_alone_knows_is_left_to_timm() -> None:
    check_img_size("timm:vit_base_patch32_224", 33)


def test_every_name_is_known_and_no_other() -> None:
    for name in (*victim_names(), "timm:whatever"):
        check_victim_name(name)
        check_classifier_name(name)
    assert tuple(CLASSIFIERS) == NOT_ATTACKED
    for name in CLASSIFIERS:
        check_classifier_name(name)
        with pytest.raises(PrivlabError, match="This needs a plain ViT"):
            check_victim_name(name)
    check_classifier_name("swin_t_mjp")
    assert classifier_names() == [*victim_names(), *CLASSIFIERS]
    for check in (check_victim_name, check_classifier_name):
        with pytest.raises(PrivlabError, match=r"'deit_xs'.*deit_s"):
            check("deit_xs")


def test_a_path_is_refused_if_it_is_no_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("cifar_vit", "mine", "empty"):
        Path(folder).mkdir()
    Path("mine/config.json").write_text("{}")
    assert folder_of("cifar_vit") is None  # a name is not shadowed
    assert folder_of("mine") == Path("mine")
    check_victim_name("mine")
    check_img_size("mine", 33)
    for path in ("empty", "mine/config.json", "google/vit-base"):
        with pytest.raises(PrivlabError, match=f"Found no config.json in '{path}'"):
            check_victim_name(path)

"""Re-assembly by a trained position predictor: alone, beside the borders, and refused where it does not fit."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor

import privlab
from privlab.attacks.features.border_jigsaw import BorderJigsaw
from privlab.base import PrivlabError
from privlab.defenses import Jigsaw, RowPermutation
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.experiments.training.loop import train
from privlab.experiments.training.objectives import ObjectiveRecipe, TrainDropPos, TrainMp3
from privlab.experiments.training.plan import Plan
from privlab.grids import specify
from privlab.metrics import placed_share, placement_accuracy
from privlab.reassembly import (
    REASSEMBLIES,
    Borders,
    ByDropPos,
    ByMp3,
    Mp3Network,
    PositionPredictor,
    Predicted,
    Reassembly,
    save_predictor,
    tiles,
)
from privlab.release import feature_capabilities
from privlab.threat import Draws, FeatureObservation, Sent
from privlab.victims import VictimModel, shipped_file

GRID, PATCH = (4, 4), 4


def model(side: int = 16) -> VictimModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = VisionTransformer(
            img_size=side, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3, pos_embed="learn"
        )
    return VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3).requires_grad_(False)


def pictures(n: int, seed: int) -> Tensor:
    """Return images whose colour says the place of a patch, under noise that no border continues."""
    draw = Generator().manual_seed(seed)
    across = torch.linspace(0.2, 0.8, 16).expand(16, 16)
    images = torch.stack([across, across.T, torch.full((16, 16), 0.5)])
    return (images + 0.1 * torch.randn(n, 3, 16, 16, generator=draw)).clamp(0, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the files of two predictors, trained on such images."""
    files = {}
    data = Examples((pictures(256, 0) * 255).byte(), torch.full((256,), -1), 0, "toy")
    small_ones: dict[str, Any] = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}
    for objective in (
        TrainMp3(eta=0.25, drop_path=0.0),
        TrainDropPos(gamma=0.25, sigma=0.0, temperature=math.inf, **small_ones),
    ):
        recipe = ObjectiveRecipe(model(), data, objective, Augmentation(flip=False, shift=0))
        train(recipe, Plan(steps=150, batch_size=32, learning_rate=5e-3, warmup=5))
        (found,) = [part for part in recipe.model.modules() if isinstance(part, PositionPredictor)]
        path = tmp_path_factory.mktemp(objective.name) / "predictor.safetensors"
        save_predictor(found, path, half=True)
        files[objective.name] = str(path)
    return files


def share_placed(solver: Reassembly, gamma: float, *, told: bool = True) -> float:
    images = pictures(12, 1)
    feed = Jigsaw(gamma=gamma)(images, PATCH, [Generator().manual_seed(i) for i in range(12)])
    known = ~feed.moved if told else torch.zeros_like(feed.moved)
    order = solver(tiles(feed.images, PATCH), GRID, known)
    assert torch.equal(order.sort(1).values, torch.arange(16).expand(12, -1))
    if told:
        assert torch.equal(order[known], torch.arange(16).expand(12, -1)[known])
    return float(placed_share(feed.order.gather(1, order), feed.moved).nanmean())


def test_the_solvers_are_known_by_their_names() -> None:
    assert [*REASSEMBLIES] == ["border", "mp3", "droppos"]
    for name, kind in REASSEMBLIES.items():
        assert kind.name == name
        assert isinstance(kind(), Reassembly)
    with pytest.raises(PrivlabError, match=r"at least 0\. Found -1\."):
        ByMp3(rounds=-1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByMp3, ByDropPos])
def test_a_predictor_beats_chance_and_helps_the_borders(kind: type[Predicted], trained: dict[str, str]) -> None:
    """By chance one of the 12 or 16 shuffled patches is placed."""
    for gamma in (0.75, 1.0):
        borders = share_placed(Borders(rounds=3), gamma)
        alone = share_placed(kind(weights=trained[kind.name], borders=False), gamma)
        both = share_placed(kind(weights=trained[kind.name], rounds=3), gamma)
        assert alone > 0.4
        assert both >= borders


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByMp3, ByDropPos])
def test_patches_that_are_alike_stay(kind: type[Predicted], trained: dict[str, str]) -> None:
    patches = tiles(pictures(2, 2), PATCH)
    known = torch.arange(16).expand(2, -1) < 6
    patches[~known] = 0.5
    assert torch.equal(kind(weights=trained[kind.name])(patches, GRID, known), torch.arange(16).expand(2, -1))


def test_double_precision_is_taken_too(trained: dict[str, str]) -> None:
    patches = tiles(pictures(1, 3), PATCH)
    known = torch.zeros(1, 16, dtype=torch.bool)
    solver = ByMp3(weights=trained["mp3"])
    assert torch.equal(solver(patches, GRID, known), solver(patches.double(), GRID, known))


# In a run


def records(trained: dict[str, str], **options: Any) -> Any:
    small: dict[str, Any] = {"attacks": "patch-gradient", "limit": 1, "metrics": "psnr", "gamma": 0.5, "settings": "c"}
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=1, num_heads=2, num_classes=3)
    return privlab.attack(vit, **(small | options)).records


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_records_say_what_re_assembled(trained: dict[str, str]) -> None:
    made = records(trained, reassembly="mp3", options=(f"mp3.weights={trained['mp3']}", "mp3.borders=false"))
    plain = records(trained).query("attack == 'patch-gradient'")
    rows = made.query("attack == 'patch-gradient'")
    assert set(rows.geometry) == {"in_place", "oracle", "reassembled"}
    said = json.loads(rows.conditions.iloc[0])["reassembly"]["mp3"]
    assert (said["borders"], len(said["weights"])) == (False, 16)
    assert "reassembly" not in json.loads(plain.conditions.iloc[0])
    assert set(rows.cell).isdisjoint(plain.cell)
    assert rows.query("geometry == 'reassembled'").placement_accuracy.between(0, 1).all()


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reassembly": "mp4"}, "Unknown reassembly 'mp4'. Did you mean mp3"),
        ({"reassembly": "mp3", "options": ("mp3.weights=nowhere",)}, "Found no file 'nowhere'."),
        ({"reassembly": "mp3", "options": ("mp3.weigths=a",)}, "Unknown option 'weigths'. Did you mean weights"),
        ({"reassembly": "mp3", "options": ("droppos.weights=a",)}, "'droppos.weights'|'droppos'"),
        (
            {"reassembly": "droppos", "options": ("droppos.weights=MP3",)},
            "is a predictor of mp3. Use --reassembly mp3.",
        ),
        ({"reassembly": "mp3", "options": ("mp3.weights=OTHER",)}, "is for 8 × 8 patches of 4 × 4 pixels. Found 4 × 4"),
        ({"reassembly": "mp3", "options": ("mp3.weights=TEXT",)}, "is not a position predictor"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], message: str, trained: dict[str, str], tmp_path: Path
) -> None:
    other, text = tmp_path / "other.safetensors", tmp_path / "text"
    save_predictor(Mp3Network(model(32)), other)
    text.write_text("no tensors")
    files = {"MP3": trained["mp3"], "OTHER": str(other), "TEXT": str(text)}
    given = dict(change)
    for name, path in files.items():
        given["options"] = tuple(option.replace(f"={name}", f"={path}") for option in given.get("options", ()))
    with pytest.raises(PrivlabError) as error:
        records(trained, **given)
    assert any(part in str(error.value) for part in message.split("|"))
    assert "\n" not in str(error.value)


def test_an_option_without_its_name_is_no_re_assemblys() -> None:
    with pytest.raises(PrivlabError, match="Unknown option 'borders'"):
        specify(model=("vit_ti",), reassembly="mp3", options=("borders=false",))


@pytest.mark.parametrize(("patch", "kind", "name"), [(4, ByMp3, "cifar_mp3"), (8, ByDropPos, "tiny_droppos")])
def test_that_of_the_zoo_is_the_one_for_the_patches(patch: int, kind: type[Predicted], name: str) -> None:
    assert kind().file((8, 8), patch) == shipped_file(name)


def test_patches_that_the_zoo_has_no_predictor_for_are_refused() -> None:
    with pytest.raises(PrivlabError, match=r"--set.*mp3.weights=FILE.*14.*14.*16.*16"):
        ByMp3().predictor((14, 14), 16)


def test_predictors_of_ones_own_are_compared_by_value(trained: dict[str, str]) -> None:
    make: Callable[[], ByMp3] = lambda: ByMp3(weights=trained["mp3"])  # noqa: E731
    assert make() == make()
    assert make() != ByMp3()


# Of released rows


@pytest.mark.parametrize("per", ["image", "batch"])
def test_rows_of_images_that_no_border_continues_are_put_together_by_a_predictor(
    per: str, trained: dict[str, str]
) -> None:
    """A linear map that can be inverted, no position embeddings, rows in a random order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        vit = VisionTransformer(
            img_size=16, patch_size=4, embed_dim=64, depth=1, num_heads=2, num_classes=3, pos_embed="none"
        )
    client, images = VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3), pictures(6, 4)
    defense = RowPermutation(per=per)
    generators = [Generator().manual_seed(i) for i in range(8)]
    plain = Sent.plain(client.embed(images).detach(), client.vit.num_prefix_tokens)
    sent = defense.send(plain, Draws(generators[2:], generators[0], generators[1]))
    public = pictures(64, 5)
    seen = FeatureObservation(client, sent.features, (defense,), public, feature_capabilities(client, len(public)))
    by_borders = placement_accuracy(sent, BorderJigsaw(rounds=3)(seen))
    helped = placement_accuracy(sent, BorderJigsaw(rounds=3, predictor=trained["mp3"])(seen))
    assert by_borders is not None
    assert helped is not None
    assert helped.mean() >= by_borders.mean()
    assert helped.mean() > 0.5


def test_a_predictor_for_other_patches_is_refused(trained: dict[str, str]) -> None:
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=208, depth=1, num_heads=2, num_classes=3, pos_embed="none"
    )
    client, images = VictimModel(vit.eval(), (0.5,) * 3, (0.25,) * 3), torch.rand(3, 3, 32, 32)
    sent = Sent.plain(client.embed(images).detach(), client.vit.num_prefix_tokens)
    seen = FeatureObservation(client, sent.features, (RowPermutation(),), images, feature_capabilities(client, 3))
    with pytest.raises(PrivlabError, match=r"4.*4.*4.*4.*4.*4.*8.*8"):
        BorderJigsaw(predictor=trained["mp3"])(seen)
    with pytest.raises(PrivlabError, match="No position predictor at 'nowhere'"):
        BorderJigsaw(predictor="nowhere")(seen)

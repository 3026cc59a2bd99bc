"""Public photographs never contain the private one: not by its hash, and not as a copy with another one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from privlab.base import PrivlabError
from privlab.grids import specify
from privlab.images import Others, open_images
from privlab.runs.audit_reference import ReferenceScorer

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


def disguised(private: Tensor, others: Tensor, digests: list[str]) -> dict[str, Tensor]:
    """Return public photographs with the private ones among them, the first by its hash, the others by their pixels."""
    own = {digests[0]: 1 - private[0], **{f"copy {i}": image.clone() for i, image in enumerate(private[1:])}}
    return {"first": others[0]} | own | {f"other {i}": image for i, image in enumerate(others[1:])}


@pytest.fixture
def public(crops: Tensor) -> dict[str, Tensor]:
    """Return disguised public photographs of the crops that are attacked."""
    from hashlib import sha256

    private = crops[:260:130]
    return disguised(private, crops[7:380:29], [sha256(image.numpy().tobytes()).hexdigest() for image in private])


def test_attacks_on_features_do_not_see_it(run: Any, crops: Tensor, public: dict[str, Tensor]) -> None:
    watched = run(defense="row-permutation", attack=("least-squares",), public=public)
    ((_, seen),) = watched.called
    assert len(seen.public) == len(public) - 2
    assert torch.equal(seen.public, torch.stack([crops[7], *crops[36:380:29]]).to(seen.public))


def test_attacks_on_gradients_do_not_see_it(run: Any, crops: Tensor, public: dict[str, Tensor]) -> None:
    watched = run(defense="gradient-sign", attack=("learning-to-invert",), public=public)
    ((_, seen),) = watched.called
    assert torch.equal(seen.public, torch.stack([crops[7], *crops[36:380:29]]).to(seen.public))
    none = run(defense="gradient-sign", attack=("learning-to-invert",), public=dict([*public.items()][1:3]))
    rows = [row for row in none.records if row["attack"] == "learning-to-invert"]
    assert rows
    assert all(row["status"] == "failed" and "auxiliary_images" in row["reason"] for row in rows)


def test_controls_are_made_without_it(run: Any, crops: Tensor, public: dict[str, Tensor]) -> None:
    """Each image is left out of its own controls alone."""
    ((mean, other, shuffled, _),) = run(gamma=0.5, attack=("patch-gradient",), public=public).controls
    images = crops[:260:130].to(mean)
    for i, key in enumerate([next(key for key in public if len(key) == 64), "copy 0"]):
        left = torch.stack([image for name, image in public.items() if name != key])
        torch.testing.assert_close(mean[i], left.mean(0).to(mean), rtol=0, atol=1e-6)
        assert torch.equal(other[i], crops[7].to(mean))
        assert sorted(shuffled[i].flatten().tolist()) == sorted(images[i].flatten().tolist())
        assert (shuffled[i] != images[i]).double().mean() > 0.5


def test_the_first_public_photograph_is_left_out_too(run: Any, crops: Tensor) -> None:
    public = {"copy": crops[0], "next": crops[9], "last": crops[77]}
    ((mean, other, *_),) = run(gamma=0.5, attack=("patch-gradient",), public=public).controls
    assert torch.equal(other[0], crops[9].to(other))
    assert torch.equal(other[1], crops[0].to(other))
    torch.testing.assert_close(mean[0], ((crops[9] + crops[77]) / 2).to(mean), rtol=0, atol=1e-6)


def test_controls_know_nothing_of_the_image_but_its_patches(run: Any, crops: Tensor) -> None:
    one, two = (
        run(gamma=0.5, attack=("patch-gradient",), images=images).controls[0]
        for images in (crops[:260:130], crops[50:260:110])
    )
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_of_an_image_that_is_no_public_one_the_mean_is_that_of_all(run: Any, crops: Tensor) -> None:
    public = {"one": crops[9], "two": crops[77], "three": crops[200]}
    ((mean, *_),) = run(gamma=0.5, attack=("patch-gradient",), public=public).controls
    expected = torch.stack([*public.values()]).mean(0).expand_as(mean)
    torch.testing.assert_close(mean, expected.to(mean), rtol=0, atol=1e-6)


def test_without_another_there_is_no_control(crops: Tensor) -> None:
    others = Others({"copy": crops[0]})
    assert others.without(["other"], crops[:1]) == []
    with pytest.raises(PrivlabError, match="--public"):
        others.beside("other", crops[0])
    assert others.beside("other", crops[1]) == ["copy"]


def test_pixels_decide_and_a_row_of_them_does_not(crops: Tensor) -> None:
    half = crops[0].clone()
    half[:, -1] = 1 - half[:, -1]  # the same middle row
    others = Others({"copy": crops[0], "half": half, "other": crops[1]})
    assert others.without(["?"], crops[:1]) == ["half", "other"]
    assert others.without(["?"], crops[:2].double()) == ["half"]
    assert others.without(["half"], crops[2:3]) == ["copy", "other"]


def test_the_reference_of_an_audit_is_left_out_of_its_control(tmp_path: Path, small: Any) -> None:
    """A copy in another file format has another hash, and the same pixels."""
    for i, image in enumerate(open_images("samples", limit=3)):
        assert image.pixels is not None
        image.pixels.crop((0, 0, 160, 160)).save(tmp_path / f"{i}.png")
    with Image.open(tmp_path / "0.png") as image:
        image.save(tmp_path / "copy.bmp")
    named = tuple(str(tmp_path / name) for name in ("0.png", "1.png", "2.png"))
    specification = specify(model=("tiny",), metrics=("psnr",), public=named)
    scorer = ReferenceScorer.of(tmp_path / "copy.bmp", specification, small(), 1)
    assert len(scorer.public) == 2
    assert not (scorer.public == scorer.images).flatten(1).all(1).any()

"""`privlab audit gradients`: a real training step audited without its image, and every file that cannot be."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab.attacks import ATTACKS, PatchGradient
from privlab.images import open_images
from privlab.images.sources import SAMPLES
from privlab.release.capture import capture
from privlab.threat import Capability, Observation
from privlab.victims import save, victim

State = dict[str, Tensor]
ROOT = Path(__file__).parents[2]


def rewritten(path: Path, change: Callable[[State, dict[str, str]], object]) -> Path:
    """Change tensors and metadata of a gradient file in place."""
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


@pytest.mark.slow
def test_a_step_is_audited_without_its_image(
    audit: Callable[..., Any], step: Callable[..., Path], tmp_path: Path
) -> None:
    done = audit(step(), "--json")
    assert done.status == 0
    told = json.loads(done.out)
    assert told["labels"] == [7]
    assert told["flags"] == ["labels given away by the gradient of the head: 7"]
    rows = {row["attack"]: row for row in told["attacks"]}
    assert {"patch-gradient", "mjp-subspace"} <= rows.keys()
    assert rows["patch-gradient"]["explained"] is True
    assert rows["patch-gradient"]["residual"] < 1e-3
    assert "psnr" not in rows["patch-gradient"]
    assert [(tmp_path / "audit" / name).exists() for row in rows.values() for name in row["files"]] == [True] * len(
        rows
    )
    facts = json.loads((tmp_path / "audit" / "run.json").read_text())
    assert facts["specification"]["defense"] == "none"
    assert facts["command"].startswith(f"privlab audit gradients {tmp_path}/update.safetensors --model vit_ti ")
    assert facts["attacks"] == told["attacks"]
    assert facts["released"]["batch_size"] == 1
    shown = audit(step(), "--overwrite", "--attack", "patch-gradient")
    assert re.search(r"the private image: it gives the released\W+gradient", shown.out)
    assert "flag: labels given away by the gradient of the head: 7" in shown.out


@pytest.mark.slow
def test_a_reference_scores(
    audit: Callable[..., Any], step: Callable[..., Path], photos: Path, picture: Callable[..., Path], tmp_path: Path
) -> None:
    options = ("--metrics", "psnr,ssim", "--attack", "patch-gradient", "--public", photos)
    done = audit(step(), *options, "--reference", photos / "a.png", "--json")
    assert done.status == 0
    mean, exact = json.loads(done.out)["attacks"]
    assert (mean["attack"], exact["attack"]) == ("control:mean", "patch-gradient")
    assert exact["psnr"] > 60 > 30 > mean["psnr"]
    assert len(list((tmp_path / "audit" / "strips").iterdir())) == 1
    other = audit(step(), *options, "--reference", picture("other.png"), "--overwrite")
    assert other.status == 0
    assert float(re.findall(r"patch-gradient.*?│ +(\d+\.\d\d) │", other.out)[0]) < 30
    lost = audit(step(), "--reference", tmp_path / "nowhere.png", "--overwrite").error
    assert "nowhere.png" in lost


@pytest.mark.slow
def test_a_reference_teaches_no_prior(
    audit: Callable[..., Any], step: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(PatchGradient, "__call__", lambda self, each: seen.append(each) or torch.zeros(1, 3, 32, 32))
    picture = next(iter(open_images("samples", limit=1))).pixels
    assert picture is not None
    picture.save(tmp_path / "sample.png")
    options = ("--attack", "patch-gradient", "--overwrite")
    assert audit(step(), *options, "--reference", tmp_path / "sample.png").status == 0
    assert audit(step(), *options).status == 0
    kept, every = (each.photographs for each in seen)
    assert every is None
    assert {name for name, *_ in SAMPLES} - {name.removeprefix("samples/") for name in kept} == {
        "astronaut-0",
        "astronaut-1",
    }


@pytest.mark.slow
def test_a_reference_of_the_input_s_size_is_what_was_fed(
    audit: Callable[..., Any], step: Callable[..., Path], photos: Path, state: State, tmp_path: Path
) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    assert isinstance(vit, VisionTransformer)
    pixels = next(iter(open_images(photos / "a.png"))).pixels
    assert pixels is not None
    fed = (victim(vit).preprocessing(pixels) * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(fed).save(tmp_path / "fed.png")
    options = ("--metrics", "psnr", "--attack", "patch-gradient", "--public", photos)
    done = audit(step(), *options, "--reference", tmp_path / "fed.png", "--json")
    assert json.loads(done.out)["attacks"][1]["psnr"] > 60


@pytest.mark.slow
def test_a_batch_says_what_it_can(audit: Callable[..., Any], step: Callable[..., Path]) -> None:
    """Attacks for one image are left out, and asked for by name they are refused; the labels come out all the same."""
    path = step((7, 3))
    done = audit(path, "--json")
    assert done.status == 0
    told = json.loads(done.out)
    assert told["labels"] == [3, 7]
    assert any(flag.startswith("2 images in one gradient") for flag in told["flags"])
    assert not any(row["attack"] == "patch-gradient" for row in told["attacks"])
    assert "batch_size_one" in audit(path, "--attack", "patch-gradient", "--overwrite").error
    forced = audit(path, "--attack", "patch-gradient", "--block", "stock", "--force", "--overwrite", "--json")
    assert [row["status"] for row in json.loads(forced.out)["attacks"]] == ["ok"]


@dataclass(frozen=True)
class Odd:
    """Return grey pictures, spoilt in the way that `kind` names; said to be exact nowhere."""

    name: ClassVar[str] = "odd"
    paper: ClassVar[str] = "made for this test"
    requires: ClassVar[frozenset[Capability]] = frozenset()
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed",)

    kind: str = "none"

    def beyond(self, seen: Observation) -> str | None:
        """Return that it is so."""
        return "made for this test"

    def __call__(self, seen: Observation) -> Tensor:
        """Return the pictures."""
        grey = torch.full((1, *seen.model.image_shape), 0.5)
        return {"none": grey, "nan": grey.where(grey > 1, torch.nan)}[self.kind]


@pytest.mark.slow
def test_what_is_not_finite_spares_the_other_attacks(
    audit: Callable[..., Any], step: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTACKS, "odd", Odd)
    done = audit(step(), "--attack", "odd,patch-gradient", "--set", "odd.kind=nan", "--json")
    assert done.status == 2
    odd, exact = json.loads(done.out)["attacks"]
    assert (odd["status"], odd["reason"]) == ("failed", "odd: the attack returned values that are not finite")
    assert (exact["status"], exact["explained"]) == ("ok", True)


@pytest.mark.slow
def test_attacks_outside_their_stated_range_are_named(
    audit: Callable[..., Any], step: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTACKS, "odd", Odd)
    told = json.loads(audit(step(), "--attack", "odd,patch-gradient", "--json").out)
    assert "outside their stated range, so that a failure says nothing: odd (made for this test)" in told["flags"]
    assert [row.get("beyond_range") for row in told["attacks"]] == ["made for this test", None]
    forced = audit(step((7, 3)), "--attack", "patch-gradient", "--block", "stock", "--force", "--overwrite")
    said = "outside their stated range, so that a failure says nothing: patch-gradient (forced without batch_size_one)"
    assert said in " ".join(forced.out.split())


@pytest.mark.slow
def test_red_flags(audit: Callable[..., Any], step: Callable[..., Path], weights: Path) -> None:
    """Each is raised by a case made for it; a healthy file raises that of its label alone (see above)."""

    def masked(tensors: State, _: dict[str, str]) -> None:
        tensors["pos_embed"][0, 2] = 0

    told = json.loads(audit(rewritten(step(), masked), "--json").out)
    assert told["flags"][0].startswith("visible mask: 1 of 4 position embeddings have no gradient")

    def zero(tensors: State, _: dict[str, str]) -> None:
        for tensor in tensors.values():
            tensor.zero_()

    done = audit(rewritten(step(), zero), "--json", "--overwrite")
    assert done.status == 2
    told = json.loads(done.out)
    assert told["flags"] == ["zero gradient: nothing was released, so nothing can be said of privacy"]
    assert {row["reason"] for row in told["attacks"]} == {"what is released is zero"}


@pytest.mark.slow
def test_more_tokens_than_equations_and_random_weights_are_flags(cli: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="RANDOM"):
        model = victim("vit_ti", weights="random").model
    vit = model.vit.requires_grad_(True)
    F.cross_entropy(vit(torch.zeros(1, 3, 224, 224)), torch.tensor([5])).backward()
    capture(vit, tmp_path / "update.safetensors", batch_size=1)
    options = ("--model", "vit_ti", "--weights", "random", "--attack", "patch-gradient", "--out", tmp_path / "audit")
    done = cli("audit", "gradients", tmp_path / "update.safetensors", *options, "--json")
    assert json.loads(done.out)["flags"] == [
        "more tokens than equations: N = 196 ≥ D = 192, so closed forms are not exact",
        "labels given away by the gradient of the head: 5",
        "random weights: leakage of trained weights differs",
        "outside their stated range, so that a failure says nothing: patch-gradient (N = 196 ≥ D = 192)",
    ]


@pytest.mark.slow
def test_other_weights_are_noticed(audit: Callable[..., Any], step: Callable[..., Path], state: State) -> None:
    """`patch-gradient` needs no weights; what does is left out, and no reconstruction is checked by its gradient."""
    moved = {name: value + 0.01 for name, value in state.items()}
    path = step()
    save(moved, path.with_name("moved.safetensors"))
    done = audit(path, "--weights", path.with_name("moved.safetensors"), "--json", "--attack", "patch-gradient")
    told = json.loads(done.out)
    assert any("was taken at other weights" in message for message in told["warnings"])
    assert "residual" not in told["attacks"][0]
    unstated = audit(step(hash_weights=False), "--json", "--overwrite", "--attack", "patch-gradient")
    assert "states no weights_sha256" in unstated.err
    assert json.loads(unstated.out)["attacks"][0]["explained"] is True


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_warned_of_and_goes_on(
    audit: Callable[..., Any], step: Callable[..., Path], dtype: torch.dtype
) -> None:
    def halved(tensors: State, _: dict[str, str]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    done = audit(rewritten(step(), halved), "--attack", "patch-gradient", "--json")
    assert done.status == 0
    assert f"are {str(dtype).removeprefix('torch.')}, rounded to" in done.err
    assert json.loads(done.out)["labels"] == [7]


def remove(name: str) -> Callable[[State, dict[str, str]], object]:
    return lambda tensors, _: tensors.pop(name)


def put(name: str, make: Callable[[State], Tensor]) -> Callable[[State, dict[str, str]], object]:
    return lambda tensors, _: tensors.update({name: make(tensors)})


def state_as(**told: str) -> Callable[[State, dict[str, str]], object]:
    return lambda _, metadata: metadata.update(told)


def scale(factor: float) -> Callable[[State, dict[str, str]], object]:
    return lambda tensors, _: tensors.update({name: factor * tensor for name, tensor in tensors.items()})


BAD = {
    "missing": (remove("patch_embed.proj.weight"), r"do not fit .* missing: patch_embed\.proj\.weight\."),
    "extra": (put("neck.weight", lambda _: torch.ones(2)), r"do not fit .* unexpected: neck\.weight\."),
    "mis-shaped": (
        put("pos_embed", lambda t: t["pos_embed"][:, :-1].contiguous()),
        r"--img-size .* mis-shaped: pos_embed \(1, 4, 192\) instead of \(1, 5, 192\)\.",
    ),
    "other classes": (
        lambda t, _: t.update({"head.bias": torch.ones(9)}),
        r"--weights takes the client's own, .* mis-shaped: head\.bias \(9,\) instead of \(10,\)\.",
    ),
    "nan": (
        put("cls_token", lambda t: t["cls_token"] * torch.nan),
        r"must be finite\. Found NaN or infinity in cls_token \(192 of 192 entries\)",
    ),
    "integers": (
        put("cls_token", lambda t: t["cls_token"].to(torch.int8)),
        r"must hold floating-point gradients\. Found cls_token \(torch\.int8\)\.",
    ),
    "scaled": (scale(1024), r"contradicts itself: .*the gradient scaled \(unscale it first\)\."),
    "no format": (state_as(format="pt"), r"must state format = privlab-gradients .* Found pt: write it with"),
    "version": (state_as(version="2"), r"version in the metadata must be 1\. Found 2\."),
    "batch size": (state_as(batch_size="many"), r"batch_size in the metadata must be a positive number\. Found many\."),
    "reduction": (state_as(reduction="none"), r"reduction in the metadata must be mean or sum\. Found none\."),
    "names": (state_as(without_gradient="norm"), r"without_gradient in the metadata must be a JSON list of names"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(audit: Callable[..., Any], step: Callable[..., Path], name: str) -> None:
    change, message = BAD[name]
    assert re.search(message, audit(rewritten(step(), change)).error)


def test_a_batch_size_that_contradicts_the_head_is_one_line(
    audit: Callable[..., Any], step: Callable[..., Path]
) -> None:
    summed = rewritten(step((1, 5, 8)), scale(3))
    assert (
        "batch size 3 under reduction mean, the positive entries of head.bias add up to at most 1"
        in audit(summed).error
    )


@pytest.mark.slow
def test_several_labels_of_one_image_are_those_of_a_mixed_one_or_of_a_batch(
    audit: Callable[..., Any], step: Callable[..., Path]
) -> None:
    told = audit(step((1, 5, 8), batch_size=1), "--attack", "patch-gradient", "--json").json
    assert any("names 3 labels" in line for line in told["warnings"])
    assert (told["leaks"], told["attacks"][0]["explained"], told["attacks"][0]["proof"]) == (None, False, None)


@pytest.mark.parametrize("kept", [0, 5, 1000, -100])
def test_a_truncated_file_is_one_line(audit: Callable[..., Any], step: Callable[..., Path], kept: int) -> None:
    path = step()
    path.write_bytes(path.read_bytes()[:kept])
    assert "is not a safetensors file, or is truncated" in audit(path).error


def test_a_pickle_is_never_opened(audit: Callable[..., Any], state: State, tmp_path: Path) -> None:
    for legacy in (True, False):
        path = tmp_path / "update.safetensors"
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
        assert "is refused: it is a pickle, as torch.save writes it, and may hold code." in audit(path).error


@pytest.mark.slow
def test_what_has_no_meaning_is_one_line(audit: Callable[..., Any], step: Callable[..., Path], tmp_path: Path) -> None:
    path = step()
    assert "No such option '--labels'." in audit(path, "--labels", "predicted").error
    assert "--metrics needs a --reference to score by. Found none." in audit(path, "--metrics", "psnr").error
    assert "An audit has one victim. Found 2" in audit(path, "--model", "vit_ti,vit_s").error
    assert "Cannot read the gradients" in audit(tmp_path / "nowhere.safetensors").error
    assert "reads features, and this run releases gradients" in audit(path, "--attack", "pe-assignment").error


@pytest.mark.slow
def test_the_documented_loop_runs(
    audit: Callable[..., Any], state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's three lines and the notes' loop, as printed."""
    for page in (ROOT / "docs" / "how-to" / "gradients.md", ROOT / "experiments" / "notes" / "gradients.md"):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        (code,) = [block for block in blocks if "loss.backward()" in block]
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        vit.load_state_dict(state)
        images, labels = torch.rand(1, 3, 32, 32), torch.tensor([4])
        optimiser = torch.optim.SGD(vit.parameters(), lr=0.1)
        loss = F.cross_entropy(vit(images), labels)
        names = {"model": vit, "images": images, "labels": labels, "loss": loss, "loader": [(images, labels)]}
        (folder := tmp_path / page.parent.name).mkdir()
        monkeypatch.chdir(folder)
        exec(code, names | {"optimiser": optimiser, "F": F})
        (captured,) = folder.glob("*.safetensors")
        assert json.loads(audit(captured, "--json", "--overwrite").out)["labels"] == [4]

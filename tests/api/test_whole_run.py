"""Whole runs in Python: what is given as objects, and what a run gives back."""

import copy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import privlab
from privlab.attacks import PatchGradient
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import GradientNoise, Mjp
from privlab.evaluation import CLASS_MEAN, CONTROLS
from privlab.threat.effects import Effects

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
QUICK: dict[str, Any] = {"settings": "a", "attacks": "patch-gradient", "metrics": "psnr", "progress": False}


@pytest.fixture(scope="module")
def run(photos: Tensor) -> privlab.Run:
    return privlab.attack(
        "cifar_vit_mjp27", photos, [3, 5, 7], **(QUICK | {"settings": "a,c", "attacks": ["april", PatchGradient()]})
    )


@dataclass(frozen=True)
class Careless:
    """Returns what no attack may return, or changes what others read."""

    how: str

    def __call__(self, seen: Any) -> Any:
        """Return black images, or what `how` says."""
        images = torch.zeros(len(seen.gradients["pos_embed"]), *seen.model.image_shape)
        if self.how == "weights":
            with torch.no_grad():
                seen.model.vit.head.weight.zero_()
        elif self.how == "released":
            seen.gradients["pos_embed"].zero_()
        elif self.how == "mode":
            seen.model.train()
        wrong = {"shape": images[:, :, :16], "nan": images / 0, "device": images.to("meta"), "numpy": images.numpy()}
        return wrong.get(self.how, images)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *(("shape", "instead of"), ("nan", "finite"), ("device", "meta"), ("numpy", "ndarray")),
        *((how, "changed") for how in ("weights", "released", "mode")),
    ],
)
def test_a_careless_attack_fails_alone(photos: Tensor, how: str, message: str) -> None:
    victim = privlab.victim("cifar_vit")
    before = copy.deepcopy(victim.model.state_dict())
    records = privlab.attack(
        victim, photos[:2], [3, 5], **(QUICK | {"attacks": [Careless(how), PatchGradient()]})
    ).records
    own = records[records.attack == "careless"]
    assert (own.status == "failed").all()
    assert own.reason.str.contains(message).all()
    assert (records[records.attack == "patch-gradient"].psnr > 60).all()
    assert all(torch.equal(value, before[name]) for name, value in victim.model.state_dict().items())


@dataclass(frozen=True)
class Lossy:
    """Releases no position embedding, or a part of it."""

    shape: bool

    def release(self, gradients: Any, draws: Any) -> Any:
        """Return what is left."""
        if self.shape:
            return gradients | {"pos_embed": gradients["pos_embed"][:, :, :1]}
        return {name: g for name, g in gradients.items() if name != "pos_embed"}


@pytest.mark.parametrize("release", [privlab.Gradient(), privlab.Update()])
@pytest.mark.parametrize("shape", [True, False])
def test_a_defense_that_loses_a_parameter_is_refused(photos: Tensor, release: Any, shape: bool) -> None:
    with pytest.raises(PrivlabError, match=r"lossy.*pos_embed"):
        privlab.attack("cifar_vit", photos[:1], [3], defense=Lossy(shape), release=release, progress=False)


def test_a_run_gives_its_records_table_verdict_and_images(run: privlab.Run, photos: Tensor, tmp_path: Path) -> None:
    assert set(run.records.label) == {3, 5, 7}
    assert list(run.table().columns) == ["setting", "defense", "attack", "images", "exact", "psnr"]
    assert max(map(len, str(run.table()).splitlines())) <= 80
    assert {"setting", "psnr_low"} <= set(run.details().data.columns)
    with pytest.raises(PrivlabError, match="psnr"):
        run.table(metrics=["lpips"])
    assert run.leaks is True
    assert "patch-gradient" in str(run.details())
    assert "leaks" in run.verdict
    assert all(flag.head for flag in run.flags)
    assert torch.equal(run.images("private"), (photos * 255).round() / 255)
    assert (run.images("patch-gradient") - photos).abs().max() < 1 / 255
    with pytest.raises(PrivlabError, match=r"nobody.*patch-gradient"):
        run.images("nobody")
    with pytest.raises(PrivlabError, match=r"nothing.*strips"):
        run.plot("nothing")
    assert "control" in run.to_latex()
    assert "tabular" in run.to_latex(tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text().count("\\caption") == 1
    assert run.to_html(tmp_path / "page.html").stat().st_size > 10_000
    assert run.plot("distribution").axes
    saved = run.save(tmp_path / "saved")
    pd.testing.assert_frame_equal(privlab.load(saved.path).records, run.records)
    with pytest.raises(PrivlabError, match="not empty"):
        run.save(tmp_path / "saved")
    for foreign in (tmp_path, tmp_path / "table.tex", tmp_path / "nowhere"):
        with pytest.raises(PrivlabError, match="not the directory of a run"):
            privlab.load(foreign)


def test_a_directory_is_of_the_same_images_and_labels_alone(photos: Tensor, tmp_path: Path) -> None:
    out = tmp_path / "run"
    privlab.attack("cifar_vit", photos, [3, 5, 7], out=out, **QUICK)
    privlab.attack("cifar_vit", photos, [3, 5, 7], out=out, **QUICK)  # finished: nothing runs again
    for images, labels, message in ((photos.flip(3), [3, 5, 7], "other images"), (photos, [3, 5, 8], "label of")):
        with pytest.raises(PrivlabError, match=message):
            privlab.attack("cifar_vit", images, labels, out=out, **QUICK)
    assert set(privlab.load(out).records.label) == {3, 5, 7}


def test_images_from_anywhere_are_the_same_images(photos: Tensor) -> None:
    levels = (photos * 255).round().byte()
    frames = [
        privlab.attack("cifar_vit", given, labels, **QUICK).records.set_index("attack").psnr["control:flat"]
        for given, labels in (
            (levels, [3, 5, 7]),
            (levels.numpy(), np.array([3, 5, 7])),
            (list(levels.float() / 255), torch.tensor([3, 5, 7])),
            (TensorDataset(levels, torch.tensor([3, 5, 7])), None),
            (DataLoader(TensorDataset(levels, torch.tensor([3, 5, 7])), batch_size=2), None),
        )
    ]
    for frame in frames[1:]:
        assert frame.tolist() == frames[0].tolist()


def test_values_are_not_rounded_and_another_size_is_resized(photos: Tensor) -> None:
    fine = (photos + 0.3 / 255).clamp(0, 1)
    frame = privlab.attack("cifar_vit", fine, [3, 5, 7], **QUICK).records
    assert frame[frame.attack == "patch-gradient"].psnr.min() > 90
    large = torch.nn.functional.interpolate(photos, scale_factor=2)
    frame = privlab.attack("cifar_vit", large, [3, 5, 7], **QUICK).records
    assert set(frame.status) == {"ok"}


def test_a_victim_of_ones_own(photos: Tensor) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    mine = privlab.victim(vit, normalisation="imagenet")
    frame = privlab.attack(mine, photos, [3, 5, 7], **QUICK).records
    assert frame[frame.attack == "patch-gradient"].psnr.min() > 80


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(3, 32, 32), None, "one image is images"),
        ([], [], "At least one"),
        (torch.rand(2, 3, 32, 32), [1], "one label for each of the 2 images"),
        (7, None, "Found int"),
        (torch.rand(2, 3, 32, 32) * 255, None, "divide by 255"),
        ([torch.rand(3, 32, 32) - 1], None, "Of image 0"),
        (np.zeros((1, 32, 32, 3)), None, "channels first"),
    ],
)
def test_mistakes(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        privlab.attack("cifar_vit", images, labels, **QUICK)


def test_a_bad_image_of_a_data_set_fails_and_no_other(photos: Tensor) -> None:
    bad = photos.clone()
    bad[1, 0, 0, 0] = 1.5
    frame = privlab.attack("cifar_vit", TensorDataset(bad, torch.tensor([3, 5, 7])), **QUICK).records
    assert frame[frame.status == "failed"].image.unique().tolist() == ["image-1"]
    assert "outside [0, 1]" in frame[frame.status == "failed"].reason.iloc[0]


@dataclass(frozen=True)
class Unpicklable:
    """It holds what no other process can have."""

    def __post_init__(self) -> None:
        """Take a lock."""
        object.__setattr__(self, "lock", threading.Lock())

    def __call__(self, seen: Any) -> Tensor:
        """Return images."""
        return PatchGradient()(seen)


@dataclass(frozen=True)
class Broken:
    """It reads what an observation lacks."""

    def __call__(self, seen: Any) -> Tensor:
        """Fail."""
        return seen.gradient


@pytest.mark.filterwarnings("default::privlab.base.warnings.PrivlabWarning")
def test_an_attack_that_fails_on_every_image_is_named_where_the_run_is_printed(photos: Tensor) -> None:
    with pytest.warns(PrivlabWarning, match="'broken' failed on every image: AttributeError") as caught:
        run = privlab.attack("cifar_vit", photos, [3, 5, 7], **(QUICK | {"attacks": [Broken(), "patch-gradient"]}))
    # where shapes are checked, jaxtyping's wrapper calls privlab
    assert {Path(warning.filename).name for warning in caught} <= {"test_whole_run.py", "_decorator.py"}
    assert list(run.failed_attacks) == ["broken"]
    for shown in (str(run), run._repr_html_()):
        assert "Failed on every image: broken: AttributeError" in shown


def test_a_papers_attack_belongs_to_the_defenses_of_its_paper(photos: Tensor) -> None:
    """`april` is the attack of MJP's paper: it is shown as such for MJP and without a defense, and for no other one."""
    given: dict[str, Any] = QUICK | {"attacks": ["april"], "settings": ["a", "c"]}
    for defense, papers in ((Mjp(gamma=0.27), ["a", "c"]), (GradientNoise(), ["a"])):
        rows = privlab.attack("cifar_vit_mjp27", photos, [3, 5, 7], defense=defense, **given).details().data
        assert rows[rows["row"] == "paper"].setting.tolist() == papers
        assert sorted(rows[rows.attack == "april"].setting) == ["a", "c"]


@pytest.mark.filterwarnings("default::privlab.base.warnings.PrivlabWarning")
def test_what_cannot_be_pickled_runs_in_this_process(photos: Tensor) -> None:
    with pytest.warns(PrivlabWarning, match="runs in this process"):
        run = privlab.attack("cifar_vit", photos, [3, 5, 7], **(QUICK | {"attacks": Unpicklable()}), workers=2)
    assert set(run.records.status) == {"ok"}


@pytest.mark.slow
def test_a_grid_is_a_case_for_each_value_and_goes_on(photos: Tensor, tmp_path: Path) -> None:
    def run() -> privlab.Run:
        return privlab.grid(
            "cifar_vit_mjp27", photos, [3, 5, 7], defense=[Mjp(gamma=g) for g in (0.1, 0.5)], settings="c",
            attacks=["april", "patch-gradient"], metrics=["psnr"], out=tmp_path / "grid", progress=False,
        )  # fmt: skip

    first = run()
    assert [case.options["gamma"] for case in first.results.cases] == [0.1, 0.5]
    assert first.plot("curve", x="gamma").axes
    table = first.table().query("attack == 'april'")
    assert table.gamma.tolist() == [0.1, 0.5]
    assert table.images.tolist() == [3, 3]
    parts = sorted((tmp_path / "grid" / "records").iterdir())
    pd.testing.assert_frame_equal(run().records, first.records)
    assert sorted((tmp_path / "grid" / "records").iterdir()) == parts
    with pytest.raises(PrivlabError, match="defense"):
        privlab.grid("cifar_vit", photos, defense=[], progress=False)
    with pytest.raises(PrivlabError, match="object"):
        privlab.grid(["cifar_vit", privlab.victim("cifar_vit")], photos, progress=False)  # pyright: ignore[reportArgumentType]
    assert len({file.read_bytes() for file in first.path.glob("strips/*.png")}) == 2 * 3  # of each case and image
    labels = [case.label for case in first.results.cases]
    fed = [first.images("fed", case) for case in (*labels, *range(2))]
    assert [torch.equal(fed[0], other) for other in fed] == [True, False, True, False]
    with pytest.raises(PrivlabError, match=r"no case 2.*gamma"):
        first.images("fed", 2)
    assert [axes.get_title(loc="left") for axes in first.plot("strips").axes] == labels


def test_strips_are_a_figure(run: privlab.Run) -> None:
    assert len(run.plot("strips").axes) == 3


@dataclass(frozen=True)
class KnowsNoise:
    """An attack that says that it knows noise, and finds nothing."""

    knows: ClassVar[frozenset[str]] = frozenset({"gradient-noise"})

    def __call__(self, seen: Any) -> Tensor:
        """Return a grey image."""
        return torch.full((1, *seen.model.image_shape), 0.5)


@dataclass(frozen=True)
class AddsNoise:
    """A defense that says that it adds noise."""

    acts_as: ClassVar[Effects] = Effects(gradients="noisy")

    def release(self, gradients: dict[str, Tensor], draws: Any) -> dict[str, Tensor]:
        """Return gradients with noise of a thousandth."""
        return {
            name: g + 1e-3 * torch.stack([torch.randn(g.shape[1:], generator=draw) for draw in draws])
            for name, g in gradients.items()
        }


@pytest.mark.parametrize(
    ("defense", "attack", "knows"),
    [
        (GradientNoise(multiplier=1.0), KnowsNoise(), True),
        (AddsNoise(), KnowsNoise(), True),
        (AddsNoise(), "patch-gradient-adaptive", True),
        (AddsNoise(), "patch-gradient", False),
    ],
)
def test_what_classes_of_ones_own_declare_counts_for_the_verdict(
    defense: Any, attack: Any, knows: bool, photos: Tensor
) -> None:
    run = privlab.attack(
        "cifar_vit", photos[:1], [3], defense=defense, attacks=[attack], settings="c", metrics="psnr", progress=False
    )
    assert ("No adaptive attack" in {flag.head for flag in run.flags}) != knows


def test_the_table_in_a_text_names_every_row(photos: Tensor) -> None:
    run = privlab.attack("cifar_vit", photos[:1], [3], attacks="patch-gradient", settings="a", progress=False)
    text = str(run.details())
    assert {"patch-gradient", "control: flat", "worst case:"} <= {
        line.strip().partition("   ")[0] for line in text.splitlines()
    }
    assert max(map(len, str(run).splitlines())) <= 80


def test_public_images_with_labels_give_the_mean_of_the_class(photos: Tensor, photographs: Any, tmp_path: Path) -> None:
    """Gradients show labels and features do not; a second run finds nothing to measure."""
    public = list(zip(photographs(9, 32)[3:], [3, 1, 3, 1, 1, 1], strict=True))
    arguments: dict[str, Any] = {"metrics": "psnr", "settings": "a", "progress": False, "public": public}
    of_gradient = arguments | {"attacks": "patch-gradient", "out": tmp_path / "run"}
    run = privlab.attack("cifar_vit", photos[:1], [3], **of_gradient)
    mean = (public[0][0] + public[2][0]) / 2
    control = run.records[run.records.attack == CLASS_MEAN].psnr
    assert control.item() == pytest.approx(float(-10 * (mean - photos[0]).square().mean().log10()), abs=0.05)
    again = privlab.attack("cifar_vit", photos[:1], [3], **of_gradient)
    assert len(again.records) == len(run.records)
    features = privlab.attack(
        "cifar_vit", photos[:1], release=privlab.Features(batch=1), attacks="least-squares", **arguments
    )
    assert {*features.records.attack} == {"least-squares", *CONTROLS}


def test_public_images_may_be_a_tensor(photos: Tensor, photographs: Any) -> None:
    """The control is their mean, and one line says what is wrong with others."""
    arguments: dict[str, Any] = {"attacks": "patch-gradient", "metrics": "psnr", "settings": "a", "progress": False}
    public = photographs(9, 32)[3:]
    run = privlab.attack("cifar_vit", photos[:1], [3], public=public, **arguments)
    mean = public.mean(0, keepdim=True)
    control = run.records[run.records.attack == CONTROLS[0]].psnr.iloc[0]
    assert control == pytest.approx(float(-10 * (mean - photos[:1]).square().mean().log10()), abs=0.05)
    with pytest.raises(PrivlabError, match="b × c × h × w"):
        privlab.attack("cifar_vit", photos[:1], [3], public=public[0], **arguments)

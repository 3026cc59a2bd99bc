"""What a defense does is seen, whatever its name: plug-ins of another package are attacked as privlab's own are."""

import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from torch import Tensor

import privlab
from privlab.attacks import BorderJigsaw, FeatureOptimisation, LeastSquares, PEAssignment, RowAlignment
from privlab.base import PrivlabError, PrivlabWarning
from privlab.base import plugins as registry
from privlab.defenses import (
    DEFENSES,
    BatchShuffle,
    ColumnPermutation,
    GaussianNoise,
    GradientNoise,
    GradientPruning,
    GradientSign,
    Jigsaw,
    Mjp,
    RowPermutation,
)
from privlab.release import effects_of, kinds_of, measure_effects, observe_features, send
from privlab.release.effects import contradictions
from privlab.report.tables import Facts, red_flags
from privlab.threat import Draws, Effects, Feed, Sent, Stack
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]
ROOT = Path(__file__).parents[2] / "defenses"

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

COPIED = {
    "row_permutation": ("RowPermutation", "my-rows"),
    "column_permutation": ("ColumnPermutation", "my-columns"),
    "batch_shuffle": ("BatchShuffle", "my-shuffle"),
    "gaussian_noise": ("GaussianNoise", "my-noise"),
    "jigsaw": ("Jigsaw", "patch-mix"),
    "mjp": ("Mjp", "my-masks"),
}
"""Modules of defenses, their classes, and the names under which copies of them are installed."""

SUBCLASS = """
from privlab.defenses import Jigsaw, Mjp, RowPermutation
from privlab.threat import Effects, Feed
class Rows(RowPermutation):
    name = "sub-rows"
class Masks(Mjp):
    name = "sub-masks"
class Liar(RowPermutation):
    name = "liar"
    acts_as = Effects()
class Silent(Jigsaw):
    name = "silent-mix"
    acts_as = None
    def __call__(self, images, patch, draws):
        return Feed.undefended(Jigsaw(gamma=1.0)(images, patch, draws).images, patch)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Install copies of defenses under other names, which declare nothing, and bare subclasses, as a package would."""
    site = tmp_path_factory.mktemp("site")
    package, info = site / "elsewhere", site / "elsewhere-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    points = []
    for module, (kind, name) in COPIED.items():
        (file,) = ROOT.rglob(f"{module}.py")
        code = file.read_text(encoding="utf-8")
        assert f'= "{module.replace("_", "-")}"' in code
        code = code.replace(f'= "{module.replace("_", "-")}"', f'= "{name}"', 1).replace("acts_as", "_unsaid")
        code = re.sub(r"privlab\.defenses\.\w+\.", "elsewhere.", code)
        (package / f"{module}.py").write_text(code, encoding="utf-8")
        points.append(f"{name} = elsewhere.{module}:{kind}")
    (package / "__init__.py").write_text(SUBCLASS, encoding="utf-8")
    points += [
        "sub-rows = elsewhere:Rows",
        "sub-masks = elsewhere:Masks",
        "liar = elsewhere:Liar",
        "silent-mix = elsewhere:Silent",
    ]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n", encoding="utf-8")
    text = "[privlab.defenses]\n" + "\n".join(points) + "\n"
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(site))
    registry.installed_plugins.cache_clear()
    assert "my-rows" in {point.name for point in entry_points(group="privlab.defenses")}
    yield site
    sys.path.remove(str(site))
    registry.installed_plugins.cache_clear()
    for module in [name for name in sys.modules if name.partition(".")[0] == "elsewhere"]:
        del sys.modules[module]


@pytest.mark.parametrize("defense", [kind() for kind in DEFENSES.values()], ids=[*DEFENSES])
def test_what_is_declared_is_what_is_measured(defense: Any, tiny_model: Make) -> None:
    if defense.name != "blur":  # wider than a tiny image
        assert measure_effects(tiny_model(), defense) == defense.acts_as


@pytest.mark.parametrize(
    ("parts", "together"),
    [
        ((), Effects()),
        ((RowPermutation(), RowPermutation("image")), Effects(rows="own")),
        ((BatchShuffle(), RowPermutation()), Effects(rows="mixed")),
        ((GaussianNoise(3.0), ColumnPermutation(), GaussianNoise(4.0)), Effects(columns=True, noise_std=5.0)),
        ((Mjp(), GradientPruning()), Effects(patches="masked", pe="unknown", one_order=True, gradients="pruned")),
        ((Mjp(masked_pe="none"), Mjp()), Effects(patches="shuffled", pe="unknown", one_order=True)),
        ((Jigsaw(), Mjp(masked_pe="none")), Effects(patches="shuffled", pe="zero", one_order=True)),
        ((Mjp(per="image"), Jigsaw()), Effects(patches="shuffled", pe="unknown")),
    ],
)
def test_defenses_act_together(parts: tuple[Any, ...], together: Effects, tiny_model: Make) -> None:
    assert effects_of(tiny_model(), parts) == together


@dataclass(frozen=True)
class Odd:
    """A defense of ones own on features; `how` says what it does."""

    name: ClassVar[str] = "odd"
    paper: ClassVar[str] = "a test"

    how: str
    std: float = 0.0

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Do it."""
        z = sent.features
        if self.how == "noise":
            noise = torch.stack([torch.randn(z.shape[1:], generator=draw, dtype=z.dtype) for draw in draws.images])
            return replace(sent, features=z + 0.5 * noise)
        if self.how == "scale":
            return replace(sent, features=0.5 * z)
        if self.how == "bright":  # rows of bright images alone: content decides
            order = torch.arange(z.shape[1]).flip(0)
            i = int(z.square().mean((1, 2)).argmax())
            source, features = sent.source.clone(), z.clone()
            source[i], features[i] = source[i, order], z[i, order]
            return replace(sent, features=features, source=source)
        if self.how == "seldom" and int(torch.randint(3, (), generator=draws.batch)):
            return sent
        if self.how == "fails":
            raise ValueError("no\nsuch thing")
        return RowPermutation().send(sent, draws)


def test_what_is_not_declared_is_measured(tiny_model: Make) -> None:
    model = tiny_model()
    noise = measure_effects(model, Odd("noise"))
    assert noise == Effects(noise_std=noise.noise_std)
    assert noise.noise_std == pytest.approx(0.5, rel=0.05)
    assert noise.noise_std != 0.5
    assert measure_effects(model, Odd("noise", std=0.5)).noise_std == 0.5, "std is taken at its word where it is true"
    assert measure_effects(model, Odd("noise", std=0.7)).noise_std == noise.noise_std, "and not where it is not"
    assert measure_effects(model, Odd("scale")) == Effects(other=True)
    assert measure_effects(model, Odd("bright")).rows == "own"
    assert measure_effects(model, Odd("seldom")).rows == "shared"
    with pytest.raises(PrivlabError, match=r"'odd'.*ValueError"):
        measure_effects(model, Odd("fails"))


@dataclass(frozen=True)
class Unsaid:
    """Shuffles patches as the jigsaw does, and says nothing of it; noise may hide it."""

    name: ClassVar[str] = "unsaid"
    paper: ClassVar[str] = "a test"

    per: str = "image"
    std: float = 0.0

    def __call__(self, images: Tensor, patch: int, draws: Any) -> Feed:
        """Shuffle."""
        fed = Jigsaw(gamma=1.0, per=self.per)(images, patch, draws).images  # pyright: ignore[reportArgumentType]
        noise = torch.stack([torch.randn(fed.shape[1:], generator=draw, dtype=fed.dtype) for draw in draws])
        return Feed.undefended(fed + self.std * noise, patch)


def test_patches_that_move_unsaid_are_found_by_their_pixels(tiny_model: Make) -> None:
    model = tiny_model()
    assert measure_effects(model, Unsaid()) == Effects(patches="shuffled")
    assert measure_effects(model, Unsaid(std=0.1)) == Effects(patches="shuffled", other=True)
    assert measure_effects(model, Unsaid(std=10.0)) == Effects(other=True), "no order explains what is fed"


def test_noise_that_is_declared_as_none_is_told(tiny_model: Make) -> None:
    @dataclass(frozen=True)
    class Signs:
        name: ClassVar[str] = "signs"
        paper: ClassVar[str] = "none"
        acts_as: ClassVar[Effects] = Effects(other=True)

        def send(self, sent: Sent, draws: Draws) -> Sent:
            signs = torch.stack([torch.randn(sent.features.shape[2:], generator=d).sign() for d in draws.images])
            return replace(sent, features=sent.features * signs[:, None].to(sent.features))

    told = contradictions(tiny_model(), Signs())
    assert any(line.startswith("noise_std: 0.0 declared, ") for line in told)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_what_moves_unsaid_is_re_assembled_and_a_false_declaration_is_refused() -> None:
    given: dict[str, Any] = {"weights": "random", "img_size": 48, "limit": 1, "metrics": "psnr"}
    records = privlab.attack("vit_ti", settings="c", defense="silent-mix", attacks="patch-gradient", **given).records
    own = records[records.attack == "patch-gradient"].set_index("geometry").psnr
    said = privlab.attack(
        "vit_ti", settings="c", defense="patch-mix", gamma=1.0, attacks="patch-gradient", **given
    ).records
    assert own["reassembled"] == said[said.attack == "patch-gradient"].set_index("geometry").psnr["reassembled"]
    match = (
        r"^Defense 'liar' declares effects that its releases contradict \(rows: kept declared, shared measured\)\. Corr"
    )
    with pytest.raises(PrivlabError, match=match):
        privlab.attack("vit_ti", settings="c", defense="liar", **given)


def test_what_is_declared_must_be_effects(tiny_model: Make) -> None:
    class Told(RowPermutation):
        acts_as = "row-permutation"

    with pytest.raises(PrivlabError, match=r"acts_as.*'row-permutation'.*Effects"):
        effects_of(tiny_model(), [Told()])


@dataclass(frozen=True)
class Pixels:
    """A defense that returns images where a Feed is wanted."""

    name: ClassVar[str] = "pixels"
    paper: ClassVar[str] = ""

    def __call__(self, images: Tensor, patch: int, draws: Any) -> Any:
        """Return the images."""
        return images


def test_a_defense_that_does_not_run_is_given_what_its_method_must_be(tiny_model: Make) -> None:
    with pytest.raises(PrivlabError, match=r"__call__\(images, patch, draws\) must return a Feed"):
        measure_effects(tiny_model(), Pixels())


def test_measuring_leaves_the_global_generator_alone(tiny_model: Make) -> None:
    state = torch.get_rng_state()
    measure_effects(tiny_model(), Odd("noise"))
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_are_looked_at_too(tiny_model: Make) -> None:
    kinds = {
        d.name: measure_effects(tiny_model(), d).gradients for d in (GradientNoise(), GradientPruning(), GradientSign())
    }
    assert kinds == {"gradient-noise": "noisy", "gradient-pruning": "pruned", "gradient-sign": "rounded"}
    assert measure_effects(tiny_model(), GradientPruning(keep=1.0)) == Effects()


SCORES = ["image_sha256", "setting", "attack", "geometry", "mse", "psnr", "ssim", "psnr_masked", "placement_accuracy"]


def scored(model: str, defense: str, **options: object) -> pd.DataFrame:
    """Return the scores of a run, controls left out."""
    given: dict[str, Any] = {"weights": "random", "img_size": 32, "limit": 3, "metrics": "mse,psnr,ssim", **options}
    records = privlab.attack(model, settings="c", defense=defense, **given).records
    assert (records.status == "ok").any()
    return records[~records.attack.str.startswith("control:")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        ("row-permutation", "my-rows"),
        ("row-permutation", "sub-rows"),
        ("column-permutation", "my-columns"),
        ("batch-shuffle", "my-shuffle"),
        ("gaussian-noise", "my-noise"),
        ("row-permutation+gaussian-noise", "sub-rows+my-noise"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_features_under_another_name_leak_as_much(own: str, theirs: str) -> None:
    attack = "pe-assignment,least-squares" + ("" if "shuffle" in own else ",class-token-key,border-jigsaw")
    first, second = (scored("vit_ti", name, attacks=attack) for name in (own, theirs))
    pd.testing.assert_frame_equal(first[SCORES], second[SCORES])
    assert len(first) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "theirs", "options"),
    [
        ("jigsaw", "patch-mix", {"gamma": 1.0}),
        ("mjp", "my-masks", {"gamma": 0.5}),
        ("mjp", "sub-masks", {"gamma": 0.5}),
        ("mjp", "my-masks", {"gamma": 0.5, "masked_pe": "none"}),
        ("mjp", "my-masks", {"gamma": 0.5, "masked_pe": "slot"}),
        ("mjp+gradient-noise", "my-masks+gradient-noise", {"options": ("gradient-noise.multiplier=1e-4",)}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_gradients_under_another_name_leak_as_much(own: str, theirs: str, options: dict[str, Any]) -> None:
    attack = "patch-gradient,mjp-subspace" + (
        ",patch-gradient-adaptive" if "+" in own else ",mjp-full" if theirs == "my-masks" and len(options) == 1 else ""
    )
    given = {"attacks": attack, "img_size": 48, "limit": 2, **options}
    first, second = (scored("vit_ti_mjp", name, **given) for name in (own, theirs))
    pd.testing.assert_frame_equal(first[SCORES], second[SCORES])
    assert set(first.geometry) == {"in_place", "oracle", "reassembled"}


@pytest.mark.parametrize(
    ("theirs", "attack", "silent"),
    [
        ("my-rows", "pe-assignment", True),
        ("my-rows", "least-squares", False),
        ("sub-rows", "border-jigsaw", True),
        ("my-shuffle", "pe-assignment", True),
        ("my-shuffle", "border-jigsaw", False),
        ("my-columns", "pe-assignment", False),
        ("my-masks", "mjp-subspace", True),
        ("sub-masks", "mjp-full", True),
        ("my-masks", "patch-gradient", False),
        ("my-masks", "pe-assignment", False),
        ("not-installed", "mjp-full", False),
    ],
)
@pytest.mark.usefixtures("installed")
def test_who_knows_a_defense_knows_it_by_another_name(theirs: str, attack: str, silent: bool) -> None:
    params = json.dumps({"masked_pe": "unknown"} if "masks" in theirs else {})
    row = {"case": 0, "attack": attack, "geometry": "in_place", "image": "x", "image_sha256": "x", "status": "ok"}
    release = "features" if attack in ("pe-assignment", "least-squares", "border-jigsaw") else "gradients"
    row |= {"defense": theirs, "defense_params": params, "release": release, "psnr": 20.0, "setting": "c"}
    heads = {flag.head: flag.items for flag in red_flags(Facts(pd.DataFrame([row]), ["here"], ["psnr"]))}
    assert ("No adaptive attack" not in heads) == silent
    if theirs == "my-rows" and not silent:
        assert "pe-assignment" in heads["No adaptive attack"][0]


def test_what_does_something_else_too_is_not_known() -> None:
    assert kinds_of(Odd("scale")) == {"other"}
    assert kinds_of(RowPermutation()) == {"rows"}
    assert kinds_of(Mjp()) == {"masked"}
    assert kinds_of(Odd("fails")) == frozenset()


@pytest.mark.parametrize(
    ("attack", "part", "said"),
    [
        (LeastSquares(), RowPermutation(), "rows"),
        (LeastSquares(), ColumnPermutation(), "columns"),
        (LeastSquares(), Odd("seldom"), "rows"),
        (FeatureOptimisation(steps=0), BatchShuffle(), "rows"),
        (PEAssignment(), ColumnPermutation(), "columns"),
        (BorderJigsaw(), ColumnPermutation(), "columns"),
        (RowAlignment(), ColumnPermutation(), "columns"),
    ],
)
@pytest.mark.filterwarnings("default::privlab.base.warnings.PrivlabWarning")
def test_an_attack_that_takes_all_for_unmoved_says_so(attack: Any, part: Any, said: str, tiny_model: Make) -> None:
    model, stack = tiny_model(), Stack((part,))
    public = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = [torch.Generator().manual_seed(i) for i in range(4)]
    sent = send(model, Feed.undefended(public[:2], model.patch), stack, Draws(draws[:2], draws[2], draws[3]))
    with pytest.warns(PrivlabWarning, match=f"{attack.name} takes the {said} of what is sent for unmoved"):
        attack(observe_features(model, sent, stack, public))
    plain = observe_features(model, Sent.plain(sent.features, sent.prefix), Stack(()), public)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attack(plain)

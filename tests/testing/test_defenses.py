"""The admission test: every defense of privlab passes, and each check catches a defense that was made to fail it."""

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from privlab.base import PrivlabError
from privlab.defenses import (
    DEFENSES,
    ExcludeVars,
    GaussianNoise,
    GradientNoise,
    GradientPruning,
    GradientQuantisation,
    Jigsaw,
    Mjp,
    RowPermutation,
)
from privlab.patches import permute_features
from privlab.testing import Check, check_any, check_defense
from privlab.threat import Draws, Feed, Sent
from privlab.victims import VictimModel, closed_form

Model = Callable[..., VictimModel]
Admit = Callable[..., dict[str, Check]]
Gradients = Mapping[str, Tensor]

ALWAYS = {"contents", "gradients", "effect", "same-draw", "neighbours", "random-state", "untouched", "control"}


def failed(checks: Mapping[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFENSES)
def test_every_defense_is_admitted(name: str, tried: Admit) -> None:
    checks = tried(DEFENSES[name]())
    assert failed(checks) == set()
    own = {"variance", "overstated", "at-bound"} if hasattr(DEFENSES[name], "release") else {"order", "rows"}
    assert ALWAYS | {"acts-as"} <= set(checks) <= ALWAYS | {"acts-as"} | own
    assert checks["contents"].value == checks["same-draw"].value == 0
    assert checks["control"].value >= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "defense",
    [
        Jigsaw(gamma=0.9),
        Mjp(gamma=0.5, masked_pe="none"),
        Mjp(gamma=0.0),
        GaussianNoise(std=0.0),
        RowPermutation(per="image", class_token=False),
        GradientNoise(clip=1e9, multiplier=0.0),
        GradientNoise(clip=0.1, multiplier=1e-4),
        GradientPruning(keep=1e-5),
        GradientPruning(keep=0.01),
        GradientPruning(keep=1.0),
        GradientQuantisation(dtype="fp16"),
        GradientQuantisation(dtype="bf16"),
        ExcludeVars(pattern=r"^head\."),
    ],
    ids=repr,
)
def test_their_options_are_admitted(defense: Any, tried: Admit) -> None:
    assert failed(tried(defense)) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "nothing"),
    [
        *((DEFENSES[name](), name in ("none", "exclude-vars")) for name in DEFENSES),
        *((defense, True) for defense in (GaussianNoise(std=0.0), Jigsaw(gamma=0.0), Mjp(gamma=0.0))),
        *((defense, True) for defense in (GradientPruning(keep=1.0), GradientNoise(clip=1e9, multiplier=0.0))),
    ],
    ids=repr,
)
def test_a_defense_that_does_nothing_is_told(defense: Any, nothing: bool, tried: Admit) -> None:
    check = tried(defense)["effect"]
    assert check.passed  # it may say that it does nothing
    assert (check.value == 0) == nothing
    assert ("does nothing here" in check.text) == nothing


# Defenses made to fail. Each is a good one but for one thing.


@dataclass(frozen=True)
class OnImages:
    """Feeds the images as they are, or what a function makes of them."""

    name: ClassVar[str] = "bad"
    paper: ClassVar[str] = "none"

    make: Callable[[Tensor, Sequence[Generator]], Tensor]

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return what is fed."""
        return Feed.undefended(self.make(images, draws), patch)


@dataclass(frozen=True)
class Mixing(OnImages):
    """Says that it mixes."""

    mixes: ClassVar[bool] = True


@dataclass(frozen=True)
class Altered:
    """The jigsaw, with something else declared."""

    name: ClassVar[str] = "bad"
    paper: ClassVar[str] = "none"

    alter: Callable[[Feed], Feed]

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return what is fed."""
        return self.alter(Jigsaw(gamma=0.6)(images, patch, draws))


@dataclass(frozen=True)
class OnGradients:
    """Releases what a function makes of the gradients, and declares a variance, of zero unless it is told."""

    name: ClassVar[str] = "bad"
    paper: ClassVar[str] = "none"

    make: Callable[[dict[str, Tensor], Sequence[Generator]], Any]
    declared: float = 0.0

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Any:
        """Return what is released."""
        return self.make(dict(gradients), draws)

    def variance(self, released: Gradients) -> dict[str, Tensor]:
        """Return the declared variance."""
        return {name: torch.full_like(g, self.declared) for name, g in released.items()}


@dataclass(frozen=True)
class Vague(GradientPruning):
    """Says of what is missing that it may be thirty times as large as the least that was released."""

    def variance(self, released: Gradients) -> dict[str, Tensor]:
        """Return the declared variance."""
        return {name: 900 * v for name, v in super().variance(released).items()}


@dataclass(frozen=True)
class Leaky(ExcludeVars):
    """Releases what it says that it withholds."""

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Return all of them."""
        return dict(gradients)


@dataclass(frozen=True)
class OnFeatures:
    """Sends what a function makes of a batch."""

    name: ClassVar[str] = "bad"
    paper: ClassVar[str] = "none"

    make: Callable[[Sent, Draws], Sent]

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return what is sent."""
        return self.make(sent, draws)


class MoreThanAFeed(Feed):
    """Has room for the private image."""


def noisy(g: dict[str, Tensor], draws: Sequence[Generator]) -> dict[str, Tensor]:
    return GradientNoise(clip=1e9, multiplier=1e-9).release(g, draws)  # of deviation 1


def shuffled(images: Tensor) -> Tensor:
    return Jigsaw(gamma=0.6)(images, 4, [Generator().manual_seed(i) for i in range(len(images))]).images


def altered(**fields: Any) -> Altered:
    return Altered(lambda feed: replace(feed, **{name: make(feed) for name, make in fields.items()}))


BESIDE = {
    "images of torch.float32 instead of torch.float64": OnImages(lambda x, _: x.float()),
    "images in [0.6, ": OnImages(lambda x, _: x / 2 + 0.6),
    "images with nan or inf": OnImages(lambda x, _: x / 0),
    "images of shape (4, 3, 16, 16) instead of (2, 3, 16, 16)": OnImages(lambda x, _: torch.cat([x, x])),
    "MoreThanAFeed instead of Feed": Altered(lambda f: MoreThanAFeed(f.images, f.order, f.moved)),
    "order that leaves some out": altered(order=lambda f: f.order * 0, moved=lambda f: f.moved | True),
    "an order that moves slots which are not declared as moved": altered(moved=lambda f: f.moved & False),
    "image, which is no released parameter": OnGradients(lambda g, _: g | {"image": torch.zeros(2, 3, 16, 16)}),
    "head.bias, which it says that it withholds": Leaky(pattern=r"^head\."),
    "pos_embed: NoneType instead": OnGradients(lambda g, _: {k: v for k, v in g.items() if k != "pos_embed"}),
    "of torch.float16 instead of torch.float64": OnGradients(lambda g, _: {k: v.half() for k, v in g.items()}),
    "cls_token of shape (1, 64) instead of (2, 1, 1, 64)": OnGradients(
        lambda g, _: g | {"cls_token": g["cls_token"][0, 0]}
    ),
    "cls_token with nan or inf": OnGradients(lambda g, _: g | {"cls_token": g["cls_token"] / 0}),
    "list instead of gradients by name": OnGradients(lambda g, _: list(g)),
    "features of shape (2, 34, 64) instead of (2, 17, 64)": OnFeatures(
        lambda s, _: Sent.plain(s.features.repeat(1, 2, 1), 1)
    ),
    "source that leaves some out": OnFeatures(lambda s, _: replace(s, source=s.source * 0)),
    "columns that leaves some out": OnFeatures(lambda s, _: replace(s, columns=torch.zeros(64, dtype=torch.int64))),
    "prefix 0 instead of 1": OnFeatures(lambda s, _: replace(s, prefix=0)),
    "key_bits nan": OnFeatures(lambda s, _: replace(s, key_bits=float("nan"))),
}


@pytest.mark.parametrize("said", BESIDE)
def test_contents_are_the_release_and_nothing_else(said: str, tried: Admit) -> None:
    checks = tried(BESIDE[said])
    assert failed(checks) == {"contents"}
    assert said in checks["contents"].text
    assert set(checks) == {"contents", "random-state", "untouched", "control"}


@pytest.mark.parametrize(
    "defense",
    [
        altered(order=lambda f: f.order.roll(1, 0), moved=lambda f: f.moved | True),  # of another image
        altered(order=lambda f: f.order.sort(1).values),  # moved, but nowhere
        altered(images=lambda f: f.images.flip(0)),
        altered(images=lambda f: (f.images + 1e-3).clamp(0, 1)),  # moved, and not the patches that they were
        OnImages(lambda x, _: shuffled(x)),  # in secret
        OnImages(lambda x, _: (shuffled(x) * 0.9).round(decimals=2)),
    ],
)
def test_an_order_is_the_declared_one(defense: Any, tried: Admit) -> None:
    assert failed(tried(defense)) - {"neighbours"} == {"order"}


@pytest.mark.parametrize(
    "make",
    [
        lambda s, _: replace(s, features=s.features + 0.01),
        lambda s, _: replace(s, source=s.source.roll(1, 1)),
        lambda s, _: replace(s, columns=torch.arange(64).roll(1)),
        lambda s, _: replace(s, features=permute_features(s.features, columns=torch.arange(64).roll(1))),
        lambda s, d: GaussianNoise(std=0.1).send(s, d),  # as if there were none
    ],
)
def test_rows_are_what_is_declared(make: Callable[[Sent, Draws], Sent], tried: Admit) -> None:
    assert failed(tried(OnFeatures(make))) == {"rows"}


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_rows_have_the_declared_noise(factor: float, tried: Admit) -> None:
    @dataclass(frozen=True)
    class Louder(GaussianNoise):
        def send(self, sent: Sent, draws: Draws) -> Sent:
            """Send more or less noise than is declared."""
            return GaussianNoise(std=self.std * factor).send(sent, draws)

    checks = tried(Louder(std=0.2))
    assert failed(checks) == {"acts-as", "rows"}
    assert checks["rows"].value == pytest.approx(max(factor, 1 / factor) ** 2, rel=0.2)


@pytest.mark.parametrize(("times", "admitted"), [(1.09, True), (1.12, False), (1 / 1.09, True), (1 / 1.12, False)])
def test_noise_on_rows_may_be_a_tenth_off(times: float, admitted: bool, tried: Admit) -> None:
    """The factor of the drawn noise is measured first: chance has no say in what is told apart."""

    @dataclass(frozen=True)
    class Scaled(GaussianNoise):
        variance: float = 1.0

        def send(self, sent: Sent, draws: Draws) -> Sent:
            """Send noise of another variance than is declared."""
            return GaussianNoise(std=self.std * self.variance**0.5).send(sent, draws)

    drawn = tried(Scaled(std=0.2, variance=4.0))["rows"].value / 4
    check = tried(Scaled(std=0.2, variance=times / drawn))["rows"]
    assert check.value == pytest.approx(max(times, 1 / times), rel=1e-3)
    assert check.passed == admitted


@pytest.mark.parametrize(("times", "admitted"), [(1.09, True), (1.12, False)])
@pytest.mark.parametrize("check", ["variance", "overstated"])
def test_a_declared_variance_may_be_a_tenth_off(check: str, times: float, admitted: bool, tried: Admit) -> None:
    """Beyond chance: by how much a true variance seems to be off is measured first."""
    up = check == "overstated"
    off = tried(OnGradients(noisy, declared=2.0 if up else 0.5))[check].value / 2
    found = tried(OnGradients(noisy, declared=times / off if up else off / times))[check]
    assert found.value == pytest.approx(times, rel=1e-3)
    assert found.passed == admitted


@pytest.mark.parametrize(
    ("defense", "which"),
    [
        (OnGradients(noisy, declared=0.01), {"variance", "gradients"}),
        (OnGradients(noisy, declared=0.5), {"variance"}),
        (OnGradients(noisy, declared=2.0), {"overstated"}),
        (OnGradients(lambda g, _: g, declared=1.0), {"overstated"}),
        (Vague(keep=1e-3), {"overstated"}),
        (OnGradients(lambda g, _: {k: v.round(decimals=1) for k, v in g.items()}, declared=0.01**2), {"variance"}),
        (OnGradients(lambda g, _: g, declared=-1.0), {"variance"}),
        (OnGradients(lambda g, _: g, declared=float("nan")), {"variance"}),
    ],
)
def test_a_variance_is_the_declared_one(defense: OnGradients | Vague, which: set[str], tried: Admit) -> None:
    assert which <= failed(tried(defense)) <= which | {"variance", "gradients"}


@pytest.mark.parametrize(
    "make",
    [
        lambda g, _: {k: -v for k, v in g.items()},
        lambda g, _: {k: v.flip(-1) for k, v in g.items()},
        lambda g, _: g | {"cls_token": g["cls_token"] * 2},
        lambda g, _: g | {"pos_embed": g["pos_embed"] * 0},
        lambda g, _: g | {"head.bias": g["head.bias"] + 1e-4},
    ],
)
def test_released_gradients_are_the_models(make: Callable[..., Any], tried: Admit) -> None:
    assert failed(tried(OnGradients(make))) >= {"gradients", "variance"}


def test_an_image_may_have_a_scale_of_its_own(tried: Admit) -> None:
    clipped = OnGradients(
        lambda g, _: {k: v * torch.tensor([0.5, 0.1]).view(2, *[1] * (v.ndim - 1)) for k, v in g.items()}
    )
    assert failed(tried(clipped)) == set()


def test_gradients_of_what_is_fed_are_the_models(tried: Admit, monkeypatch: pytest.MonkeyPatch) -> None:
    right = closed_form._of_embedding

    def wrong(name: str, *args: Any) -> torch.Tensor:
        return right(name, *args) * (1 + 1e-4 * (name == "unk_embed"))

    monkeypatch.setattr(closed_form, "_of_embedding", wrong)
    assert failed(tried(Mjp(gamma=0.5))) == {"gradients"}
    assert failed(tried(Jigsaw(gamma=0.5))) == set()  # E_unk stands nowhere


@pytest.mark.parametrize(
    "make",
    [
        lambda s, _: replace(s, features=s.features.detach()),
        lambda s, _: replace(s, features=s.features + (s.features - s.features.detach())),
    ],
)
def test_what_is_sent_can_be_trained_through(make: Callable[[Sent, Draws], Sent], tried: Admit) -> None:
    assert failed(tried(OnFeatures(make))) == {"gradients"}


@pytest.mark.parametrize(
    "make",
    [
        lambda x, _: (x + 0.01 * torch.from_numpy(np.random.rand(*x.shape))).clamp(0, 1),
        lambda x, _: x * random.uniform(0.9, 1),
        lambda x, _: (x + 0.01 * torch.rand(x.shape)).clamp(0, 1),
    ],
)
def test_draws_come_from_the_given_generators(make: Callable[..., Tensor], tried: Admit) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    assert failed(tried(OnImages(make))) == {"random-state", "same-draw", "neighbours"}
    assert torch.equal(torch.get_rng_state(), before[0])  # left as they were, whatever the defense does
    assert pickle.dumps(np.random.get_state()) == before[1]


def test_seeding_a_global_generator_is_no_draw_from_ones_own(tried: Admit) -> None:
    assert failed(tried(OnImages(lambda x, _: x * bool(torch.random.manual_seed(7))))) == {"random-state"}


def test_one_draw_is_one_release(tried: Admit) -> None:
    fresh = Generator().manual_seed(0)
    drawn = OnImages(lambda x, _: (x + 0.01 * torch.rand(x.shape, generator=fresh)).clamp(0, 1))
    assert failed(tried(drawn)) - {"random-state"} == {"same-draw", "neighbours"}  # beartype draws too


@pytest.mark.parametrize(
    "defense",
    [
        OnImages(lambda x, _: x.mul_(0.5)),
        OnGradients(lambda g, _: {k: v.mul_(0.5) for k, v in g.items()}),
        OnFeatures(lambda s, _: replace(s, features=s.features.mul_(0.5))),
    ],
)
def test_what_is_given_is_left_as_it_is(defense: Any, tried: Admit) -> None:
    assert "untouched" in failed(tried(defense))


def test_the_model_is_left_as_it_is(tiny_model: Model, tried: Admit) -> None:
    model = tiny_model()

    def train(images: Tensor, _: Sequence[Generator]) -> Tensor:
        model.get_parameter("vit.head.bias").data.add_(1)
        return images

    checks = tried(OnImages(train), model)
    assert failed(checks) == {"untouched"}
    assert "vit.head.bias" in checks["untouched"].text


@pytest.mark.parametrize(
    "defense",
    [
        OnImages(lambda x, _: (x + x.mean(0)) / 2),
        OnImages(lambda x, d: (x + 0.01 * torch.rand(x.shape, generator=d[1])).clamp(0, 1)),  # another's draw
        OnGradients(lambda g, _: {k: v / (1 + v.norm()) for k, v in g.items()}),
        OnFeatures(lambda s, _: replace(s, features=s.features + 1e-6 * s.features.mean(0))),
    ],
)
def test_neighbours_do_not_matter(defense: Any, tried: Admit) -> None:
    assert "neighbours" in failed(tried(defense))


def test_unless_the_defense_says_that_it_mixes(tried: Admit) -> None:
    assert failed(tried(Mixing(lambda x, _: (x + x.mean(0)) / 2))) == set()


@pytest.mark.parametrize("defense", [OnImages(lambda x, _: x), OnGradients(lambda g, _: g)])
def test_a_victim_that_does_not_leak_undefended_proves_nothing(defense: Any, tiny_model: Model, tried: Admit) -> None:
    assert failed(tried(defense, tiny_model(embed_dim=8, num_heads=2))) == {"control"}  # 16 tokens, 8 equations


def test_the_control_of_features_is_of_what_the_projection_carries(tiny_model: Model, tried: Admit) -> None:
    model = tiny_model(embed_dim=16)  # of 48 dimensions
    assert tried(RowPermutation(), model)["control"].value > 100
    model.vit.patch_embed.proj.weight.data[0] *= 1e-9  # less than rounding leaves of it
    assert failed(tried(RowPermutation(), model)) == {"control"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: check_any("mpj"), "Unknown defense, attack or metric 'mpj'. Did you mean mjp"),
        (lambda: check_any("mjp+blur"), "one at a time. Found 'mjp+blur'"),
        (lambda: check_any("blur", gamma=0.5), "--gamma is for jigsaw and mjp. Found 0.5 for blur"),
        (lambda: check_any("blur", ["sigmo=1"]), "Unknown option 'sigmo'. Did you mean sigma"),
        (lambda: check_any("mjp", model="vit_ti"), "this model has none. Use a `_mjp` victim"),
        (lambda: check_any("jigsaw", model="vit_ti_nope"), "needs what this observation does not grant"),
        (lambda: check_any("blur", ["sigma=90"]), "sigma of blur must be at most 21"),
        (lambda: check_defense(OnImages(lambda x, _: x[9])), "Defense 'bad' does not run: IndexError"),
        (lambda: check_defense(Jigsaw(), images=torch.rand(2, 3, 64, 64)), "three images, of shape (3, 3, 64, 64)"),
    ],
)
def test_mistakes(call: Callable[[], object], said: str) -> None:
    with pytest.raises(PrivlabError) as error:
        call()
    assert said in str(error.value)

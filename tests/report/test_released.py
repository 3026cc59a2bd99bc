"""Releases that are made again, against gradients that are computed by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError, draw_for
from privlab.defenses import GradientNoise
from privlab.grids import specify
from privlab.images import NamedImage
from privlab.release import observe, released_parameters
from privlab.report.released import Releases, unreleased
from privlab.threat import Features, Gradient
from privlab.victims import Victim, victim

OWN = torch.tensor([4, 1, 3])
GIVEN = {"model": ("cifar_vit",), "setting": ("c",), "img_size": 32}


@pytest.fixture(scope="module")
def base() -> Victim:
    return victim("cifar_vit", img_size=32)


@pytest.fixture(scope="module")
def candidates(photographs: Callable[[int, int], Tensor]) -> Tensor:
    return photographs(5, 32).float()


@pytest.fixture(scope="module")
def labels(base: Victim, candidates: Tensor) -> list[int]:
    with torch.no_grad():
        return base.model(candidates).argmax(1).tolist()


@pytest.fixture(scope="module")
def similar(base: Victim, candidates: Tensor, labels: list[int]) -> Callable[..., dict[tuple[str, str], Tensor]]:
    """Return a maker of similarities under a defense, with a client."""

    def of(releases: Releases | None = None, **given: object) -> dict[tuple[str, str], Tensor]:
        spec = specify(**(GIVEN | given))  # type: ignore[arg-type]
        private = [NamedImage(f"{i}", f"sha {i}", None, labels[i]) for i in OWN]
        return (releases or Releases()).similarities(spec, base, private, OWN, candidates)

    return of


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], 1).double()


def test_the_noise_is_that_of_the_run_and_candidates_have_none(
    base: Victim, candidates: Tensor, labels: list[int], similar: Callable[..., dict[tuple[str, str], Tensor]]
) -> None:
    found = similar(defense="gradient-noise", options=("gradient-noise.multiplier=0.01",), seed=7)
    names, told = released_parameters(base.model), torch.tensor(labels)
    draws = [draw_for(7, f"sha {i}", "release", 0) for i in OWN]
    part = GradientNoise(clip=1.0, multiplier=0.01)
    sent = flat(observe(base.model, candidates[OWN], told[OWN], names, [part], draws).gradients)
    plain = flat(observe(base.model, candidates, told, names).gradients)
    for feature, compared in (("release", plain), ("release, signs", plain.sign())):
        expected = F.normalize(sent, dim=1) @ F.normalize(compared, dim=1).T
        assert_close(found["release", feature], expected, rtol=0, atol=1e-6)
        assert torch.equal(found["control:other", feature], found["release", feature][[2, 0, 1]])


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"setting": ("a",)}, "release"),
        ({"defense": "gradient-sign"}, "release, signs"),
        (
            {"setting": ("a",), "client": "flower-default", "options": ("client.images=1", "client.batch_size=1")},
            "release",
        ),
        ({"defense": "censor"}, "release, orthogonality"),
        ({"defense": "exclude-vars", "options": ("exclude-vars.pattern=^head",)}, "release"),  # less is compared
    ],
)
def test_what_a_candidate_would_release_is_the_release(
    given: dict[str, object], feature: str, similar: Callable[..., dict[tuple[str, str], Tensor]]
) -> None:
    near = similar(**given)["release", feature]
    best = torch.full((3,), 0.0 if feature == "release, orthogonality" else 1.0).double()
    assert_close(near[torch.arange(3), OWN], best, rtol=0, atol=1e-3)  # signs of what is nearly 0 differ
    assert (near.argmax(1) == OWN).all()


def test_orthogonality_is_of_each_parameter(
    base: Victim, candidates: Tensor, labels: list[int], similar: Callable[..., dict[tuple[str, str], Tensor]]
) -> None:
    found = similar(setting=("a",))["release", "release, orthogonality"]
    names = released_parameters(base.model)
    each = observe(base.model, candidates, torch.tensor(labels), names).gradients
    expected = torch.zeros(3, 5).double()
    for name in names:
        unit = F.normalize(each[name].flatten(1).double(), dim=1)
        expected -= (unit[OWN] @ unit.mT).square()
    assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_e_unk_is_compared_with_nobodys(candidates: Tensor) -> None:
    """A client with MJP moves it; the candidates' clients have no defense."""
    client = ("client.images=1", "client.batch_size=1")
    spec = specify(
        model=("cifar_vit_mjp27",),
        setting=("c",),
        img_size=32,
        client="flower-default",
        defense="mjp",
        options=(*client, "mjp.gamma=0.1", "mjp.masked_pe=unknown"),
    )
    base = victim("cifar_vit_mjp27", img_size=32)
    with torch.no_grad():
        labels = base.model(candidates).argmax(1).tolist()
    private = [NamedImage(f"{i}", f"sha {i}", None, labels[i]) for i in OWN]
    near = Releases().similarities(spec, base, private, OWN, candidates)["release", "release"]
    assert (near.argmax(1) == OWN).all()


def test_one_colour_shows_the_label_alone(
    labels: list[int], candidates: Tensor, base: Victim, similar: Callable[..., dict[tuple[str, str], Tensor]]
) -> None:
    found = similar(setting=("a",))["control:flat", "release"]
    names = released_parameters(base.model)
    grey = base.model.mean.expand_as(candidates[OWN])
    sent = flat(observe(base.model, grey, torch.tensor(labels)[OWN], names).gradients)
    plain = flat(observe(base.model, candidates, torch.tensor(labels), names).gradients)
    expected = F.normalize(sent, dim=1) @ F.normalize(plain, dim=1).T
    assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_candidates_of_another_client_are_computed_anew(similar: Callable[..., dict[tuple[str, str], Tensor]]) -> None:
    shared = Releases()
    client = {
        "setting": ("a",),
        "client": "flower-default",
        "options": ("client.images=1", "client.batch_size=1", "client.epochs=2"),
    }
    for given in ({"setting": ("a",)}, {"defense": "gradient-sign"}, client):
        for key, value in similar(shared, **given).items():
            assert torch.equal(value, similar(**given)[key])


def test_what_is_not_compared_is_said(
    base: Victim, candidates: Tensor, similar: Callable[..., dict[tuple[str, str], Tensor]]
) -> None:
    spec = specify(**GIVEN)  # type: ignore[arg-type]
    assert unreleased(spec) == ""
    assert unreleased(replace(spec, release=Features())) == "features are released"
    assert unreleased(replace(spec, release=Gradient(2))) == "several images are released as one"
    with pytest.raises(PrivlabError, match=r"images.*1"):
        Releases().similarities(spec, base, [NamedImage("0", "0", None, 0)], OWN[:1], candidates)

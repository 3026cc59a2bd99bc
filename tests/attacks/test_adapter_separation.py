"""`adapter-separation` against images that are known, and its parts against what the model computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import AdapterSeparation
from privlab.attacks.solvers import photograph_gradients
from privlab.attacks.tokens import (
    Bottleneck,
    InputLaw,
    Inverted,
    Mlp,
    PatchLaw,
    Spans,
    fit_patches,
    invert_mlp,
    patch_prior,
    places_of_tokens,
    separate_inputs,
)
from privlab.attacks.tokens.bottleneck import _Search
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import unread
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import as_gradients, observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel, first_block, victim

Model = Callable[..., VictimModel]
PATH = "blocks.0.mlp.adapter"
SEARCH = {"size": 2.0, "starts": 64, "rounds": 40, "steps": 60, "tolerance": 1e-5}


def seen_of(model: VictimModel, images: Tensor, rank: int = 64, **settings: Any) -> Observation:
    """Return what clients of one image each send that train adapters."""
    client = Client(**({"trains": "adapters", "rank": rank, "lr": 0.5} | settings))
    data = [ClientData(image[None], torch.tensor([n % 7]), Generator()) for n, image in enumerate(images)]
    return observe_updates(model, client, data)


def adapter_of(seen: Observation) -> Bottleneck:
    """Return the first adapter with its gradients."""
    gradients = {name.removeprefix(f"{PATH}."): g[0] for name, g in as_gradients(seen).gradients.items()}
    return Bottleneck.of(seen.model.vit.get_submodule(PATH), gradients)


def first_mlp(model: VictimModel, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the first MLP reads of an image and gives, and the bias of its second layer."""
    block, (z,) = first_block(model), model.embed(image[None]).double()
    u = block.norm2(z + block.attention(z))
    b2 = model.vit.get_parameter("blocks.0.mlp.fc2.bias").detach().double()
    return u, block.mlp(u), b2


def usual(model: VictimModel, crops: Tensor) -> InputLaw:
    return InputLaw.of(torch.stack([first_mlp(model, image)[0] for image in crops[1:200:5]]))


def exact(model: VictimModel, u: Tensor) -> Inverted:
    """Return tokens of which there is hardly a doubt."""
    return Inverted(u, u.new_zeros(len(u)), 1e-12 * torch.eye(u.shape[1]).to(u).expand(len(u), -1, -1))


@pytest.fixture(scope="module")
def model() -> VictimModel:
    """Return a trained model of 16 patches: outputs of random weights are so small that GELU is linear."""
    return victim("cifar_vit", img_size=16).model


@pytest.fixture
def contrast(crops: Tensor) -> Tensor:
    """Return crops of the most contrast: patches that are alike have one token."""
    return crops[crops.std((1, 2, 3)).argsort(descending=True)[[0, 40]]].float()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [36, 64])
def test_all_outputs_of_the_mlp_are_found_one_by_one(model: VictimModel, contrast: Tensor, rank: int) -> None:
    h = first_mlp(model, contrast[0])[1]
    found = separate_inputs(adapter_of(seen_of(model, contrast[:1], rank)), 17, Generator().manual_seed(0), **SEARCH)
    off, of = (torch.cdist(found.u, h) / h.norm(dim=1)).min(1)
    assert sorted(of.tolist()) == [*range(17)]
    assert (off < 0.02).all()
    assert (found.residual < 1e-5).all()
    assert found.wanted == 17


def test_the_jacobian_of_the_search_for_outputs_is_its_derivative(model: VictimModel, contrast: Tensor) -> None:
    parts = adapter_of(seen_of(model, contrast[:1], 36))
    search = _Search.of(parts, Spans.of(parts.G_down, parts.G_up, 17))
    β = torch.randn(2, 16, generator=Generator().manual_seed(0), dtype=torch.float64)
    _, J, _ = search.residual(β)
    for k in (0, 9):
        step = 1e-6 * torch.eye(16).double()[k]
        slope = (search.residual(β + step)[0] - search.residual(β - step)[0]) / 2e-6
        assert_close(J[..., k], slope, rtol=1e-4, atol=1e-7)
    assert_close(search.coordinates(search.inputs(β)), β)


def test_an_adapter_of_fewer_equations_than_unknowns_tells_no_outputs(model: VictimModel, contrast: Tensor) -> None:
    """At r = 24 there are 7 equations for 16 unknowns: solutions are no outputs, which the range of the attack says."""
    seen = seen_of(model, contrast[:1], 24)
    h = first_mlp(model, contrast[0])[1]
    found = separate_inputs(adapter_of(seen), 17, Generator().manual_seed(0), **SEARCH | {"rounds": 1})
    assert len(found.u)
    assert ((torch.cdist(found.u, h) / h.norm(dim=1)).amin(1) > 0.05).any()
    assert AdapterSeparation().beyond(seen) == "2·(N + 1) = 34 ≥ r = 24"
    with pytest.warns(PrivlabWarning, match=r"2·\(N.*1\).*34.*24"):
        made = AdapterSeparation()(seen)
    assert made.tokens is not None
    assert made.tokens.tolist() == [0]
    assert_close(made.images, torch.full_like(made.images, 0.5))


@pytest.mark.slow
def test_outputs_are_inverted_in_any_order(model: VictimModel, crops: Tensor, contrast: Tensor) -> None:
    u, h, b2 = first_mlp(model, contrast[0])
    order = torch.randperm(17, generator=Generator().manual_seed(0))[:6]
    made = invert_mlp(Mlp.of(first_block(model)), b2, h[order], usual(model, crops))
    assert (made.residual < 1e-5).all()
    error = made.u - u[order]
    assert (error.norm(dim=1) < 5e-3 * u[order].norm(dim=1)).all()
    square = (error * torch.linalg.solve(made.doubt, error)).sum(1) / u.shape[1]  # one, of an error of its law
    assert (square < 2).all()
    assert (made.doubt.diagonal(dim1=1, dim2=2) < 1e-2).all()
    assert len(made.found().u) == 6
    assert len(made._replace(residual=made.residual + 1).found().u) == 0


@pytest.mark.slow
def test_tokens_are_put_into_their_places_and_the_image_is_exact(model: VictimModel, contrast: Tensor) -> None:
    """D = 128 entries of an embedding tell all 48 pixels of a patch."""
    block, law = first_block(model), PatchLaw.of(model, patch_prior(model, photograph_gradients(model)))
    x = patchify(model.normalise(contrast), model.patch)
    for image, own in zip(contrast, x, strict=True):
        u = first_mlp(model, image)[0]
        order = torch.randperm(17, generator=Generator().manual_seed(1))
        places = places_of_tokens(model, block, exact(model, u[order]), law)
        assert places.tolist() == order.tolist()
        assert (
            fit_patches(model, block, exact(model, u[order]), places, law, Generator().manual_seed(0)) - own
        ).norm() < 0.02 * own.norm()


@pytest.mark.slow
def test_a_patch_without_a_token_is_told_by_what_others_read_of_it(model: VictimModel, contrast: Tensor) -> None:
    block, law = first_block(model), PatchLaw.of(model, patch_prior(model, photograph_gradients(model)))
    (x,) = patchify(model.normalise(contrast[:1]), model.patch)
    places = torch.tensor([0, *range(2, 17)])
    tokens = exact(model, first_mlp(model, contrast[0])[0][places])
    made = fit_patches(model, block, tokens, places, law, Generator().manual_seed(0))
    assert (made[1:] - x[1:]).norm() < 0.1 * x[1:].norm()
    assert (made[0] - x[0]).norm() < x[0].norm()


def test_tokens_of_mlp_inputs_with_their_doubts_are_put_into_their_places(model: VictimModel, contrast: Tensor) -> None:
    """An error along what is doubted changes no place; the same error as if it were none changes some."""
    block, law = first_block(model), PatchLaw.of(model, patch_prior(model, photograph_gradients(model)))
    u, order = first_mlp(model, contrast[0])[0], torch.randperm(17, generator=Generator().manual_seed(1))
    V = torch.linalg.svd(law.spread).Vh[-8:]  # where patches have no variance
    draw = torch.randn(17, 8, generator=Generator().manual_seed(2), dtype=torch.float64)
    norm = Mlp.of(block).γ
    off = exact(model, u[order])._replace(u=u[order] + 2 * draw @ V * norm)
    doubt = off.doubt + 4 * norm[:, None] * V.mT @ V * norm
    told = places_of_tokens(model, block, off._replace(doubt=doubt), law)
    assert told.tolist() == order.tolist()
    assert places_of_tokens(model, block, off, law).tolist() != order.tolist()


def test_the_law_of_patches_is_that_of_its_prior(model: VictimModel) -> None:
    """Embeddings base + c B have the covariance W S Wᵀ, where patches have any, and x = c M is the patch of z."""
    L = patch_prior(model, photograph_gradients(model))
    law = PatchLaw.of(model, L)
    W = model.vit.patch_embed.proj.weight.flatten(1).double()
    S = W @ L @ L.mT @ W.mT
    assert_close(law.B.mT @ law.B, S, atol=float(2e-4 * S.diagonal().mean()), rtol=1e-3)
    c = torch.eye(len(law.B), dtype=torch.float64)
    made = c @ law.M @ W.mT
    assert (made - c @ law.B)[:8].norm() < 1e-3 * law.B[:8].norm()


@pytest.mark.slow
def test_the_image_of_a_trained_model_is_nearly_exact(model: VictimModel, contrast: Tensor) -> None:
    made = AdapterSeparation()(seen_of(model, contrast[:1]))
    assert made.tokens is not None
    assert made.tokens_sure is not None
    assert (made.tokens.tolist(), made.tokens_sure.tolist()) == ([17], [17])
    assert float(psnr(made.images, contrast[:1])) > 40


def test_decay_and_momentum_of_one_step_change_nothing(model: VictimModel, contrast: Tensor) -> None:
    plain = adapter_of(seen_of(model, contrast[:1], 36))
    other = adapter_of(seen_of(model, contrast[:1], 36, weight_decay=0.1, momentum=0.9, lr=0.2))
    assert_close(other.G_down, plain.G_down, rtol=1e-3, atol=1e-5)
    assert_close(other.G_up, plain.G_up, rtol=1e-3, atol=1e-5)


def test_what_it_cannot_read_is_one_line(tiny_model: Model, contrast: Tensor) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"trains": "head"}, "reads the update of bottleneck adapters, and here client.trains=head"),
        ({"steps": 3}, "reads the update of one step of SGD, and here there are 3 steps"),
    )
    for settings, why in refused:
        given: dict[str, Any] = {"trains": "adapters"} | settings
        client = Client(**given)
        assert unread(AdapterSeparation, client) == (
            f"Attack 'adapter-separation' {why}. That it does not apply is no evidence of privacy."
        )
    assert unread(AdapterSeparation, Client(trains="adapters")) is None
    with pytest.raises(PrivlabError, match="embeddings"):
        AdapterSeparation()(seen_of(tiny_model(pos_embed="none"), contrast[:1]))
    with pytest.raises(PrivlabError, match=r"MLP.*pre-norm.*pre-norm"):
        AdapterSeparation()(seen_of(tiny_model(pre_norm=True), contrast[:1]))
    with pytest.raises(PrivlabError, match=r"starts of adapter-separation.*1.*0"):
        AdapterSeparation(starts=0)
    with pytest.raises(PrivlabError, match=r"tolerance of adapter-separation.*1"):
        AdapterSeparation(tolerance=1.0)

"""Cloaks hide weights from nobody who has a public model of the same origin."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from privlab.attacks.weights.cloak_matching import CloakMatching, CloakObservation, uncloaked_fraction
from privlab.base import PrivlabError
from privlab.keys import Cloak, apply_cloak, cloak_bits, new_cloak, offloaded, public_state

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def pair() -> tuple[State, State]:
    """Return the matrices of a fine-tuned victim of the package, and of another one of the same origin."""
    tuned, public = (public_state(name) for name in ("cifar_vit_mjp27", "cifar_vit_mjp"))
    own, base = (offloaded({name: W.float() for name, W in state.items()}) for state in (tuned, public))
    return own, base


def cloaked(plain: State) -> tuple[State, dict[str, Cloak]]:
    cloaks = {name: new_cloak(len(W)) for name, W in plain.items()}
    return {name: apply_cloak(W, cloaks[name]) for name, W in plain.items()}, cloaks


def share(attack: CloakMatching, plain: State, base: State) -> float:
    hidden, cloaks = cloaked(plain)
    return uncloaked_fraction(attack(CloakObservation(hidden, base)), {name: c.order for name, c in cloaks.items()})


def test_a_cloak_is_its_formula_and_the_enclave_takes_it_off() -> None:
    W, x = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    cloak = new_cloak(6)
    hidden = apply_cloak(W, cloak)
    m = sum((int(c) * row for c, row in zip(cloak.combination, W, strict=True)), torch.zeros(4, dtype=torch.float64))
    for j, i in enumerate(cloak.order.tolist()):
        torch.testing.assert_close(hidden[j], cloak.scales[i] * W[i] + cloak.ratios[i] * m)
    inside = (hidden @ x - cloak.ratios[cloak.order] * (m @ x)) / cloak.scales[cloak.order]
    torch.testing.assert_close(inside, (W @ x)[cloak.order])


def test_every_integer_of_a_cloak_is_drawn() -> None:
    cloak = new_cloak(1000)
    assert sorted(cloak.scales.unique().tolist()) == [1, 2]
    assert sorted(cloak.ratios.unique().tolist()) == list(range(-5, 6))
    assert sorted(cloak.combination.unique().tolist()) == list(range(5))
    assert torch.equal(cloak.order.sort().values, torch.arange(1000))
    assert repr(cloak) == "Cloak()"


def test_the_bits_of_a_cloak_are_those_of_its_integers() -> None:
    assert cloak_bits(2) == pytest.approx(torch.tensor(2 * 110.0**2).log2().item())


def test_the_matrices_on_the_device_are_those_of_the_blocks() -> None:
    state = public_state("cifar_vit")
    found = offloaded(state)
    assert len(found) == 6 * 4
    assert torch.equal(found["blocks.2.attn.k"], state["blocks.2.attn.qkv.weight"][128:256])
    assert torch.equal(found["blocks.3.mlp.fc1"], state["blocks.3.mlp.fc1.weight"])


@pytest.mark.slow
def test_the_order_is_found_without_the_mask_and_not_with_it(pair: tuple[State, State]) -> None:
    plain, base = pair
    assert share(CloakMatching(), plain, base) == 1
    assert share(CloakMatching(masks=0), plain, base) < 0.8


def test_directions_alone_find_rows_that_no_mask_hides(pair: tuple[State, State]) -> None:
    plain, base = pair
    orders = {name: torch.randperm(len(W), generator=torch.Generator().manual_seed(0)) for name, W in plain.items()}
    seen = CloakObservation({name: 2 * W[orders[name]] for name, W in plain.items()}, base)
    assert uncloaked_fraction(CloakMatching(masks=0)(seen), orders) == 1


def test_weights_come_back_nearer_than_the_public_ones(pair: tuple[State, State]) -> None:
    plain, base = pair
    hidden, _ = cloaked(plain)
    found = CloakMatching()(CloakObservation(hidden, base)).weights
    ratio = torch.stack([(found[name] - W).norm() / (base[name] - W).norm() for name, W in plain.items()])
    assert ratio.median() < 0.4


def test_weights_of_the_public_model_itself_come_back_exactly(pair: tuple[State, State]) -> None:
    base = {name: W.double() for name, W in pair[1].items()}
    hidden, _ = cloaked(base)
    found = CloakMatching()(CloakObservation(hidden, base)).weights
    for name, W in base.items():
        torch.testing.assert_close(found[name], W, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda W: W[:3], r"one architecture\. Found 'a' of shape \(3, 4\) and \(5, 4\)."),
        (lambda W: W * float("nan"), "Found NaN or infinity in 'a'."),
    ],
)
def test_what_cannot_be_matched_is_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    W = torch.randn(5, 4)
    with pytest.raises(PrivlabError, match=message):
        CloakMatching()(CloakObservation({"a": change(W)}, {"a": W}))


def test_bad_options_and_sizes_are_refused() -> None:
    with pytest.raises(PrivlabError, match=r"cloak-matching.*0.*1.*2"):
        CloakMatching(masks=2)
    with pytest.raises(PrivlabError, match=r"3.*matrix.*4"):
        apply_cloak(torch.zeros(4, 2), new_cloak(3))
    with pytest.raises(PrivlabError, match=r"Found none of them\."):
        offloaded({"head.weight": torch.zeros(2, 2)})

"""A server that chooses the weights: its attacks alone see what is released with them, and every record says so."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import privlab
from privlab.attacks import ATTACKS, PatchGradient
from privlab.base import PrivlabError
from privlab.evaluation import applicable, default_attacks
from privlab.evaluation.observing import with_chosen_weights
from privlab.grids import specify
from privlab.report.tables.case_verdicts import scope
from privlab.threat import Capability, Client, Observation
from privlab.victims import VictimModel

CHEATS = [name for name, kind in ATTACKS.items() if Capability.CHOOSES_WEIGHTS in kind.requires]


@dataclass(frozen=True)
class DoubledHead:
    """Doubles the head, and returns grey images, or the colour of the mean by which the victim normalises."""

    name: ClassVar[str] = "doubled-head"
    paper: ClassVar[str] = ""
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.CHOOSES_WEIGHTS})
    parameters: ClassVar[tuple[str, ...]] = ("head.weight",)

    wrong: bool = False

    def choose(self, model: VictimModel, images: int, client: Client | None) -> dict[str, Tensor]:
        """Return the head twice as large."""
        parameters = dict(model.vit.named_parameters())
        parameters["head.bias"].detach().fill_(7)  # a change in place must not reach the caller's model
        return {"nose.weight" if self.wrong else "head.weight": 2 * parameters["head.weight"].detach()}

    def __call__(self, seen: Observation) -> Tensor:
        """Return grey images."""
        return torch.full((seen.images_per_release * len(seen.gradients["head.weight"]), *seen.model.image_shape), 0.5)


@dataclass(frozen=True)
class TripledHead(DoubledHead):
    """Triples the head."""

    name: ClassVar[str] = "tripled-head"

    def choose(self, model: VictimModel, images: int, client: Client | None) -> dict[str, Tensor]:
        """Return the head three times as large."""
        return {"head.weight": 3 * dict(model.vit.named_parameters())["head.weight"].detach()}


@pytest.fixture(scope="module")
def victim() -> privlab.Victim:
    return privlab.victim("cifar_vit")


def test_clients_release_with_the_chosen_weights_and_the_victim_keeps_its_own(victim: privlab.Victim) -> None:
    images, labels = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    before = {name: tensor.clone() for name, tensor in victim.model.state_dict().items()}
    honest = privlab.observe(victim, images, labels, ["head.weight"])
    seen = privlab.observe(victim, images, labels, ["head.weight"], server=DoubledHead())
    assert isinstance(seen, Observation)
    assert seen.grants - honest.grants == {Capability.CHOOSES_WEIGHTS}
    assert isinstance(honest, Observation)
    held = seen.model.vit.state_dict()
    assert torch.equal(held["head.weight"], 2 * before["vit.head.weight"])
    with_its_own = privlab.observe(seen.model, images, labels, ["head.weight"])
    assert isinstance(with_its_own, Observation)
    assert torch.equal(seen.gradients["head.weight"], with_its_own.gradients["head.weight"])
    assert not torch.equal(seen.gradients["head.weight"], honest.gradients["head.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in victim.model.state_dict().items())


def test_a_weight_that_the_model_lacks_is_refused(victim: privlab.Victim) -> None:
    with pytest.raises(PrivlabError, match=r"nose\.weight"):
        with_chosen_weights(victim.model, DoubledHead(wrong=True), 1)


def test_records_labels_and_verdict_state_the_capability(victim: privlab.Victim) -> None:
    images, labels = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    run = privlab.attack(victim, images, labels, attacks=[DoubledHead(), TripledHead()], metrics=["psnr"])
    assert {*run.records.attack} >= {"doubled-head", "tripled-head"}
    assert all(json.loads(text)["chooses_weights"] is True for text in run.records.conditions)
    assert set(run.records.status) == {"ok"}
    assert run.records.beyond_range.isna().all()
    assert "dishonest server that chose the weights" in scope(run.records)
    assert "the server chose the weights" in run.verdict.splitlines()[0]


def test_an_honest_run_states_nothing_of_it(victim: privlab.Victim) -> None:
    run = privlab.attack(victim, torch.rand(1, 3, 32, 32), [1], attacks=[PatchGradient()], metrics=["psnr"])
    assert not run.records.conditions.str.contains("chooses_weights").any()
    assert "honest-but-curious" in scope(run.records)


def test_one_run_has_one_threat_model(victim: privlab.Victim) -> None:
    with pytest.raises(PrivlabError, match="separate run"):
        privlab.attack(victim, torch.rand(1, 3, 32, 32), [1], attacks=[PatchGradient(), DoubledHead()])


def test_each_dishonest_attack_has_a_release_that_no_other_sees(victim: privlab.Victim) -> None:
    spec = specify(model=("cifar_vit",), attack=(DoubledHead(), TripledHead()))
    groups, refused = applicable(spec, victim)
    assert not refused
    assert [group.key for group in groups] == [("stock", "doubled-head"), ("stock", "tripled-head")]


@pytest.mark.parametrize("effort", ["quick", "standard", "full"])
def test_no_attack_of_a_dishonest_server_runs_unnamed(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of another package that forgets to say so."""
    assert CHEATS
    monkeypatch.setattr("privlab.evaluation.case.installed_attacks", lambda: {**ATTACKS, "doubled-head": DoubledHead})
    assert not {*CHEATS, "doubled-head"} & {*default_attacks(effort)}

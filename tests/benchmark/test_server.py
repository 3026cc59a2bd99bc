"""The track on a dishonest server: what passes counts, a refusal costs, and a check that is none is refused."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from privlab.attacks.dishonest.layout import STEEP, noise_images
from privlab.attacks.dishonest.manipulations import manipulation_of, quotient_errors
from privlab.base import PrivlabError
from privlab.benchmark import server
from privlab.benchmark.cards import CHECKED, Card, instances, parse_card, write_template
from privlab.benchmark.measure import Photographs
from privlab.benchmark.page import evaluation_record, fragment
from privlab.benchmark.results import FORMAT, Result, to_rows, write_result
from privlab.benchmark.rule import conclude, standings
from privlab.benchmark.tracks import Track, TrackCase, TrackVictim, photographs, track
from privlab.runs.weight_checks import AuditCheck, SignalToNoise
from privlab.testing.plugin_process import Limits, Plugin
from privlab.victims import VictimModel, victim

pytestmark = pytest.mark.filterwarnings("ignore:cifar_vit has RANDOM weights")

OF = track(CHECKED)
CARD = """
track = "dishonest-server"
version = "privlab/1"
kind = "defense"
name = "{name}"
uses = "{uses}"
paper = "a paper"
secret_bits = 0
epsilon = "none"
[parameters]
{parameters}
[utility]
measure = "honest rounds"
how = "by the track"
"""
LEAKS = {"bins": 0.6, "traps": 0.4, "places mixed 0.003": 0.1, "control:honest weights": 0.0}
"""What a server reads in the tests of the rule."""


def card(name: str = "mine", uses: str = "weights-audit", parameters: str = 'part = "all"') -> Card:
    return parse_card(CARD.format(name=name, uses=uses, parameters=parameters), Path(f"{name}.toml"))


@dataclass(frozen=True)
class Check:
    """A check of the tests: it returns what a function says of a model."""

    says: Callable[[VictimModel], float]
    name = "weights-audit"
    paper = "none"

    def suspicion(self, model: VictimModel, images: Tensor, labels: Tensor, last: Mapping[str, Tensor] | None) -> float:
        """Return what the function says."""
        return self.says(model)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the track have few manipulations and few honest weights, of a first round, and one client of two images."""
    honest = {"trained": ["cifar_vit", "cifar_vit_early"], "random": 1, "starts": [], "rounds": 0, "client": []}
    own = replace(
        OF,
        honest=honest,
        attacks=("bins", "places mixed 0.003"),
        cases=(TrackCase("first", {"start": "cifar_vit", "rounds": 0}),),
    )
    monkeypatch.setattr(Card, "of", property(lambda self: own if self.track == CHECKED else track(self.track)))
    monkeypatch.setattr(server, "track", lambda name: own)
    server.battery.cache_clear()
    whole = server.clients_of

    def few(of: Track, victim: TrackVictim, how: Photographs) -> list[server.OneClient]:
        (one,) = whole(of, victim, how)
        return [server.OneClient(one.images[:2], one.labels[:2], one.names[:2], one.hashes[:2])]

    monkeypatch.setattr(server, "clients_of", few)
    verify = importlib.import_module("privlab.benchmark.verify")
    monkeypatch.setattr(verify, "photographs", lambda part: [*photographs(part)][:2])
    yield
    server.battery.cache_clear()


def measured(monkeypatch: pytest.MonkeyPatch, *parts: Any) -> tuple[pd.DataFrame, float, list[str]]:
    monkeypatch.setattr(server, "instances", lambda card: [*parts])
    return server.measure_checks(card(), Photographs())


def read(rows: pd.DataFrame, setting: str) -> dict[str, float]:
    return rows[rows.setting == setting].groupby("attack").patches_read.mean().to_dict()


def is_honest(model: VictimModel) -> bool:
    return float(model.vit.get_parameter("blocks.0.mlp.fc1.weight").abs().max()) < STEEP / 10


@pytest.mark.usefixtures("short")
def test_what_passes_leaks_as_without_a_check_and_what_is_refused_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, worth, refused = measured(monkeypatch, Check(lambda model: 1.0 if is_honest(model) else 1.01))
    plain, passed = read(rows, "a"), read(rows, "c")
    assert plain["bins"] > 0.2 > plain["control:honest weights"]
    assert passed["bins"] == 0
    assert passed["places mixed 0.003"] == plain["places mixed 0.003"]
    assert (worth, refused) == (1.0, [])


@pytest.mark.usefixtures("short")
def test_no_call_says_whose_weights_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen weights come with the same photographs, labels and flags as honest ones."""
    seen: list[tuple[Any, ...]] = []

    class Looking(Check):
        def suspicion(self, model: VictimModel, images: Tensor, labels: Tensor, last: Any) -> float:
            flags = {p.requires_grad for p in model.vit.parameters()} | {p.dtype for p in model.vit.parameters()}
            seen.append((flags, model.training, type(model), images.sum().item(), labels.tolist(), last))
            return 0.0

    measured(monkeypatch, Looking(lambda model: 0.0))
    assert len(seen) == 12  # three weights of the case, three honest ones, and three of these twice
    assert all(each == seen[0] for each in seen)


@pytest.mark.usefixtures("short")
def test_a_check_that_always_refuses_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, worth, refused = measured(monkeypatch, Check(lambda model: float("inf")))
    assert set(read(rows, "c").values()) == {0.0}
    assert (worth, refused) == (0.0, ["cifar_vit", "cifar_vit_early", "random 0"])


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("says", [lambda model: float("nan"), lambda model: "high", lambda model: torch.rand(())])
def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, says: Callable[[VictimModel], Any]) -> None:
    with pytest.raises(PrivlabError, match="must return a number"):
        measured(monkeypatch, Check(says))


@pytest.mark.usefixtures("short")
def test_a_check_that_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrivlabError, match="must return one number for the same weights"):
        measured(monkeypatch, Check(lambda model: float(torch.rand(()))))


def result(folder: Path, name: str, passes: Sequence[str], worth: float, images: int = 64) -> Result:
    """Return the result of a check by which some manipulations of `LEAKS` pass."""
    hashes = [*photographs("bundled"), *photographs("public")][:images]
    rows: list[dict[str, Any]] = []
    for setting in ("a", "c"):
        for attack, leak in LEAKS.items():
            share = leak if setting == "a" or attack in passes else 0.0
            stated = {"attack": attack, "setting": setting, "attack_params": "{}", "patches_read": share}
            stated["case"] = "after three rounds" + (", undefended" if setting == "a" else "")
            stated["defense"] = "none" if setting == "a" else "weights-audit"
            rows += [server.row_of(card(name), sha, sha) | stated for sha in hashes]
    found = server.as_kept(pd.DataFrame(rows), OF)
    data = {
        "format": FORMAT,
        "track": {"name": OF.name, "version": OF.version, "sha256": OF.sha256},
        "created": 0,
        "card": card(name).text,
        "plugin": None,
        "versions": {"privlab": "0"},
        "photographs": ["bundled", "public"],
        "admission": [],
        "judged": conclude(card(name), found),
        "utility": worth,
        "draws": 1,
        "rows": to_rows(found),
    }
    return write_result(data, folder / f"{name}.json")


def test_a_faithful_check_wins_and_one_that_refuses_honest_weights_has_no_rank(tmp_path: Path) -> None:
    given = [
        result(tmp_path, "faithful", ["places mixed 0.003"], 0.995),
        result(tmp_path, "weak", ["bins", "places mixed 0.003"], 1.0),
        result(tmp_path, "blind", [*LEAKS], 1.0),
        result(tmp_path, "always", [], 0.0),
        result(tmp_path, "perfect", [], 1.0),
        result(tmp_path, "few", [], 1.0, images=14),
    ]
    rows = {row.name: row for row in standings(given)}
    assert {name: (row.rank, row.score, row.best_attack if row.score else "") for name, row in rows.items()} == {
        "perfect": (1, 0.0, ""),
        "faithful": (2, 0.1, "places mixed 0.003"),
        "blind": (3, 0.6, "bins"),
        "weak": (3, 0.6, "bins"),
        "always": (None, 0.0, ""),
        "few": (None, 0.0, ""),
    }
    assert rows["perfect"].verdict == "holds"
    assert rows["always"].unreliable == ("costs honest rounds too much: 0.000 is kept, and a rank needs 0.99",)
    page = fragment([*rows.values()])
    assert "share of the patches" in page
    assert evaluation_record(rows["faithful"])["evaluation_results"][0]["metric_config"]["max_score"] == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (('"defense"', '"attack"'), "has a fixed list of attacks and takes no other one"),
        (('"dishonest-server"', '"gradients"'), "acts on weights, which the track 'gradients' does not take"),
        (('part = "all"', 'part = "none"'), "part"),
    ],
)
def test_what_the_track_does_not_take_is_refused(changes: tuple[str, str], said: str) -> None:
    text = CARD.format(name="mine", uses="weights-audit", parameters='part = "all"').replace(*changes)
    with pytest.raises(PrivlabError, match=said):
        instances(parse_card(text, Path("mine.toml")))


def test_a_manipulation_that_is_not_there_is_refused() -> None:
    for name in ("nothing", "bins mixed", "bins hidden 1"):
        with pytest.raises(PrivlabError, match="No manipulation is called"):
            manipulation_of(name)


def test_a_token_of_which_only_the_place_is_known_is_not_read() -> None:
    """A row in the direction of a slot is near each of its tokens, and tells nothing of the patch."""
    known = 100 * torch.eye(4, 8, dtype=torch.float64)
    tokens = known + torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)).double()
    by_place = quotient_errors((known, torch.ones(4).double()), tokens, known)
    assert float(by_place.min()) >= 1 - 1e-6
    bins = torch.cat([2 * tokens[0, :1] + tokens[1, 1:2], tokens[1, 1:2]])  # two rows whose difference is one token
    errors = quotient_errors((bins, torch.tensor([3.0, 1.0]).double()), tokens, known)
    assert errors[0, 0] < 1e-6
    assert errors[1, 1] < 1e-6
    assert (errors < server.READ).sum() == 2


def test_signal_to_noise_is_that_of_the_gradients_of_examples(cifar: VictimModel) -> None:
    images, labels = noise_images(3, cifar.image_shape), torch.tensor([0, 1, 2])
    name = "blocks.1.mlp.fc1.weight"
    found: list[float] = []
    weight = cifar.vit.get_parameter(name)
    for i in range(3):
        loss = torch.nn.functional.cross_entropy(cifar(images[i : i + 1]), labels[i : i + 1])
        found.append(float(torch.autograd.grad(loss, [weight])[0].norm()))
    ratio = max(found) / (sum(found) - max(found))
    assert SignalToNoise().suspicion(cifar, images, labels, None) >= 0.999 * ratio
    assert SignalToNoise().suspicion(cifar, images[:1], labels[:1], None) == float("inf")
    assert 0 < SignalToNoise("tokens").suspicion(cifar, images, labels, None) < float("inf")


def test_the_audit_is_above_its_limit_for_chosen_weights_alone(
    cifar: VictimModel, photographs: Callable[[int, int], Tensor]
) -> None:
    images = photographs(4, 32)
    assert AuditCheck().suspicion(cifar, images, torch.arange(4), None) <= 1
    manipulation_of("bins")(cifar, images)
    for part in ("all", "patches", "statistics"):
        assert AuditCheck(part).suspicion(cifar, images, torch.arange(4), None) > 1


@pytest.fixture
def cifar() -> VictimModel:
    model = copy.deepcopy(victim("cifar_vit").model)
    model.vit.requires_grad_(True)
    return model


PLUGIN = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine:
    name = "mine"
    paper = "p"
    def suspicion(self, model, images, labels, last):
        {body}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('return float("nan")', "nan instead of a number"),
        ("return images", "instead of a number"),
        ('raise ValueError("no")', "The plug-in failed: ValueError: no"),
        ("while True: pass", "longer than 2 seconds|ended with signal"),
    ],
)
def test_a_plugin_that_does_not_answer_with_a_number_is_refused(cifar: VictimModel, body: str, said: str) -> None:
    plugin = Plugin(PLUGIN.format(body=body), Limits(seconds=2.0))
    try:
        made = plugin.stand_ins()["Mine"]()
        with pytest.raises(PrivlabError, match=said):
            made.suspicion(cifar, noise_images(2, cifar.image_shape), torch.arange(2), None)
    finally:
        plugin.close()


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_template_of_a_check_enters_and_is_verified(tmp_path: Path, cli: Callable[..., Any]) -> None:
    write_template("check", tmp_path)
    found = cli("benchmark", "submit", tmp_path / "my_check.toml", "--out", tmp_path / "my.json", "--json").json
    assert found["judged"]["images"] == 2
    again = cli("benchmark", "verify", tmp_path / "my.json", "--json").json
    assert (again["rows"], again["confirmed"]) == (12, 12)  # two settings, two manipulations and a control, two images
    listed = cli("benchmark", "list", "--track", CHECKED, "--entries", tmp_path, "--json").json
    (row,) = [row for row in listed if row["name"] == "my-check"]
    assert (row["rank"], row["measured_utility"]) == (None, 1.0)

"""The script for a card, without one: `on_a_card.sh --dry` takes every step on the CPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from privlab.grids import check_shuffled, specify

SCRIPT = Path(__file__).with_name("on_a_card.sh")
RESULTS = {"log.txt", "steps.tsv", "machine.json", "bench-deit_s.json", "bench-vit_ti_160.json"}
RESULTS |= {"search.json", "equality.json", "limits.json"}


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the script is for Python 3.12")
def test_every_step_succeeds_on_the_cpu(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [str(SCRIPT), str(tmp_path / "out"), "--dry"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == RESULTS
    steps = dict(line.split("\t")[::3] for line in (out / "steps.tsv").read_text().splitlines())
    assert set(steps.values()) == {"0"}
    equality = json.loads((out / "equality.json").read_text())
    assert (equality["wrong"], equality["not done"]) == ([], [])
    assert equality["tables"]["card"]["patch-gradient"]["exact"] > 0
    assert json.loads((out / "limits.json").read_text())["message"]["status"] == 2
    assert set(json.loads((out / "machine.json").read_text())["first_result"]) >= {"imported", "first reconstruction"}
    costs = json.loads((out / "bench-vit_ti_160.json").read_text())["seconds_per_image"]
    assert {"mjp-full", "mjp-subspace", "inversion-conv: inversion", "gradient-matching: a step"} <= costs.keys()


def test_results_of_two_devices_are_counted_by_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    compared = importlib.import_module("on_a_card_equality").compared

    def rows(*scores: tuple[float, bool]) -> list[dict[str, object]]:
        return [
            {"key": f"c stock fit in_place {i}", "psnr": psnr, "exact": exact, "seconds": 0.0, "found": []}
            for i, (psnr, exact) in enumerate(scores)
        ]

    cpu = rows((99, True), (20, False), (30, False), (60, False), (99, True))
    card = rows((110, True), (20.05, False), (30.5, False), (62, False), (98, False))
    found = compared({"case": {"cpu": cpu, "card": card}})
    of = found["tables"]["card"]["fit"]
    assert (of["rows"], of["exact"], of["below"], of["above"]) == (5, 1, [2, 1, 0.5], [1, 0, 2])
    assert len(found["wrong"]) == 1
    assert "one is exact" in found["wrong"][0]


def test_no_case_of_equality_is_refused_for_what_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    cases = importlib.import_module("on_a_card_equality").equality_cases(few=False)
    for case in cases.values():
        stated = {name: value for name, value in case.items() if name not in ("settings", "attacks")}
        check_shuffled([specify(**stated, setting=case.get("settings"), attack=case.get("attacks"))])


@pytest.mark.parametrize("given", [(), ("out", "--wet")])
def test_a_mistake_is_answered_at_once(tmp_path: Path, given: tuple[str, ...]) -> None:
    done = subprocess.run([str(SCRIPT), *given], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()

"""By which network a run is scored that asks for "lpips"."""

from typing import Any

import pytest

from privlab.evaluation.lpips_choice import begun_lpips, choose_lpips, named_lpips, with_lpips
from privlab.grids import specify
from privlab.metrics import LpipsUnavailable

ALEX, SQUEEZE = ("alex", None), ("squeeze", "AlexNet is not here.")
SAID = "LPIPS is by SqueezeNet, not AlexNet; see `privlab explain lpips`."


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, tuple[str, str | None]]:
    """Say which network is found at a place; what is looked for elsewhere fails."""
    found: dict[str | None, tuple[str, str | None]] = {}

    def net(weights: object, *, download: bool) -> tuple[str, str | None]:
        return found[None if weights is None else str(weights)]

    monkeypatch.setattr("privlab.evaluation.lpips_choice.net_at_hand", net)
    return found


def begun(*metrics: str, missing: tuple[str, ...] = (), warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what `run.json` states of a run of one case."""
    jobs = [{"specification": {"metrics": ["psnr", *metrics]}}]
    return {"cases": [{"jobs": jobs}], "missing_metrics": dict.fromkeys(missing, "why"), "warnings": list(warnings)}


def test_alexnet_is_taken_where_it_can_be_had_in_every_place(at_hand: Any) -> None:
    at_hand.update({None: ALEX, "here": ALEX, "there": SQUEEZE})
    assert choose_lpips([None, "here"], {}) == ("lpips_alex", None)
    metric, said = choose_lpips([None, "there"], {})
    assert metric == "lpips_squeeze"
    assert said == SAID
    assert len(f"Warning: {said}") <= 80  # one line of a terminal


def test_a_run_that_goes_on_keeps_its_network(at_hand: Any) -> None:
    """Nothing is looked for: a figure of the other network would stand in another column."""
    assert choose_lpips([None], begun("lpips_alex")) == ("lpips_alex", None)
    assert choose_lpips([None], begun("lpips_squeeze")) == ("lpips_squeeze", SAID)


def test_what_the_earlier_part_lacks_is_not_kept(at_hand: Any) -> None:
    at_hand[None] = SQUEEZE
    assert begun_lpips(begun()) is begun_lpips({}) is None
    assert begun_lpips(begun("lpips_alex", missing=("lpips_alex",))) is None
    assert choose_lpips([None], begun("lpips_alex", missing=("lpips_alex",)))[0] == "lpips_squeeze"


def test_the_name_gives_way_once() -> None:
    assert named_lpips(("lpips", "psnr", "lpips_squeeze"), "lpips_squeeze") == ("lpips_squeeze", "psnr")
    assert named_lpips(("lpips", "psnr"), None) == ("lpips", "psnr")


def test_a_metric_that_is_named_is_never_replaced(at_hand: Any) -> None:
    at_hand[None] = SQUEEZE
    for name in ("lpips_alex", "lpips_vgg"):
        spec = specify(model=("vit_ti",), metrics=("psnr", name))
        assert with_lpips(spec, {}) == (spec, None)
    default = specify(model=("vit_ti",))
    assert with_lpips(default, {})[0].metrics == (*default.metrics[:-1], "lpips_squeeze")
    assert default.metrics[-1] == "lpips"


def test_a_place_that_holds_no_backbone_is_an_error(tmp_path: Any) -> None:
    spec = specify(model=("vit_ti",), lpips_weights=str(tmp_path))
    with pytest.raises(LpipsUnavailable, match="lpips_alex: found no file"):
        with_lpips(spec, {})

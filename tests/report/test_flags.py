"""Red flags: each is raised by a case made for it, and none by healthy records."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Generator

from privlab.attacks import ATTACKS
from privlab.defenses import DEFENSES
from privlab.report.flag_meanings import FLAG_MEANINGS
from privlab.report.tables import DETERMINISTIC, RULES, Facts, Flag, flag_lines, lead_metric, red_flags
from privlab.report.tables.flags import BUDGETS, NOTHING_RELEASED
from privlab.threat import Draws, Stack

NAMES = ["plain", "defended"]
LEVELS = {
    0: {"april": 14.0, "patch-gradient": 60.0, "control:mean": 11.0},
    1: {"april": 13.0, "patch-gradient": 16.0, "mjp-subspace": 22.0, "control:mean": 11.0},
}


def records(levels: Mapping[int, Mapping[str, float]] = LEVELS, **values: Any) -> pd.DataFrame:
    """Return two draws of twenty images for each case and attack: undefended, and under MJP."""
    return pd.DataFrame(
        [
            {
                **{"case": case, "victim": "vit_ti", "weights": "pretrained:timm", "weights_sha256": "0" * 64},
                **{"block": "stock", "release": "gradients", "setting": "ac"[case], "conditions": "{}"},
                **{"defense": ("none", "mjp")[case], "defense_params": "{}", "attack": attack, "attack_params": "{}"},
                **{"geometry": "in_place", "image": image, "image_sha256": image * 8, "seed": 0, "draw": draw},
                **{"status": "ok", "reason": None, "external": None, "psnr": level + place % 2, "ssim": level / 100},
                **{"victim_params": '{"unk_embed": "trained"}', "label_origin": "folder", "beyond_range": None},
            }
            | values
            for case, attacks in levels.items()
            for attack, level in attacks.items()
            for draw in (0, 1)
            for place, image in enumerate("abcdefghijklmnopqrst")
        ]
    )


def found(
    rows: pd.DataFrame, names: Sequence[str] = NAMES, metric: str = "psnr", geometry: str = "in_place"
) -> dict[str, list[str]]:
    return {flag.head: list(flag.items) for flag in red_flags(Facts(rows, names, [metric], geometry))}


def case(attacks: Mapping[str, float], defense: str = "mjp", **values: Any) -> pd.DataFrame:
    """Return the records of one defended case, whose number is 0."""
    return records({1: attacks}, **{"case": 0, "defense": defense, **values})


def test_healthy_records_raise_none() -> None:
    assert found(records()) == {}
    assert flag_lines([]) == []
    assert found(records().iloc[:0]) == {}


def test_records_that_state_less_raise_no_more() -> None:
    stated = ["case", "attack", "geometry", "image", "image_sha256", "status", "psnr"]
    assert found(records()[stated]) == {}


def test_less_than_the_standard_effort() -> None:
    assert found(records(effort="standard")) == found(records(effort="full")) == {}
    assert found(records(effort="quick")) == {"Low effort": ["effort quick (every case)"]}
    rows = records(effort="quick")
    rows["effort"] = rows.effort.mask(rows.attack == "mjp-subspace", "standard")  # the run went on with more
    assert found(rows) == {"Low effort": ["effort quick (plain)"]}


def test_a_control_that_scores_as_well() -> None:
    levels = {"april": 11.0, "mjp-subspace": 22.0, "control:mean": 11.0, "control:other": 9.0}
    line = "defended: april 11.50 dB does not beat control:mean 11.50 dB"
    assert found(records(LEVELS | {1: levels})) == {"No better than a control": [line]}
    levels = {"april": 8.0, "mjp-subspace": 10.0, "control:mean": 11.0}
    line = "defended: april 8.50 dB, mjp-subspace 10.50 dB do not beat control:mean 11.50 dB"
    assert found(records(LEVELS | {1: levels})) == {"No better than a control": [line]}


def test_structure_without_its_scale_is_no_failure() -> None:
    """An attack that PSNR puts below a control, and its picture shows the private image all the same."""
    rows = records({1: {"april": 8.0, "mjp-subspace": 10.0, "control:mean": 11.0}}, case=0)
    rows["correlation"] = 0.1 + 0.001 * (rows.psnr % 2)
    rows.loc[rows.attack == "mjp-subspace", "correlation"] = 0.5
    rows["correlation_mirrored"] = 0.15
    named = found(rows, ["one"])
    assert named["No better than a control"] == ["one: april 8.50 dB does not beat control:mean 11.50 dB"]
    (line,) = named["Structure without its scale"]
    assert line.startswith(
        "one: mjp-subspace 10.50 dB does not beat control:mean 11.50 dB, but it shows structure without its scale ("
    )
    assert "20 of 20 images; 0.5000 correlation against 0.1500 of the mirrored image, a gain of 0.3500 [" in line
    chance = rows.assign(correlation=0.5 - 0.4 * (rows.image.map(ord) % 2 == (rows.attack == "mjp-subspace")))
    smooth = rows.assign(correlation_mirrored=0.5)
    unknown = rows.drop(columns="correlation_mirrored")
    for silent in (chance, smooth, unknown):
        assert "Structure without its scale" not in found(silent, ["one"])


def test_no_attack_was_scored_that_knows_the_defense() -> None:
    (line,) = found(case({"april": 14.0}), ["one"])["No adaptive attack"]
    assert line.startswith("mjp: mjp-subspace, mjp-full, ")
    assert line.endswith(" not scored")
    assert "patch-gradient-adaptive" not in line  # it has no defense on gradients to work on
    failed = case({"mjp-subspace": math.nan}, status="failed", reason="no inverse")
    assert "No adaptive attack" in found(failed, ["one"])


def test_no_attack_is_written_against_the_defense() -> None:
    rows = pd.concat([case({"april": 14.0}, "blur"), case({"april": 14.0}, "pixel-noise").assign(case=1)])
    assert found(rows.assign(release="features"))["No adaptive attack"] == [
        "blur: deconvolution, inversion-conv, inversion-mae, inversion-set, inversion-token not scored (plain)",
        "pixel-noise: no attack is written against it (defended)",
    ]


def test_only_attacks_on_what_was_released_are_named() -> None:
    def named(defense: str, **values: Any) -> str:
        (line,) = found(case({"april": 14.0}, defense, **values), ["one"])["No adaptive attack"]
        return line

    assert named("blur") == "blur: no attack is written against it"  # of a client that releases gradients
    assert named("jigsaw", release="features") == "jigsaw: no attack is written against it"
    assert named("mjp", batch_images=1).startswith("mjp: mjp-subspace, ")
    assert "mjp-subspace" not in named("mjp", batch_images=4)  # it is for one image per gradient
    assert "inversion-mae" in named("blur", release=None)  # nothing is known of what was released


def test_an_attack_must_know_all_of_a_stack() -> None:
    stack = "mjp+gradient-noise"
    assert "No adaptive attack" in found(case({"mjp-subspace": 20.0}, stack), ["one"])
    assert found(case({"patch-gradient-adaptive": 20.0}, stack), ["one"]) == {}


def test_reassembly_knows_the_jigsaw() -> None:
    rows = case({"patch-gradient": 20.0}, "jigsaw")
    assert found(rows, ["one"])["No adaptive attack"] == ["jigsaw: geometry reassembled not scored"]
    for geometry in ("oracle", "reassembled"):
        assert found(rows.assign(geometry=geometry), ["one"], geometry=geometry) == {}


def test_an_attack_counts_in_the_leakiest_geometry_that_an_adversary_can_make() -> None:
    rows = case({"patch-gradient": 10.0, "control:mean": 12.0}, "jigsaw")
    beaten = "No better than a control"
    assert beaten in found(rows, ["one"])
    ours = rows[rows.attack == "patch-gradient"]
    for geometry, flagged in (("reassembled", False), ("oracle", True)):
        both = pd.concat([rows, ours.assign(geometry=geometry, psnr=60.0)], ignore_index=True)
        raised = found(both, ["one"])
        assert (beaten in raised) == ("No adaptive attack" in raised) == flagged


def test_the_adaptive_attack_is_weaker() -> None:
    rows = case({"april": 14.0, "patch-gradient": 21.0, "mjp-subspace": 20.0, "mjp-full": 19.0})
    line = "one: mjp-subspace 20.50 dB leaks less than patch-gradient 21.50 dB"
    assert found(rows, ["one"]) == {"Adaptive attack weaker": [line]}
    assert found(case({"patch-gradient": 140.0, "mjp-full": 130.0}), ["one"]) == {}  # both are exact
    assert found(case({"patch-gradient": 20.001, "mjp-full": 20.0}), ["one"]) == {}  # nothing that a table shows
    lower = rows.assign(lpips_alex=1 - rows.psnr / 100)
    assert "Adaptive attack weaker" in found(lower, ["one"], metric="lpips_alex")
    healthy = records().assign(lpips_alex=lambda rows: 1 - rows.psnr / 100)
    assert found(healthy, metric="lpips_alex") == {}


def test_an_attack_on_few_images_is_not_compared_with_one_on_all() -> None:
    """Images that leak more to every attack would make it the stronger one."""
    rows = case({"patch-gradient": 21.0, "mjp-subspace": 20.0, "mjp-full": 25.0})
    few = rows.image.isin(rows.image.unique()[:2])
    line = "one: mjp-subspace 20.50 dB leaks less than patch-gradient 21.50 dB"
    on_few = rows.loc[few | (rows.attack != "mjp-full")]
    assert found(on_few, ["one"])["Adaptive attack weaker"] == [line]
    others = rows.loc[few | (rows.attack != "patch-gradient")].assign(attack=rows.attack.replace("mjp-full", "april"))
    assert "Adaptive attack weaker" in found(others, ["one"])
    assert "Adaptive attack weaker" not in found(others.loc[others.attack != "april"], ["one"])


@pytest.mark.parametrize(
    ("few", "many"),
    [
        ({"steps": 10, "epsilon": 0.1}, {"steps": 20, "epsilon": 0.1}),
        ({"config": [["optim.max_iterations", 10]], "seed": 0}, {"config": [["optim.max_iterations", 20]], "seed": 0}),
    ],
)
def test_more_budget_made_it_worse(few: Mapping[str, Any], many: Mapping[str, Any]) -> None:
    first = case({"mjp-subspace": 22.0}, attack_params=json.dumps(few))
    more = case({"mjp-subspace": 20.0}, attack_params=json.dumps(many)).assign(case=1)
    ((head, (line,)),) = found(pd.concat([first, more])).items()
    assert head == "More budget, less leakage"
    assert line.startswith("defended: mjp-subspace with ")
    assert "=20 20.50 dB leaks less than with " in line
    assert line.endswith("=10 22.50 dB")
    assert found(pd.concat([first, more.assign(psnr=more.psnr + 4)])) == {}
    apart = first.psnr - first.psnr.mean()
    near = [rows.assign(psnr=apart + mean) for rows, mean in ((first, 22.5051), (more, 22.5049))]  # 22.51 and 22.50
    assert found(pd.concat(near)) == {}
    assert found(pd.concat([first, more.assign(setting="b")])) == {}  # another case altogether
    other = json.dumps({**many, "epsilon": 0.2})
    assert found(pd.concat([first, more.assign(attack_params=other)])) == {}  # not the budget alone


def test_budgets_of_which_one_is_less_are_not_compared() -> None:
    first = case({"mjp-subspace": 22.0}, attack_params='{"starts": 4, "steps": 10}')
    other = case({"mjp-subspace": 20.0}, attack_params='{"starts": 2, "steps": 20}').assign(case=1)
    assert found(pd.concat([first, other])) == {}


def test_budgets_are_compared_on_the_images_that_both_have() -> None:
    first = case({"mjp-subspace": 22.0}, attack_params='{"steps": 10}')
    more = case({"mjp-subspace": 22.0}, attack_params='{"steps": 20}').assign(case=1)
    one = pd.concat([first, more[more.image == "a"]])  # whose mean alone is half a decibel less
    assert found(one) == {"Few images": ["1 image (defended)"]}


def test_one_draw_of_a_random_defense() -> None:
    rows = records()
    assert found(rows[rows.draw == 0]) == {"One draw": ["mjp (defended)"]}
    assert found(rows[rows.draw == 0].assign(defense="none")) == {}
    assert found(case({"inversion-set": 20.0}, "blur", draw=0), ["one"]) == {}
    assert found(case({"patch-gradient": 20.0}, "blur+pixel-noise", draw=0), ["one"])["One draw"] == ["pixel-noise"]
    seeds = rows[rows.draw == 0]
    assert found(pd.concat([seeds, seeds.assign(seed=1)])) == {}


def test_failures() -> None:
    rows = records()
    lost = rows.assign(status="failed", reason="april: no inverse", psnr=math.nan)
    rows = rows.where(~((rows.attack == "april") & (rows.image == "b")), lost)
    line = "1 image, april: no inverse"
    assert found(rows) == {"Failed": [f"plain: {line}", f"defended: {line}"]}
    nothing = rows.where(rows.status == "ok", rows.assign(reason=NOTHING_RELEASED))
    assert found(nothing) == {"Nothing released": ["1 image (every case)"]}


def test_random_weights() -> None:
    rows = records()
    assert found(rows.assign(weights="random")) == {"Random weights": ["vit_ti (every case)"]}
    mixed = rows.assign(weights=rows.weights.where(rows.case == 1, "random"))
    assert found(mixed) == {"Random weights": ["vit_ti (plain)"]}


def test_few_images() -> None:
    rows = records()
    assert found(rows[rows.image != "a"]) == {"Few images": ["19 images (every case)"]}
    assert found(rows[(rows.image != "a") | (rows.case == 0)]) == {"Few images": ["19 images (defended)"]}
    spoilt = rows.assign(status=rows.status.where(rows.image != "a", "failed"), reason=NOTHING_RELEASED)
    assert found(spoilt[spoilt.case == 1].assign(case=0), ["one"])["Few images"] == ["19 images"]
    twice = rows.assign(image_sha256=rows.image_sha256.where(rows.image != "b", "a" * 8))  # one image, two names
    assert found(twice) == {"Few images": ["19 images (every case)"]}


def test_predicted_labels() -> None:
    rows = records()
    some = rows.assign(label_origin=rows.label_origin.where((rows.case == 0) | (rows.image > "c"), "predicted"))
    assert found(some) == {"Predicted labels": ["of 3 images (defended)"]}
    assert "Predicted labels" not in found(some.assign(release="features"))


def test_untrained_unknown_position_embedding() -> None:
    fed = json.dumps({"gamma": 0.27, "masked_pe": "unknown"})
    rows = records(victim_params='{"unk_embed": "mean-pe"}', defense_params=fed)
    rows = rows.assign(defense_params=rows.defense_params.where(rows.case == 1, "{}"))  # nothing is fed undefended
    assert found(rows) == {"Untrained E_unk": ["E_unk mean-pe (defended)"]}
    assert found(rows.assign(victim_params='{"unk_embed": "trained"}')) == {}
    assert found(rows.assign(victim_params='{"unk_embed": null}')) == {}
    assert found(rows.assign(defense_params=json.dumps({"masked_pe": "slot"}))) == {}
    stack = json.dumps({"mjp": json.loads(fed), "gradient-noise": {"clip": 1}})
    rows = case({"patch-gradient-adaptive": 20.0}, "mjp+gradient-noise", defense_params=stack)
    assert found(rows.assign(victim_params='{"unk_embed": "random"}'), ["one"]) == {"Untrained E_unk": ["E_unk random"]}


def test_no_attack_ran() -> None:
    rows = records()
    controls = rows[(rows.case == 0) | rows.attack.str.startswith("control:")]
    assert found(controls)["No attack ran"] == ["defended"]
    assert found(rows[rows.attack.str.startswith("control:")])["No attack ran"] == ["every case"]
    assert "No attack ran" not in found(rows.assign(status="failed", reason="no inverse", psnr=math.nan))


def test_every_attack_is_outside_its_range() -> None:
    why = "N = 196 ≥ D = 192"
    rows = case({"patch-gradient": 16.0, "mjp-subspace": 22.0, "control:mean": 11.0})
    attacked = ~rows.attack.str.startswith("control:")
    outside = rows.assign(beyond_range=rows.beyond_range.where(~attacked, why))
    line = f"mjp-subspace: {why}, patch-gradient: {why}"
    (said,) = found(outside, ["one"])["Outside its stated range"]
    assert ", ".join(sorted(said.split(", "))) == line
    one = rows.assign(beyond_range=rows.beyond_range.where(rows.attack != "patch-gradient", why))
    assert found(one, ["one"]) == {}
    partly = outside.assign(beyond_range=outside.beyond_range.where(outside.image != "a", None))
    assert found(partly, ["one"]) == {}


def test_text_says_what_none_of_them_proves() -> None:
    lines = flag_lines([Flag("Failed", ["a", "b", "c", "d", "e"])])
    assert lines == ["flag: Failed: a; b; c; 2 more", "An attack that fails is no evidence of privacy."]


def test_the_metric_of_comparison() -> None:
    assert lead_metric(["mse", "psnr"]) == "psnr"
    assert lead_metric(["correct", "ssim", "mse"]) == "ssim"
    assert lead_metric(["correct"]) == "correct"
    assert found(records(correct=1.0), metric="correct") == {}


def test_every_rule_is_documented() -> None:
    assert list(FLAG_MEANINGS) == list(RULES)
    assert all(meaning.endswith(".") for meaning in FLAG_MEANINGS.values())


# What the rules go by


def test_attacks_know_defenses_that_exist() -> None:
    known = {name: set(getattr(kind, "knows", ())) for name, kind in ATTACKS.items()}
    assert set().union(*known.values()) <= set(DEFENSES)
    assert known["mjp-full"] == {"mjp"}
    assert not known["april"] | known["patch-gradient"]


def test_budgets_are_options_of_attacks() -> None:
    options = {name for kind in ATTACKS.values() for name in kind.__dataclass_fields__}
    assert {"steps", "rounds", "starts"} <= BUDGETS & options


@pytest.mark.parametrize("name", DEFENSES)
def test_what_draws_nothing_gives_the_same_under_any_seed(name: str) -> None:
    images = torch.rand(2, 3, 32, 32, generator=Generator().manual_seed(0))
    features = torch.rand(2, 5, 8, generator=Generator().manual_seed(0))
    defense = DEFENSES[name](**({"rounds": 2} if name == "adaptive-clipping" else {}))  # it draws for earlier rounds

    def under(seed: int) -> torch.Tensor:
        of_image = [Generator().manual_seed(seed + i) for i in range(2)]
        if hasattr(defense, "release"):
            return defense.release({"pos_embed": features}, of_image)["pos_embed"]
        if hasattr(defense, "send"):
            draws = Draws(of_image, Generator().manual_seed(seed), Generator().manual_seed(seed))
            return Stack((defense,)).send(features, 1, draws).features
        return Stack((defense,)).feed(images, 8, of_image, key=Generator().manual_seed(seed)).images

    same = all(torch.equal(under(0), under(seed)) for seed in (10, 20, 30))
    assert same == (name in DETERMINISTIC)

"""Red flags: what weakens a verdict, found in records alone. Tables and the page share these rules."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from privlab.attacks import attacks as installed
from privlab.base import parse_object
from privlab.defenses import defenses
from privlab.report.intervals import FEWEST_IMAGES
from privlab.report.tables.cells import some
from privlab.report.tables.facts import COMPARED_COLUMNS, Facts, join_first
from privlab.report.tables.knowledge import AGGREGATION, declared_defenses, knows
from privlab.report.tables.per_image import Scored
from privlab.threat import AttackClass, Capability, acts_on

DETERMINISTIC = frozenset(
    {
        *("none", "low-pass", "blur", "gradient-pruning", "gradient-quantisation", "gradient-sign"),
        *("percentile-privacy", "exclude-vars", AGGREGATION),
    }
)
"""The defenses that draw nothing at random; every other one, also from another package, is taken to do so."""

BUDGETS = frozenset({"steps", "rounds", "iterations", "max_iterations", "starts", "restarts", "num_trials", "inner"})
"""Options of attacks that are budgets: more of them is more work. Of optim.max_iterations the last part counts."""

NOTHING_RELEASED = "what is released is zero or not finite"
"""The reason in a record where there was nothing to attack."""


@dataclass(frozen=True)
class Flag:
    """A way in which a verdict is weakened, and the cases or attacks that it concerns."""

    head: str
    items: Sequence[str]


def red_flags(facts: Facts) -> list[Flag]:
    """Return the flags that the rules raise, in the order of `RULES`; those without an item are left out."""
    return [Flag(head, items) for head, rule in RULES.items() if (items := rule(facts))]


def flag_lines(flags: Sequence[Flag]) -> list[str]:
    """Return the flags as lines of text; if there are any, a last line says that a failed attack proves nothing."""
    lines = [f"flag: {flag.head}: {join_first(flag.items)}" for flag in flags]
    return [*lines, "An attack that fails is no evidence of privacy."] if lines else []


def _no_adaptive_attack(facts: Facts) -> list[str]:
    found: dict[int, str] = {}
    for case, parts in facts.defended.items():
        if not any(facts.knows(attack, case) for attack in facts.attacks(case)):
            rows = facts.rows.loc[facts.rows.case == case]
            kinds = facts.kinds[case]
            able = [
                name
                for name, kind in installed().items()
                if knows(declared_defenses(name), parts, kinds) and _fits(kind, parts, rows)
            ]
            shuffled = knows(frozenset({"jigsaw"}), parts, kinds) and "features" not in rows.release.unique()
            able += ["geometry reassembled"] if shuffled else []
            said = f"{', '.join(able)} not scored" if able else "no attack is written against it"
            found[case] = f"{'+'.join(sorted(parts))}: {said}"
    return facts.group(found)


def _fits(kind: AttackClass, parts: frozenset[str], rows: pd.DataFrame) -> bool:
    """Return whether an attack could run on what was released in a case, as far as its rows state it.

    The attack must be on features or on gradients, as released; on features behind blocks, or on gradients of several
    images, if they were; and on defended gradients, if it needs such.
    """
    on_features = Capability.RELEASED_FEATURES in kind.requires
    if {"features", "gradients"} & {*rows.release} == {"gradients" if on_features else "features"}:
        return False
    if (rows.cut_layer > 0).any() and Capability.EMBEDDED_ROWS in kind.requires:
        return False
    if not on_features and (rows.batch_images > 1).any() and Capability.BATCH_SIZE_ONE in kind.requires:
        return False
    acts = any(acts_on(made) == "gradients" for part in parts if (made := defenses().get(part)))
    return acts or Capability.GRADIENT_DEFENSE not in kind.requires


def _weaker(facts: Facts) -> list[str]:
    lines = []
    for case in facts.defended:
        images = facts.images.loc[facts.images.case == case].groupby("attack").image.nunique()
        scored, few = facts.attacks(case), {*images.index[2 * images < images.max()]}  # whose images may be easier
        known = {name: mean for name, mean in scored.items() if facts.knows(name, case)}
        knowing = {name: mean for name, mean in known.items() if name not in few} or known
        others = {name: mean for name, mean in scored.items() if name not in {*known, *few}}
        adaptive, plain = facts.leakiest(knowing), facts.leakiest(others)
        if adaptive and plain and facts.rank(scored[adaptive]) < facts.rank(scored[plain]):
            weak, strong = facts.with_mean(adaptive, scored[adaptive]), facts.with_mean(plain, scored[plain])
            lines.append(f"{facts.names[case]}: {weak} leaks less than {strong}")
    return lines


def _worse_with_more(facts: Facts) -> list[str]:
    """Compare an attack with itself where nothing but its budget differs, on the images that both have."""
    if not facts.sign:
        return []
    own = facts.rows.loc[(facts.rows.geometry == facts.geometry) & facts.rows.attack_params.notna()]
    kinds = own.drop_duplicates([*COMPARED_COLUMNS, "attack_params"])
    lines = []
    for _, same in kinds.groupby(COMPARED_COLUMNS, dropna=False, sort=False):
        runs = [(*_split(row.attack_params), row) for row in same.itertuples()]
        for (rest, less, low), (other, more, high) in itertools.permutations(runs, 2):
            larger = less.keys() == more.keys() and all(more[name] >= less[name] for name in less)
            if rest != other or less == more or not larger:
                continue
            before, after = _paired_means(facts, own, low, high)
            if facts.rank(after - before) < 0:  # two means may round apart that are not
                changed = [name for name in less if less[name] != more[name]]
                weak, strong = (
                    facts.with_mean(", ".join(f"{name}={budget[name]:g}" for name in changed), mean)
                    for budget, mean in ((more, after), (less, before))
                )
                lines.append(f"{facts.names[high.case]}: {low.attack} with {weak} leaks less than with {strong}")
    return lines


def _paired_means(facts: Facts, own: pd.DataFrame, *runs: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return the means of two runs over the images that both have."""
    found = []
    for run in runs:
        rows = own.loc[(own.case == run.case) & (own.attack == run.attack) & (own.attack_params == run.attack_params)]
        images = Scored(rows, [facts.metric], facts.geometry).measured
        found.append(images[images.attack == run.attack].groupby("image")[facts.metric].mean().dropna())
    common = found[0].index.intersection(found[1].index)
    return float(found[0][common].mean()), float(found[1][common].mean())


def _split(params: str) -> tuple[dict[str, object], dict[str, float]]:
    """Return the options of an attack without budgets, and its budgets; breaching's are pairs under `config`."""
    given: dict[str, Any] = parse_object(params, "attack_params of a record")
    flat = {name: value for name, value in given.items() if name != "config"} | dict(given.get("config") or ())
    budget = {
        name: float(value)
        for name, value in flat.items()
        if name.rpartition(".")[2] in BUDGETS and isinstance(value, int | float)
    }
    return {name: value for name, value in flat.items() if name not in budget}, budget


def _one_draw(facts: Facts) -> list[str]:
    own = facts.rows.loc[facts.own, ["case", "seed", "draw"]]
    draws = own.dropna().drop_duplicates().groupby("case").size()
    drawn = {case: "+".join(sorted(parts - DETERMINISTIC)) for case, parts in facts.defended.items()}
    return facts.group({case: parts for case, parts in drawn.items() if parts and draws.get(case) == 1})


def _shown_nothing(facts: Facts) -> list[str]:
    lines = []
    for case in facts.means:
        best, beaten = facts.beaten(case)
        if found := {name: mean for name, mean in beaten.items() if name not in facts.structure[case]}:
            said = ", ".join(facts.with_mean(name, mean) for name, mean in found.items())
            verb = "does" if len(found) == 1 else "do"
            lines.append(
                f"{facts.names[case]}: {said} {verb} not beat {facts.with_mean(best, facts.means[case][best])}"
            )
    return lines


def _structure_alone(facts: Facts) -> list[str]:
    """Name the attacks that leak structure but lose its scale, so that the lead metric does not show the leak."""
    lines = []
    for case in facts.means:
        best, beaten = facts.beaten(case)
        seen = {name: one for name, one in facts.structure[case].items() if name in beaten}
        for name, one in seen.items():
            bar = facts.with_mean(best, facts.means[case][best])
            lines.append(
                f"{facts.names[case]}: {facts.with_mean(name, beaten[name])} does not beat {bar}, but it shows "
                f"structure without its scale ({one})"
            )
    return lines


def _nothing_released(facts: Facts) -> list[str]:
    rows = facts.rows[facts.rows.reason == NOTHING_RELEASED]
    counts = rows.groupby("case").image.nunique().to_dict()
    return facts.group({case: some(count, "image") for case, count in counts.items()})


def _failures(facts: Facts) -> list[str]:
    failed = facts.rows.loc[(facts.rows.status != "ok") & (facts.rows.reason != NOTHING_RELEASED)]
    lines = []
    for case in sorted(failed.case.unique().tolist()):
        rows = failed.loc[failed.case == case]
        reasons = rows.reason.fillna("no reason is recorded").value_counts()
        more = f", and {some(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
        reason = reasons.index[0].rstrip(".")
        lines.append(f"{facts.names[case]}: {some(rows.image.nunique(), 'image')}, {reason}{more}")
    return lines


def _random_weights(facts: Facts) -> list[str]:
    rows = facts.rows.loc[facts.rows.weights == "random", ["case", "victim"]].drop_duplicates("case")
    return facts.group({case: str(victim) for case, victim in rows.itertuples(index=False)})


def _few_images(facts: Facts) -> list[str]:
    """Count the different images on which attacks were scored; a case where no attack ran has another flag."""
    images = facts.images
    counts = images.loc[~images.control.astype(bool) & (images.image != "")].groupby("case").image.nunique().to_dict()
    return facts.group({case: some(n, "image") for case, n in counts.items() if n < FEWEST_IMAGES})


def _predicted_labels(facts: Facts) -> list[str]:
    rows = facts.rows.loc[facts.rows.release != "features"]  # features do not depend on labels
    named = rows.image_sha256.where(rows.image_sha256.fillna("") != "", rows.image)
    told = rows.assign(named=named).loc[rows.label_origin == "predicted"]
    counts = told.groupby("case").named.nunique().to_dict()
    return facts.group({case: f"of {some(n, 'image')}" for case, n in counts.items()})


def _untrained_unknown(facts: Facts) -> list[str]:
    """Name the origin of E_unk where a defense feeds it and no training has shaped it."""
    stated = facts.rows.loc[facts.rows.victim_params.notna(), ["case", "victim_params", "defense_params"]]
    found: dict[int, str] = {}
    for case, victim, defense in stated.drop_duplicates().itertuples(index=False):
        origin = parse_object(victim, "victim_params of a record").get("unk_embed")
        if origin not in (None, "trained") and '"masked_pe": "unknown"' in (defense or ""):
            found[case] = f"E_unk {origin}"
    return facts.group(found)


def _no_attack(facts: Facts) -> list[str]:
    tried = {*facts.rows.case[facts.own]}
    without = [case for case in range(len(facts.names)) if case not in tried]
    return [facts.where(without)] if without and not facts.rows.empty else []


def _low_effort(facts: Facts) -> list[str]:
    """Name the cases for which nothing but the quick effort was made; the rows of one may be of several efforts."""
    quick = facts.rows.loc[facts.own].groupby("case").effort.agg(lambda efforts: (efforts == "quick").all())
    return facts.group(dict.fromkeys(quick.index[quick.astype(bool)].tolist(), "effort quick"))


def _beyond_range(facts: Facts) -> list[str]:
    """Return the attacks of each case in which every attack is beyond its stated range, with the reasons."""
    found: dict[int, str] = {}
    own = facts.rows.loc[facts.own & (facts.rows.status == "ok")]
    for case, rows in own.groupby("case", sort=True):
        if rows.beyond_range.notna().all():
            reasons = rows.drop_duplicates("attack")[["attack", "beyond_range"]]
            found[int(str(case))] = ", ".join(f"{name}: {why}" for name, why in reasons.itertuples(index=False))
    return facts.group(found)


RULES: Mapping[str, Callable[[Facts], list[str]]] = {
    "No attack ran": _no_attack,
    "Outside its stated range": _beyond_range,
    "Low effort": _low_effort,
    "No better than a control": _shown_nothing,
    "Structure without its scale": _structure_alone,
    "No adaptive attack": _no_adaptive_attack,
    "Adaptive attack weaker": _weaker,
    "More budget, less leakage": _worse_with_more,
    "One draw": _one_draw,
    "Nothing released": _nothing_released,
    "Failed": _failures,
    "Random weights": _random_weights,
    "Untrained E_unk": _untrained_unknown,
    "Predicted labels": _predicted_labels,
    "Few images": _few_images,
}
"""The rule behind each flag; `privlab.report.flag_meanings` states them in words."""

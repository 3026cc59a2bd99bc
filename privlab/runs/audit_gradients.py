"""An audit of a released gradient, or of a client's update: what could be reconstructed from a real training.

No private image is needed.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from jaxtyping import Float
from torch import Tensor

from privlab.attacks import attacks as installed_attacks
from privlab.base import (
    PrivlabError,
    PrivlabWarning,
    collect_warnings,
    first,
    pick_device,
)
from privlab.evaluation import CONTROLS, AttackGroup, Specification, applicable, default_attacks, stands_in, unread
from privlab.evaluation.lpips_choice import with_lpips
from privlab.release import (
    EXPLAINED_RESIDUAL,
    GradientFile,
    head_of,
    labels_of_signs,
    slots_without_gradient,
)
from privlab.release.residual import explained_share, residual, tells_images
from privlab.runs.audit_case import UNSCORED, AuditCase, Release, failed, unknown_images
from privlab.runs.audit_given import GIVE_WEIGHTS, Files, Given, other_weights, read_given
from privlab.runs.audit_reference import ReferenceScorer, Row, as_fed, write_scores
from privlab.stores import RunDirectory, sheet_png
from privlab.threat import Attack, Capability, Observation, Stack, attack_declarations, check_capabilities
from privlab.victims import Victim

__all__ = ["GradientAudit", "audit_gradients"]


@dataclass(frozen=True, eq=False)
class GradientAudit:
    """The results of an audit: a row for each attack, the red flags, and the directory of the images.

    A row has `residual` where the reconstruction could be checked by the gradient that it gives, and scores where there
    is a reference. `missing` holds the reason for each metric that could not be computed. `reference` says how the
    client preprocessed the reference, if it did so otherwise than the victim does. `metrics` are those that were asked
    for, none without a reference. `what` was released, a "gradient" or an "update".
    """

    rows: Sequence[Row]
    flags: Sequence[str]
    labels: Sequence[int] | None
    warnings: Sequence[str]
    path: Path
    missing: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    metrics: Sequence[str] = ()
    what: str = "gradient"


def audit_gradients(
    file: Files,
    spec: Specification,
    *,
    device: str = "auto",
    out: Path,
    overwrite: bool = False,
    reference: Path | None = None,
    command: str | None = None,
) -> GradientAudit:
    """Run every attack that the file grants; write its records and reconstructions as soon as it is finished.

    An image that is not known is named by the file and its number, and its records have no scores. The private image
    is the first of the images of the step; the reconstruction nearest to it is the one that is scored.

    `spec` names one victim, which is the client's model with the weights of that step, and the defense that the client
    is known to use: "auto" is MJP where the model has E_unk, else none. `block` "auto" is the stock block: a client
    trains one model, and no attack may choose another. If it names a client, what is audited is the update of a round.

    Args:
        file: what `privlab.capture` wrote; or the weights before and after a client's round, state dicts in files as
            `--weights` takes them.
        spec: the victim, the attacks, and the metrics if there is a reference.
        device: "auto", "cpu", "cuda" or "cuda:N".
        out: the run directory.
        overwrite: whether an earlier run in `out` is replaced.
        reference: the private image, by which reconstructions are scored. It is preprocessed as the victim's inputs
            are; if that does not give the released gradient and one of the usual ways does, it is preprocessed in that
            way. Without a reference, a reconstruction is checked by the gradient that it gives, and image priors learn
            from all bundled photographs, as it cannot be known whether one of them is private.
        command: the command line, for `run.json`.

    Raises:
        PrivlabError: for a file that cannot be read, does not fit the victim or contradicts itself, an attack that was
            asked for and needs more than the file grants, or a reference that is no image.
    """
    spec, told_of_lpips = with_lpips(spec, {}, download=reference is not None)
    messages = [told_of_lpips] if told_of_lpips is not None and reference is not None else []
    with collect_warnings(messages):
        given = read_given(file, spec, pick_device(device))
        spec, base, released, seen, labels = given.spec, given.base, given.released, given.seen, given.labels
        what = "gradient" if seen.client is None else "update"
        attacks, refused = _attacks(spec, base, seen, released)
        _check_left(seen, attacks, released)
        scorer = None if reference is None else ReferenceScorer.of(reference, spec, base)
        if scorer is not None:
            seen = replace(seen, photographs=scorer.photographs(base.preprocessing))
    case = _case(spec, base, attacks, refused, _images(file, released, scorer, labels), scorer)
    run = RunDirectory.create(out, overwrite=overwrite)
    facts = case.facts(out, released.source, command) | _facts(base, released)
    facts |= {"labels": labels} | ({"unscored": UNSCORED} if scorer is None else {})
    told_of_reference = None
    with run.noted(facts, messages):
        with collect_warnings(messages):
            made = [_attack(case, attack, seen, released, labels, scorer, run) for attack in attacks]
            if scorer is not None and labels is not None:
                scorer, told_of_reference = as_fed(scorer, base, seen, labels[0], made)
            rows: list[Row] = [] if scorer is None else [scorer.control()]
            rows += [row if scorer is None or images is None else row | scorer(images) for row, images in made]
            if scorer is not None:
                write_scores(case, scorer, rows, made, run)
        messages += [] if scorer is None else [f"{name} is n/a: {reason}" for name, reason in scorer.missing.items()]
        found = _flags(given, rows)
        facts |= {"flags": found, "reference": told_of_reference, "attacks": [_plain(row) for row in rows]}
        if scorer is None:
            facts["unscored"] = _proof(rows, what)
    missing = {} if scorer is None else scorer.missing
    metrics = () if scorer is None else spec.metrics
    return GradientAudit(rows, found, labels, messages, out, missing, told_of_reference, metrics, what)


def _images(
    file: Files, released: GradientFile, scorer: ReferenceScorer | None, labels: Sequence[int] | None
) -> Release:
    """Return the images of the step, with their label where it is known; the private image comes first."""
    content = b"".join(path.read_bytes() for path in (file if isinstance(file, tuple) else (file,)))
    found = unknown_images(released.source, content, released.batch_size)
    if scorer is not None:
        found = (replace(found[0], name=scorer.named.name, sha256=scorer.named.sha256), *found[1:])
    if labels is None or len({*labels}) != 1:
        return found
    return tuple(replace(image, label=labels[0], label_origin="released") for image in found)


def _case(
    spec: Specification,
    base: Victim,
    attacks: Sequence[Attack],
    refused: Mapping[str, str],
    images: Release,
    scorer: ReferenceScorer | None,
) -> AuditCase:
    """Return the case of the file; if the private image is known, with what it is scored by."""
    group = AttackGroup(base, tuple(attacks))
    if scorer is None:
        return AuditCase(spec, group, refused, [images])
    scored_by = (scorer.public_sha256, scorer.metrics, CONTROLS[:1], scorer.missing)
    return AuditCase(spec, group, refused, [images], *scored_by)


def _attacks(
    spec: Specification, base: Victim, seen: Observation, released: GradientFile
) -> tuple[list[Attack], dict[str, str]]:
    """Return the attacks that can run on what the file grants, and the reason for each other one.

    Raises:
        PrivlabError: if one was asked for by name and cannot run.

    Warns:
        PrivlabWarning: for the others that cannot run, by reason.
    """
    groups, refused = applicable(spec, base, stand_ins=True)
    able: list[Attack] = []
    for attack in (cast(Attack, attack) for group in groups for attack in group.attacks):
        try:
            check_capabilities(attack, seen.grants, force=spec.force)
        except PrivlabError as refusal:
            refused[attack.name] = str(refusal)
            continue
        if lacking := [name for name in attack.parameters if name not in {"*", *seen.gradients}]:
            refused[attack.name] = f"Attack '{attack.name}' reads gradients that the file lacks: {', '.join(lacking)}."
        else:
            able.append(attack)
    if spec.attacks is not None and refused:
        name, refusal = next(iter(refused.items()))
        lacks = installed_attacks()[name].requires - seen.grants
        if Capability.BATCH_SIZE_ONE in lacks and (asked := _on_request(seen, spec.effort)):
            refusal += f" Of {released.batch_size} images in one gradient --attack {asked[0]} can be tried."
        if lacks == {Capability.KNOWS_WEIGHTS}:
            refusal = f"Attack '{name}' needs the client's weights. {other_weights(released, base)}. {GIVE_WEIGHTS}"
        raise PrivlabError(refusal)
    by_reason: dict[str, list[str]] = {}
    for name, refusal in refused.items():
        by_reason.setdefault(refusal.removeprefix(f"Attack '{name}' "), []).append(name)
    for reason, names in by_reason.items():
        _warn(f"Left out: {', '.join(names)}. {'It' if len(names) == 1 else 'Each'} {reason}")
    running = {attack.name for attack in able}
    return [attack for attack in able if spec.attacks is not None or not stands_in(attack, running)], refused


def _check_left(seen: Observation, attacks: Sequence[Attack], released: GradientFile) -> None:
    """Refuse a release of which filters left no entry that any of the attacks reads.

    Raises:
        PrivlabError: with the filters and their options.
    """
    filters = Stack(tuple(seen.defense)).on_gradients
    read = {name for attack in attacks for name in (seen.gradients if "*" in attack.parameters else attack.parameters)}
    if filters and read and not any(seen.gradients[name].any() for name in read):
        raise PrivlabError(
            f"{released.source}: the filter left nothing of what the attacks read, {first(sorted(read), 2)}. Found "
            f"{' + '.join(map(str, filters))}: let it leave more. That no attack can run is no evidence of privacy."
        )


def _on_request(seen: Observation, effort: str) -> list[str]:
    """Return the attacks on gradients that this effort leaves out, and for which the file grants everything."""
    running = default_attacks(effort)
    return [
        name
        for name, kind in installed_attacks().items()
        if name not in running
        and unread(kind, seen.client, filtered=bool(seen.defense)) is None
        and not (declared := attack_declarations(kind)).obstacle
        and not kind.requires - seen.grants
        and {*declared.parameters} <= {"*", *seen.gradients}
    ]


def _attack(
    case: AuditCase,
    attack: Attack,
    seen: Observation,
    released: GradientFile,
    labels: Sequence[int] | None,
    scorer: ReferenceScorer | None,
    run: RunDirectory,
) -> tuple[Row, Float[Tensor, "r c h w"] | None]:
    """Run one attack, write its images and then its records, and return its row and its reconstruction, if it has one.

    The reconstruction of a single image is checked by the gradient that it gives, if its label is known.
    """
    row: Row = {"attack": attack.name, "block": "april" if Capability.APRIL_BLOCK in seen.grants else "stock"}
    (release,) = case.releases
    if released.is_zero:
        records, images = failed(case.rows(attack, release), "what is released is zero"), None
    else:
        records, images = case.attack(attack, seen, release)
    if (beyond := records[0].get("beyond_range")) is not None:
        row["beyond_range"] = beyond
    if images is None:
        run.write_records(records)
        return row | {"status": "failed", "reason": records[0]["reason"]}, None
    row |= {"status": "ok", "images": len(images)}
    row["seconds"] = round(sum(record["seconds_attack"] for record in records), 4)
    darkest, lightest = images.flatten(2).aminmax(dim=2)
    row["blank"] = bool((lightest - darkest < 1 / 255).all())
    checked = Capability.KNOWS_WEIGHTS in seen.grants and tells_images(seen)
    if released.batch_size == len(images) == 1 and labels is not None and checked:
        row["residual"] = residual(seen, images, labels[0])
        row["explained"] = row["residual"] < EXPLAINED_RESIDUAL
        share: Row = {"explained": explained_share(row["residual"])}
        records = [record | share for record in records]
    order = list(range(len(images)))
    if scorer is not None:
        order.insert(0, order.pop(scorer.nearest(images)))
    row["files"] = [f"pictures/{re.sub(r'[^A-Za-z0-9_.-]+', '-', attack.name)}-{i}.png" for i in range(len(images))]
    for image, i in zip(release, order, strict=False):  # an attack for one image may be forced on several
        run.write_file(row["files"][i], sheet_png(images[i : i + 1], [image.sha256], records[0]["cell"]))
    run.write_records(records)
    return row, images


def _proof(rows: Sequence[Row], what: str) -> str:
    """Return the sentences of an audit without a private image: which reconstructions give what was released."""
    if not (found := [row for row in rows if row.get("explained")]):
        return UNSCORED
    names, left = first([row["attack"] for row in found]), max(row["residual"] for row in found)
    return f"{UNSCORED} What gives the released {what} (residual {left:.1e}) was reconstructed by {names}."


def _flags(given: Given, rows: Sequence[Row]) -> list[str]:
    """Return the red flags: what weakens a verdict on this file, and what the file gives away without any attack."""
    spec, released, seen, base, told = given.spec, given.released, given.seen, given.base, given.told
    changed = given.changed
    if released.is_zero:
        return ["zero gradient: nothing was released, so nothing can be said of privacy"]
    found = []
    masked, width = slots_without_gradient(seen), base.model.vit.embed_dim
    if masked.all():
        found.append("position embeddings: their gradient is zero throughout, and closed forms have no equations")
    elif masked.any():
        found.append(
            f"visible mask: {int(masked.sum())} of {len(masked)} position embeddings have no gradient, as under MJP: "
            "which patches were shuffled is public"
        )
    if spec.effort == "quick":
        found.append("low effort: quick, less than the standard effort")
    if len(masked) >= width:
        found.append(f"more tokens than equations: N = {len(masked)} ≥ D = {width}, so closed forms are not exact")
    if released.batch_size > 1:
        found.append(
            f"{released.batch_size} images in one gradient: attacks for one image do not run, "
            "which is no evidence of privacy"
        )
    tried = spec.attacks is not None or changed or (released.batch_size == 1 and any("block" in row for row in rows))
    if not tried and (asked := _on_request(seen, spec.effort)):
        found.append(
            f"not tried, as these searches are not of effort {spec.effort}: {first(asked, 3)}. Add --attack {asked[0]}"
        )
    if changed and (mean := head_of(released)) is not None and (seen_by := labels_of_signs(mean, released.batch_size)):
        found.append(
            "labels given away by signs in the gradient of the head, if they are not smoothed: "
            f"{first(map(str, seen_by), 16)}"
        )
    if told is not None and told.certain:
        among = "" if told.all_certain else "among them "
        found.append(f"labels given away by the gradient of the head: {among}{first(map(str, told.certain), 16)}")
    if told is not None and not told.all_certain:
        found.append(f"labels, guessed where they are not given away: {first(map(str, told.labels), 16)}")
    if base.weights.is_random:
        found.append("random weights: leakage of trained weights differs")
    beyond = [f"{row['attack']} ({row['beyond_range']})" for row in rows if "beyond_range" in row]
    if beyond:
        found.append(f"outside their stated range, so that a failure says nothing: {'; '.join(beyond)}")
    if not any("block" in row for row in rows):
        found.append("no attack ran on this file, which is no evidence of privacy")
    return found


def _facts(base: Victim, released: GradientFile) -> Row:
    """Return what `run.json` states of the file, and of the one victim."""
    stated = {"file": released.source, "batch_size": released.batch_size, "reduction": released.reduction}
    stated |= {"model": released.model, "weights_sha256": released.weights_sha256}
    return {
        "victim": {"name": base.name, "block": base.block, "weights": asdict(base.weights)} | base.params(),
        "released": stated | {"gradients": len(released.gradients), "without_gradient": sorted(released.without)},
    }


def _plain(row: Row) -> Row:
    """Return a row that JSON can hold: an infinite PSNR is "Infinity"."""
    return {key: "Infinity" if value == math.inf else value for key, value in row.items()}


def _warn(message: str) -> None:
    warnings.warn(message, PrivlabWarning, stacklevel=3)

"""An audit of a released gradient, or of a client's update: what could be reconstructed from a real training.

No private image is needed.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, collect_warnings, first, option_text, pick_device, plain_data, read_bytes, warn
from privlab.evaluation import Case, applicable, default_attacks, stands_in, unread
from privlab.evaluation.lpips_choice import with_lpips
from privlab.release import head_of, labels_of_signs, slots_without_gradient
from privlab.release.explained import explained_share
from privlab.runs.audit_certificate import certify
from privlab.runs.audit_reference import ReferenceScorer, as_fed, write_scores
from privlab.runs.audited import GIVE_WEIGHTS, Audited, Files, other_weights, read_audited
from privlab.runs.audits import UNSCORED, Audit, Row, failed, unknown_images
from privlab.runs.update_diagnosis import label_shares
from privlab.stores import RunDirectory, sheet_png
from privlab.threat import Attack, Capability, Observation, Stack, attack_declarations, check_capabilities
from privlab.victims import Victim, file_of

if TYPE_CHECKING:
    from privlab.report.run import Run

_MOST_BYTES = 2**36
"""The most bytes of a release; that of the largest ViT of timm has 2³⁵."""


def audit_gradients(
    file: Files,
    spec: Case,
    *,
    own: nn.Module | Victim | None = None,
    device: str = "auto",
    out: Path,
    overwrite: bool = False,
    reference: Path | None = None,
    command: str | None = None,
) -> "Run":
    """Run every attack that the file grants; write its records and reconstructions as soon as it is finished.

    An image that is not known is named by the file and its number, and its records have no scores. The private image
    is the first of the images of the step; the reconstruction nearest to it is the one that is scored. The slices of a
    volume are the first ones, each with the reconstruction that is matched with it.

    `spec` names one victim, which is the client's model with the weights of that step, and the defense that the client
    is known to use: "auto" is MJP where the model has E_unk, else none. `block` "auto" is the stock block: a client
    trains one model, and no attack may choose another. If it names a client, what is audited is the update of a round.

    Args:
        file: what `privlab.capture` wrote; or the weights before and after a client's round, state dicts in files as
            `--weights` takes them.
        spec: the victim, the attacks, and the metrics if there is a reference.
        own: the client's model, or a victim, in place of the one that `spec` names.
        device: "auto", "cpu", "cuda" or "cuda:N".
        out: the run directory.
        overwrite: whether an earlier run in `out` is replaced.
        reference: the private image, or a volume of them, by which reconstructions are scored. It is preprocessed as
            the victim's inputs are; if that does not give the released gradient and one of the usual ways does, one
            image is preprocessed in that way. Without a reference, a reconstruction is checked by the gradient that it
            gives, and image priors learn from all bundled photographs, as it cannot be known whether one is private.
        command: the command line, for `run.json`.

    Raises:
        PrivlabError: for a file that cannot be read, does not fit the victim or contradicts itself, an attack that was
            asked for and needs more than the file grants, or a reference that is not an image.
    """
    RunDirectory(out).check(overwrite=overwrite)
    spec, of_lpips = with_lpips(spec, {}, download=reference is not None)
    messages = list[str]()
    asides = [of_lpips] if of_lpips is not None and reference is not None else []  # they are said last
    with collect_warnings(messages):
        audited = read_audited(file, spec, pick_device(device), own)
        with collect_warnings(asides):
            attacks, refused = _attacks(audited)
        if (reason := _nothing_left(audited, attacks)) is not None:
            attacks, refused = [], refused | {attack.name: reason for attack in attacks}
        scorer = (
            None
            if reference is None
            else ReferenceScorer.of(reference, audited.spec, audited.base, audited.file.batch_size)
        )
    names, files = (("before", "after"), file) if isinstance(file, tuple) else (("file",), (file,))
    content = {name: read_bytes(file_of(path), "release", _MOST_BYTES) for name, path in zip(names, files, strict=True)}
    images = unknown_images(audited.source, b"".join(content.values()), audited.file.batch_size)
    if audited.labels is not None and len({*audited.labels}) == 1:
        images = tuple(replace(image, label=audited.labels[0], label_origin="released") for image in images)
    by: dict[str, Any] = {}
    if scorer is not None:
        known = [replace(image, name=o.name, sha256=o.sha256) for image, o in zip(images, scorer.named, strict=False)]
        images = (*known, *images[len(known) :])
        seen = replace(audited.seen, photographs=scorer.photographs(audited.base.preprocessing))
        audited = replace(audited, seen=seen)
        by = {"public": scorer.public_sha256, "metrics": scorer.metrics, "missing": scorer.missing}
    by |= {"attacks": attacks, "refused": refused, "releases": [images]}
    audit = Audit(spec=audited.spec, base=audited.base, source=audited.source, **by)
    run = RunDirectory.create(out, overwrite=overwrite)
    facts = audit.facts(out, command) | _stated(audited, content) | ({"unscored": UNSCORED} if scorer is None else {})
    with run.noted(facts, messages):
        with collect_warnings(messages):
            made = [_attack(audit, audited, attack, scorer, run) for attack in attacks]
            rows, facts["reference"], exact = [row for row, _ in made], None, False
            if audited.unexplained is not None and not any(row["proof"] for row in rows):
                warn(audited.unexplained)
            if scorer is not None:
                scorer, facts["reference"] = as_fed(scorer, audited, made)
                rows = [scorer.control(), *(row if x is None else row | scorer(x) for row, x in made)]
                exact = any(scorer.is_exact(x) for _, x in made if x is not None)
                write_scores(audit, scorer, rows, made, run)
        messages += asides + [f"{name} is n/a: {reason}" for name, reason in audit.missing.items()]
        leaks = False if audited.file.is_zero else exact or any(row.get("explained") for row in rows) or None
        facts |= {"flags": _flags(audited, rows), "attacks": plain_data(rows), "leaks": leaks}
        if scorer is None and (proven := [row for row in rows if row["proof"] == audited.what]):
            names, left = first([row["attack"] for row in proven]), max(row["residual"] for row in proven)
            facts["unscored"] += (
                f" What gives the released {audited.what} (residual {left:.1e}) was reconstructed by {names}."
            )
    return audit.run(out)


def _stated(audited: Audited, content: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what `run.json` states of the files, whose bytes are `content`."""
    base, file = audited.base, audited.file
    released = {name: getattr(file, name) for name in ("batch_size", "reduction", "model", "weights_sha256")}
    released |= {"file": file.source, "gradients": len(file.gradients), "without_gradient": sorted(file.without)}
    released["sha256"] = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    victim = {"name": base.name, "block": base.block, "weights": asdict(base.weights)} | base.params()
    return {"victim": victim, "released": released, "labels": audited.labels}


def _attacks(audited: Audited) -> tuple[list[Attack], dict[str, str]]:
    """Return the attacks that can run on what the file grants, and the reason for each other one.

    Raises:
        PrivlabError: if one was asked for by name and cannot run.

    Warns:
        PrivlabWarning: for the others that cannot run, by reason.
    """
    spec, seen = audited.spec, audited.seen
    groups, refused = applicable(spec, audited.base, stand_ins=True)
    able: list[Attack] = []
    for attack in (cast(Attack, attack) for group in groups for attack in group.attacks):
        try:
            check_capabilities(attack, seen.grants, force=spec.adversary.force)
        except PrivlabError as refusal:
            refused[attack.name] = str(refusal)
            continue
        if lacking := [name for name in attack.parameters if name not in {"*", *seen.gradients}]:
            refused[attack.name] = f"Attack '{attack.name}' reads gradients that the file lacks: {', '.join(lacking)}."
        else:
            able.append(attack)
    if spec.adversary.attacks is not None and refused:
        name, refusal = next(iter(refused.items()))
        lacks = installed_attacks()[name].requires - seen.grants
        if Capability.BATCH_SIZE_ONE in lacks and (asked := _on_request(seen, spec.adversary.effort)):
            refusal += f" Of {audited.file.batch_size} images in one gradient --attack {asked[0]} can be tried."
        if lacks == {Capability.KNOWS_WEIGHTS}:
            other = other_weights(audited.file, audited.base)
            refusal = f"Attack '{name}' needs the client's weights. {other}. {GIVE_WEIGHTS}"
        raise PrivlabError(refusal)
    by_reason: dict[str, list[str]] = {}
    for name, refusal in refused.items():
        by_reason.setdefault(refusal.removeprefix(f"Attack '{name}' "), []).append(name)
    for reason, names in by_reason.items():
        who = "It" if len(names) == 1 else "Each"
        needs = reason.replace("needs what this observation does not grant: ", "needs ")
        warn(f"Left out: {', '.join(names)}. {who} {needs} See `privlab explain {names[0]}`.")
    running = {attack.name for attack in able}
    return [attack for attack in able if spec.adversary.attacks is not None or not stands_in(attack, running)], refused


def _nothing_left(audited: Audited, attacks: Sequence[Attack]) -> str | None:
    """Return that filters left no entry of a release that any of the attacks reads, and warn of it; else None.

    Raises:
        PrivlabError: if an attack was asked for by name: else this is a result.
    """
    gradients, filters = audited.seen.gradients, Stack(tuple(audited.seen.defense)).on_gradients
    read = {name for attack in attacks for name in (gradients if "*" in attack.parameters else attack.parameters)}
    if not filters or not read or any(gradients[name].any() for name in read):
        return None
    reason = (
        f"{audited.source}: no evidence: the filter left nothing of what the attacks read, {first(sorted(read), 2)}. "
        f"Found {' + '.join(map(str, filters))}. That no attack can run is no evidence of privacy."
    )
    if audited.spec.adversary.attacks is not None:
        raise PrivlabError(reason)
    warn(reason)
    return reason


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
    audit: Audit, audited: Audited, attack: Attack, scorer: ReferenceScorer | None, run: RunDirectory
) -> tuple[Row, Float[Tensor, "r c h w"] | None]:
    """Run one attack, write its images and then its records, and return its row and its reconstruction, if it has one.

    Reconstructions are checked by what they give (`certify`).
    """
    seen = audited.seen
    row: Row = {"attack": attack.name, "block": "april" if Capability.APRIL_BLOCK in seen.grants else "stock"}
    row |= {"explained": None, "proof": None, "fitted": {}}
    (release,) = audit.releases
    if audited.file.is_zero:
        records, images = failed(audit.records(attack, release), "what is released is zero"), None
    else:
        records, images = audit.attack(attack, seen, release)
    if (beyond := records[0].get("beyond_range")) is not None:
        row["beyond_range"] = beyond
    if images is None:
        run.write_records(records)
        return row | {"status": "failed", "reason": records[0]["reason"]}, None
    row |= {"status": "ok", "images": len(images)}
    row["seconds"] = round(sum(record["seconds_attack"] for record in records), 4)
    darkest, lightest = images.flatten(2).aminmax(dim=2)
    row["blank"] = bool((lightest - darkest < 1 / 255).all())
    found = certify(
        seen, images, audited.target, checked=not audited.changed, of_levels=bool(getattr(attack, "levels", 0))
    )
    row |= {"explained": found.explained, "proof": found.proof}
    if found.residual is not None:
        row["residual"] = found.residual
        share: Row = {"explained": explained_share(found.residual)}
        records = [record | share for record in records]
    if found.target is not None:
        row["target"] = list(found.target)
    if found.proof == audited.what:
        row["fitted"] = dict(audited.fitted)
    order = list(range(len(images)))
    if scorer is not None:
        places = scorer.places(images)
        order = places + [i for i in order if i not in places]
    row["files"] = [f"pictures/{re.sub(r'[^A-Za-z0-9_.-]+', '-', attack.name)}-{i}.png" for i in range(len(images))]
    for image, i in zip(release, order, strict=False):  # an attack for one image may be forced on several
        run.write_file(row["files"][i], sheet_png(images[i : i + 1], [image.sha256], records[0]["cell"]))
    run.write_records(records)
    return row, images


def _flags(audited: Audited, rows: Sequence[Row]) -> list[str]:
    """Return the red flags: what weakens a verdict on this file, and what the file reveals without any attack."""
    spec, released, seen, base, told = audited.spec, audited.file, audited.seen, audited.base, audited.told
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
    if spec.adversary.effort == "quick":
        found.append("low effort: quick, less than the standard effort")
    if len(masked) >= width:
        found.append(f"more tokens than equations: N = {len(masked)} ≥ D = {width}, so closed forms are not exact")
    if released.batch_size > 1:
        found.append(
            f"{released.batch_size} images in one gradient: attacks for one image do not run, "
            "which is no evidence of privacy"
        )
    tried = (
        spec.adversary.attacks is not None
        or audited.changed
        or (released.batch_size == 1 and any("block" in row for row in rows))
    )
    if not tried and (asked := _on_request(seen, spec.adversary.effort)):
        found.append(
            f"not tried, as these searches are not of effort {spec.adversary.effort}: {first(asked, 3)}. "
            f"Add --attack {asked[0]}"
        )
    mean = head_of(released) if audited.changed else None
    if mean is not None and (by_signs := labels_of_signs(mean, released.batch_size)):
        found.append(
            "labels given away by signs in the gradient of the head, if they are not smoothed: "
            f"{first(map(str, by_signs), 16)}"
        )
    if "label" in audited.fitted:
        found.append(f"label: {label_shares(audited.fitted['label'])}")
    if targets := [row["target"] for row in rows if "target" in row]:
        found.append(f"target of client.loss={audited.client.loss_name}: {first(targets[0], 16)}")
    if fitted := [f"client.{name}={option_text(value)}" for name, value in audited.fitted.items() if name != "label"]:
        found.append(f"fitted to the update: {first(fitted, 8)}")
    if told is not None and told.certain:
        among = "" if told.all_certain else "among them "
        found.append(f"labels given away by {told.by}: {among}{first(map(str, told.certain), 16)}")
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

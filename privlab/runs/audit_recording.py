"""An audit of recorded features: what a server of split learning could reconstruct. No image is known."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from privlab.base import PrivlabError, collect_warnings, pick_device, warn
from privlab.evaluation import Case, Record, applicable, defense_of, plan
from privlab.evaluation.lpips_choice import with_lpips
from privlab.evaluation.setup import public_of
from privlab.release import Recorded, feature_capabilities, read_recording, recorded_cut_layer, recorded_sessions
from privlab.runs.attack import status_of
from privlab.runs.audits import UNSCORED, Audit, Release, Row, audited_victim, unknown_images
from privlab.stores import RunDirectory, sheet_png
from privlab.threat import FeatureAttack, FeatureObservation
from privlab.victims import Victim

if TYPE_CHECKING:
    from privlab.report.run import Run


def audit_features(
    folder: Path,
    spec: Case,
    *,
    device: str = "auto",
    out: Path,
    overwrite: bool = False,
    limit: int | None = None,
    command: str | None = None,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> "Run":
    """Run attacks on recorded features; write records, and a contact sheet for each batch and attack, batch by batch.

    `spec` names one victim, which is the public base of the recorded client, and the defense that the client is known
    to use. The private images are not available, so whether one of them is among the public ones cannot be checked:
    whoever names `--public` must leave them out. Records have no scores, and name an image by its session, batch and
    number. If `out` holds an audit of the same case, batches that have records are not attacked again.

    Args:
        folder: what `privlab split serve --record` wrote.
        spec: the victim, the defense, the attacks, and the adversary's public images; `folder` becomes its images.
        device: "auto", "cpu", "cuda" or "cuda:N".
        out: the run directory.
        overwrite: whether an earlier run in `out` is replaced.
        limit: most batches of each session and kind; without it all are attacked.
        command: the command line, for `run.json`.
        progress: called after each batch with (batches done, None).

    Raises:
        PrivlabError: before anything is attacked, if there is no recording, its features or its cut layer do not fit
            the victim or `spec`, attacks lack a capability, or `out` holds another run.

    Warns:
        PrivlabWarning: for each batch that is replaced or added while the audit runs; it is left out.
    """
    begun = {} if overwrite else RunDirectory(out).begun()
    spec, _ = with_lpips(
        replace(spec, settings=("c",), data=replace(spec.data, images=(str(folder),))), begun, download=False
    )
    if (cut_layer := recorded_cut_layer(folder)) != spec.cut_layer:
        raise PrivlabError(f"The recording in '{folder}' has cut layer {cut_layer}. Found {spec.cut_layer}.")
    goes_on = not overwrite and status_of(out, spec) is not None
    RunDirectory(out).check(overwrite=overwrite, resume=goes_on)
    messages: list[str] = []
    with collect_warnings(messages):
        base = audited_victim(spec, pick_device(device))
        sessions = recorded_sessions(folder)
        attacks = [cast(FeatureAttack, attack) for group in plan(spec, base) for attack in group.attacks]
        public = public_of(spec, base).images
        found = {_name(batch): _images(batch, base) for batch in _limited(read_recording(folder), limit)}
    refused = applicable(spec, base)[1]
    own = {"attacks": attacks, "refused": refused, "releases": [*found.values()], "public": [*public]}
    audit = Audit(spec=spec, base=base, source=f"{folder}", **own)
    run = RunDirectory.create(out, overwrite=overwrite, resume=goes_on)
    facts = audit.facts(out, command) | {"unscored": UNSCORED, "recording": dict(sessions)}
    facts["batches"] = rows = list[Row]()
    warned = run.read_run()["warnings"] if goes_on else []
    messages += [message for message in warned if message not in messages]
    parts, photographs = defense_of(spec, base, "c").parts, torch.stack([*public.values()])
    grants = feature_capabilities(base.model, len(photographs), parts, spec.cut_layer)
    with run.noted(facts, messages), collect_warnings(messages):
        columns = ["cell", "image_sha256", "status", "reason", "seconds_attack"]
        earlier = {(row["cell"], row["image_sha256"]): row for row in run.store.read(columns).to_pylist()}
        for number, batch in enumerate(_limited(read_recording(folder), limit), 1):
            images, new = found.get(_name(batch)), list[Record]()
            if images is None or images != _images(batch, base):
                warn(f"'{_name(batch)}' was recorded while the audit ran. Left out: the same command attacks it.")
                continue
            features = batch.features.to(base.model.mean)
            seen = FeatureObservation(base.model, features, parts, photographs, grants, spec.cut_layer)
            for attack in attacks:
                keys = [(record["cell"], record["image_sha256"]) for record in audit.records(attack, images)]
                if all(key in earlier for key in keys):
                    records = [earlier[key] for key in keys]
                else:
                    records, made = audit.attack(attack, seen, images)
                    new += records
                    if made is not None:
                        sheet = sheet_png(made, [image.sha256 for image in images], keys[0][0])
                        run.write_file(f"strips/{_sheet(batch, attack.name)}", sheet)
                rows.append(_row(batch, attack.name, records))
            run.write_records(new)
            progress(number, None)
    return audit.run(out)


def _limited(batches: Iterable[Recorded], limit: int | None) -> Iterator[Recorded]:
    """Yield at most `limit` batches of each session and kind."""
    seen: dict[tuple[str, str], int] = {}
    for batch in batches:
        key = (batch.session, batch.kind)
        seen[key] = seen.get(key, 0) + 1
        if limit is None or seen[key] <= limit:
            yield batch


def _name(batch: Recorded) -> str:
    return f"{batch.session}/{batch.kind}-{batch.number:08d}"


def _sheet(batch: Recorded, attack: str) -> str:
    return f"{batch.session[:12]}-{batch.kind}-{batch.number:08d}-{attack}.png"


def _images(batch: Recorded, base: Victim) -> Release:
    """Return the images of a batch, whose features must fit the victim."""
    model = base.model
    tokens = model.vit.num_prefix_tokens + model.vit.patch_embed.num_patches
    want, found = (tokens, model.vit.embed_dim), tuple(batch.features.shape[1:])
    if found != want:
        raise PrivlabError(
            f"{base.name} sends {want[0]} tokens of width {want[1]}. Found {found[0]} of width {found[1]} in the "
            "recording: name the recorded client's --model and --img-size."
        )
    return unknown_images(_name(batch), batch.features.contiguous().numpy().tobytes(), len(batch.features))


def _row(batch: Recorded, attack: str, records: Sequence[Record]) -> Row:
    """Return what is printed of one attack on one batch; a failure has a row too."""
    row: Row = {"session": batch.session, "kind": batch.kind, "number": batch.number, "attack": attack}
    if records[0]["status"] != "ok":
        return row | {"status": "failed", "reason": records[0]["reason"]}
    seconds = round(sum(record["seconds_attack"] for record in records), 4)
    return row | {"images": len(records), "seconds": seconds, "sheet": _sheet(batch, attack), "status": "ok"}

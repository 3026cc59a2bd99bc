"""An audit of recorded features: what a server of split learning could reconstruct. No image is known."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torchvision.utils import save_image

from privlab.base import PrivlabError, collect_warnings, hardware, pick_device, versions
from privlab.evaluation import Specification, attack_batch, defense_of, plan, public_images, reason_of
from privlab.release import Recorded, feature_capabilities, read_recording, recorded_sessions
from privlab.stores import RunDirectory
from privlab.threat import FeatureAttack, FeatureObservation
from privlab.victims import Victim, victim

__all__ = ["Audit", "audit"]

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Audit:
    """The results of an audit: a row for each batch and attack, the warnings, and the directory of the sheets."""

    rows: Sequence[Row]
    warnings: Sequence[str]
    path: Path


def audit(
    folder: Path,
    spec: Specification,
    *,
    device: str = "auto",
    out: Path,
    overwrite: bool = False,
    limit: int | None = None,
    command: str | None = None,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> Audit:
    """Run attacks on recorded features; write a contact sheet for each batch and attack, and `run.json`.

    `spec` names one victim, which is the public base of the recorded client, and the defense that the client is known
    to use. The private images are not at hand, so whether one of them is among the public ones cannot be checked:
    whoever names `--public` must leave them out.

    Args:
        folder: what `privlab split serve --record` wrote.
        spec: the victim, the defense, the attacks, and the adversary's public images.
        device: "auto", "cpu", "cuda" or "cuda:N".
        out: the run directory.
        overwrite: whether an earlier run in `out` is replaced.
        limit: most batches of each session and kind; without it all are attacked.
        command: the command line, for `run.json`.
        progress: called after each batch with (batches done, None).

    Raises:
        PrivlabError: if there is no recording, or its features do not fit the victim, or attacks lack a capability.
    """
    messages: list[str] = []
    with collect_warnings(messages):
        base = victim(
            spec.models[0], weights=spec.weights, img_size=spec.img_size, seed=spec.seed, classes=spec.classes
        ).to(pick_device(device))
        sessions = recorded_sessions(folder)
        (group,) = plan(spec, base)
        attacks = cast(tuple[FeatureAttack, ...], group.attacks)  # `plan` refuses those that read gradients
        public_ones = public_images(spec.public, spec.public_limit, base.preprocessing, base.model.mean.device)
        public = torch.stack([*public_ones.values()])
        run = RunDirectory.create(out, overwrite=overwrite)
        rows: list[Row] = []
        for number, batch in enumerate(_limited(read_recording(folder), limit), 1):
            seen = _observation(base, batch, spec, public)
            rows += [_attack(attack, seen, batch, run) for attack in attacks]
            progress(number, None)
    facts = _facts(spec, base, sessions) | ({} if command is None else {"command": command})
    run.write_run(facts | {"batches": rows, "warnings": messages})
    return Audit(rows, messages, out)


def _limited(batches: Any, limit: int | None) -> Any:  # noqa: ANN401
    """Yield at most `limit` batches of each session and kind."""
    seen: dict[tuple[str, str], int] = {}
    for batch in batches:
        key = (batch.session, batch.kind)
        seen[key] = seen.get(key, 0) + 1
        if limit is None or seen[key] <= limit:
            yield batch


def _observation(base: Victim, batch: Recorded, spec: Specification, public: Tensor) -> FeatureObservation:
    model = base.model
    tokens = model.vit.num_prefix_tokens + model.vit.patch_embed.num_patches
    want, found = (tokens, model.vit.embed_dim), tuple(batch.features.shape[1:])
    if found != want:
        raise PrivlabError(
            f"{base.name} sends {want[0]} tokens of width {want[1]}. Found {found[0]} of width {found[1]} in the "
            "recording: name the recorded client's --model and --img-size."
        )
    stack = defense_of(spec, base, "c")
    features = batch.features.to(model.mean)
    return FeatureObservation(
        model, features, stack.parts, public, feature_capabilities(model, len(public), stack.parts)
    )


def _attack(attack: FeatureAttack, seen: FeatureObservation, batch: Recorded, run: RunDirectory) -> Row:
    """Run one attack on one batch, and return its row; a failure has a row too."""
    row: Row = {"session": batch.session, "kind": batch.kind, "number": batch.number, "attack": attack.name}
    start = time.perf_counter()
    try:
        reconstruction = attack_batch(attack, seen)
    except Exception as error:
        return row | {"status": "failed", "reason": reason_of(attack, error)}
    seconds = time.perf_counter() - start
    sheet = f"{batch.session[:12]}-{batch.kind}-{batch.number:08d}-{attack.name}.png"
    run.write_file(
        f"strips/{sheet}", lambda path: save_image(reconstruction.images.cpu(), path, nrow=8, padding=4, pad_value=1.0)
    )
    return row | {"images": len(reconstruction.images), "seconds": round(seconds, 4), "sheet": sheet, "status": "ok"}


def _facts(spec: Specification, base: Victim, sessions: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "specification": asdict(spec),
        "victim": {"name": base.name, "weights": asdict(base.weights)} | base.params(),
        "recording": dict(sessions),
        "versions": versions(),
        "hardware": hardware(base.model.mean.device),
    }

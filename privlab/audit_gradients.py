"""An audit of a released gradient in a file: what could be made of a real training step. No private image is needed."""

import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from privlab.decode import Picture
from privlab.errors import PrivlabError
from privlab.evaluate import Panel, Strip
from privlab.gradients import full_precision, per_sample_gradients, released_parameters
from privlab.images import Preprocessing, open_images
from privlab.labels_by_rank import Told, told_labels
from privlab.machine import commit, hardware, pick_device, versions
from privlab.metrics import Learned, score
from privlab.photographs import apart_from
from privlab.plan import Specification, applicable, defense_of, stands_in
from privlab.public import Others
from privlab.reconstruction import beyond_range, brought, check_reconstruction
from privlab.records import CONTROLS
from privlab.released import Released, check_fit, check_head, first, head_of, observation, read_released
from privlab.store import RunDirectory
from privlab.strips import save_strip, strip_name, to_png
from privlab.subjects import collected, learned_metrics, public_images
from privlab.threat import Attack, Capability, Feed, Observation, PrivlabWarning, check_capabilities
from privlab.victims import Victim, victim

__all__ = ["EXPLAINED", "GradientAudit", "audit_gradients", "residual"]

EXPLAINED = 0.05
"""The residual below which a released gradient is taken for that of the reconstruction (experiments/gradients.md)."""

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class GradientAudit:
    """What an audit left: a row for each attack, the red flags, and the directory of the pictures.

    A row has `residual` where the reconstruction could be checked by the gradient that it gives, and scores where there
    is a reference; `missing` says of each metric that could not be computed why.
    """

    rows: Sequence[Row]
    flags: Sequence[str]
    labels: Sequence[int] | None
    warnings: Sequence[str]
    path: Path
    missing: Mapping[str, str] = field(default_factory=dict)


def audit_gradients(
    file: Path,
    spec: Specification,
    *,
    device: str = "auto",
    out: Path,
    overwrite: bool = False,
    reference: Path | None = None,
    command: str | None = None,
) -> GradientAudit:
    """Run every attack that the file grants; write each reconstruction as a PNG, and `run.json`.

    `spec` names one victim, the client's model with the weights of that step, and the defense that the client is known
    to use: "auto" is MJP where the model has E_unk, else none. `block` "auto" is the stock block: a client trains one
    model, and no attack may choose another.

    Args:
        file: what `privlab.capture.capture` wrote.
        spec: the victim, the attacks, and the metrics if there is a reference.
        device: "auto", "cpu", "cuda" or "cuda:N".
        out: the run directory.
        overwrite: whether an earlier run in `out` gives way.
        reference: the private image, to score by; without it a reconstruction is checked by the gradient that it gives,
            and image priors learn from all bundled photographs: whether one of them is private cannot be known.
        command: that `run.json` states.

    Raises:
        PrivlabError: for a file that cannot be read, does not fit the victim or contradicts itself, an attack that was
            asked for and needs more than the file grants, or a reference that is no picture.
    """
    spec = replace(spec, block="stock" if spec.block == "auto" else spec.block, release="gradients")
    messages: list[str] = []
    with collected(messages):
        released = read_released(file)
        base = victim(spec.models[0], weights=spec.weights, block=spec.block, img_size=spec.img_size, seed=spec.seed)
        base = base.to(pick_device(device))
        check_fit(released, base.model)
        head = head_of(released) if check_head(released) and not released.is_zero else None
        if spec.defense == "auto" and not base.has_mjp:
            spec = replace(spec, defense="none")
        defense = defense_of(spec, base, "c")
        knows = _knows_weights(released, base)
        seen = observation(released, base.model, defense=defense.parts, knows_weights=knows)
        attacks = _attacks(spec, base, seen)
        judge = None if reference is None else _Judge.of(reference, spec, base)
        if judge is not None:
            seen = replace(seen, photographs=judge.photographs(base.preprocessing))
        run = RunDirectory.create(out, overwrite=overwrite)
        told = None if head is None else _told(base, seen)
        labels = told.labels if told is not None and told.all_certain else None
        rows: list[Row] = [] if judge is None else [judge.control()]
        panels: list[Panel] = []
        for attack in attacks:
            row, images = _attack(attack, seen, released, labels)
            rows.append(row)
            if images is not None:
                row["files"] = [_write(run, attack.name, i, image) for i, image in enumerate(images.cpu())]
                row |= {} if judge is None else judge(images)
                panels += [Panel(attack.name, image, (attack.name,)) for image in images.cpu()]
    if judge is not None:
        messages += [f"{name} is n/a: {reason}" for name, reason in judge.missing.items()]
        strip = judge.strip(panels)
        run.write_file(f"strips/{strip_name(0, strip)}", partial(save_strip, strip))
    found = _flags(released, seen, base, told, rows)
    facts = _facts(spec, base, released) | ({} if command is None else {"command": command})
    facts |= {"labels": labels, "flags": found, "warnings": messages}
    run.write_run(facts | {"attacks": [_plain(row) for row in rows]})
    return GradientAudit(rows, found, labels, messages, out, {} if judge is None else judge.missing)


def residual(seen: Observation, images: Float[Tensor, "1 c h w"], label: int) -> float:
    """Return ‖∇ℓ(images) − G‖ / ‖G‖ over the released gradients G that have a per-image rule; 0 is the client's own.

    Slots whose position embedding has no gradient are fed as MJP feeds them: with E_unk where it has a gradient.
    """
    model, held = seen.model, seen.gradients
    feed = Feed.undefended(images, model.patch)
    masked = _masked(seen)
    if masked.any():
        unknown = "unk_embed" in held and bool(held["unk_embed"].any())
        feed = replace(feed, masked_pe=masked[None], replacement="unknown" if unknown else "zero")
    names = sorted(released_parameters(model) & held.keys())
    with full_precision():
        own = per_sample_gradients(model, feed, torch.tensor([label], device=images.device), names)
    off = sum((own[name] - held[name]).double().square().sum() for name in names)
    return float(torch.as_tensor(off).sqrt() / sum(held[name].double().square().sum() for name in names) ** 0.5)


@dataclass(frozen=True, eq=False)
class _Judge:
    """Scores reconstructions against the private image, which the user has."""

    picture: Picture
    image: Float[Tensor, "1 c h w"]
    public: Float[Tensor, "m c h w"]
    metrics: Sequence[str]
    learned: Mapping[str, Learned]
    missing: Mapping[str, str]

    @classmethod
    def of(cls, reference: Path, spec: Specification, base: Victim) -> "_Judge":
        """Read the reference: as it is where it has the victim's input size, else as the victim's preprocessing has it.

        Raises:
            PrivlabError: if it is no picture.
        """
        picture = next(iter(open_images(reference)))
        if picture.pixels is None:
            raise PrivlabError(f"--reference must be one readable picture. Found {picture.name}: {picture.problem}")
        device = base.model.mean.device
        learned, missing = learned_metrics(spec, device, [base])
        public = public_images(spec.public, spec.public_limit, base.preprocessing, device)
        own = base.preprocessing(picture.pixels).to(device)
        others = torch.stack([public[key] for key in Others(public).beside(picture.sha256, own)])
        metrics = [name for name in spec.metrics if name not in missing]
        fed = replace(base.preprocessing, crop_pct=1.0) if _fits(picture.pixels, base) else base.preprocessing
        image = fed(picture.pixels)[None].to(base.model.mean)
        return cls(picture, image, others.to(base.model.mean), metrics, learned, missing)

    def __call__(self, images: Float[Tensor, "r c h w"]) -> Row:
        """Return the scores of the reconstruction that is nearest to the private image."""
        nearest = (images - self.image).square().mean((1, 2, 3)).argmin()
        with full_precision():
            scores = score(images[nearest : nearest + 1], self.image, self.metrics, self.learned)
        return {name: float(value) for name, value in scores.items()}

    def photographs(self, cut: Preprocessing) -> tuple[str, ...] | None:
        """Return the bundled photographs that priors may learn from, if the private image is one of them."""
        assert self.picture.pixels is not None
        return apart_from([self.picture.sha256], cut(self.picture.pixels)[None], cut)[0]

    def control(self) -> Row:
        """Return the row of the mean public photograph: what "nothing leaks" looks like."""
        return {"attack": CONTROLS[0], "status": "ok"} | self(self.public.mean(0, keepdim=True))

    def strip(self, panels: Sequence[Panel]) -> Strip:
        """Return the private image beside what was reconstructed."""
        private = Panel("private", self.image[0].cpu(), ("private image",))
        return Strip(self.picture.name, self.picture.sha256, "audit", ((private, *panels),))


def _knows_weights(released: Released, base: Victim) -> bool:
    """Return whether the victim's weights are, for all we know, those of the client at that step."""
    if released.weights_sha256 is None:
        _warn(
            f"{released.source} states no weights_sha256: {base.weights.origin} are taken for the client's, on trust."
        )
    elif released.weights_sha256 != base.weights.sha256:
        _warn(
            f"{released.source} was taken at other weights (SHA-256 {released.weights_sha256[:12]}) than "
            f"{base.weights.origin} ({base.weights.sha256[:12]}): attacks that need the weights are left out, and no "
            "reconstruction can be checked. Give --weights the client's, saved at that step."
        )
        return False
    return True


def _attacks(spec: Specification, base: Victim, seen: Observation) -> list[Attack]:
    """Return the attacks that the file grants.

    Raises:
        PrivlabError: if one was asked for by name and cannot run.

    Warns:
        PrivlabWarning: for each other one that cannot run.
    """
    cells, refused = applicable(spec, base, stand_ins=True)
    able: list[Attack] = []
    for attack in (cast(Attack, attack) for cell in cells for attack in cell.attacks):
        try:
            check_capabilities(attack, seen.grants, force=spec.force)
        except PrivlabError as refusal:
            refused[attack.name] = str(refusal)
            continue
        if lacking := [name for name in attack.parameters if name not in {"*", *seen.gradients}]:
            refused[attack.name] = f"Attack '{attack.name}' reads gradients that the file lacks: {', '.join(lacking)}."
        else:
            able.append(attack)
    for refusal in refused.values():
        if spec.attacks is not None:
            raise PrivlabError(refusal)
        _warn(f"Left out. {refusal}")
    running = {attack.name for attack in able}
    return [attack for attack in able if spec.attacks is not None or not stands_in(attack, running)]


def _attack(
    attack: Attack, seen: Observation, released: Released, labels: Sequence[int] | None
) -> tuple[Row, Float[Tensor, "r c h w"] | None]:
    """Run one attack; a failure is a row too. One image is checked by its own gradient, where its label is known."""
    row: Row = {"attack": attack.name, "block": "april" if Capability.APRIL_BLOCK in seen.grants else "stock"}
    if released.is_zero:
        return row | {"status": "failed", "reason": "what is released is zero"}, None
    start = time.perf_counter()
    try:
        if (beyond := beyond_range(attack, seen)) is not None:
            row["beyond_range"] = beyond
        with full_precision():
            stolen = brought(attack, seen)
        alone = Capability.BATCH_SIZE_ONE in attack.requires  # forced on a batch, it returns one image
        check_reconstruction(stolen.images, (1 if alone else seen.images_per_release, *seen.model.image_shape))
    except Exception as error:
        kind = "" if isinstance(error, PrivlabError) else f"{type(error).__name__}: "
        return row | {"status": "failed", "reason": f"{attack.name}: {kind}{error}".splitlines()[0]}, None
    images = stolen.images
    row |= {"status": "ok", "images": len(images), "seconds": round(time.perf_counter() - start, 4)}
    if released.batch_size == len(images) == 1 and labels is not None and Capability.KNOWS_WEIGHTS in seen.grants:
        row["residual"] = residual(seen, images, labels[0])
        row["explained"] = row["residual"] < EXPLAINED
    return row, images


def _fits(pixels: Image.Image, base: Victim) -> bool:
    """Return whether a picture has the size of a victim's input: it is what was fed, and nothing is to be cut off."""
    return (pixels.height, pixels.width) == base.preprocessing.size


def _told(base: Victim, seen: Observation) -> Told | None:
    """Return the labels that the head's gradient tells; its weights tell more, where they are the client's."""
    held = {name: g[0] for name, g in seen.gradients.items()}
    if Capability.KNOWS_WEIGHTS not in seen.grants:
        held.pop("head.weight", None)
    return told_labels(base.model.vit.head, held, seen.images_per_release)


def _write(run: RunDirectory, attack: str, number: int, image: Float[Tensor, "c h w"]) -> str:
    name = f"pictures/{re.sub(r'[^A-Za-z0-9_.-]+', '-', attack)}-{number}.png"
    run.write_file(name, lambda path: path.write_bytes(to_png(image)))
    return name


def _masked(seen: Observation) -> Bool[Tensor, " n"]:
    """Return the patch slots whose position embedding has no gradient."""
    height, width = seen.model.grid
    if "pos_embed" not in seen.gradients:
        return torch.zeros(height * width, dtype=torch.bool, device=seen.model.mean.device)
    return (seen.gradients["pos_embed"][0, 0, -height * width :] == 0).all(1)


def _flags(
    released: Released,
    seen: Observation,
    base: Victim,
    told: Told | None,
    rows: Sequence[Row],
) -> list[str]:
    """Return the red flags: what weakens a verdict on this file, and what it gives away without any attack.

    `told` are the labels that the head's gradient gives away, where it can be relied on.
    """
    if released.is_zero:
        return ["zero gradient: nothing was released, so nothing can be said of privacy"]
    found = []
    masked, width = _masked(seen), base.model.vit.embed_dim
    if masked.all():
        found.append("position embeddings: their gradient is zero throughout, and closed forms have no equations")
    elif masked.any():
        found.append(
            f"visible mask: {int(masked.sum())} of {len(masked)} position embeddings have no gradient, as under MJP: "
            "which patches were shuffled is public"
        )
    if len(masked) >= width:
        found.append(f"more tokens than equations: N = {len(masked)} ≥ D = {width}, so closed forms are not exact")
    if released.batch_size > 1:
        found.append(
            f"{released.batch_size} images in one gradient: attacks for one image do not run, "
            "which is no evidence of privacy"
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
        found.append("no attack can run on this file, which is no evidence of privacy")
    return found


def _facts(spec: Specification, base: Victim, released: Released) -> Row:
    stated = {"file": released.source, "batch_size": released.batch_size, "reduction": released.reduction}
    stated |= {"model": released.model, "weights_sha256": released.weights_sha256}
    return {
        "specification": asdict(spec),
        "victim": {"name": base.name, "block": base.block, "weights": asdict(base.weights)} | base.params(),
        "released": stated | {"gradients": len(released.gradients), "without_gradient": sorted(released.without)},
        "versions": versions(),
        "hardware": hardware(base.model.mean.device),
        "commit": commit(),
    }


def _plain(row: Row) -> Row:
    """Return a row that JSON can hold: an infinite PSNR is "Infinity"."""
    return {key: "Infinity" if value == math.inf else value for key, value in row.items()}


def _warn(message: str) -> None:
    warnings.warn(message, PrivlabWarning, stacklevel=3)

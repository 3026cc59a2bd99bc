"""How well does the audit of a server's weights know chosen ones from honest ones? `privlab study sent-weights`."""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.dishonest.imprint_bins import bins
from privlab.attacks.dishonest.layout import STEEP, mlp_inputs
from privlab.attacks.dishonest.manipulations import MANIPULATIONS, Manipulation, mixed, pairs, reading_errors
from privlab.attacks.dishonest.transparent_backbone import TransparentBackbone
from privlab.attacks.registry import attacks as installed_attacks
from privlab.base import PrivlabError, check_name, draw_for, full_precision, write_whole
from privlab.evaluation import batch_of, unread
from privlab.evaluation.observing import with_chosen_weights
from privlab.experiments.methods.hidden_backbone import HiddenBackbone
from privlab.images import open_images
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe_updates, train_round
from privlab.runs.sent_weights import WeightsAudit, audit_sent_weights
from privlab.threat import Capability, Client, ClientData
from privlab.victims import ZOO, Victim, VictimModel, victim

LAYER = "blocks.0.mlp.fc1"


_ARCHITECTURES = (
    *("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_small_patch32_224"),
    *("deit_tiny_patch16_224", "deit_small_patch16_224", "deit3_small_patch16_224", "vit_medium_patch16_gap_240"),
    *("vit_base_patch16_clip_224", "flexivit_small", "vit_relpos_small_patch16_224", "vit_small_patch8_224"),
    *("vit_base_patch32_224", "deit3_base_patch16_224", "vit_wee_patch16_reg1_gap_256", "vit_betwixt_patch16_gap_256"),
    *(
        "vit_xsmall_patch16_clip_224",
        "vit_little_patch16_reg4_gap_256",
        "vit_tiny_patch16_384",
        "deit_base_patch16_384",
    ),
)
"""Architectures of timm that are drawn at random, at 64 pixels."""

_STARTS = ("cifar_vit", "cifar_vit_early", "random", "cifar_vit_droppos", "cifar_vit_mp3")
_CLIENTS = (
    Client(optimiser="sgd", lr=0.01, steps=5, images=8),
    Client(optimiser="sgd", lr=0.1, steps=5, images=8),
    Client(optimiser="adam", lr=1e-4, steps=5, images=8),
    Client(optimiser="adamw", lr=1e-3, steps=5, images=8, weight_decay=0.05),
)
_ROUNDS = 9
"""Rounds of each of five starts and four clients: 180 in all. The limits were chosen on the first three starts."""

HIDDEN: dict[str, TransparentBackbone] = {
    "as it is": TransparentBackbone(),
    "rotated": HiddenBackbone(1.0, None),
    **{f"filled, pixels {x:g}": HiddenBackbone(x) for x in (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)},
    **{f"filled, pixels 100, noise {x:g}": HiddenBackbone(100.0, x) for x in (0.01, 0.1, 1.0)},
    **{f"filled, pixels 100, mixed {x:g}": HiddenBackbone(100.0, share=x) for x in (0.1, 0.5, 0.9, 0.99)},
    **{f"filled, pixels 30, attention {x:g}": HiddenBackbone(30.0, attention=x) for x in (1.0, 1.2, 1.5)},
    **{f"filled, pixels 100, attention {x:g}": HiddenBackbone(100.0, attention=x) for x in (0.5, 1.0)},
}
"""`transparent-backbone`, and its versions that hide."""

KINDS = ("trained", "attack", "mixed", "neurons", "steepness", "noise", "hidden", "round", "random")
"""The kinds of weights, in the order in which they are measured."""


@dataclass(frozen=True)
class SentWeightsStudy:
    """Audit honest weights and manipulated ones, and manipulated ones that hide.

    Args:
        weights: file of a trained ViT-Ti; None leaves it out.
        images: a source of photographs, such as "samples".
        limit: how many of them are the client's batch, ≥ 1.
        offset: how many photographs of the source are left out, ≥ 0.
        kinds: which of `KINDS` are measured; none for all.
    """

    weights: Path | None = None
    images: str = "samples"
    limit: int = 14
    offset: int = 0
    kinds: Sequence[str] = ()

    def __call__(self, out: Path) -> list[dict[str, Any]]:
        """Run the study, write its rows to `facts.json` of a folder after each one, and return them.

        A row has `kind`, `name`, `x` (the strength, the number of neurons, the steepness or the noise; of hidden
        versions the share of the mixture), `by_test` and `by_statistics`, `readable` (the largest share of patches that
        the test counts in a layer), `read` and `recognisable` (the shares of the patches of the batch that the server
        reads with a relative error of 0.1 or 0.3 at most), and each statistic.

        Raises:
            PrivlabError: if there is no such kind, or the folder has a study.
        """
        for kind in self.kinds:
            check_name("kind of weights", kind, KINDS)
        path = out / "facts.json"
        if path.exists():
            raise PrivlabError(f"'{path}' is another study, which is kept: give a new folder by --out.")
        out.mkdir(parents=True, exist_ok=True)
        base, rows = victim("cifar_vit"), list[dict[str, Any]]()
        images = self._batch(base)
        for kind in self.kinds or KINDS:
            for row in self._measured(kind, base.model, images):
                rows.append(row)
                text = json.dumps(rows, indent=1)
                write_whole(path, lambda part, text=text: part.write_text(text, encoding="utf-8"))
        return rows

    def _measured(self, kind: str, base: VictimModel, images: Float[Tensor, "b c h w"]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a kind of weights."""
        match kind:
            case "trained":
                for name in ZOO:
                    yield audit_row(kind, name, audit_sent_weights(victim(name).model, images))
                if self.weights is not None:
                    trained = victim("vit_ti", weights=self.weights)
                    yield audit_row(kind, "vit_ti", audit_sent_weights(trained.model, self._batch(trained)))
            case "attack":
                for name, manipulation in MANIPULATIONS.items():
                    yield _manipulated(kind, name, base, manipulation, images, 1.0)
                client = Client(optimiser="adamw")
                for name, attack in installed_attacks().items():
                    if Capability.CHOOSES_WEIGHTS in attack.requires and unread(attack, client) is None:
                        server: Any = attack()
                        model = with_chosen_weights(base, server, len(images), client)
                        yield audit_row(kind, name, audit_sent_weights(model, images)) | {"x": 1.0}
            case "mixed":
                for strength in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
                    for name in ("bins", "traps", "places"):
                        mixing = mixed(MANIPULATIONS[name], strength)
                        yield _manipulated(kind, name, base, mixing, images, strength)
            case "neurons":
                for neurons in (2, 4, 8, 16, 32, 64, 128, 256, 512):
                    few = lambda model, public, m=neurons: bins(model, public, STEEP, m)  # noqa: E731
                    yield _manipulated(kind, "bins", base, few, images, neurons)
            case "steepness":
                for steep in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0):
                    soft = lambda model, public, s=steep: bins(model, public, s)  # noqa: E731
                    yield _manipulated(kind, "bins", base, soft, images, steep)
            case "noise":
                for steep in (1.0, STEEP):
                    for noise in (0.0, 0.01, 0.03, 0.1, 0.2, 0.3):
                        unequal = lambda model, public, n=noise, s=steep: pairs(model, public, n, s)  # noqa: E731
                        yield _manipulated(kind, f"pairs, steepness {steep:g}", base, unequal, images, noise)
            case "hidden":
                for name, hidden in HIDDEN.items():
                    yield hidden_row(name, base, hidden, images, getattr(hidden, "share", 1.0))
            case "round":
                yield from _rounds(images)
            case "random":
                for name in _ARCHITECTURES:
                    drawn = victim(f"timm:{name}", weights="random", img_size=64, classes=10)
                    yield audit_row(kind, name, audit_sent_weights(drawn.model, self._batch(drawn)))

    def _batch(self, base: Victim) -> Float[Tensor, "b c h w"]:
        return batch_of(open_images(self.images, offset=self.offset, limit=self.limit), base.preprocessing).images


def _rounds(images: Float[Tensor, "b c h w"]) -> Iterator[dict[str, Any]]:
    """Yield a row for each round of honest training, compared with the round before."""
    for start in _STARTS:
        for number, client in enumerate(_CLIENTS):
            base = victim("cifar_vit", weights="random") if start == "random" else victim(start)
            model = copy.deepcopy(base.model)
            draw = draw_for(0, f"{start} {number}", "rounds")
            for place in range(_ROUNDS):
                before = train_round(model, client, images, torch.arange(len(images)) % model.classes, draw)
                found = audit_sent_weights(model, images, before)
                said = f"{start}, {client.optimiser} {client.lr:g}, round {place + 1}"
                yield audit_row("round", said, found)


def _manipulated(
    kind: str, name: str, base: VictimModel, manipulation: Manipulation, images: Float[Tensor, "b c h w"], x: float
) -> dict[str, Any]:
    """Return the row of manipulated weights: half of the images are the server's, the other half is attacked."""
    model, half = copy.deepcopy(base), len(images) // 2
    manipulation(model, images[:half])
    row = audit_row(kind, name, audit_sent_weights(model, images[half:])) | {"x": x}
    return row | _shares(_reading_errors(model, images[half:]))


def hidden_row(
    name: str, base: VictimModel, server: TransparentBackbone, images: Float[Tensor, "b c h w"], x: float
) -> dict[str, Any]:
    """Return the row of weights for LoRA, which the audit sees without the adapters; each image is an update.

    Args:
        name: the name of the row.
        base: the honest model.
        server: the attack.
        images: the images that are audited, and then attacked one by one.
        x: the strength.
    """
    client = Client(lr=0.1, trains="lora", rank=16)
    chosen = with_chosen_weights(base, server, 1, client)
    audited = copy.deepcopy(base)
    shared = {path.replace(".base_layer", ""): tensor for path, tensor in chosen.vit.state_dict().items()}
    audited.vit.load_state_dict({path: shared[path] for path in audited.vit.state_dict()})
    clients = [ClientData(image[None], torch.tensor([i % base.classes]), Generator()) for i, image in enumerate(images)]
    found = server(observe_updates(chosen, client, clients))
    sought, read = (patchify(base.normalise(each), base.patch) for each in (images, found.clamp(0, 1)))
    errors = (read - sought).norm(dim=2) / sought.norm(dim=2)
    row = audit_row("hidden", name, audit_sent_weights(audited, images)) | {"x": x}
    trained = {each.name: each.value for each in audit_sent_weights(audited, images, pretrained=True).statistics}
    by_slot = {"dependence by slot": trained["dependence on the image"]}
    return row | by_slot | _shares(errors) | {"psnr": float(psnr(found, images).median())}


def _shares(errors: Tensor) -> dict[str, float]:
    """Return the shares of the patches that are read with these relative errors, and of those that are recognisable."""
    return {name: float((errors <= most).double().mean()) for name, most in (("read", 0.1), ("recognisable", 0.3))}


def _reading_errors(model: VictimModel, images: Float[Tensor, "b c h w"]) -> Float[Tensor, " n"]:
    """Return how far the best row of the first MLP's gradient, or difference of adjacent rows, is from each patch.

    The gradient is that of all images together.
    """
    weight = model.vit.get_parameter(f"{LAYER}.weight")
    labels = torch.arange(len(images)) % model.classes
    with full_precision(), torch.enable_grad():
        weight.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(images), labels), [weight])
    inputs = mlp_inputs(model, images)[:, -model.vit.patch_embed.num_patches :].flatten(0, 1)
    return reading_errors(gradient, inputs)


def audit_row(kind: str, name: str, found: WeightsAudit) -> dict[str, Any]:
    """Return what an audit found as a row of the study.

    Args:
        kind: what weights they are, such as "round".
        name: their name.
        found: the audit.
    """
    by_test = any(not each.is_usual for each in found.layers)
    by_statistics = any(not each.is_usual for each in found.statistics)
    readable = max(max(each.of_one_image, each.of_batch) / each.patches for each in found.layers)
    of_layer = next((asdict(each) for each in found.layers if each.layer == LAYER), {})
    said = {"kind": kind, "name": name, "by_test": by_test, "by_statistics": by_statistics, "readable": readable}
    return said | {"of_layer": of_layer} | {each.name: each.value for each in found.statistics}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a line for each kind of honest weights and each attack: how many the test and the statistics found."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = f"{row['kind']} {row['name']}" if "x" in row else f"honest, {row['kind']}"
        groups.setdefault(name, []).append(row)
    lines = []
    for name, members in groups.items():
        found = {
            "by the test": sum(row["by_test"] for row in members),
            "by statistics": sum(row["by_statistics"] for row in members),
            "by either": sum(row["by_test"] or row["by_statistics"] for row in members),
        }
        most = {
            "most patches counted": max(row["readable"] for row in members),
            "most recognised": max(row.get("recognisable", math.nan) for row in members),
        }
        shares = {what: "–" if math.isnan(share) else f"{100 * share:.1f} %" for what, share in most.items()}
        lines.append({"weights": name, "number": str(len(members))} | {k: str(v) for k, v in found.items()} | shares)
    return lines

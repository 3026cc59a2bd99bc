"""`privlab study adam`: what the first step of AdamW shows of a gradient, next to the number of unknowns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from privlab.attacks.solvers import Shown, shown_by_round, token_count
from privlab.base import PrivlabError, check_range, full_precision
from privlab.evaluation import batches, labelled, source_of
from privlab.grids import specify
from privlab.release import each_release, observe_updates, released_parameters
from privlab.threat import Client, ClientData
from privlab.victims import Victim, victim

_PE, _PROJECTION = "pos_embed", "patch_embed.proj.weight"

WHOLE = 0.95
"""The share of a row's entries whose magnitudes must be known for it to count as whole."""


@dataclass(frozen=True, kw_only=True)
class AdamStudy:
    """Clients that take one step of AdamW from a fresh state, on one photograph each.

    Args:
        images: a source of photographs, such as "samples" or a folder.
        model: the victim; it needs a learned position embedding.
        weights: of the victim: auto, pretrained, random, or a file.
        img_size: the side of the input, in pixels; None for the victim's own.
        labels: a CSV file with file and label, or "predicted"; None for the source's own.
        rate: η, > 0.
        blocks: L, the first blocks that are counted besides the embedding, ≥ 0.
        limit: photographs, ≥ 1.
        every: the photographs at positions 0, K, 2 K, ….
        offset: the first photographs, which are left out.

    Raises:
        PrivlabError: if a number is out of its range.
    """

    images: str = "samples"
    model: str = "vit_ti"
    weights: str = "auto"
    img_size: int | None = None
    labels: str | None = None
    rate: float = 1e-4
    blocks: int = 2
    limit: int | None = None
    every: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        """Raise PrivlabError if a number is out of its range."""
        check_range(0 < self.rate < float("inf"), "rate", "above 0 and finite", self.rate)
        check_range(self.blocks >= 0, "blocks", "at least 0", self.blocks)

    def __call__(self, say: Callable[[str], object] = lambda line: None) -> list[dict[str, Any]]:
        """Return what the step shows of each photograph, by name.

        A row has the `loss` before the step, and the shares of entries whose magnitude is known, which is to 3 standard
        deviations of rounding from a full step (`shown_by_adam`), of the patches' position embeddings, of the
        projection W and of all parameters (`known_positions`, `known_projection`, `known_all`). For each of the N (D +
        K) numbers of ∂ℓ/∂E_pos and X it has the known magnitudes of these two gradients (`equations_embedding`), and
        for each of those of X and Δ = ∂ℓ/∂z_L the known magnitudes and the signs of the matrices of the embedding and
        of the first L blocks (`equations_blocks`, `signs_blocks`).

        Of the head it has the classes whose bias's magnitude is known (`known_classes`), the relative error of what the
        head read, by the known entries (`features_error`, NaN if a feature has none), and whether the only class whose
        logit rises is the label (`label_told`). Of the first block it has the rows of q and k (`whole_qk`), of v
        (`whole_v`), and the rows of fc1 and columns of fc2 (`whole_mlp`) of which 95 % of all entries are known.

        Args:
            say: called with the name of each photograph before it is measured.

        Raises:
            PrivlabError: if the victim has no learned position embedding, or no photograph can be used.
        """
        base = victim(self.model, weights=self.weights, img_size=self.img_size)
        spec = specify(
            model=(self.model,),
            images=(self.images,),
            weights=self.weights,
            img_size=self.img_size,
            labels=self.labels,
            limit=self.limit,
            every=self.every,
            offset=self.offset,
        )
        if _PE not in released_parameters(base.model):
            raise PrivlabError(f"privlab study adam needs a learned position embedding. {self.model} has none.")
        rows = []
        for chunk in batches(source_of(spec, [base]), base.preprocessing, 1):
            batch = labelled(chunk, base.model, predicted=self.labels == "predicted")
            for image, pixels, label in zip(batch.named, batch.images, batch.labels, strict=True):
                say(image.name)
                rows.append({"image": image.name} | self._row(base, pixels[None], label[None]))
        if not rows:
            raise PrivlabError(f"'{self.images}' has no photograph that can be used. Found 0 of them.")
        return rows

    def _row(self, base: Victim, pixels: Tensor, label: Tensor) -> dict[str, float]:
        client = Client(optimiser="adamw", lr=self.rate, steps=1)
        seen = observe_updates(base.model, client, [ClientData(pixels, label, Generator().manual_seed(0))])
        (update,) = each_release(seen)
        shown = shown_by_round(base.model, client, update)
        n = base.model.vit.patch_embed.num_patches
        shown[_PE] = shown[_PE].last(n)
        d, k = shown[_PROJECTION].value.shape
        before = (_PE, _PROJECTION, *(f"blocks.{level}." for level in range(self.blocks)))
        matrices = [name for name in shown if name.startswith(before) and update[name].ndim > 1]
        embedding, blocks = [shown[_PE], shown[_PROJECTION]], [shown[name] for name in matrices]
        behind = n * k + token_count(base.model) * d
        with torch.no_grad(), full_precision():
            loss = float(F.cross_entropy(base.model(pixels), label))
            read = base.model.vit.forward_head(base.model.vit.forward_features(base.model.normalise(pixels)), True)[0]
        W, b = shown["head.weight"], shown["head.bias"]
        features = told_features(W, b)
        rises = b.sign[0] < 0
        return {
            "loss": loss,
            "known_positions": _known([shown[_PE]]) / _entries([shown[_PE]]),
            "known_projection": _known([shown[_PROJECTION]]) / _entries([shown[_PROJECTION]]),
            "known_all": _known(shown.values()) / _entries(shown.values()),
            "equations_embedding": _known(embedding) / (n * (d + k)),
            "equations_blocks": _known(blocks) / behind,
            "signs_blocks": _entries(blocks) / behind,
            "known_classes": int(b.known.sum()),
            "features_error": float((features - read).norm() / read.norm()),
            "label_told": bool(rises.sum() == 1 and rises[label]),
            **_whole_rows({name: each.known for name, each in shown.items()}),
        }


def told_features(W: Shown, b: Shown) -> Float[Tensor, " d"]:
    """Return what the head read of one image, f_j = ∂ℓ/∂W_cj / ∂ℓ/∂b_c for every class c; NaN where none is known.

    The quotients of the classes whose magnitudes are known are averaged by the inverse of their variances.

    Args:
        W: what is shown of the gradient of the head's weight, a row for each class.
        b: what is shown of that of its bias, in one row.
    """
    r = b.value.mT
    quotient = W.value / r
    variance = (W.deviation.square() + (quotient * b.deviation.mT).square()) / r.square()
    weight = torch.where(W.known & b.known.mT, 1 / variance, 0.0)
    return (weight * torch.where(weight > 0, quotient, 0.0)).sum(0) / weight.sum(0)


def _whole_rows(known: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rows of q and k, those of v, and the hidden units of the first block that are known but for 5 %."""
    q, k, v = known["blocks.0.attn.qkv.weight"].chunk(3)
    mlp = (known["blocks.0.mlp.fc1.weight"], known["blocks.0.mlp.fc2.weight"].mT)
    return {
        name: sum(_whole(each) for each in of)
        for name, of in (("whole_qk", (q, k)), ("whole_v", (v,)), ("whole_mlp", mlp))
    }


def _whole(known: Bool[Tensor, "r c"]) -> int:
    return int((known.double().mean(1) >= WHOLE).sum())


def _known(of: Iterable[Shown]) -> int:
    """Return the number of entries whose magnitude is known."""
    return sum(int(each.known.sum()) for each in of)


def _entries(of: Iterable[Shown]) -> int:
    return sum(each.known.numel() for each in of)


def to_rows(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row of text for each photograph, by the words of the table's heads.

    Args:
        facts: what a study returned.
    """
    return [
        {
            "image": of["image"],
            "loss": f"{of['loss']:.3g}",
            "known: positions": f"{of['known_positions']:.1%}",
            "projection": f"{of['known_projection']:.1%}",
            "all": f"{of['known_all']:.1%}",
            "equations per unknown: embedding": f"{of['equations_embedding']:.2f}",
            "with blocks": f"{of['equations_blocks']:.2f}",
            "signs per unknown": f"{of['signs_blocks']:.1f}",
            "error of features": f"{of['features_error']:.1e}",
            "whole rows: q and k, v, MLP": f"{of['whole_qk']}, {of['whole_v']}, {of['whole_mlp']}",
        }
        for of in facts
    ]

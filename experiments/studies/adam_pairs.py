"""`privlab study adam-pairs`: what attacks of one image find in a step of AdamW on two."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.attacks import AdamUpdate, PatchGradient
from privlab.base import PrivlabError, check_range, collect_warnings
from privlab.evaluation import batches, labelled, source_of
from privlab.grids import specify
from privlab.metrics import psnr
from privlab.release import observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import Victim, VictimModel, victim

GUESSES = ("adam-update", "patch-gradient", "one colour", "mean of both", "patch-gradient, alone")
"""What is compared with each photograph of a pair."""


@dataclass(frozen=True, kw_only=True)
class AdamPairsStudy:
    """Clients that take one step of AdamW from a fresh state, on two photographs each.

    Attacks refuse such updates, as signs and magnitudes are those of the sum of two gradients: they are called here
    without that check.

    Args:
        images: a source of photographs, such as "samples" or a folder.
        model: the victim; it needs a learned position embedding.
        weights: of the victim: auto, pretrained, random, or a file.
        img_size: the side of the input, in pixels; None for the victim's own.
        labels: a CSV file with file and label, or "predicted"; None for the source's own.
        rate: η, > 0.
        limit: photographs, ≥ 2; of an odd number the last is left out.
        every: the photographs at positions 0, K, 2 K, ….
        offset: the first photographs, which are left out.

    Raises:
        PrivlabError: if the rate is out of its range.
    """

    images: str = "samples"
    model: str = "vit_ti"
    weights: str = "auto"
    img_size: int | None = None
    labels: str | None = None
    rate: float = 1e-4
    limit: int | None = None
    every: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        """Raise PrivlabError if the rate is out of its range."""
        check_range(0 < self.rate < float("inf"), "rate", "above 0 and finite", self.rate)

    def __call__(self, say: Callable[[str], object] = lambda line: None) -> list[dict[str, Any]]:
        """Return a row for each photograph: the PSNR in dB of each of `GUESSES`, and whether it is the louder one.

        The louder of a pair is that whose ∂ℓ/∂W of the patch embedding has the larger norm.

        Args:
            say: called with the name of each photograph before its pair is measured.

        Raises:
            PrivlabError: if there are no two photographs, or an attack does not apply to one image either.
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
        rows = []
        for chunk in batches(source_of(spec, [base]), base.preprocessing, 2):
            batch = labelled(chunk, base.model, predicted=self.labels == "predicted")
            if len(batch.images) == 2:
                names = [image.name for image in batch.named]
                for name in names:
                    say(name)
                found = self._pair(base, batch.images, batch.labels)
                rows += [{"image": name} | row for name, row in zip(names, found, strict=True)]
        if not rows:
            raise PrivlabError(f"A pair takes two photographs that can be used. '{self.images}' has fewer.")
        return rows

    def _pair(self, base: Victim, pixels: Float[Tensor, "2 c h w"], labels: Int[Tensor, " 2"]) -> list[dict[str, Any]]:
        sizes, alone = [], []
        for image, label in zip(pixels, labels, strict=True):
            plain = self._seen(base.model, Client(optimiser="sgd", lr=1.0), image[None], label[None])
            sizes.append(float(plain.gradients["patch_embed.proj.weight"].norm()))
            alone.append(PatchGradient()(self._seen(base.model, self._client(1), image[None], label[None])))
        both = self._seen(base.model, self._client(2), pixels, labels)
        with collect_warnings([]):  # that one gradient is taken for the sum of two is what is measured
            guesses = [
                AdamUpdate()(both),
                PatchGradient()(both),
                pixels.new_full(pixels.shape[1:], 0.5)[None],
                pixels.mean(0, keepdim=True),
            ]
        scores = [psnr(guess.expand_as(pixels), pixels) for guess in guesses] + [psnr(torch.cat(alone), pixels)]
        return [
            {"louder": sizes[i] == max(sizes)} | {name: float(of[i]) for name, of in zip(GUESSES, scores, strict=True)}
            for i in (0, 1)
        ]

    def _client(self, images: int) -> Client:
        return Client(optimiser="adamw", lr=self.rate, images=images, batch_size=images)

    def _seen(self, model: VictimModel, client: Client, pixels: Tensor, labels: Tensor) -> Observation:
        return observe_updates(model, client, [ClientData(pixels, labels, Generator().manual_seed(0))])


def to_rows(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row of text for each photograph, by the words of the table's heads.

    Args:
        facts: what a study returned.
    """
    return [
        {"image": of["image"], "louder": "yes" if of["louder"] else "no"}
        | {name: f"{of[name]:.1f}" for name in GUESSES}
        for of in facts
    ]

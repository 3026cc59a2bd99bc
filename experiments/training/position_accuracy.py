"""The accuracy of position predictors, by what is hidden from them."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base import draw_for
from privlab.experiments.training.examples import Examples
from privlab.experiments.training.objectives.context import in_context
from privlab.experiments.training.objectives.droppos import TrainDropPos
from privlab.experiments.training.objectives.mp3 import TrainMp3
from privlab.reassembly import DropPosNetwork, Mp3Network, PositionPredictor

HIDDEN = (0.0, 0.25, 0.5, 0.75)
"""The values of η, or γ, at which position predictors are evaluated."""

DROPPED = (0.25, 0.5, 0.75, 0.95)
"""The values of γ_pos at which DropPos is evaluated (Tables S3 to S5)."""


@torch.no_grad()
def position_accuracy(
    predictor: PositionPredictor,
    data: Examples,
    *,
    seed: int = 0,
    batch: int = 250,
    hidden: Sequence[float] = HIDDEN,
) -> dict[str, float]:
    """Return the shares of patches whose likeliest slot is their own, in [0, 1], by what is hidden.

    Of MP3, over all patches, these are `accuracy_eta_E` for each η of `hidden`, and `accuracy` at η = 0. Of DropPos,
    over the patches whose PE is dropped, they are `accuracy_gamma_G_pos_P` for each γ of `hidden` and each γ_pos of
    `DROPPED`, and their mean as `accuracy`.

    Args:
        predictor: the position predictor; it is put into evaluation mode.
        data: the images, of the predictor's input size; their labels are not used.
        seed: seed of the draws of what is hidden.
        batch: the number of images computed at a time; each batch has its own draws, keyed by its first image.
        hidden: the shares η, or γ, of the patches that are hidden, in [0, 1).

    Source: MP3, Figure 3; DropPos, Section 4.1 and Tables S3 to S5.
    """
    predictor.eval()
    hits: dict[str, Int[Tensor, " 2"]] = {}
    for rows in torch.arange(len(data)).split(batch):
        images, draw = data.pixels(rows).to(predictor.model.mean), draw_for(seed, str(int(rows[0])), "positions")
        for name, right in _right(predictor, images, data.labels[rows], hidden, draw).items():
            counts = torch.tensor([int(right.sum()), right.numel()])
            hits[name] = hits.get(name, torch.zeros_like(counts)) + counts
    shares = {name: int(right) / int(of) for name, (right, of) in hits.items()}
    mean = sum(shares.values()) / len(shares)
    return {"accuracy": shares.get("accuracy_eta_0", mean)} | shares


def _right(
    predictor: PositionPredictor,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    hidden: Sequence[float],
    draw: Generator,
) -> dict[str, Bool[Tensor, " k"]]:
    """Return, under each name, which patches of a batch are given their own slot."""
    found = {}
    if isinstance(predictor, Mp3Network):
        for eta in hidden:
            patches, context = TrainMp3(eta=eta).batch(images, labels, predictor.model, draw)
            guess = in_context(predictor, patches, context.to(patches.device)).argmax(2)
            found[f"accuracy_eta_{eta:g}"] = (guess == torch.arange(guess.shape[1]).to(guess)).flatten()
    if isinstance(predictor, DropPosNetwork):
        for gamma, dropped in itertools.product(hidden, DROPPED):
            objective = TrainDropPos(gamma=gamma, gamma_pos=dropped)
            made = objective.batch(images, labels, predictor.model, draw)[:3]
            patches, visible, known = (each.to(images.device) for each in made)
            seen = patches[torch.arange(len(patches)).to(visible)[:, None], visible]
            guess = predictor(seen, visible, known).argmax(2)
            found[f"accuracy_gamma_{gamma:g}_pos_{dropped:g}"] = (guess == visible)[~known]
    return found

"""Both photographs of a mixture: `python -m privlab.experiments.methods.mixtures IMAGES OUT.csv [PAIRS] [FIRST]`.

Pair i mixes the photographs FIRST + i and FIRST + 200 + i of a folder, by name, as MixUp does: pixels and labels in the
shares λ and 1 − λ. Labels are the victim's predictions; pairs of one class are left out, because their label does not
show λ. A client of `cifar_vit` takes one step of SGD. λ is drawn from 0.5 to 0.95, at rates of 0.1 and 0.01, or is one
of three fractions at 0.1. A row that the file already has is not measured again.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from privlab.attacks import PatchUpdate
from privlab.images import NamedImage, open_images
from privlab.metrics import psnr
from privlab.release import observe_updates
from privlab.threat import Client, ClientData
from privlab.victims import victim

COLUMNS = ("pair", "way", "share", "rate", "mixture", "right", "first", "second")
"""Of the file: PSNR of the mixture and of both photographs in dB, and the share of values whose pair is right."""

WAYS = ((None, 0.1), (None, 0.01), (0.7, 0.1), (0.6, 0.1), (0.9, 0.1))
"""λ, None where it is drawn, and the rate."""


def measure(images: Float[Tensor, "b c h w"], pair: int, share: float | None, rate: float) -> tuple[float, ...] | None:
    """Return the columns of one pair; None if both photographs have one class.

    Args:
        images: the two photographs, in [0, 1].
        pair: the number of the pair, from which λ is drawn.
        share: λ; None if it is drawn.
        rate: the client's learning rate.
    """
    model, λ = victim("cifar_vit").model, share
    if λ is None:
        λ = 0.5 + 0.45 * float(torch.rand(1, generator=torch.Generator().manual_seed(pair), dtype=torch.float64))
    with torch.no_grad():
        classes = model.vit(model.normalise(images)).argmax(1)
    if classes[0] == classes[1]:
        return None
    weights = torch.tensor([λ, 1 - λ]).to(images)
    mixed = λ * images[:1] + (1 - λ) * images[1:]
    label = (weights[:, None] * torch.eye(model.classes)[classes]).sum(0, keepdim=True)
    seen = observe_updates(model, Client(lr=rate), [ClientData(mixed, label, torch.Generator().manual_seed(0))])
    attack = PatchUpdate(rounds=0)
    both = attack.unmix(seen)[0]
    right = ((both * 255).round() == (images * 255).round()).all(0).double().mean()
    first, second = psnr(both, images).tolist()
    return λ, rate, float(psnr(attack(seen), mixed)), float(right), first, second


def study(folder: str, out: Path, pairs: int, first: int) -> None:
    """Measure each way on each pair, and append it to the file at once.

    Args:
        folder: the images.
        out: the file.
        pairs: how many pairs; every fourth of them is mixed by the fractions too.
        first: the position of the first photograph.
    """
    size = victim("cifar_vit").model.image_shape[1]
    done = set[tuple[str, str]]()
    if out.exists():
        with out.open() as file:
            done = {(row["pair"], row["way"]) for row in csv.DictReader(file)}
    else:
        out.write_text(",".join(COLUMNS) + "\n")
    data = open_images(folder)
    for pair in range(pairs):
        images = torch.cat([_stored(data[first + pair + apart], size) for apart in (0, 200)])
        for way, (share, rate) in enumerate(WAYS):
            if (str(pair), str(way)) in done or (share is not None and pair % 4):
                continue
            found = measure(images, pair, share, rate)
            if found is None:
                break
            with out.open("a") as file:
                file.write(",".join([str(pair), str(way), *(f"{each:.5g}" for each in found)]) + "\n")


def _stored(image: NamedImage, size: int) -> Float[Tensor, "1 3 h w"]:
    """Return the middle of an image, resized in eight bits."""
    assert isinstance(image.pixels, Image.Image)
    cut = ImageOps.fit(image.pixels, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1)[None].float() / 255


if __name__ == "__main__":
    study(sys.argv[1], Path(sys.argv[2]), int((sys.argv[3:] or ["60"])[0]), int((sys.argv[4:] or ["100"])[0]))

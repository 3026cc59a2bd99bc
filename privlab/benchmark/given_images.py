"""Attacks that are given by what they reconstructed: images of the public half, scored here."""

from pathlib import Path

import pandas as pd
import torch
from torchvision.transforms.functional import to_tensor

from privlab.base import PrivlabError
from privlab.benchmark.cards import Card
from privlab.benchmark.measure import KEPT, Photographs, case_label, specification
from privlab.benchmark.tracks import photographs
from privlab.evaluation import SCHEMA, victim_of
from privlab.images import open_images
from privlab.images.manifest import read_manifest
from privlab.metrics import MIRRORED, score

__all__ = ["MANIFEST", "reconstructions"]

MANIFEST = "manifest.csv"
"""The file in the folder that names each reconstruction and the SHA-256 of the photograph that it is of."""


def reconstructions(card: Card, target: Card) -> pd.DataFrame:
    """Return a record for each reconstruction in a card's folder.

    Args:
        card: that of the attack; its folder holds images as large as the victim's input, and `manifest.csv` with the
            columns name and sha256.
        target: that of the defense whose releases they were made from.

    Raises:
        PrivlabError: if an image is missing, has another size, or is of no bundled photograph of the track.
    """
    folder = card.folder / card.reconstructions
    entries, bundled = read_manifest(folder / MANIFEST), photographs("bundled")
    if wrong := [entry for entry in entries if entry.sha256 not in bundled]:
        raise PrivlabError(
            f"{folder / MANIFEST}, line {wrong[0].line}: '{wrong[0].name}' is of a photograph with SHA-256 "
            f"{wrong[0].sha256[:12]}…, which is none of the {len(bundled)} bundled ones of the track."
        )
    if lacking := [name for sha, name in bundled.items() if sha not in {entry.sha256 for entry in entries}]:
        raise PrivlabError(f"{folder / MANIFEST} lacks {len(lacking)} of {len(bundled)} photographs: {lacking[0]}.")
    case = target.of.cases[0]
    spec = specification(target, case, "c", target.of.attacks[:1], Photographs())
    base = victim_of(spec, torch.device("cpu"))
    private = {each.sha256: each for each in open_images("samples")}
    rows = []
    for entry in entries:
        made, shown = _image(folder / entry.name, base.model.image_shape), private[entry.sha256].pixels
        assert shown is not None  # bundled
        own = {"image": bundled[entry.sha256], "image_sha256": entry.sha256}
        wanted = [name for each in card.of.metrics for name in (each, MIRRORED.get(each)) if name]
        plain = base.preprocessing(shown)[None]
        values = score(made[None], plain, list(card.of.metrics), {})
        mirrored = score(made[None], plain.flip(3), [name for name in card.of.metrics if name in MIRRORED], {})
        scores = {name: value.item() for name, value in values.items()}
        scores |= {MIRRORED[name]: value.item() for name, value in mirrored.items()}
        rows.append(_row(card, target) | own | {name: scores[name] for name in wanted})
    mirrors = [MIRRORED[name] for name in card.of.metrics if name in MIRRORED]
    found = pd.DataFrame(rows).reindex(columns=[*KEPT, *card.of.metrics, *mirrors])
    return found.assign(case=case_label(case, "c"))


def _image(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    (image,) = open_images(path)
    if image.pixels is None:
        raise PrivlabError(f"'{path}' is no image: {image.problem}")
    if (image.pixels.height, image.pixels.width) != shape[1:]:
        found = f"{image.pixels.width}×{image.pixels.height}"
        raise PrivlabError(f"'{path}' has {found} pixels; the victim takes {shape[2]}×{shape[1]}.")
    return to_tensor(image.pixels)


def _row(card: Card, target: Card) -> dict[str, object]:
    return {
        "victim": target.victim_name,
        "release": target.of.release,
        "defense": "+".join(target.parts),
        "setting": "c",
        "attack": card.name,
        "effort": target.of.effort,
        "geometry": "in_place",
        "seed": 0,
        "draw": 0,
        "status": "ok",
        "external": card.paper,
        "schema": SCHEMA,
    }

"""Entries that are given as files: attacks by what they reconstructed, defenses by what they released.

Reconstructions are images, releases are gradients as `privlab.capture` writes them, of the bundled photographs.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pandas as pd
import torch
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from privlab.base import PrivlabError
from privlab.benchmark.cards import Card
from privlab.benchmark.entries import defense_entries
from privlab.benchmark.measure import KEPT, Photographs, case_label, measure_defense, specification
from privlab.benchmark.tracks import Track, TrackCase, photographs
from privlab.evaluation import CONTROL, SCHEMA, applicable, as_read, attack_batch, victim_of
from privlab.images import NamedImage, open_images
from privlab.images.manifest import read_manifest
from privlab.metrics import MIRRORED, score
from privlab.release import check_fit, observation, read_gradient_file
from privlab.threat import Attack, Observation, check_capabilities
from privlab.victims import Victim

__all__ = ["measure_releases", "reconstructions", "releases_sha256"]

MANIFEST = "manifest.csv"
"""The file in a folder that names each file of it and the SHA-256 of the photograph that it is of."""


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
    case = target.of.cases[0]
    spec = specification(target, case, "c", target.of.attacks[:1], Photographs())
    base = victim_of(spec, torch.device("cpu"))
    given = {"defense": "+".join(target.parts), "attack": card.name, "external": card.paper}
    rows = [
        _row_of(target, named) | given | _scores(card.of, base, _image(folder / name, base.model.image_shape), named)
        for name, named in _bundled(folder).items()
    ]
    return _kept(rows, target, case)


def _bundled(folder: Path) -> dict[str, NamedImage]:
    """Return the bundled photographs by the files of a folder that are of them, as its `manifest.csv` says.

    Args:
        folder: with the files, and a manifest with the columns name and sha256, that of the photograph.

    Raises:
        PrivlabError: if a file is of no bundled photograph, or a photograph has none.
    """
    entries, names = read_manifest(folder / MANIFEST), photographs("bundled")
    if wrong := [entry for entry in entries if entry.sha256 not in names]:
        raise PrivlabError(
            f"{folder / MANIFEST}, line {wrong[0].line}: '{wrong[0].name}' is of a photograph with SHA-256 "
            f"{wrong[0].sha256[:12]}…, which is none of the {len(names)} bundled ones of the track."
        )
    if lacking := [name for sha, name in names.items() if sha not in {entry.sha256 for entry in entries}]:
        raise PrivlabError(f"{folder / MANIFEST} lacks {len(lacking)} of {len(names)} photographs: {lacking[0]}.")
    private = {each.sha256: each for each in open_images("samples")}
    return {entry.name: private[entry.sha256] for entry in entries}


def _scores(of: Track, base: Victim, made: Tensor, private: NamedImage) -> dict[str, float]:
    """Return the scores of a reconstruction by the metrics of a track, also against the mirrored photograph.

    Args:
        of: the track.
        base: the victim, whose preprocessing the photograph gets.
        made: the reconstruction, c × h × w in [0, 1].
        private: the photograph.
    """
    assert private.pixels is not None  # bundled
    plain = base.preprocessing(private.pixels)[None].to(made)
    values = score(made[None], plain, list(of.metrics), {})
    mirrored = score(made[None], plain.flip(3), [name for name in of.metrics if name in MIRRORED], {})
    found = {name: value.item() for name, value in values.items()}
    return found | {MIRRORED[name]: value.item() for name, value in mirrored.items()}


def _row_of(target: Card, private: NamedImage) -> dict[str, object]:
    """Return what the record of one photograph under a defense says beside its scores.

    Args:
        target: the card of the defense.
        private: the photograph.
    """
    return {
        "image": photographs("bundled")[private.sha256],
        "image_sha256": private.sha256,
        "victim": target.victim_name,
        "release": target.of.release,
        "setting": "c",
        "effort": target.of.effort,
        "geometry": "in_place",
        "seed": 0,
        "draw": 0,
        "status": "ok",
        "schema": SCHEMA,
    }


def _kept(rows: Sequence[Mapping[str, object]], target: Card, case: TrackCase) -> pd.DataFrame:
    """Return rows as a result keeps them.

    Args:
        rows: those of `row_of`, with scores.
        target: the card of the defense.
        case: the track's, in which it was at work.
    """
    of = target.of
    mirrors = [MIRRORED[name] for name in of.metrics if name in MIRRORED]
    found = pd.DataFrame(rows).reindex(columns=[*KEPT, *of.metrics, *mirrors])
    return found.assign(case=case_label(case, "c"))


def _image(path: Path, shape: tuple[int, ...]) -> Tensor:
    (image,) = open_images(path)
    if image.pixels is None:
        raise PrivlabError(f"'{path}' is no image: {image.problem}")
    if (image.pixels.height, image.pixels.width) != shape[1:]:
        found = f"{image.pixels.width}×{image.pixels.height}"
        raise PrivlabError(f"'{path}' has {found} pixels; the victim takes {shape[2]}×{shape[1]}.")
    return to_tensor(image.pixels)


def releases_sha256(card: Card) -> str:
    """Return the SHA-256 of the files of a card's folder, in the order of its photographs.

    Raises:
        PrivlabError: if the manifest does not name one for each bundled photograph, or a file cannot be read.
    """
    paths = [card.folder / card.releases / name for name in _bundled(card.folder / card.releases)]
    return hashlib.sha256("/".join(hashlib.sha256(_content(path)).hexdigest() for path in paths).encode()).hexdigest()


def measure_releases(card: Card, out: Path) -> pd.DataFrame:
    """Return the records of the track's attacks on recorded gradients, and those of the undefended release.

    An attack is told nothing of the defense, so that none of those that know one runs.

    Args:
        card: that of the defense; its folder holds a file of `privlab.capture` for each bundled photograph, of the
            track's victim, and `manifest.csv` with the columns name and sha256.
        out: folder of the run directories of the undefended release.

    Raises:
        PrivlabError: if a file is missing, cannot be read, does not fit the victim, or is of other weights or of
            several images.
    """
    case, folder = card.of.cases[0], card.folder / card.releases
    control = replace(defense_entries(card.track, ["undefended"])[0], victim=card.victim_name)
    spec = replace(specification(control, case, "a", card.of.attacks, Photographs()), block="stock")
    base = victim_of(spec, torch.device("cpu"))
    able = [cast(Attack, attack) for group in applicable(spec, base)[0] for attack in group.attacks]
    rows: list[Mapping[str, object]] = []
    for name, private in _bundled(folder).items():
        seen = _seen(folder / name, base)
        own = _row_of(card, private) | {"defense": card.name, "defense_params": json.dumps(dict(card.parameters))}
        rows += [own | made for attack in able if (made := _attacked(attack, seen, private, card.of, base))]
    plain = measure_defense(control, Photographs(), out)
    controls = plain.loc[plain.attack.str.startswith(CONTROL)].assign(setting="c", defense=card.name)
    plain = plain.assign(case=f"{case.name}, undefended")
    return pd.concat([plain, _kept(rows, card, case), controls.assign(case=case.name)], ignore_index=True)


def _seen(path: Path, base: Victim) -> Observation:
    """Return what an adversary sees in a file of one gradient.

    Raises:
        PrivlabError: if it cannot be read, does not fit, or is of other weights or of several images.
    """
    released = read_gradient_file(path)
    check_fit(released, base.model)
    if released.weights_sha256 != base.weights.sha256:
        found = "none" if released.weights_sha256 is None else f"{released.weights_sha256[:12]}…"
        raise PrivlabError(
            f"'{path}' must be of the track's {base.name}, whose weights have SHA-256 {base.weights.sha256[:12]}…. "
            f"Found {found}."
        )
    if released.batch_size != 1:
        raise PrivlabError(f"'{path}' must be the gradient of one photograph. Found {released.batch_size} images.")
    return observation(released, base.model)


def _attacked(attack: Attack, seen: Observation, private: NamedImage, of: Track, base: Victim) -> dict[str, object]:
    """Return what an attack makes of a release; nothing where the release lacks what it needs."""
    try:
        check_capabilities(attack, seen.grants)
    except PrivlabError:
        return {}
    if not {*attack.parameters} <= {"*", *seen.gradients}:
        return {}
    row: dict[str, object] = {"attack": attack.name}
    try:
        (image,) = attack_batch(attack, as_read(attack, seen)).images
    except PrivlabError as error:
        return row | {"status": "failed", "reason": str(error)}
    return row | _scores(of, base, image, private)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PrivlabError(f"Cannot read the release '{path}': {error.strerror}.") from None

"""Entries that are given as files: attacks by what they reconstructed, defenses by what they released.

Reconstructions are images, releases are gradients as `privlab.capture` writes them, of the bundled photographs.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pandas as pd
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from privlab.base import PrivlabError, sha256_of
from privlab.benchmark.cards import Card
from privlab.benchmark.measure import Measurement, as_kept, row_of
from privlab.benchmark.results import defense_entries
from privlab.benchmark.tracks import BUNDLED, Track, photographs
from privlab.evaluation import CONTROL, Record, applicable, attempt, score_images, victim_of
from privlab.images import NamedImage, open_images
from privlab.images.manifest import read_manifest
from privlab.metrics import MIRRORED
from privlab.release import check_fit, observation, read_gradient_file
from privlab.threat import Attack, Observation, check_capabilities
from privlab.victims import Victim

_CPU = torch.device("cpu")

MANIFEST = "manifest.csv"
"""The file in a folder that names each file of it and the SHA-256 of the photograph that it shows."""


def reconstructions(card: Card, target: Card) -> pd.DataFrame:
    """Return a record for each reconstruction in the folder of an attack's card, made from releases of a defense.

    The folder holds images as large as the victim's input, and `manifest.csv` with the columns name and sha256.
    """
    folder = card.folder / card.reconstructions
    base = victim_of(Measurement(target).specification(target.of.cases[0], "c", target.of.attacks[:1]), _CPU)
    stated = {"defense": "+".join(target.parts), "attack": card.name, "external": card.paper}
    rows: list[Record] = []
    for name, private in _bundled(folder).items():
        made = _image(folder / name, base.model.image_shape)
        rows.append(_row(target, private) | stated | _scores(card.of, base, made, private))
    return as_kept(pd.DataFrame(rows), card.of)


def _row(card: Card, private: NamedImage) -> Record:
    """Return what a record of a bundled photograph states, under the name that the track has for it."""
    return row_of(card, photographs(BUNDLED)[private.sha256], private.sha256)


def _bundled(folder: Path) -> dict[str, NamedImage]:
    """Return the bundled photographs by the names of their files in a folder, as its `manifest.csv` says."""
    entries, names = read_manifest(folder / MANIFEST), photographs(BUNDLED)
    if wrong := [entry for entry in entries if entry.sha256 not in names]:
        raise PrivlabError(
            f"{folder / MANIFEST}, line {wrong[0].line}: '{wrong[0].name}' belongs to a photograph with SHA-256 "
            f"{wrong[0].sha256[:12]}…, which is not one of the {len(names)} bundled ones of the track."
        )
    if lacking := [name for sha, name in names.items() if sha not in {entry.sha256 for entry in entries}]:
        raise PrivlabError(f"{folder / MANIFEST} lacks {len(lacking)} of {len(names)} photographs: {lacking[0]}.")
    private = {each.sha256: each for each in open_images("samples")}
    return {entry.name: private[entry.sha256] for entry in entries}


def _scores(of: Track, base: Victim, made: Tensor, private: NamedImage) -> Record:
    """Return the scores of a reconstruction, c × h × w in [0, 1], also against the mirrored photograph."""
    assert private.pixels is not None  # bundled
    plain, names = base.preprocessing(private.pixels)[None].to(made), [name for name in of.metrics if name in MIRRORED]
    scores = score_images(made[None], plain, of.metrics, {})
    mirrored = score_images(made[None], plain.flip(3), names, {})
    scores |= {MIRRORED[name]: mirrored[name] for name in names}
    return {name: value for name, (value,) in scores.items()}


def _image(path: Path, shape: tuple[int, ...]) -> Tensor:
    (image,) = open_images(path)
    if not isinstance(image.pixels, Image.Image):
        raise PrivlabError(f"'{path}' cannot be read as an image: {image.problem}")
    if (image.pixels.height, image.pixels.width) != shape[1:]:
        found = f"{image.pixels.width}×{image.pixels.height}"
        raise PrivlabError(f"'{path}' has {found} pixels; the victim takes {shape[2]}×{shape[1]}.")
    return to_tensor(image.pixels)


def releases_sha256(card: Card) -> str:
    """Return the SHA-256 of the files of a card's folder, in the order of its photographs."""
    folder = card.folder / card.releases
    try:
        hashes = [sha256_of(folder / name) for name in _bundled(folder)]
    except OSError as error:
        raise PrivlabError(f"Cannot read the release '{error.filename}': {error.strerror}.") from None
    return hashlib.sha256("/".join(hashes).encode()).hexdigest()


def measure_releases(card: Card, out: Path) -> pd.DataFrame:
    """Return the records of the track's attacks on recorded gradients, and those of the undefended release.

    Attacks learn nothing of the defense, so that none of those that know one runs. The folder of the card holds a
    file of `privlab.capture` for each bundled photograph, of the track's victim, and `manifest.csv` with the columns
    name and sha256. `out` is the folder of the run directories of the undefended release.
    """
    case, folder = card.of.cases[0], card.folder / card.releases
    control = replace(defense_entries(card.track, ["undefended"])[0], victim=card.victim_name)
    undefended = Measurement(control, out=out)
    spec = undefended.specification(case, "a", card.of.attacks)
    spec = replace(spec, victim=replace(spec.victim, block="stock"))
    base = victim_of(spec, _CPU)
    able = [cast(Attack, attack) for group in applicable(spec, base)[0] for attack in group.attacks]
    stated = {"defense": card.name, "defense_params": json.dumps(dict(card.parameters))}
    rows: list[Record] = []
    for name, private in _bundled(folder).items():
        seen, own = _seen(folder / name, base), _row(card, private) | stated
        rows += [own | made for attack in able if (made := _attacked(attack, seen, private, card.of, base))]
    plain = undefended.records()
    controls = plain.loc[plain.attack.str.startswith(CONTROL)]
    controls = controls.assign(setting="c", defense=card.name, case=case.name)
    return pd.concat([plain, as_kept(pd.DataFrame(rows), card.of), controls], ignore_index=True)


def _seen(path: Path, base: Victim) -> Observation:
    """Return what an adversary sees in a file of one gradient, which must be of the track's weights."""
    released = read_gradient_file(path)
    check_fit(released, base.model)
    if released.weights_sha256 != base.weights.sha256:
        found = "none" if released.weights_sha256 is None else f"{released.weights_sha256[:12]}…"
        raise PrivlabError(
            f"'{path}' must come from the track's {base.name}, whose weights have SHA-256 {base.weights.sha256[:12]}…. "
            f"Found {found}."
        )
    if released.batch_size != 1:
        raise PrivlabError(f"'{path}' must be the gradient of one photograph. Found {released.batch_size} images.")
    return observation(released, base.model)


def _attacked(attack: Attack, seen: Observation, private: NamedImage, of: Track, base: Victim) -> Record:
    """Return what an attack makes of a release; nothing where the release lacks what it needs."""
    try:
        check_capabilities(attack, seen.grants)
    except PrivlabError:
        return {}
    if not {*attack.parameters} <= {"*", *seen.gradients}:
        return {}
    found, how = attempt(attack, seen)
    if found is None:
        return {"attack": attack.name, "status": "failed", "reason": how.reason}
    return {"attack": attack.name, **_scores(of, base, found.images[0], private)}

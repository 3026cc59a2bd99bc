"""Whether the person, the photograph and the class are still there in the pictures that a run kept."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from privlab.base import PrivlabError, collect_warnings, warn
from privlab.evaluation import CONTROL, Batch, Case, Public, victim_of
from privlab.grids import case_of
from privlab.images import Data, NamedImage, Others, Preprocessing
from privlab.metrics import Embedding, psnr
from privlab.report.intervals import clopper_pearson
from privlab.report.ranks import class_agreement, cosines, low_pass, ranks_by, squeeze_embedding
from privlab.report.released import Releases, unreleased
from privlab.report.tables import Results
from privlab.stores import Place
from privlab.victims import Victim

DEFAULT_AMONG = (10, 100)
"""The numbers of candidates where none are asked for, besides all."""

_PIXELS = 32
"""Of the grid of the feature "pixels", on which text of a few characters can still be read."""

_AT_A_TIME = 64

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked of the pictures of a run.

    Args:
        candidates: the images among which each private one is looked for, all private ones included; None asks
            nothing of identity.
        people: whether an identity is a class of the candidates, found by its other pictures, and not an image.
        among: the numbers of identities that the adversary chooses among; empty takes `DEFAULT_AMONG` and all.
        embedding: a network whose features are compared too.
        released: whether the releases of the run, made again, are compared with those of candidates, and no pictures.
        judge: the victim or `NamedClassifier` that says whether the class is still there; None asks nothing of classes.
        device: where networks compute.
    """

    candidates: Data | None = None
    people: bool = False
    among: tuple[int, ...] = ()
    embedding: Embedding | None = None
    released: bool = False
    judge: Any = None
    device: torch.device | str = "cpu"
    _pools: dict[Preprocessing, "_Pool"] = field(default_factory=dict, init=False)

    @cached_property
    def features(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return what images are compared by: names ↦ functions of images."""
        found = {
            "low pass": low_pass,
            "pixels": partial(low_pass, side=_PIXELS),
            "squeezenet": squeeze_embedding(self.device).embed,
        }
        return found if self.embedding is None else found | {self.embedding.name: self.embedding.embed}

    def pool(self, preprocessing: Preprocessing) -> "_Pool":
        """Return the candidates as a victim of that preprocessing is fed; they are read once for each."""
        if self.candidates is not None and preprocessing not in self._pools:
            self._pools[preprocessing] = _Pool.of(self.candidates, preprocessing)
        return self._pools[preprocessing]


def identity_of(results: Results, question: Question) -> dict[str, list[Row]]:
    """Return a row for each case, attack or control, and feature and number n ("identity"), or for its class ("class").

    Rows also state the median PSNR, and the 95 % interval of Clopper and Pearson (low, high); its counts are rounded
    away from the mean where they are expectations. `images` of `attacked` have a picture, which is in 8 bits. Controls
    are made of the candidates, or of the private images where no candidates are given.

    Raises:
        PrivlabError: if the run keeps no pictures, or its releases cannot be compared, a private image is not among
            the candidates, candidates have no classes, or the classifier is the attacked one.
    """
    if question.candidates is None and (question.judge is None or question.released):
        raise PrivlabError("Give --candidates, --classifier, or both. Found neither.")
    if "cases" not in results.facts:
        raise PrivlabError(f"'{results.path}' is not a run of privlab attack or table with private images.")
    rows: dict[str, list[Row]] = {"identity": [], "class": []}
    if question.released:
        return rows | {"identity": _by_release(results, question)}
    for number in range(len(results.cases)):
        for kind, row in _by_picture(results, number, question):
            rows[kind].append(row)
    if not any(rows.values()):
        raise PrivlabError(
            f"'{results.path}' keeps no pictures of reconstructions: run it with --strips (privlab attack) or "
            "--pictures N (privlab table)."
        )
    return rows


@dataclass(frozen=True, eq=False)
class _Pool:
    """The candidates by their hash, as the victim of a case is fed, and the class of each where they have one.

    `what` names them in a message.
    """

    images: Mapping[str, Float[Tensor, "c h w"]]
    people: Sequence[int | None]
    what: str
    _features: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, candidates: Data, preprocessing: Preprocessing) -> "_Pool":
        """Return the candidates, each content once; those that cannot be read are left out with a warning."""
        images: dict[str, Tensor] = {}
        people: dict[str, int | None] = {}
        unread = 0
        for image in candidates:
            if image.pixels is None:
                unread += 1
            elif image.sha256 not in images:
                images[image.sha256], people[image.sha256] = preprocessing(image.pixels), image.label
        if unread:
            warn(f"{unread} candidates cannot be read, and are left out.")
        return cls(images, [*people.values()], f"{len(images)} candidates, as the same file")

    @cached_property
    def stacked(self) -> Float[Tensor, "m c h w"]:
        return torch.stack([*self.images.values()])

    def features(self, name: str, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the features of all candidates; they are computed once."""
        if name not in self._features:
            self._features[name] = _by_parts(function, self.stacked)
        return self._features[name]

    def places(self, private: Mapping[str, str]) -> Int[Tensor, " b"]:
        """Return the places of private images, hashes ↦ names, among the candidates."""
        place = {sha: i for i, sha in enumerate(self.images)}
        if missing := [name for sha, name in private.items() if sha not in place]:
            raise PrivlabError(f"Every private image must be among the {self.what}. '{missing[0]}' is not.")
        return torch.tensor([place[sha] for sha in private])


def _by_picture(results: Results, number: int, question: Question) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a case, "identity" or "class": of the pictures of each attack, and of negative controls.

    There are none of a case of which no reconstruction was kept.
    """
    records = results.records
    records = records[(records.case == number) & records.external.isna() & ~records.attack.str.startswith(CONTROL)]
    names = dict(zip(records.image_sha256, records.image, strict=True))
    hashes = records.groupby("attack", sort=False).image_sha256.unique().to_dict()
    kept = {
        attack: {sha: place for sha in of_attack if sha and (place := results.picture(number, sha, attack))}
        for attack, of_attack in hashes.items()
    }
    everyone = list(dict.fromkeys(chain.from_iterable(kept.values())))
    if not everyone:
        return
    spec, base, label = _subject(results, number)
    if (colours := len(base.preprocessing.mean)) not in (1, 3):
        raise PrivlabError(f"Pictures are compared of victims of 1 or 3 colours. {base.name} has {colours}.")
    if question.candidates is None:
        private = {sha: results.picture(number, sha, "private") for sha in everyone}
        images = {sha: _pixels(place, colours) for sha, place in private.items() if place}
        pool = _Pool(images, (), "pictures that the run kept")
    else:
        pool = question.pool(base.preprocessing)
    own = pool.places({sha: names[sha] for sha in everyone})
    if len(pool.images) < 2:
        raise PrivlabError(f"--candidates must be two images or more. Found {len(pool.images)}.")
    named = [NamedImage(names[sha], sha, None) for sha in everyone]
    batch = Batch(named, pool.stacked[own])
    controls = Public(Others(pool.images), base.model.mean.cpu()).controls(
        batch, base.model.patch, batch.draws(spec.seed, "control", 0), together=False
    )
    shown = {attack: [*places] for attack, places in kept.items() if places} | dict.fromkeys(controls, everyone)
    for attack, of_attack in shown.items():
        own = pool.places({sha: names[sha] for sha in of_attack})
        private = pool.stacked[own]
        if attack in controls:
            pictures, attacked = controls[attack], len(everyone)
        else:
            pictures = torch.stack([_pixels(place, colours) for place in kept[attack].values()])
            attacked = len(hashes[attack])
        row: Row = {"case": label, "attack": attack, "images": len(own), "attacked": attacked}
        row["psnr"] = psnr(pictures, private).median().item()
        if question.candidates is not None:
            for name, function in question.features.items():
                near = cosines(_by_parts(function, pictures), pool.features(name, function))
                for rates in _rates(question, row | {"features": name}, near, own, pool):
                    yield "identity", rates
        if question.judge is not None:
            if question.judge.weights.sha256 == base.weights.sha256:
                both = question.judge.name
                raise PrivlabError(
                    f"--classifier must be another network than the attacked one. Found {both} for both."
                )
            yield "class", row | _agreement(question.judge, pictures, private)


def _rates(
    question: Question, row: Row, near: Float[Tensor, "b m"], own: Int[Tensor, " b"], pool: _Pool
) -> Iterator[Row]:
    """Yield a row for each number of candidates: how near b pictures are to m candidates, of which `own` are theirs."""
    if question.people and None in pool.people:
        raise PrivlabError("--by class needs candidates with classes, such as a folder for each person.")
    ranks = ranks_by(near, own, torch.tensor(pool.people) if question.people else None)
    every = ranks.identities
    for n in question.among or (*(n for n in DEFAULT_AMONG if n < every), every):
        first, reciprocal = ranks.rank_1(n), ranks.reciprocal(n).mean().item()
        rates = {"n": n, "rank_1": first.mean().item(), **_interval(first)}
        yield row | rates | {"reciprocal_rank": reciprocal, "chance": 1 / n}


def _agreement(judge: Any, pictures: Tensor, private: Tensor) -> Row:  # noqa: ANN401
    """Return how often a judge gives pictures the class of their private images, with its interval."""
    size, colours = judge.model.image_shape, pictures.shape[1]
    if size[0] != colours:
        raise PrivlabError(f"--classifier must take images of {colours} colours. {judge.name} takes {size[0]}.")
    device = judge.model.mean.device
    pairs = zip(pictures.split(_AT_A_TIME), private.split(_AT_A_TIME), strict=True)
    same = torch.cat([class_agreement(judge.model, x.to(device), y.to(device), size[1:]).cpu() for x, y in pairs])
    return {"agreement": same.mean().item(), **_interval(same)}


def _by_release(results: Results, question: Question) -> list[Row]:
    """Return the rows of all cases whose releases can be compared; the others are named in a warning."""
    rows: list[Row] = []
    left: dict[str, list[str]] = {}
    releases, records = Releases(), results.records
    for number in range(len(results.cases)):
        spec, base, label = _subject(results, number, question.device)
        if why := unreleased(spec):
            left.setdefault(why, []).append(label)
            continue
        pool = question.pool(base.preprocessing)
        own = records.loc[(records.case == number) & records.external.isna() & records.label.notna()]
        stated = own.groupby("image_sha256", sort=False)[["image", "label"]].last()
        private = [NamedImage(row.image, str(row.Index), None, int(row.label)) for row in stated.itertuples()]
        at = pool.places(stated.image.to_dict())
        near = releases.similarities(spec, base, private, at, pool.stacked)
        for (attack, feature), similarity in near.items():
            row: Row = {"case": label, "attack": attack, "images": len(at), "attacked": len(at), "psnr": None}
            rows += _rates(question, row | {"features": feature}, similarity, at, pool)
    reasons = "; ".join(f"{', '.join(labels)}: {why}" for why, labels in left.items())
    if not rows:
        raise PrivlabError(f"No release of '{results.path}' can be compared with those of candidates. {reasons}.")
    if reasons:
        warn(f"Left out, as {reasons}.")
    return rows


def _interval(values: Tensor) -> dict[str, float]:
    total = round(values.sum().item(), 9)
    low, _ = clopper_pearson(math.floor(total), len(values))
    _, high = clopper_pearson(math.ceil(total), len(values))
    return {"low": low, "high": high}


def _subject(results: Results, number: int, device: torch.device | str = "cpu") -> tuple[Case, Victim, str]:
    """Return a case, its victim, without the warnings of its weights, which the run gave, and its name."""
    case, job = results.cases[number], results.facts["cases"][number]["jobs"][0]
    spec = case_of(job["specification"], job["released"])
    with collect_warnings([]):
        return spec, victim_of(spec, torch.device(device)), f"{case.group or ''} {case.label}".strip()


def _pixels(place: Place, colours: int) -> Float[Tensor, "c h w"]:
    """Return a picture that the run kept."""
    return pil_to_tensor(place.open().convert("L" if colours == 1 else "RGB")).float() / 255


def _by_parts(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(part).cpu() for part in images.split(_AT_A_TIME)])

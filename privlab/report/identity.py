"""Whether the person, the photograph and the class are still there in the pictures that a run kept."""

import io
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from privlab.base import PrivlabError, collect_warnings, warn
from privlab.evaluation import CONTROL, Batch, Controls, Specification
from privlab.images import Data, NamedImage, Others, Preprocessing
from privlab.metrics import Embedding, psnr
from privlab.report.intervals import clopper_pearson
from privlab.report.ranks import Ranks, class_agreement, cosines, low_pass, ranks_by, squeeze_embedding
from privlab.report.released import Releases, unreleased
from privlab.report.tables import CaseFacts, Results
from privlab.stores import Place, pngs
from privlab.victims import Victim, victim

DEFAULT_AMONG = (10, 100)
"""The numbers of candidates where none are asked for, beside all."""

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
            self._pools[preprocessing] = _pool(self.candidates, preprocessing)
        return self._pools[preprocessing]


def identity_of(results: Results, question: Question) -> dict[str, list[Row]]:
    """Return a row for each case, attack or control, and feature and number n ("identity"), or for its class ("class").

    Rows state the median PSNR beside, and the 95 % interval of Clopper and Pearson (low, high); its counts are rounded
    away from the mean where they are expectations. `images` of `attacked` have a picture, which is in 8 bits. Controls
    are made of the candidates, or of the private images where no candidates are given.

    Raises:
        PrivlabError: if the run keeps no pictures, or its releases cannot be compared, a private image is not among
            the candidates, candidates have no classes, or the classifier is the attacked one.
    """
    if question.candidates is None and (question.judge is None or question.released):
        raise PrivlabError("Give --candidates, --classifier, or both. Found neither.")
    if "cases" not in results.facts:
        raise PrivlabError(f"'{results.path}' is no run of privlab attack or table with private images.")
    rows: dict[str, list[Row]] = {"identity": [], "class": []}
    if question.released:
        return {**rows, "identity": _by_release(results, question)}
    kept = False
    for number in range(len(results.cases)):
        for shown in _shown(results, number, question):
            kept = True
            if question.candidates is not None:
                rows["identity"] += _identity(shown, question)
            if question.judge is not None:
                rows["class"].append(_class(shown, question.judge))
    if not kept:
        raise PrivlabError(
            f"'{results.path}' keeps no pictures of reconstructions: run it with --strips (privlab attack) or "
            "--pictures N (privlab table)."
        )
    return rows


@dataclass(frozen=True, eq=False)
class _Pool:
    """The candidates by their hash, as the victim of a case is fed, and the class of each where they have one."""

    images: Mapping[str, Float[Tensor, "c h w"]]
    people: tuple[int | None, ...] = ()
    features: dict[Hashable, Tensor] = field(default_factory=dict)

    @cached_property
    def stacked(self) -> Float[Tensor, "m c h w"]:
        return torch.stack([*self.images.values()])

    def once(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was computed under a key, or compute it."""
        if key not in self.features:
            self.features[key] = compute()
        return self.features[key]


@dataclass(frozen=True, eq=False)
class _Shown:
    """The pictures of an attack or a control on a case, in the order of `own`, the hashes of the private images.

    `drawn` is the same for the same pictures of a control in several cases, and of one case otherwise.
    """

    case: str
    attack: str
    own: Sequence[str]
    pictures: Float[Tensor, "b c h w"]
    attacked: int
    pool: _Pool
    weights_sha256: str
    drawn: Hashable

    @property
    def private(self) -> Float[Tensor, "b c h w"]:
        return torch.stack([self.pool.images[sha] for sha in self.own])

    @property
    def row(self) -> Row:
        """Return what every row states."""
        median = psnr(self.pictures, self.private).median().item()
        images = {"images": len(self.own), "attacked": self.attacked}
        return {"case": self.case, "attack": self.attack, **images, "psnr": median}


def _identity(shown: _Shown, question: Question) -> list[Row]:
    pool, place = shown.pool, {sha: i for i, sha in enumerate(shown.pool.images)}
    own, people = torch.tensor([place[sha] for sha in shown.own]), _people(pool, question)
    rows: list[Row] = []
    for name, function in question.features.items():
        found = pool.once((name, shown.drawn), partial(_by_parts, function, shown.pictures))
        candidates = pool.once(name, partial(_by_parts, function, pool.stacked))
        ranks = ranks_by(cosines(found, candidates), own, people)
        rows += _rates(shown.row | {"features": name}, ranks, question.among)
    return rows


def _people(pool: _Pool, question: Question) -> Tensor | None:
    """Return whom each candidate shows, where people are asked for."""
    if question.people and None in pool.people:
        raise PrivlabError("--by class needs candidates with classes, such as a folder for each person.")
    return torch.tensor(pool.people) if question.people else None


def _rates(row: Row, ranks: Ranks, among: Sequence[int]) -> list[Row]:
    """Return a row for each number of candidates."""
    every, rows = ranks.identities, list[Row]()
    for n in among or (*(n for n in DEFAULT_AMONG if n < every), every):
        first, reciprocal = ranks.rank_1(n), ranks.reciprocal(n).mean().item()
        found = {"n": n, "rank_1": first.mean().item(), **_interval(first)}
        rows.append(row | found | {"reciprocal_rank": reciprocal, "chance": 1 / n})
    return rows


def _by_release(results: Results, question: Question) -> list[Row]:
    """Return the rows of all cases whose releases can be compared; the others are named in a warning."""
    rows: list[Row] = []
    left: dict[str, list[str]] = {}
    releases = Releases()
    for number, case in enumerate(results.cases):
        label = _label(case)
        job = results.facts["cases"][number]["jobs"][0]["specification"]
        given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in job.items()}
        spec = Specification(**given)
        if why := unreleased(spec):
            left.setdefault(why, []).append(label)
            continue
        base = _victim_of(job, question.device)
        pool, records = question.pool(base.preprocessing), results.records
        own = records.loc[(records.case == number) & records.external.isna() & records.label.notna()]
        stated = dict(zip(own.image_sha256, zip(own.image, own.label, strict=True), strict=True))
        private = [NamedImage(name, sha, None, int(label)) for sha, (name, label) in stated.items()]
        _check_among(pool, {image.sha256: image.name for image in private}, "candidates, as the same file")
        place = {sha: i for i, sha in enumerate(pool.images)}
        at = torch.tensor([place[image.sha256] for image in private])
        near = releases.similarities(spec, base, private, at, pool.stacked)
        for (attack, feature), each in near.items():
            row: Row = {"case": label, "attack": attack, "images": len(at), "attacked": len(at), "psnr": None}
            ranks = ranks_by(each, at, _people(pool, question))
            rows += _rates(row | {"features": feature}, ranks, question.among)
    told = "; ".join(f"{', '.join(labels)}: {why}" for why, labels in left.items())
    if not rows:
        raise PrivlabError(f"No release of '{results.path}' can be compared with those of candidates. {told}.")
    if told:
        warn(f"Left out, as {told}.", 3)
    return rows


def _class(shown: _Shown, judge: Any) -> Row:  # noqa: ANN401
    if judge.weights.sha256 == shown.weights_sha256:
        raise PrivlabError(f"--classifier must be another network than the attacked one. Found {judge.name} for both.")
    size = judge.model.image_shape
    if size[0] != shown.pictures.shape[1]:
        raise PrivlabError(
            f"--classifier must take images of {shown.pictures.shape[1]} colours. {judge.name} takes {size[0]}."
        )
    device = judge.model.mean.device

    def agreement() -> Tensor:
        pairs = zip(shown.pictures.split(_AT_A_TIME), shown.private.split(_AT_A_TIME), strict=True)
        parts = [class_agreement(judge.model, x.to(device), y.to(device), size[1:]) for x, y in pairs]
        return torch.cat(parts).cpu()

    same = shown.pool.once(("class", shown.drawn), agreement)
    return shown.row | {"agreement": same.mean().item(), **_interval(same)}


def _interval(values: Tensor) -> dict[str, float]:
    total = round(values.sum().item(), 9)
    low, _ = clopper_pearson(math.floor(total), len(values))
    _, high = clopper_pearson(math.ceil(total), len(values))
    return {"low": low, "high": high}


def _label(case: CaseFacts) -> str:
    return f"{case.group or ''} {case.label}".strip()


def _shown(results: Results, number: int, question: Question) -> Iterator[_Shown]:
    """Yield what can be compared of a case: the pictures of each attack, and negative controls; nothing without any."""
    records = results.records
    ours = (records.case == number) & records.external.isna() & ~records.attack.str.startswith(CONTROL)
    shas = {
        str(attack): of.unique().tolist() for attack, of in records[ours].groupby("attack", sort=False).image_sha256
    }
    found = {
        attack: {sha: place for sha in those if sha and (place := results.picture(number, sha, attack))}
        for attack, those in shas.items()
    }
    everyone = [*dict.fromkeys(chain.from_iterable(found.values()))]
    if not everyone:
        return
    job = results.facts["cases"][number]["jobs"][0]["specification"]
    base = _victim_of(job)
    if (colours := len(base.preprocessing.mean)) not in (1, 3):
        raise PrivlabError(f"Pictures are compared of victims of 1 or 3 colours. {base.name} has {colours}.")
    if question.candidates is None:
        private = {sha: results.picture(number, sha, "private") for sha in everyone}
        pool = _Pool({sha: _pixels(place, colours) for sha, place in private.items() if place})
        told = "pictures that the run kept"
    else:
        pool, told = question.pool(base.preprocessing), "candidates, as the same file"
    names = dict(zip(records.image_sha256, records.image, strict=True))
    _check_among(pool, {sha: names[sha] for sha in everyone}, told)
    if len(pool.images) < 2:
        raise PrivlabError(f"--candidates must be two images or more. Found {len(pool.images)}.")
    named = [NamedImage(names[sha], sha, None) for sha in everyone]
    batch = Batch(named, torch.stack([pool.images[sha] for sha in everyone]), torch.zeros(len(named)).long(), "")
    controls = Controls(Others(pool.images), base.model.mean.cpu()).of(
        batch, base.model.patch, batch.draws(job["seed"], "control", 0), together=False
    )
    of_case = partial(_Shown, _label(results.cases[number]), pool=pool, weights_sha256=base.weights.sha256)
    drawn = (base.name, base.model.patch, job["seed"], tuple(everyone))
    for attack, those in found.items():
        if those:
            pictures = torch.stack([_pixels(place, colours) for place in those.values()])
            yield of_case(attack, [*those], pictures, len(shas[attack]), drawn=(attack, number))
    for name, pictures in controls.items():
        yield of_case(name, everyone, pictures, len(everyone), drawn=(name, *drawn))


def _victim_of(job: Mapping[str, Any], device: torch.device | str = "cpu") -> Victim:
    """Return the victim of a specification, without the warnings of its weights, which the run gave."""
    with collect_warnings([]):
        found = victim(job["models"][0], **{name: job[name] for name in ("weights", "img_size", "seed", "classes")})
    return found.to(device)


def _check_among(pool: _Pool, private: Mapping[str, str], what: str) -> None:
    """Check that private images, hashes ↦ names, are among the candidates."""
    if missing := [name for sha, name in private.items() if sha not in pool.images]:
        where = f"the {what}" if what.startswith("pictures") else f"the {len(pool.images)} {what}"
        raise PrivlabError(f"Every private image must be among {where}. '{missing[0]}' is not.")


def _pool(candidates: Data, preprocessing: Preprocessing) -> _Pool:
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
        warn(f"{unread} candidates cannot be read, and are left out.", 3)
    return _Pool(images, tuple(people.values()))


def _pixels(place: Place, colours: int) -> Float[Tensor, "c h w"]:
    """Return a picture that the run kept."""
    try:
        with Image.open(io.BytesIO(pngs([place])[0]), formats=["PNG"]) as picture:
            return pil_to_tensor(picture.convert("L" if colours == 1 else "RGB")).float() / 255
    except (OSError, ValueError, SyntaxError) as error:  # as Pillow says that a file is torn
        raise PrivlabError(f"'{place.file}' cannot be read as a picture: {error}") from error


def _by_parts(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(part).cpu() for part in images.split(_AT_A_TIME)])

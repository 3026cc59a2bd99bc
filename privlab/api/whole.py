"""A whole run: observe, attack, score, and keep everything in a directory."""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch import nn

from privlab.api.steps import Features, Gradient, Update
from privlab.base import unknown_name, warn
from privlab.evaluation import Specification
from privlab.grids import IN_PROCESS, Engine
from privlab.images.given import given_images
from privlab.report.run import Run
from privlab.runs import execute, shown_progress, specify
from privlab.victims import Victim, check_plain

if TYPE_CHECKING:
    pass


Part = Any
"""An attack or a defense: its name, or an instance of any dataclass that has its method."""


def attack(
    victim: str | Sequence[str] | nn.Module | Victim,
    images: Any = "samples",  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    *,
    settings: str | Sequence[str] | None = None,
    attacks: Part | Sequence[Part] | None = None,
    defense: Part | Sequence[Part] = "auto",
    release: Gradient | Features | Update | str | None = None,
    metrics: str | Sequence[str] | None = None,
    workers: int = 1,
    engine: str = "local",
    out: str | Path | None = None,
    progress: bool = True,
    **options: Any,  # noqa: ANN401
) -> Run:
    """Attack what clients release, score the reconstructions, and return the run.

    Args:
        victim: a name, several names, a ViT of timm or transformers of your own, or a `Victim`.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME"; or what `given_images` takes: tensors,
            arrays, Pillow's images, a data set or a loader.
        labels: the class of each image, or its classes; "predicted", or a CSV file; None for those of the images.
        settings: "a", "b" or "c", or several; by default c where a defense is at work, else a.
        attacks: the attacks; by default all that can run.
        defense: one defense, or several; "auto" is MJP where the victim has E_unk.
        release: what the clients release; by default what the defense and the attacks need.
        metrics: names of metrics; by default all but F-SIM.
        workers: processes, which get classes and images of this one by cloudpickle.
        engine: "local", or "ray" for a cluster.
        out: the directory of the run; an unfinished run in it goes on. None keeps it as long as the result is used.
        progress: whether a bar shows the images that are done, in Jupyter and on a terminal.
        options: limit, seed, draws, effort, public, device, batch_size, overwrite, and the other fields of
            `privlab.evaluation.Specification`.

    Raises:
        PrivlabError: if something that is asked for does not exist or does not fit, or an attack lacks a capability.

    Warns:
        PrivlabWarning: for what weakens the verdict.
    """
    how = {name: options.pop(name) for name in ("device", "batch_size", "overwrite") if name in options}
    own = victim if isinstance(victim, nn.Module | Victim) else None
    if own is None and not isinstance(victim, Sequence):
        check_plain(victim)  # it raises what is wrong
    if wrong := {"attack": "attacks", "setting": "settings"}.keys() & options.keys():
        raise unknown_name("option", wrong.pop(), ["attacks", "settings"])
    if isinstance(labels, str | Path):
        options["labels"], labels = labels, None
    if labels is not None or not _is_named(images):
        images = given_images(images, labels)
    spec = specify(
        "own" if own is not None else victim,  # pyright: ignore[reportArgumentType]
        settings,
        attack=attacks,
        defense=defense,
        images=images,
        metrics=metrics,
        **_stated_release(release),
        **options,
    )
    path = Path(tempfile.mkdtemp(prefix="privlab-"), "run") if out is None else Path(out)
    with shown_progress(shown=progress) as show:
        outcome = execute(spec, path, own=own, engine=_engine(spec, engine, workers), progress=show, **how)
    for message in outcome.warnings:
        warn(message)
    run = Run(path)
    if out is None:
        weakref.finalize(run, shutil.rmtree, path.parent, ignore_errors=True)
    return run


def _is_named(images: Any) -> bool:  # noqa: ANN401
    """Return whether images are given by the name of a source, or by paths."""
    several = [images] if isinstance(images, str | Path) else images
    return isinstance(several, list | tuple) and all(isinstance(each, str | Path) for each in several)


def _stated_release(release: Gradient | Features | Update | str | None) -> dict[str, Any]:
    """Return a release as fields of the specification."""
    match release:
        case str():
            return {"release": release}
        case Gradient(batch):
            return {"release": "gradients", "gradient_batch": batch}
        case Features(cut_layer, batch):
            return {"release": "features", "cut_layer": cut_layer, "client_batch": batch}
        case Update(client):
            return {"client": client}
        case None:
            return {}


def _engine(spec: Specification, name: str, workers: int) -> Engine:
    """Return where tasks run: in this process, with a warning, if other processes cannot have a class or an image."""
    if workers == 1 and name == "local":
        return IN_PROCESS
    try:
        cloudpickle.dumps(spec)
    except Exception as error:  # pickle raises whatever an object's own methods do
        warn(f"workers={workers} needs what can be pickled. Found {error}: it runs in this process.")
        return IN_PROCESS
    return Engine(name, workers)

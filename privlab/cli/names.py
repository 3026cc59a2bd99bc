"""Types of options: what is not there is refused before anything heavy is imported, and the shell completes names."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from privlab import images
from privlab.attacks import attacks
from privlab.base import PrivlabError, check_device, check_name, read_text
from privlab.defenses import defenses
from privlab.evaluation.names import check_names, known_names
from privlab.experiments.tables.named import experiment_names, find_experiment
from privlab.experiments.training.classifier_names import check_classifier_name, classifier_names
from privlab.inventory.explain import check_explained, known
from privlab.metrics.names import metric_names
from privlab.victims.names import (
    NORMALISATIONS,
    check_victim_name,
    check_weights_file,
    normalisation_of,
    victim_names,
)


class Checked(click.ParamType):
    """A text that is checked as soon as it is read; its last part is completed by the names that are known.

    Args:
        check: raises a PrivlabError if something that the text names is not there.
        known: returns the names that complete it.
        separators: the characters that may stand between several names; no name is completed twice.
    """

    name = "text"

    def __init__(
        self, check: Callable[[str], object], known: Callable[[], Iterable[str]] | None = None, separators: str = ""
    ) -> None:
        self._check, self._known, self._separators = check, known, separators

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, unless the check refuses it."""
        self._check(value)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the text with its last name completed, or a file where no name fits."""
        start = max((incomplete.rfind(mark) + 1 for mark in self._separators), default=0)
        taken, last = several(incomplete[:start], self._separators), incomplete[start:]
        names = [name for name in (self._known or list)() if name.startswith(last) and name not in taken]
        return [CompletionItem(incomplete[:start] + name) for name in names] or [
            CompletionItem(incomplete, type="file")
        ]


def several(text: str, separators: str = ",") -> list[str]:
    """Return the names of a text, with separators between them."""
    for mark in separators:
        text = text.replace(mark, "\n")
    return [name.strip() for name in text.split("\n") if name.strip()]


def _each(check: Callable[[str], object]) -> Callable[[str], object]:
    """Return the check of several names with commas between them."""
    return lambda text: [check(name) for name in several(text)]


def _check_source(text: str) -> None:
    if not text.startswith(("samples", "torchvision:", "hf:")) and not Path(text).exists():
        from privlab.images import archives, sources  # what would read it refuses it, without torch

        sources.files(archives.expand(Path(text)))


def _check_labels(text: str) -> None:
    if text != "predicted" and not Path(text).exists():
        images.read_labels(Path(text))


def _check_manifest(text: str) -> None:
    if not Path(text).exists():
        images.read_manifest(Path(text))


def _check_weights(text: str) -> None:
    if text not in _WEIGHTS:
        check_weights_file(Path(text))


def _check_lpips_weights(text: str) -> None:
    if not Path(text).exists():
        raise PrivlabError(
            f"No backbone of LPIPS: found no file {text}. Give the file, or the folder that holds it, with "
            "--lpips-weights PATH."
        )


def _check_embedding(text: str) -> None:
    name, _, file = text.removeprefix("timm:").partition("@")
    if not (text.startswith("timm:") and name and file):
        raise PrivlabError(f"--embedding must be timm:NAME@FILE, a timm model and its weights. Found '{text}'.")
    if not Path(file).is_file():
        raise PrivlabError(f"--embedding must be timm:NAME@FILE, with a file that is there. Found no file '{file}'.")


def _check_one(text: str) -> None:
    if len(models := several(text)) > 1:
        raise PrivlabError(f"An audit has one victim. Found {len(models)}: {', '.join(models)}.")
    check_victim_name(text)


def _check_sent(text: str) -> None:
    for name in text.split("+"):
        check_name("defense", name, defenses())


def _check_part(text: str) -> None:
    if "+" not in text:
        check_name("defense, attack or metric", text, _parts())


def _parts() -> list[str]:
    return [*defenses(), *attacks(), *metric_names()]


def _named(kind: str, separators: str = "") -> Checked:
    """Return the type of an option with a name of a kind, or with several of them with separators between."""
    names = partial(several, separators=separators) if separators else lambda text: [text]
    return Checked(lambda text: check_names(kind, names(text)), lambda: known_names(kind), separators)


PATH, POSITIVE, FROM_ZERO = click.Path(path_type=Path), click.IntRange(min=1), click.IntRange(min=0)

_WEIGHTS = ("auto", "pretrained", "random")

VICTIM = Checked(check_victim_name, victim_names)
VICTIMS = Checked(_each(check_victim_name), victim_names, ",")
ONE_VICTIM = Checked(_check_one, victim_names)
CLASSIFIER = Checked(check_classifier_name, classifier_names)
CLASSIFIERS = Checked(_each(check_classifier_name), classifier_names, ",")
WEIGHTS = Checked(_check_weights, lambda: _WEIGHTS)
ATTACKS, METRICS, SETTINGS = (_named(kind, ",") for kind in ("attack", "metric", "setting"))
BLOCK, CLIENT, EFFORT, GEOMETRY, MASKED_PE, REASSEMBLY, RELEASE = map(
    _named, ("block", "client", "effort", "geometry", "masked_pe", "reassembly", "release")
)
DEFENSES = _named("defense", "+,")
STACK = Checked(_check_sent, defenses, "+")
PART = Checked(_check_part, _parts)
EXPERIMENT = Checked(lambda text: read_text(find_experiment(text), "experiment"), experiment_names)
EXPLAINED = Checked(check_explained, known)
DEVICE = Checked(check_device, lambda: ("auto", "cpu", "cuda"))
NORMALISATION = Checked(normalisation_of, lambda: NORMALISATIONS)
LPIPS_WEIGHTS, EMBEDDING = Checked(_check_lpips_weights), Checked(_check_embedding)
IMAGES, LABELS, MANIFEST_FILE = Checked(_check_source), Checked(_check_labels), Checked(_check_manifest)

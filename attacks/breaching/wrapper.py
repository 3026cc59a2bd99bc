"""What the vision attacks of breaching share: a ViT and its released gradients as breaching expects them."""

import copy
import math
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import StringIO
from types import FrameType
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.attacks.solvers import twice_derivable
from privlab.base import PrivlabError, gradients_enabled, one_line, unknown_name
from privlab.release import told_labels
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel

Scalar: TypeAlias = bool | int | float | str | None

_FIXED = frozenset({"type", "attack_type", "label_strategy", "text_strategy", "token_recovery", "update_augmentations"})
"""Keys that are not options: the kind of attack, the guess of labels (which are given), and those for text alone."""


@dataclass(frozen=True)
class Breaching:
    """One of breaching's attacks with its own configuration and its own budget of steps, one release after the other.

    It is given a copy of the victim's model (with fused attention off, which has no second derivatives), the released
    gradients in the order of the parameters, and the label that the gradient of the head reveals; for a batch, the
    likely labels. Attacks that optimise the labels too are given none. It does not know of any defense: parameters
    without a released gradient count as constants. Its Hydra state, its output and its warnings are contained; an error
    within it becomes a `PrivlabError`.

    Args:
        config: changes to its configuration: dotted keys and values. `--set KEY=VALUE` sets it.
        seed: seed of torch's generator, set again for each image.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS})
    parameters: ClassVar[tuple[str, ...]] = ("*",)
    named_only: ClassVar[bool] = True
    search: ClassVar[bool] = True
    obstacle: ClassVar[str] = ""

    config: tuple[tuple[str, Scalar], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if breaching is not installed, or its configuration lacks a given key."""
        require_breaching()
        for key, _ in self.config:
            if key not in (known := self.config_types()):
                raise unknown_name(f"option of {self.name}", key, known)

    @classmethod
    def config_types(cls) -> dict[str, Any]:
        """Return the type of each value of its configuration, by dotted key."""
        return dict(_types(_shipped_config(cls.name.partition(":")[2])))

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if the label is not known, or breaching fails.
        """
        r, B = len(next(iter(seen.gradients.values()))), seen.images_per_release
        data = [self.solve(seen.model, {name: g[i] for name, g in seen.gradients.items()}, B)[0] for i in range(r)]
        images = torch.cat(data).to(seen.model.mean)
        return (images * seen.model.std + seen.model.mean).clamp(0, 1)

    def solve(
        self, model: VictimModel, gradients: Mapping[str, Tensor], batch_size: int = 1
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return what breaching makes of the gradients of one release: normalised images, and its own statistics.

        Args:
            model: the victim, of which breaching attacks a copy.
            gradients: ∂ℓ/∂θ of the release by timm's parameter name, each in the shape of its parameter.
            batch_size: number of images behind one gradient, that of their mean loss, ≥ 1.

        Raises:
            PrivlabError: if the label is not known, or breaching fails.
        """
        try:
            device = model.mean.device
            with contain_breaching(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(self.seed)
                data, stats = self._reconstruct(model, gradients, batch_size)
        except PrivlabError:
            raise
        except Exception as error:
            what = one_line(error, kind=True)
            known = f"; known: {self.obstacle}" if self.obstacle else ""
            raise PrivlabError(f"breaching fails with {what}{known}.") from error
        if not math.isfinite(stats.get("opt_value", 0.0)) or not data.isfinite().all():
            raise PrivlabError("breaching finds no reconstruction with a finite objective.")
        return data, stats

    def _reconstruct(
        self, model: VictimModel, gradients: Mapping[str, Tensor], batch_size: int
    ) -> tuple[Tensor, dict[str, Any]]:
        from breaching.attacks import prepare_attack
        from omegaconf import OmegaConf

        config = copy.deepcopy(_shipped_config(self.name.partition(":")[2]))
        for key, value in self.config:
            OmegaConf.update(config, key, value)
        classifier = Classifier(_fix_constants(model.vit, gradients)).requires_grad_(True)
        released = [gradients[name] for name, _ in classifier.model.named_parameters()]
        joint = config.attack_type == "joint-optimization"
        labels = None if joint else torch.tensor(_labels(model, gradients, batch_size), device=model.mean.device)
        attacker: Any = prepare_attack(
            classifier, nn.CrossEntropyLoss(), config, {"device": model.mean.device, "dtype": torch.float}
        )
        metadata = {
            "modality": "vision",
            "task": "classification",
            "shape": list(model.image_shape),
            "classes": model.vit.num_classes,
            "mean": model.mean.flatten().tolist(),
            "std": model.std.flatten().tolist(),
        }
        payload = {
            "parameters": [p.detach() for p in classifier.parameters()],
            "buffers": list(classifier.buffers()),
            "metadata": OmegaConf.create(metadata),
        }
        shared = {
            "gradients": released,
            "buffers": None,
            "metadata": {"num_data_points": batch_size, "labels": labels, "local_hyperparams": None},
        }
        with gradients_enabled():
            found, stats = attacker.reconstruct([payload], [shared], {}, dryrun=False)
        return found["data"].detach(), dict(stats)


class Classifier(nn.Module):
    """The interface that breaching expects: the timm model is the attribute `model`, and inputs are normalised."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.model = vit

    def forward(self, inputs: Float[Tensor, "b c h w"], **_: Tensor) -> Float[Tensor, "b y"]:
        """Return the logits."""
        return self.model(inputs)


def require_breaching() -> None:
    """Stop if breaching is not installed. It is an extra, because with Hydra it limits what else can be installed.

    Raises:
        PrivlabError: if it is not installed.
    """
    if find_spec("breaching") is None:
        raise PrivlabError("breaching's attacks need the extra: pip install 'privlab[breaching]'.")


@contextmanager
def contain_breaching() -> Iterator[None]:
    """Suppress what breaching and Hydra print and warn of, and restore the state that they change.

    breaching ends its search on Ctrl-C and goes on; here Ctrl-C ends the attack, as everywhere else.
    """
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()), _restore_hydra():
        warnings.simplefilter("ignore")
        with _interruptible():
            yield


@contextmanager
def _restore_hydra() -> Iterator[None]:
    """Give breaching a separate Hydra state, and restore that of the caller afterwards."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton
    from hydra.version import VersionBase
    from omegaconf.basecontainer import BaseContainer

    theirs, resolvers = Singleton._instances, BaseContainer._resolvers
    Singleton._instances = {kind: one for kind, one in theirs.items() if kind not in (GlobalHydra, VersionBase)}
    BaseContainer._resolvers = dict(resolvers)
    try:
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = theirs, resolvers


class _Interrupted(BaseException):
    """An interrupt that breaching does not catch."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let an interrupt through; do nothing outside the main thread or if the handler is not Python's own."""

    def stop(_: int, frame: FrameType | None) -> NoReturn:
        raise _Interrupted

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _shipped_config(name: str) -> Any:  # noqa: ANN401  # omegaconf's own type is not known before it is imported
    """Return the configuration of an attack as breaching ships it; callers must not change it."""
    require_breaching()
    with contain_breaching():
        import breaching

        return breaching.get_attack_config(name)


def _types(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of each value and its type; a null value may be replaced by any scalar."""
    from omegaconf import DictConfig

    for key, value in config.items():
        if isinstance(value, DictConfig):
            yield from _types(value, f"{path}{key}.")
        elif path + key not in _FIXED | {"augmentations", "regularization"}:  # empty sections
            yield path + key, Scalar if value is None else type(value)


def _labels(model: VictimModel, gradients: Mapping[str, Tensor], batch_size: int) -> tuple[int, ...]:
    """Return the labels that the adversary reads from the gradient of the head; for a batch, the likely ones."""
    told = told_labels(model.vit.head, gradients, batch_size)
    if told is None or (batch_size == 1 and not told.all_certain):
        raise PrivlabError("breaching needs the label, and the gradient of head.bias does not tell it.")
    return told.labels


def _fix_constants(vit: nn.Module, gradients: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy in which parameters without released gradient are buffers, and attention has second derivatives."""
    vit = twice_derivable(vit)
    for name, parameter in list(vit.named_parameters()):
        if name not in gradients:
            path, _, leaf = name.rpartition(".")
            owner = vit.get_submodule(path)
            delattr(owner, leaf)
            owner.register_buffer(leaf, parameter.detach())
    return vit

"""The client of a federated round: its public settings as data. Importing this costs no import of torch."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

from privlab.base import PrivlabError, check_name, check_range

OPTIMISERS = ("sgd", "adam", "adamw")
"""The optimisers of a client, by `Client.optimiser`: torch's SGD, Adam and AdamW."""

_SCHEDULES = ("constant", "cosine", "step")
_TRAINS = {
    "all": r".*",
    "no-embedding": r"(?!patch_embed\.|pos_embed|unk_embed|cls_token|dist_token|reg_token).*",
    "attention": r".*\.attn\..*",
    "norms": r"(.*\.)?[a-z_]*norm[a-z0-9_]*\.[a-z]+",
    "head": r"head\..*",
    "lora": r"(.*\.lora_|head\.).*",
    "adapters": r"(.*\.mlp\.adapter\.|head\.).*",
    "prompts": r"reg_token|head\..*",
}
"""The names of sets of trained parameters, and expressions for the timm names in them."""

_PATTERN = re.compile(r"[\w.*?\[\]!-]*[._*?][\w.*?\[\]!-]*")
"""What is read as a pattern of timm's names: the names of sets hold no dot, underscore or wildcard."""
_OF_CLASS = ("cross-entropy", "focal")
_FOR_EACH_CLASS = ("binary", "binary-focal")
_NUMERIC = ("regression", "l1", "smooth-l1")
_LOSSES = (*_OF_CLASS, *_FOR_EACH_CLASS, *_NUMERIC, "contrastive", "dino")
_SETTINGS_OF_LOSSES = {
    "label_smoothing": ("cross-entropy",),
    "class_weights": _OF_CLASS,
    "pos_weight": ("binary",),
    "gamma": ("focal", "binary-focal"),
    "alpha": ("binary-focal",),
}
_NUMBERS = ("float32", "bf16", "fp16")
_FUSIONS = ("none", "mean", "attention")

_SMALL = 1e-8
"""A decay that changes no gradient: half of the digits of float64."""


@dataclass(frozen=True)
class Client:
    """What is public of a client's local training in one round: a server that starts the round knows or sets it.

    A round makes T optimiser steps (`total_steps`) from the server's weights θ_0 and a fresh state of the optimiser.
    Step s follows the gradient g_s of the mean loss of its batches. The images, their labels or what else the loss
    compares them with, their order and the draws of dropout are private: `ClientData` holds them. Adam and AdamW decay
    and move as torch.optim does; `sgd` is torch.optim.SGD.

    With K = `clients` > 1 the server sees what secure aggregation shows it: the mean of what K such clients send, each
    trained alone from θ_0 on as many images of its own, and nothing else. Clients of equally many images have equal
    weights in federated averaging.

    Args:
        optimiser: "sgd", "adam" (decay coupled with the gradient) or "adamw" (decay decoupled from it).
        lr: η, the learning rate of the first step, in weights per unit of gradient; > 0.
        momentum: μ of SGD, in [0, 1).
        dampening: τ of SGD, in [0, 1]: the buffer takes 1 − τ of each gradient but the first.
        nesterov: whether SGD's momentum is Nesterov's; needs μ > 0 and τ = 0.
        beta1: β₁ of Adam and AdamW, the share of the first moment that is kept, in [0, 1).
        beta2: β₂ of Adam and AdamW, the share of the second moment that is kept, in [0, 1).
        eps: ε of Adam and AdamW, in units of the gradient; > 0.
        weight_decay: λ, per step and unit of η; ≥ 0.
        schedule: how η changes from step to step: "constant", "cosine" to `lr_min` over the T steps, or "step".
        lr_min: the rate at the end of the cosine, in the units of `lr`; in [0, lr].
        lr_every: optimiser steps after which schedule "step" multiplies the rate; ≥ 1.
        lr_factor: the factor of schedule "step", in (0, 1].
        steps: optimiser steps T of the round, ≥ 1; None where `epochs` says how many.
        epochs: passes over the images, ≥ 1; None where `steps` says how long. One pass where both are None.
        images: images of each client, ≥ 1.
        clients: K ≥ 1, the clients whose mean is released; 1 for a client whose update the server sees alone.
        batch_size: images of a batch, ≥ 1; the last batch of a pass may be smaller.
        shuffle: whether each pass is in its own order, drawn in private; else in the order of the images.
        fusion: how a batch becomes one prediction: "none" (each image has its own), "mean" (the head reads the mean of
            the features of all images) or "attention" (it reads a class token behind a transformer layer over these).
            The images are then the slices of one volume, in one batch, and its label is that of the first slice.
        accumulation: batches of one pass whose mean gradient makes one optimiser step, ≥ 1; the last step of a pass may
            have fewer.
        clip: the largest norm of the gradient of all trained parameters before a step, > 0; None does not clip.
        loss: what a step lowers: "cross-entropy" or "focal" of a class label, "binary" or "binary-focal" (a sigmoid for
            each class), "regression" (squared error), "l1" or "smooth-l1" of numeric targets, "contrastive" (SigLIP's,
            with embeddings of texts) or "dino" (of the server's model on mirrored images). The last two and numeric
            targets need no classifier. Or a function of logits (b × y) and targets that returns the mean loss.
        label_smoothing: share of the label that is spread evenly over all classes, in [0, 1); of cross-entropy alone.
        class_weights: weight of each class in cross-entropy and focal losses, ≥ 0. As in PyTorch, cross-entropy divides
            by the sum of the weights of the labels, so that they cancel for one image.
        pos_weight: weight of the positive entries of the binary loss, for each class or one for all, > 0.
        gamma: γ of focal losses, which weigh an entry by (1 − p)^γ with p the probability of what is true; ≥ 0.
        alpha: α of "binary-focal", the weight of positive entries, where negative ones have 1 − α, in [0, 1]; None
            weighs none.
        dropout: rate after the position embeddings and each dense layer of a block, in [0, 1).
        drop_path: rate in the last block, from 0 in the first one linearly, in [0, 1).
        autocast: number format of matrix products, by torch.autocast: "float32" (none), "bf16" or "fp16". The weights
            stay as the model stores them; losses are not scaled.
        trains: trained parameters: "all", "no-embedding" (without patch, position, class and register embeddings),
            "attention", "norms", "head", or the head and what the server adds and draws from a public seed: "lora" (by
            peft, adapters of each block's qkv, whose B begins at 0), "adapters" (a bottleneck behind each MLP) or
            "prompts" (tokens behind the class token). Or patterns of timm's names, in a tuple or with commas, of which
            a trained one matches at least one, such as "head.*,blocks.1?.*,*.bias"; * and ? stand for any text and any
            character. A tuple is kept as the text with commas.
        rank: r of "lora", whose scale α / r is 1, or the width of the bottleneck of "adapters"; in [1, 64].
        prompts: tokens of "prompts", in [1, 200].
        sends: "difference" (θ_T − θ_0) or "weights" (θ_T).
        sent_as: number format of what is sent: "float32", "bf16", "fp16", or "int8": each parameter x, a difference or
            weights, as s · round(x / s) with s = max |x| / 127.

    Example:
        >>> Client(lr=0.1, epochs=2, images=64, batch_size=32).total_steps
        4

    Raises:
        PrivlabError: if a value is out of its range, or two values contradict each other.
    """

    name: ClassVar[str] = "client"

    optimiser: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"
    lr_min: float = 0.0
    lr_every: int = 1
    lr_factor: float = 0.1
    steps: int | None = None
    epochs: int | None = None
    images: int = 1
    clients: int = 1
    batch_size: int = 1
    shuffle: bool = True
    fusion: str = "none"
    accumulation: int = 1
    clip: float | None = None
    loss: str | Callable[..., Any] = "cross-entropy"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    pos_weight: tuple[float, ...] | None = None
    gamma: float = 2.0
    alpha: float | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    autocast: str = "float32"
    trains: str | tuple[str, ...] = "all"
    rank: int = 16
    prompts: int = 10
    sends: str = "difference"
    sent_as: str = "float32"

    def __new__(cls, *_args: object, **settings: object) -> "Client":
        """Refuse a setting that a client lacks, such as `learning_rate`, with the name that it has here."""
        for name in settings:
            check_name("setting of a client", name, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise PrivlabError if a setting is out of its range."""
        check_name("optimiser", self.optimiser, OPTIMISERS)
        if not isinstance(self.loss, FunctionType):
            check_name("loss", str(self.loss), _LOSSES)
        check_name("schedule", self.schedule, _SCHEDULES)
        if not isinstance(self.trains, str):
            object.__setattr__(self, "trains", ",".join(self.trains))
        if not all(_PATTERN.fullmatch(pattern) for pattern in self.patterns):
            check_name("set of trained parameters", str(self.trains), _TRAINS)
        check_name("number format of autocast", self.autocast, _NUMBERS)
        check_name("number format of what is sent", self.sent_as, (*_NUMBERS, "int8"))
        check_name("kind of update", self.sends, ("difference", "weights"))
        check_name("fusion of slices", self.fusion, _FUSIONS)
        for name in ("lr", "eps"):
            value = getattr(self, name)
            check_range(0 < value < math.inf, f"client.{name}", "a finite number > 0", f"{value:g}")
        check_range(0 <= self.weight_decay < math.inf, "client.weight_decay", "≥ 0", f"{self.weight_decay:g}")
        check_range(0 <= self.lr_min <= self.lr, "client.lr_min", f"in [0, lr = {self.lr:g}]", f"{self.lr_min:g}")
        check_range(0 < self.lr_factor <= 1, "client.lr_factor", "in (0, 1]", f"{self.lr_factor:g}")
        for name in ("momentum", "beta1", "beta2", "label_smoothing", "dropout", "drop_path"):
            value = getattr(self, name)
            check_range(0 <= value < 1, f"client.{name}", "in [0, 1)", f"{value:g}")
        check_range(0 <= self.dampening <= 1, "client.dampening", "in [0, 1]", f"{self.dampening:g}")
        for name in ("lr_every", "images", "clients", "batch_size", "accumulation", "steps", "epochs"):
            count = getattr(self, name)
            check_range(count is None or count >= 1, f"client.{name}", "at least 1", count)
        check_range(1 <= self.rank <= 64, "client.rank", "in [1, 64]", self.rank)
        check_range(1 <= self.prompts <= 200, "client.prompts", "in [1, 200]", self.prompts)
        for name in ("class_weights", "pos_weight"):
            if (weights := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(map(float, weights)))
                right = all(0 <= w < math.inf for w in weights) and any(weights)
                check_range(right, f"client.{name}", "finite numbers ≥ 0 with one > 0", getattr(self, name))
        check_range(0 <= self.gamma < math.inf, "client.gamma", "≥ 0", f"{self.gamma:g}")
        check_range(self.alpha is None or 0 <= self.alpha <= 1, "client.alpha", "in [0, 1]", self.alpha)
        check_range(self.clip is None or 0 < self.clip < math.inf, "client.clip", "a finite number > 0", self.clip)
        self._check_together()

    def _check_together(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise PrivlabError(
                f"client.steps and client.epochs both say how long a round is. Found {self.steps} and {self.epochs}: "
                "give one of them."
            )
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise PrivlabError(
                "client.nesterov needs client.momentum > 0 and client.dampening = 0. "
                f"Found {self.momentum:g} and {self.dampening:g}."
            )
        of_sgd = {"momentum": self.momentum, "dampening": self.dampening, "nesterov": self.nesterov}
        if self.optimiser != "sgd" and (used := [f"client.{key}={value}" for key, value in of_sgd.items() if value]):
            raise PrivlabError(f"{', '.join(used)} needs sgd. Found client.optimiser={self.optimiser}.")

        if self.fuses and self.images > self.batch_size:
            raise PrivlabError(
                f"client.fusion={self.fusion} makes one prediction of all slices of a volume, which are one batch: set "
                "client.images and client.batch_size both to the number of slices. "
                f"Found {self.images} and {self.batch_size}."
            )
        if self.rank != type(self).rank and self.trains not in ("lora", "adapters"):
            raise PrivlabError(f"client.rank={self.rank} needs lora or adapters. Found client.trains={self.trains}.")
        if self.prompts != type(self).prompts and self.trains != "prompts":
            raise PrivlabError(f"client.prompts={self.prompts} needs prompts. Found client.trains={self.trains}.")
        for name, losses in _SETTINGS_OF_LOSSES.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and self.loss not in losses:
                raise PrivlabError(
                    f"client.{name}={value} applies only to client.loss={' and '.join(losses)}. "
                    f"Found client.loss={self.loss_name}."
                )

    def chooses(self, name: str) -> bool:
        """Return whether a parameter of this name of timm's is in the set that is trained, where a model has it.

        Args:
            name: such as "blocks.0.attn.qkv.weight", with adapters as privlab names them.
        """
        if self.trains in _TRAINS:
            return re.fullmatch(_TRAINS[str(self.trains)], name) is not None
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    @property
    def patterns(self) -> list[str]:
        """Return the patterns of the names of trained parameters, or the name of a set."""
        return str(self.trains).split(",")

    def check_trains(self, names: Sequence[str]) -> None:
        """Check that each pattern of trained parameters matches one of a model's; a named set may match none.

        Args:
            names: timm's names of all parameters of the model.

        Raises:
            PrivlabError: for the first pattern that matches none, with the names that exist.
        """
        for pattern in [] if self.trains in _TRAINS else self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
                raise PrivlabError(
                    f"client.trains: each pattern must match a parameter of the model. Found '{pattern}', which "
                    f"matches none of {', '.join(kinds)}."
                )

    @property
    def has_labels(self) -> bool:
        """Return whether the loss reads class labels, so that the update of the head shows them."""
        return self.is_of_class or self.is_for_each_class

    @property
    def is_of_class(self) -> bool:
        """Return whether the loss reads one class of an image, by a softmax: logits' gradients add up to 0."""
        return self.loss in _OF_CLASS

    @property
    def is_for_each_class(self) -> bool:
        """Return whether an image may have any number of classes, by a sigmoid for each."""
        return self.loss in _FOR_EACH_CLASS

    @property
    def takes_several_classes(self) -> bool:
        """Return whether a label may be a list of classes, as a loss for each class takes it, or a function."""
        return self.is_for_each_class or not isinstance(self.loss, str)

    @property
    def is_numeric(self) -> bool:
        """Return whether the targets are numbers, one for each output of the model."""
        return self.loss in _NUMERIC

    @property
    def loss_name(self) -> str:
        """Return the name of the loss, or of the function that was given."""
        return self.loss if isinstance(self.loss, str) else self.loss.__name__

    def with_loss(self, loss: str | Callable[..., Any]) -> "Client":
        """Return the client with another loss, whose settings have their defaults."""
        return replace(self, loss=loss, **{name: getattr(Client, name) for name in _SETTINGS_OF_LOSSES})

    @property
    def fuses(self) -> bool:
        """Return whether all images of a batch become one prediction, so that they have one label."""
        return self.fusion != "none"

    @property
    def released_labels(self) -> int:
        """Return the labels of one release: one for each image, or for each volume."""
        return self.clients if self.fuses else self.released_images

    @property
    def released_images(self) -> int:
        """Return the images of one release: those of all K clients."""
        return self.clients * self.images

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimiser steps of one pass over the images."""
        return math.ceil(math.ceil(self.images / self.batch_size) / self.accumulation)

    @property
    def total_steps(self) -> int:
        """Return T, the optimiser steps of the round."""
        return self.steps if self.steps is not None else (self.epochs or 1) * self.steps_per_epoch

    @property
    def rates(self) -> tuple[float, ...]:
        """Return η_0, …, η_{T−1}: η, or η_min + (η − η_min)(1 + cos πs/T)/2, or η · factor^⌊s / every⌋.

        Source: SGDR (Loshchilov and Hutter, ICLR 2017), Equation 5, without restarts; torch.optim.lr_scheduler.
        """
        T = self.total_steps
        if self.schedule == "cosine":
            half = (self.lr - self.lr_min) / 2
            return tuple(self.lr_min + half * (1 + math.cos(math.pi * s / T)) for s in range(T))
        if self.schedule == "step":
            return tuple(self.lr * self.lr_factor ** (s // self.lr_every) for s in range(T))
        return (self.lr,) * T

    @property
    def gradient_factor(self) -> float | None:
        """Return a > 0 if the round is one step along the gradient g of the mean loss of all images; None otherwise.

        The mean of K clients of such a round is that of one client with the images of all.

        Then −(θ_1 − c θ_0) = a g with a = η, or η (1 + μ) with Nesterov's momentum, and whatever reads gradients reads
        the update. That needs one step of SGD on all images, in batches of one size, of a loss without smoothing, and
        no clipping and no dropout.
        """
        whole = self.steps_per_epoch == 1 and (self.images <= self.batch_size or self.images % self.batch_size == 0)
        private = self.label_smoothing or self.dropout or self.drop_path or self.clip is not None
        if self.optimiser != "sgd" or self.total_steps > 1 or not whole or private:
            return None
        return self.rates[0] * (1 + self.momentum * self.nesterov)

    def check_filters(self, names: Sequence[str]) -> None:
        """Check that no filter acts on a mean of several clients, or on an update that is rounded to integers already.

        Each filter would act before the mean is taken, and before the update is rounded.

        Args:
            names: the defenses of the release.

        Raises:
            PrivlabError: if there is one, and K > 1 or the update is sent as int8.
        """
        if names and self.sent_as == "int8":
            raise PrivlabError(
                f"Defense '{names[0]}' acts before an update is sent in client.sent_as=int8, which is not simulated: "
                "take float32, and gradient-quantisation as the last defense, which rounds alike."
            )
        if names and self.clients > 1:
            raise PrivlabError(
                f"Defense '{names[0]}' acts on the update of each client, and its mean over client.clients="
                f"{self.clients} is not simulated: take client.clients=1, or a defense of images."
            )

    @property
    def reach(self) -> float:
        """Return Σ_s a_s of θ_T − c θ_0 = −Σ_s a_s g_s for SGD: how far a constant gradient of 1 moves a weight.

        A weight of about 1 under a decay λ that is nearly 0 has a constant gradient λ, and keeps c = 1 − λ Σ_s a_s.
        """
        return (1 - replace(self, weight_decay=_SMALL).kept_share) / _SMALL

    @property
    def is_linear(self) -> bool:
        """Return whether θ_T is linear in θ_0 and the gradients, so that `kept_share` exists."""
        return self.optimiser != "adam" or self.weight_decay == 0

    @property
    def kept_share(self) -> float:
        """Return c of θ_T = c θ_0 + Σ_s a_s u_s: the share of the starting weights that T steps of decay keep.

        For SGD u_s = g_s, and c is θ_T of θ ← θ − η_s d_s, b ← μ b + (1 − τ) λ θ (the first b is λ θ), from θ = 1, with
        d = λ θ without momentum, b with it, and λ θ + μ b with Nesterov's. For AdamW u_s is the step without decay, and
        c = Π_s (1 − η_s λ). Clipping changes g_s alone, since torch decays after it.

        Raises:
            PrivlabError: for Adam with weight decay, which divides the decay by the gradient's magnitude.

        Source: torch.optim.SGD; AdamW (Loshchilov and Hutter, ICLR 2019), Algorithm 2.
        """
        if not self.is_linear:
            raise PrivlabError(
                f"Adam with client.weight_decay={self.weight_decay:g} scales the decay by the gradient, so it has no "
                "factor of its own: take adamw, or weight_decay=0."
            )
        if self.optimiser != "sgd":
            return math.prod(1 - rate * self.weight_decay for rate in self.rates) if self.weight_decay else 1.0
        kept, buffer = 1.0, None
        for rate in self.rates:
            step = self.weight_decay * kept
            if self.momentum:
                buffer = step if buffer is None else self.momentum * buffer + (1 - self.dampening) * step
                step = step + self.momentum * buffer if self.nesterov else buffer
            kept -= rate * step
        return kept


CLIENT_PRESETS: Mapping[str, Client] = MappingProxyType(
    {
        "flower-default": Client(lr=0.1, momentum=0.9, epochs=1, batch_size=32, images=32, sends="weights"),
        "nvflare-default": Client(lr=0.01, momentum=0.9, epochs=1, batch_size=32, images=32, sends="weights"),
        "flowertune-vit": Client(
            optimiser="adam", lr=0.01, epochs=1, batch_size=32, images=32, trains="head", sends="weights"
        ),
        "mediswarm": Client(
            optimiser="adamw", lr=1e-6, weight_decay=0.01, epochs=5, batch_size=32, images=32, fusion="attention"
        ),
    }
)
"""Clients with the settings of public examples; the count of images is the user's own, here one batch.

- `flower-default`: github.com/adap/flower, examples/quickstart-pytorch (pyproject.toml: lr 0.1, batch 32, one local
  epoch; pytorchexample/task.py: SGD with momentum 0.9, shuffled). The client returns its weights.
- `nvflare-default`: github.com/NVIDIA/NVFlare, examples/hello-world/hello-pt/client.py on CIFAR-10: SGD, lr 0.01,
  momentum 0.9, batch 32, one epoch, shuffled, weights returned. There the momentum's buffer outlives the round; here
  each round is a first one.
- `flowertune-vit`: github.com/adap/flower, examples/flowertune-vit (pyproject.toml: lr 0.01, batch 32;
  vitexample/client_app.py: Adam, one epoch, shuffled; task.py: all frozen but the head), weights of the head returned.
- `mediswarm`: github.com/KatherLab/MediSwarm, application/jobs/ODELIA_ternary_classification: its ViT (custom/models/
  mst.py: lr 1e-6; base_model.py: AdamW, so torch's λ = 0.01), custom/threedcnn_ptl.py: batches of one volume, five
  epochs a round, no accumulation, no clipping; config/config_fed_client.conf: the difference of weights is sent. A
  volume has 32 slices (custom/data/datasets/dataset_3d_odelia.py, CropOrPad), which one ViT for images sees in one step
  (mst.py, `rearrange`), and a layer of a transformer fuses its features before the head (`SliceFusion`).
"""

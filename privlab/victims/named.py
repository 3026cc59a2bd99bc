"""Victims: named timm ViTs (`deit_s_mjp` …) with weights of stated origin and their own preprocessing."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, check_range, one_line, unknown_name, warn, with_plugins
from privlab.images import Preprocessing
from privlab.victims import weights as stored
from privlab.victims.anatomy import Vit, unwrapped
from privlab.victims.layouts import from_any_layout, kind_of
from privlab.victims.libraries import (
    as_timm,
    config_beside,
    fit_head,
    library_of,
    merged,
    normalisation_beside,
    of_folder,
    options_of,
)
from privlab.victims.model import AprilBlock, VictimModel, april_twin, check_plain
from privlab.victims.names import folder_of, normalisation_of, of_channels, resolve_own, size_error
from privlab.victims.own_gradients import check_gradients
from privlab.victims.zoo import BASE, COMPACT, shipped_file

UnknownOrigin = Literal["trained", "mean-pe", "random"]


@dataclass(frozen=True)
class Weights:
    """Where a victim's weights come from.

    `origin` is "random", "pretrained:NAME" (timm's name, or that of a victim of the zoo), "file:NAME" or "given";
    `unknown` says where E_unk comes from.
    """

    origin: str
    sha256: str
    unknown: UnknownOrigin | None = None

    @property
    def is_random(self) -> bool:
        """Return whether nothing was learnt."""
        return self.origin == "random"


@dataclass(frozen=True, eq=False)
class Victim:
    """A model under attack, and everything that identifies it in a record.

    Example:
        >>> import privlab
        >>> privlab.victim("cifar_vit").model.image_shape
        (3, 32, 32)
    """

    name: str
    architecture: str
    model: VictimModel
    preprocessing: Preprocessing
    weights: Weights

    @property
    def block(self) -> Literal["stock", "april"]:
        """Return which first block the model has."""
        return "april" if isinstance(self.model.vit.blocks[0], AprilBlock) else "stock"

    @property
    def has_mjp(self) -> bool:
        """Return whether the model has the unknown position embedding of MJP."""
        return self.model.unk_embed is not None

    def with_block(self, block: str) -> "Victim":
        """Return this victim, or its twin with the april block and the same weights."""
        if block == self.block:
            return self
        if block == "stock":
            raise PrivlabError("A victim with the april block has no stock block to go back to.")
        return _twin(self)

    def normalised_by(self, stated: str) -> "Victim":
        """Return this victim, with the same weights, as a client has it that normalises its images otherwise.

        That is stated by a name of `NORMALISATIONS`, or by the means and the deviations of all channels, as in
        "0.485,0.456,0.406/0.229,0.224,0.225"; one number stands for all channels.

        Raises:
            PrivlabError: if it is neither, or does not have a number for each channel.
        """
        mean, std = normalisation_of(stated, self.model.image_shape[0])
        model = self.model.normalised_by(*(self.model.mean.new_tensor(values).view(-1, 1, 1) for values in (mean, std)))
        return replace(self, model=model, preprocessing=replace(self.preprocessing, mean=mean, std=std))

    def with_weights(self, path: Path) -> "Victim":
        """Return this victim with the weights of a file or folder, as `weights` of `victim` takes it.

        Raises:
            PrivlabError: if the weights cannot be read, or do not fit the model.
        """
        state = from_any_layout(stored.read_state(path))
        unknown = state.pop("unk_embed", None)
        model = copy.deepcopy(self.model)
        stored.fit(model.vit, state, path.name)
        if model.unk_embed is not None and unknown is not None:
            model.unk_embed.copy_(unknown.view_as(model.unk_embed))
        held = dict(model.vit.state_dict()) | ({} if model.unk_embed is None else {"unk_embed": model.unk_embed})
        weights = replace(self.weights, origin=f"file:{path.name}", sha256=stored.hash_of(held))
        return replace(self, model=model, weights=weights)

    def to(self, device: torch.device | str) -> "Victim":
        """Return this victim on another device."""
        if self.model.mean.device == torch.device(device):
            return self
        return replace(self, model=copy.deepcopy(self.model).to(device))

    def params(self) -> dict[str, object]:
        """Return what a record states besides name and weights, as plain data."""
        vit, (channels, height, width) = self.model.vit, self.model.image_shape
        return {
            "architecture": self.architecture,
            "input": [channels, height, width],
            "patch": self.model.patch,
            "width": vit.embed_dim,
            "depth": len(vit.blocks),
            "mean": list(self.preprocessing.mean),
            "std": list(self.preprocessing.std),
            "unk_embed": self.weights.unknown,
        }


@lru_cache(maxsize=2)
def _twin(victim: Victim) -> Victim:
    """Return the twin with the april block, made once: every case of an experiment asks for it."""
    return replace(victim, model=april_twin(victim.model))


@torch.inference_mode(mode=False)  # else weights would be tensors that autograd cannot use later
def victim(
    model: str | nn.Module,
    *,
    weights: str | Path = "auto",
    block: str = "stock",
    img_size: int | None = None,
    seed: int = 0,
    start: bool = False,
    classes: int | None = None,
    normalisation: str | None = None,
    unknown_pe: Literal["mean"] | None = None,
) -> Victim:
    """Make a victim from a name or from a timm model of your own, which is copied and left as it is.

    Args:
        model: a name of `victim_names()`, "timm:NAME", a folder that transformers' `save_pretrained` wrote, or a ViT of
            timm or transformers (`as_timm`), also as `torch.compile`, DataParallel or DistributedDataParallel wraps it.
        weights: "auto" (pretrained where they can be had, else random, with a warning), "pretrained", "random", or a
            file in timm's, the MJP authors' or privlab's layout. A model of your own keeps its own weights.
        block: "stock" or "april" (first block without pre-norm and without skip).
        img_size: the side of the input, in pixels, a multiple of the patches'; the position embeddings are resized as
            timm does. A model of your own keeps its size.
        seed: seed of random weights.
        start: whether a training starts from the weights. Position embeddings that they lack then begin as random ones
            do, with a warning; otherwise that is an error.
        classes: the number of classes of the random head that a model without classifier is given, with a warning; of
            random weights, that of the whole model.
        normalisation: how the client normalises its images, as `Victim.normalised_by` takes it; None is as the model's
            configuration says, and by ImageNet's mean and deviation where it says nothing.
        unknown_pe: MJP's E_unk of a model of your own: "mean" is the mean of its position embeddings; None is none.

    Raises:
        PrivlabError: for an unknown name, weights that do not fit, a model that is not a plain ViT, as one whose
            `forward` was replaced by another or whose hooks change its gradients, or one that has other classes.

    Warns:
        PrivlabWarning: for weights that weaken a verdict: random ones, an untrained E_unk, dropped PEs.
    """
    check_name("block", block, ("stock", "april"))
    check_range(classes is None or classes >= 1, "classes", "a positive number", classes)
    if isinstance(model, str):
        if unknown_pe is not None:
            raise PrivlabError(f"unknown_pe is for a model of your own. Found '{model}': take a `_mjp` victim.")
        made = _make_named(model, str(weights), img_size, seed, start=start, classes=classes)
    else:
        made = _own(model, weights, seed, classes, unknown_pe)
    _, height, width = made.model.image_shape
    if img_size is not None and (height, width) != (img_size, img_size):
        if isinstance(model, str):
            raise size_error(made.name, img_size, made.model.patch)
        right = f"a model of your own keeps its {height}×{width} pixels"
        raise PrivlabError(f"--img-size {img_size} does not fit {made.name}: {right}.")
    made = made if normalisation is None else made.normalised_by(normalisation)
    return made.with_block(block)


def _own(vit: nn.Module, weights: str | Path, seed: int, classes: int | None, unknown_pe: str | None = None) -> Victim:
    if weights != "auto":
        raise PrivlabError(f"A model of your own keeps its weights. Found weights '{weights}': leave that out.")
    own = vit = merged(unwrapped(vit))
    if isinstance(vit, nn.Module) and library_of(vit) is not None:
        vit = copied = as_timm(vit)
    else:
        check_plain(vit)
        try:
            copied = cast("Vit", copy.deepcopy(vit))
        except (RuntimeError, TypeError) as error:
            raise PrivlabError(f"A model of your own is copied, and this one cannot be: {one_line(error)}.") from error
    name = getattr(vit, "pretrained_cfg", {}).get("architecture") or type(vit).__name__
    head: nn.Module = nn.Identity()
    if classes is not None and copied.num_classes == 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            copied.reset_classifier(classes)
        head = copied.head
        warn(_untrained_head(name, classes))
    _check_classes(name, copied, classes)
    if unknown_pe is not None and (unknown_pe != "mean" or copied.pos_embed is None):
        found = f"'{unknown_pe}'" if copied.pos_embed is not None else "a model without position embeddings"
        raise PrivlabError(f"unknown_pe must be 'mean', of a model with position embeddings. Found {found}.")
    unknown = (None, None) if unknown_pe is None else (_mean_pe(copied), "mean-pe")
    made = _assemble(name, name, copied, "given", *unknown)
    check_gradients(own, made.model, head)
    return made


def _untrained_head(name: str, classes: int) -> str:
    return f"{name} has no classifier; a random one of {classes} classes is UNTRAINED, and so are its labels."


def _check_classes(name: str, vit: Vit, classes: int | None) -> None:
    if classes not in (None, vit.num_classes):
        raise PrivlabError(
            f"--classes gives a head to a model that has none. Found {classes}, and {name} has {vit.num_classes}: "
            "leave it out."
        )


def _make_named(
    name: str, weights: str, img_size: int | None, seed: int, *, start: bool, classes: int | None
) -> Victim:
    if name in (plugins := with_plugins({}, "privlab.victims")):
        return replace(_own(plugins[name](), weights, seed, classes), name=name)
    if (folder := folder_of(name)) is not None:
        return _in_folder(folder, weights, img_size, seed, classes)
    architecture, variant = resolve(name)
    path = weights_file(name, architecture, weights, seed)
    if path is None:
        vit = _create(architecture, variant, img_size, seed=seed, classes=classes)
        if variant != "_mjp":
            return _assemble(name, architecture, vit, "random")
        warn(f"{name}: E_unk is random too, UNTRAINED.")
        return _assemble(name, architecture, vit, "random", _random_unknown(vit, seed), "random")
    trained = name if architecture in COMPACT else architecture
    origin = f"pretrained:{trained}" if weights in ("auto", "pretrained") else f"file:{path.name}"
    tensors = stored.read_state(path)
    state, kind = from_any_layout(tensors), kind_of(tensors)
    own, unknown = _classes(state), state.pop("unk_embed", None)
    drawn = start or (own is None and classes is not None)
    options: dict[str, Any] = {} if kind is None else options_of(kind, state, config_beside(path))
    if "fc_norm.weight" in state and "norm.weight" not in state:  # MAE and RETFound, fine-tuned with global_pool
        options["global_pool"] = "avg"
    if _grey(state):
        options["in_chans"] = 1
    vit = _create(architecture, variant, img_size, options, seed=seed if drawn else 0, classes=own or classes)
    if kind is not None:
        fit_head(vit, state)
    _check_classes(name, vit, classes)
    if own is None and classes is not None:
        warn(_untrained_head(name, classes))
        state |= {f"head.{key}": value.detach() for key, value in vit.head.named_parameters()}
    if start and vit.pos_embed is not None and "pos_embed" not in state:
        warn(f"{name}: the weights hold no position embeddings; they begin as timm draws them, UNTRAINED.")
        state["pos_embed"] = vit.pos_embed.detach()
    if variant == "_nope" and state.pop("pos_embed", None) is not None:
        warn(f"{name}: the weights were trained with position embeddings, which are left out here.")
    if unknown is not None and variant != "_mjp":
        raise PrivlabError(
            f"The weights of {path.name} hold E_unk of MJP (unexpected: unk_embed), which {name} lacks. "
            f"Use a `_mjp` victim, such as {name.removesuffix('_nope')}_mjp."
        )
    stored.fit(vit, state, path.name, resize=img_size is not None)
    if unknown is not None and unknown.numel() != vit.embed_dim:
        shapes = f"unk_embed {tuple(unknown.shape)} instead of {(1, 1, vit.embed_dim)}"
        raise PrivlabError(f"The weights of {path.name} do not fit this model. mis-shaped: {shapes}.")
    if unknown is not None:
        return _assemble(name, architecture, vit, origin, unknown.float(), "trained")
    if variant != "_mjp":
        return _assemble(name, architecture, vit, origin)
    warn(f"{name}: the weights hold no E_unk; the mean position embedding stands in, UNTRAINED.")
    return _assemble(name, architecture, vit, origin, _mean_pe(vit), "mean-pe")


def _in_folder(folder: Path, weights: str, img_size: int | None, seed: int, classes: int | None) -> Victim:
    """Return the victim that transformers wrote into a folder, with its weights or those of a file."""
    if weights == "random":
        raise PrivlabError(
            f"The model in '{folder}' has weights. Found --weights random: leave it out, or give a file."
        )
    path = folder if weights in ("auto", "pretrained") else Path(weights)
    state = from_any_layout(stored.read_state(path))
    vit = of_folder(folder, state, img_size)
    stored.fit(vit, state, path.name, resize=img_size is not None)
    made, name = _own(vit, "auto", seed, classes), folder.absolute().name
    made = made.normalised_by(stated) if (stated := normalisation_beside(folder)) else made
    return replace(made, name=name, weights=replace(made.weights, origin=f"file:{path.absolute().name}"))


def weights_file(name: str, architecture: str, weights: str, seed: int) -> Path | None:
    """Return the file of the weights that are asked for; None for random ones.

    Args:
        name: name of the model.
        architecture: timm's name of it, or that of a compact one of `COMPACT`.
        weights: "auto", "pretrained", "random", or the path of a file, which is not opened here.
        seed: seed of random weights, for the warning alone.

    Raises:
        PrivlabError: if "pretrained" is asked for and cannot be had.

    Warns:
        PrivlabWarning: if the weights are to be random.
    """
    if weights not in ("auto", "pretrained", "random"):
        return Path(weights)
    reason = ", as asked."
    if weights != "random":
        try:
            return find_pretrained(name, architecture)
        except stored.WeightsUnavailable as error:
            if weights == "pretrained":
                raise PrivlabError(f"--weights pretrained: {error}") from error
            reason = f": {error}"
    warn(f"{name} has RANDOM weights (seed {seed}){reason} Leakage of trained weights differs.")
    return None


def find_pretrained(name: str, architecture: str) -> Path:
    """Return the file of trained weights: of the zoo, or timm's.

    Raises:
        WeightsUnavailable: if there are none.
    """
    if architecture not in COMPACT:
        return stored.pretrained_file(architecture)
    if path := shipped_file(name):
        return path
    raise stored.WeightsUnavailable(f"this package holds no trained weights of {name}; `privlab train` makes some.")


def resolve(name: str) -> tuple[str, str]:
    """Return timm's name of the architecture and our variant of it."""
    if name.startswith("timm:"):
        architecture, variant = name.removeprefix("timm:"), ""
        if not timm.is_model(architecture.split(".")[0]):
            raise unknown_name("timm model", architecture, timm.list_models(["vit_*", "deit*"]))
        tagged = timm.list_pretrained(f"{architecture.split('.')[0]}.*")
        if "." in architecture and architecture not in tagged:
            raise unknown_name("timm model", architecture, tagged)
        return architecture, variant
    return resolve_own(name)


def _create(
    architecture: str,
    variant: str,
    img_size: int | None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    seed: int = 0,
    classes: int | None = None,
) -> Vit:
    """Build the architecture with random weights, leaving torch's global random state alone.

    Args:
        architecture: timm's name of it, or that of a compact one of `COMPACT`.
        variant: "_nope", "_mjp" or "".
        img_size: the side of the input, in pixels; None leaves timm's.
        options: further ones of timm's model.
        seed: of the weights.
        classes: of the head; None leaves timm's.
    """
    options = dict(COMPACT.get(architecture, {})) | dict(options)
    if classes is not None:
        options["num_classes"] = classes
    if img_size is not None:
        options["img_size"] = img_size
    if variant == "_nope":
        options["pos_embed"] = "none"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = timm.create_model(BASE if architecture in COMPACT else architecture, **options)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise PrivlabError(
                f"timm cannot build {architecture} with {options or 'its defaults'}: {one_line(error)}."
            ) from error
    check_plain(made)
    return cast("Vit", made)


def _grey(state: stored.State) -> bool:
    proj = state.get("patch_embed.proj.weight")
    return proj is not None and proj.ndim == 4 and proj.shape[1] == 1


def _classes(state: stored.State) -> int | None:
    head = state.get("head.weight")
    return None if head is None or head.ndim != 2 else len(head)


def _random_unknown(vit: Vit, seed: int) -> Tensor:
    """Draw E_unk as timm draws position embeddings."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.init.trunc_normal_(torch.empty(1, 1, vit.embed_dim), std=0.02)


def _mean_pe(vit: Vit) -> Tensor:
    assert vit.pos_embed is not None
    return vit.pos_embed.detach()[:, -vit.patch_embed.num_patches :].mean(1, keepdim=True)


def _assemble(
    name: str,
    architecture: str,
    vit: Vit,
    origin: str,
    unknown: Tensor | None = None,
    unknown_origin: UnknownOrigin | None = None,
) -> Victim:
    config = resolve_model_data_config(vit)
    channels = getattr(getattr(vit.patch_embed, "proj", None), "in_channels", 3)
    config |= {key: of_channels(config[key], channels) for key in ("mean", "std")}
    state = dict(vit.state_dict()) | ({} if unknown is None else {"unk_embed": unknown})
    model = VictimModel(vit.eval(), config["mean"], config["std"], unknown).requires_grad_(False)
    preprocessing = Preprocessing(
        size=model.image_shape[1:],
        mean=config["mean"],
        std=config["std"],
        crop_pct=config["crop_pct"],
        interpolation=config["interpolation"],
    )
    return Victim(name, architecture, model, preprocessing, Weights(origin, stored.hash_of(state), unknown_origin))

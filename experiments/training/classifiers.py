"""Classifiers that are trained and evaluated, but not attacked: Swins, ResNets, ViTs with relative PEs or indices."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Bool, Float, Int
from timm.data import resolve_model_data_config
from timm.layers import resample_abs_pos_embed
from timm.models import model_entrypoint, swin_transformer
from timm.models.resnet import ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError, one_line, warn
from privlab.experiments.training.classifier_names import CLASSIFIERS, check_classifier_name
from privlab.experiments.training.relative_attention import TABLE, RelativeBlock
from privlab.images import Preprocessing
from privlab.patches import slots_to_pixels
from privlab.victims import from_any_layout, own_layout
from privlab.victims import weights as stored
from privlab.victims.model import VictimModel, check_classifies
from privlab.victims.named import UnknownOrigin, Victim, Weights, resolve, victim, weights_file

_MODULES = {"timm.models.swin_transformer": SwinTransformer, "timm.models.resnet": ResNet}


class TimmClassifier(nn.Module):
    """A timm classifier that takes pixels in [0, 1] and has no position embeddings: MJP shuffles its images, no more.

    Args:
        net: the classifier.
        shape: (c, h, w) of the input.
        patch: the side of the pieces that the jigsaw moves, in pixels; by default 16, and 4 for sides below 128.
        mean: the mean of each colour, for which the network was made.
        std: the standard deviation of each colour.

    Raises:
        PrivlabError: if the sides are no multiples of `patch`, or the network does not classify.

    Source: MJP (CVPR 2023), Section 5.1. Its authors' code evaluates every backbone by pieces of 16 at 224 pixels.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: Any,  # noqa: ANN401  # timm's models share no type
        shape: tuple[int, int, int],
        mean: Sequence[float],
        std: Sequence[float],
        patch: int | None = None,
    ) -> None:
        super().__init__()
        self.net, self.image_shape = net, shape
        self.patch = patch or (16 if min(shape[1:]) >= 128 else 4)
        if any(side % self.patch for side in shape[1:]):
            raise PrivlabError(
                f"The sides of the input must be multiples of the jigsaw's pieces, {self.patch} pixels. "
                f"Found {shape[1]}×{shape[2]}."
            )
        if net.num_classes < 1:
            raise PrivlabError("A victim classifies. Found a model without classifier (num_classes = 0).")
        self.unk_embed: nn.Parameter | None = None
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.net.num_classes

    @property
    def grid(self) -> tuple[int, int]:
        """Return the number of pieces in a column and in a row."""
        return self.image_shape[1] // self.patch, self.image_shape[2] // self.patch

    @property
    def slot_pe(self) -> Float[Tensor, "m d"] | None:
        """Return the learnt PEs; None where there are none."""
        return None

    def slots(self, masked: Bool[Tensor, "b n"]) -> Bool[Tensor, "b m"]:
        """Return which PEs belong to masked pieces."""
        return masked

    def maps(self, images: Float[Tensor, "b c h w"], told: Tensor | None = None) -> Float[Tensor, "b ..."]:
        """Return the features before pooling."""
        if told is not None:
            raise PrivlabError("MJP masks position embeddings, and this model has none. Use a `_mjp` victim.")
        return self.net.forward_features((images - self.mean) / self.std)

    def features(self, images: Float[Tensor, "b c h w"], told: Tensor | None = None) -> Float[Tensor, "b d"]:
        """Return what the classifier reads: pooled, where ViTs have F_cls."""
        return self.net.forward_head(self.maps(images, told), pre_logits=True)

    def logits(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b y"]:
        """Return the logits of `features`."""
        return self.net.get_classifier()(features)

    def forward(self, images: Float[Tensor, "b c h w"], told: Tensor | None = None) -> Float[Tensor, "b y"]:
        """Return the logits of images in [0, 1]; `told` is what `position_hint` gives of a shuffle."""
        return self.logits(self.features(images, told))


class SwinModel(TimmClassifier):
    """timm's Swin; with `unknown`, also absolute PEs of its patches, which timm's lacks, and E_unk, both drawn.

    A piece of the jigsaw covers one or more of Swin's patches, and masks the PEs of all of them.

    Source: MJP, Section 5.1 ("we add MJP to the absolute PEs of Swin-T"); Swin (Liu et al. 2021), Section 3.2.
    """

    def __init__(
        self,
        net: Any,  # noqa: ANN401
        mean: Sequence[float],
        std: Sequence[float],
        patch: int | None = None,
        *,
        unknown: bool = False,
    ) -> None:
        embed = net.patch_embed
        (height, width), side = embed.grid_size, embed.patch_size[0]
        super().__init__(net, (embed.proj.in_channels, height * side, width * side), mean, std, patch)
        self.pos_embed: nn.Parameter | None = None
        if unknown:
            self.pos_embed = _draw_embeddings(height * width, net.embed_dim)
            self.unk_embed = _draw_embeddings(1, net.embed_dim)

    @property
    def grid(self) -> tuple[int, int]:
        """Return the number of PEs in a column and in a row."""
        return self.net.patch_embed.grid_size

    @property
    def slot_pe(self) -> Float[Tensor, "m d"] | None:
        """Return the learnt PEs; None where there are none."""
        return None if self.pos_embed is None else self.pos_embed[0]

    def no_weight_decay(self) -> set[str]:
        """Return the names that timm's optimisers spare weight decay: relative position biases, as in Swin's recipe."""
        return {f"net.{name}" for name in self.net.no_weight_decay()}

    def slots(self, masked: Bool[Tensor, "b n"]) -> Bool[Tensor, "b m"]:
        """Return which PEs belong to masked pieces."""
        return slots_to_pixels(masked, super().grid, self.patch // self.net.patch_embed.patch_size[0]).flatten(1)

    def maps(self, images: Float[Tensor, "b c h w"], told: Tensor | None = None) -> Float[Tensor, "b _ _ _"]:
        """Return the features before pooling; E_unk replaces the PEs of the pieces that `told` marks."""
        if self.pos_embed is None or self.unk_embed is None:
            return super().maps(images, told)
        pe = self.pos_embed
        if told is not None:
            pe = torch.where(self.slots(told)[..., None], self.unk_embed, pe)
        tokens = self.net.patch_embed((images - self.mean) / self.std) + pe.unflatten(1, self.grid)
        return self.net.norm(self.net.layers(tokens))


class _ViT(TimmClassifier):
    """timm's ViT, for kinds of position information that victims do not have."""

    def __init__(self, net: VisionTransformer, mean: Sequence[float], std: Sequence[float]) -> None:
        embed = net.patch_embed
        (height, width), side = embed.grid_size, embed.patch_size[0]
        super().__init__(net, (embed.proj.in_channels, height * side, width * side), mean, std, side)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns by which timm tells the layers, as `VictimModel` does."""
        stem = r"^net\.(?:cls_token|reg_token|pos_embed|idx_embed|patch_embed|norm_pre)"
        return {"stem": stem, "blocks": [(r"^net\.blocks\.(\d+)", None)]}


class IndexedViT(_ViT):
    """timm's ViT with an embedding of each patch's own index beside its slot's PE: z_n = x_n E + E_pos^n + E_idx^i.

    i = order[n] is the index, in the image as it was, of the patch that slot n holds; without an order n itself.

    Source: MJP, Section 5.3: IDX, "embeddings to indicate the global indexes for the input patches" (Table 4, F).
    """

    def __init__(self, net: VisionTransformer, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(net, mean, std)
        net.idx_embed = _draw_embeddings(net.patch_embed.num_patches, net.embed_dim)

    @property
    def slot_pe(self) -> Float[Tensor, "n d"]:
        """Return the learnt PEs of the slots."""
        return self.net.pos_embed[0, -self.net.patch_embed.num_patches :]

    def maps(self, images: Float[Tensor, "b c h w"], told: Tensor | None = None) -> Float[Tensor, "b t d"]:
        """Return the tokens before pooling; `told` is the order of the patches."""
        net, index = self.net, self.net.idx_embed[0]
        tokens = net.patch_embed((images - self.mean) / self.std) + (index if told is None else index[told])
        return net.norm(net.blocks(net.norm_pre(net.patch_drop(net._pos_embed(tokens)))))

    def complete(self, state: stored.State, pe: Tensor | None, name: str) -> stored.State:
        """Return a state with its PEs, and index embeddings of zero where it has none: the same function as without.

        Args:
            state: the weights by timm's names, without absolute PEs.
            pe: the absolute PEs of the same file, 1 × t × d; None where it has none.
            name: name of the model, for the warning.

        Warns:
            PrivlabWarning: if there are none.
        """
        if "idx_embed" not in state:
            warn(f"{name}: the weights hold no index embeddings; they begin at zero, UNTRAINED.")
            state = state | {"idx_embed": torch.zeros_like(self.net.idx_embed)}
        return state if pe is None else state | {"pos_embed": pe}


class RelativeViT(_ViT):
    """timm's ViT without absolute PEs, each block with a 2-D relative position bias (`RelativeBlock`)."""

    def __init__(self, net: VisionTransformer, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(net, mean, std)
        parts = (RelativeBlock(block, net.patch_embed.grid_size, net.num_prefix_tokens) for block in net.blocks)
        net.blocks = nn.Sequential(*parts)

    def complete(self, state: stored.State, pe: Tensor | None, name: str) -> stored.State:
        """Return a state with biases of zero where it has none: the same function as without.

        Args:
            state: the weights by timm's names, without absolute PEs.
            pe: the absolute PEs of the same file, which are left out; None where it has none.
            name: name of the model, for the warnings.

        Warns:
            PrivlabWarning: if there are none, or absolute PEs, which are left out.
        """
        if pe is not None:
            warn(f"{name}: the weights were trained with absolute position embeddings, which are left out here.")
        own = {key: table for key, table in self.net.state_dict().items() if key.endswith(TABLE)}
        if not own.keys() <= state.keys():
            warn(f"{name}: the weights hold no relative position biases; they begin at zero, UNTRAINED.")
        return own | state


Classifier = VictimModel | TimmClassifier
"""What `classify` and `mjp` train, and `privlab evaluate` scores."""


def position_hint(
    model: Classifier, masked: Bool[Tensor, "b n"], order: Int[Tensor, "b n"], *, unknown: bool
) -> Tensor | None:
    """Return what a model is told of x̃: its order if it has index embeddings, else the mask for E_unk, or nothing.

    Args:
        model: the classifier.
        masked: the slots that the jigsaw shuffled.
        order: the number of the patch that each slot of x̃ holds.
        unknown: whether E_unk replaces the PEs of the masked slots.
    """
    return order if isinstance(model, IndexedViT) else masked if unknown else None


@dataclass(frozen=True, eq=False)
class NamedClassifier:
    """A classifier that is no victim of attacks, and what identifies it."""

    name: str
    architecture: str
    model: TimmClassifier
    preprocessing: Preprocessing
    weights: Weights

    def to(self, device: torch.device | str) -> "NamedClassifier":
        """Return this classifier on another device."""
        if self.model.mean.device == torch.device(device):
            return self
        return replace(self, model=copy.deepcopy(self.model).to(device))


def classifier(
    name: str, *, weights: str | Path = "auto", img_size: int | None = None, seed: int = 0
) -> Victim | NamedClassifier:
    """Make a victim, or one of `CLASSIFIERS` or of timm's Swins and ResNets.

    Args:
        name: a name of `victim_names()` or of `CLASSIFIERS`, "timm:NAME", or the name of a Swin of `CLASSIFIERS` with
            `_mjp`.
        weights: "auto" (pretrained where they can be had, else random, with a warning), "pretrained", "random", or a
            file.
        img_size: the side of the input, in pixels; position embeddings are resized to it. None for the model's own.
        seed: seed of random weights.

    Raises:
        PrivlabError: for an unknown name, weights that do not fit, or a model without classifier.

    Warns:
        PrivlabWarning: for weights that weaken a verdict: random ones, untrained PEs or E_unk.
    """
    base, unknown = name.removesuffix("_mjp"), name.endswith("_mjp")
    if base in CLASSIFIERS:
        source, options = CLASSIFIERS[base]
        architecture = base if options else source
    elif name.startswith("timm:") and _family(name) is not None:
        (source, _), options, unknown = resolve(name), {}, False
        architecture = source
    else:
        check_classifier_name(name)
        made = victim(name, weights=weights, img_size=img_size, seed=seed)
        check_classifies(made.model)
        return made
    if unknown and _family(source) is not SwinTransformer:
        what = "E_unk" if base.endswith("_idx") else "position embeddings, and so no E_unk"
        hint = "--set unknown=false --set dal=none"
        raise PrivlabError(f"{base} has no {what}. Found {name}: train {base}, with {hint}.")
    path = weights_file(name, architecture, str(weights), seed)
    state = None if path is None else stored.read_state(path)
    kind = {"idx": IndexedViT, "relpos": RelativeViT}.get(base.rpartition("_")[2])
    model, preprocessing = _build(source, options, state, kind, unknown=unknown, img_size=img_size, seed=seed)
    origin, whence = "random", "random" if unknown else None
    if path is not None and state is not None:
        origin = f"pretrained:{architecture}" if weights in ("auto", "pretrained") else f"file:{path.name}"
        whence = _fill(model, state, name, path.name, resize=img_size is not None)
    facts = Weights(origin, stored.hash_of(own_layout(model)), whence)
    return NamedClassifier(name, architecture, model.eval().requires_grad_(False), preprocessing, facts)


def _family(name: str) -> type[nn.Module] | None:
    """Return the class of the model that timm builds by a name; None where it is neither a Swin nor a ResNet."""
    base = name.removeprefix("timm:").split(".")[0]
    return _MODULES.get(model_entrypoint(base).__module__) if timm.is_model(base) else None


def _build(
    source: str,
    options: dict[str, Any],
    state: stored.State | None,
    kind: type[_ViT] | None,
    *,
    unknown: bool,
    img_size: int | None,
    seed: int,
) -> tuple[TimmClassifier, Preprocessing]:
    """Build the network with random weights, leaving torch's global random state alone."""
    swin = _family(source) is SwinTransformer
    options = options | ({"img_size": img_size} if (swin or kind) and img_size is not None else {})
    heads = [state[key] for key in ("head.fc.weight", "head.weight", "fc.weight") if state and key in state]
    if heads and heads[0].ndim == 2:
        options = options | {"num_classes": len(heads[0])}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            net: Any = timm.create_model(source, **options)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise PrivlabError(
                f"timm cannot build {source} with {options or 'its defaults'}: {one_line(error)}."
            ) from error
        config = resolve_model_data_config(net)
        channels, height, width = config["input_size"]
        if swin:
            model: TimmClassifier = SwinModel(net, config["mean"], config["std"], unknown=unknown)
        elif kind:
            model = kind(net, config["mean"], config["std"])
        else:
            shape = (channels, img_size or height, img_size or width)
            model = TimmClassifier(net, shape, config["mean"], config["std"])
    cut = {key: config[key] for key in ("mean", "std", "crop_pct", "interpolation")}
    return model, Preprocessing(size=model.image_shape[1:], **cut)


def _fill(model: TimmClassifier, state: stored.State, name: str, source: str, *, resize: bool) -> UnknownOrigin | None:
    """Load weights in timm's, privlab's, Swin's authors' or the MJP authors' layout; return where E_unk comes from."""
    state = from_any_layout(state)
    table, pe = state.pop("absolute_pos_embed.weight", None), state.pop("absolute_pos_embed", None)
    pe, unknown = state.pop("pos_embed", pe), state.pop("unk_embed", None)
    if table is not None:  # N patches, and unknown (last)
        pe, unknown = table[None, :-1], table[None, -1:]
    if isinstance(model, SwinModel):
        state = _of_swin(model.net, state, resize=resize)
    if isinstance(model, RelativeViT | IndexedViT):
        state, pe = model.complete(state, pe, name), None
    stored.fill(model.net, state, source)
    if isinstance(model, SwinModel) and model.pos_embed is not None and model.unk_embed is not None:
        return _fill_pe(model, pe, unknown, name, source, resize=resize)
    if pe is not None or unknown is not None:
        raise PrivlabError(f"The weights of {source} hold position embeddings, which {name} lacks. Use {name}_mjp.")
    return None


def _of_swin(net: SwinTransformer, state: stored.State, *, resize: bool) -> stored.State:
    """Return a Swin's state under timm's names; what cannot be translated is returned as it is.

    `fill` then refuses it with the names and shapes.

    Args:
        net: the model that the state is for; it is left as it is.
        state: the tensors, by timm's names or those of Swin's authors.
        resize: whether relative position biases of another size are resized.
    """
    want, proj = net.state_dict(), "patch_embed.proj.weight"
    fixed = [k for k in want if k == proj or (not resize and k.endswith("relative_position_bias_table"))]
    if any(k in state and state[k].shape != want[k].shape for k in fixed):
        return state
    # What cannot be translated is refused later, by its names and shapes.
    with suppress(AttributeError, RuntimeError, ValueError, IndexError, AssertionError):
        return swin_transformer.checkpoint_filter_fn(state, net)
    return state


def _fill_pe(
    model: SwinModel, pe: Tensor | None, unknown: Tensor | None, name: str, source: str, *, resize: bool
) -> UnknownOrigin:
    """Load the absolute PEs and E_unk, if there are any; return where E_unk comes from."""
    assert model.pos_embed is not None
    assert model.unk_embed is not None
    if pe is None:
        warn(f"{name}: the weights hold no absolute position embeddings; random ones and E_unk stand in, UNTRAINED.")
        return "random"
    if resize and pe.shape[1:] != model.pos_embed.shape[1:]:
        with suppress(RuntimeError, ValueError, IndexError):  # an impossible grid is refused below, by its shapes
            pe = resample_abs_pos_embed(pe, list(model.grid), num_prefix_tokens=0)
    trained = unknown is not None
    if unknown is None:
        warn(f"{name}: the weights hold no E_unk; the mean position embedding stands in, UNTRAINED.")
        unknown = pe.mean(1, keepdim=True)
    for key, own, found in (("pos_embed", model.pos_embed, pe), ("unk_embed", model.unk_embed, unknown)):
        if found.shape != own.shape:
            shapes = f"{key} {tuple(found.shape)} instead of {tuple(own.shape)}"
            hint = "" if resize else " (--img-size resizes position embeddings)"
            raise PrivlabError(f"The weights of {source} do not fit this model. mis-shaped: {shapes}{hint}.")
        own.data.copy_(found)
    return "trained" if trained else "mean-pe"


def _draw_embeddings(n: int, width: int) -> nn.Parameter:
    """Draw position embeddings as Swin's authors do."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, n, width), std=0.02))

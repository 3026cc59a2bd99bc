"""What timm's ViTs have in common: one linear patch embedding, blocks of equal width, and a head; shown as a plain ViT.

EVA-02 and DINOv3 tell every block a rotary embedding, BEiT and the relative-position ViTs a shared bias, and the
distilled DeiT has one more token. Here each gets the attributes of timm's `VisionTransformer`, so that whatever runs
`vit.blocks` on tokens runs them too. Nothing goes by a model's name: what it has decides, and its own logits are the
test.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError, first

if TYPE_CHECKING:
    Vit: TypeAlias = VisionTransformer
else:  # other classes of timm have what this one has (`plain_interface`), and do not inherit from it
    Vit = nn.Module
    """timm's `VisionTransformer`, or another ViT of timm with all that one has."""

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")
"""The learned tokens before those of the patches, in their order; a model has some of them or none."""

TELLERS = {"rope": "rope", "rel_pos_bias": "shared_rel_pos_bias", "shared_rel_pos": "shared_rel_pos"}
"""The module by which a model knows places besides its position embeddings -> the argument of its blocks for it."""

_OPTIONAL = ("pos_embed", "cls_token", "reg_token", "patch_drop", "attn_pool")
"""Attributes of timm's `VisionTransformer` that other ViTs may lack; None says so."""


@dataclass(frozen=True, eq=False)
class _Teller:
    """A hook before a block that adds what it gets of places; an object, since a copied model then has its own."""

    argument: str
    source: nn.Module
    grid: tuple[int, int]
    block: int
    of_each: bool

    def __call__(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, given | self.told()

    def told(self) -> dict[str, Tensor]:
        """Return the argument and its value."""
        source: Any = self.source
        if self.argument == "rope":
            value = source.get_embed(shape=self.grid)
        else:
            value = source.get_bias() if hasattr(source, "get_bias") else source()
        return {self.argument: value[self.block] if self.of_each else value}


def unwrapped(model: Any) -> Any:  # noqa: ANN401
    """Return the model inside the wrappers of `torch.compile`, DataParallel and DistributedDataParallel.

    Anything else, and other wrappers, which may change what it computes, are returned as they are.
    """
    while True:
        if type(model).__name__ == "OptimizedModule" and "_orig_mod" in vars(model).get("_modules", {}):
            model = model._modules["_orig_mod"]
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def is_changed(module: nn.Module) -> bool:
    """Return whether a module has hooks, or own methods in place of its class's."""
    hooks = {**module._forward_hooks, **module._forward_pre_hooks}.values()
    replaced = any(callable(value) and hasattr(type(module), name) for name, value in vars(module).items())
    backward = module._backward_hooks or module._backward_pre_hooks
    return replaced or bool(backward) or any(not isinstance(hook, _Teller) for hook in hooks)


def changed_parts(model: nn.Module) -> list[str]:
    """Return the paths of a model's modules that `is_changed` finds."""
    return [path or "the model" for path, module in model.named_modules() if is_changed(module)]


def causes(model: nn.Module) -> str:
    """Return which parts of a model hooks or replaced methods change, as the end of a sentence; "" if none is."""
    hooked = [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
    changed = changed_parts(model) + hooked
    return f"; changed by hooks or replaced methods: {first(changed, 3)}" if changed else ""


def told_of_places(block: nn.Module) -> dict[str, Tensor]:
    """Return what a block of a `plain_interface` gets of places besides its tokens, by argument; often nothing."""
    hooks = block._forward_pre_hooks.values()
    return {name: value for hook in hooks if isinstance(hook, _Teller) for name, value in hook.told().items()}


def plain_interface(vit: nn.Module) -> Vit:
    """Return a ViT that `check_plain` passes as it is if it is a `VisionTransformer`, else a copy with all one has."""
    if type(vit) is VisionTransformer:
        return vit
    made: Any = copy.deepcopy(vit)
    for name in _OPTIONAL:
        if not hasattr(made, name):
            setattr(made, name, None)
    for name in ("norm_pre", "pos_drop"):
        if not hasattr(made, name):
            setattr(made, name, nn.Identity())
    made.blocks = nn.Sequential(*made.blocks)
    grid = made.patch_embed.grid_size
    for name, argument in TELLERS.items():
        if getattr(made, name, None) is not None:
            of_each = name == "rope" and bool(getattr(made, "rope_mixed", False))
            for i, block in enumerate(made.blocks):
                teller = _Teller(argument, getattr(made, name), grid, i, of_each)
                block.register_forward_pre_hook(teller, with_kwargs=True)
    for module in made.modules():
        if hasattr(module, "qkv_bias_separate"):  # the same sum, made where a hook on the layer sees its output
            module.qkv_bias_separate = True
    return cast("Vit", made)


def check_plain(vit: object) -> None:
    """Check that a model is a ViT of timm: a patch embedding, one sequence of blocks, a norm and a head.

    Raises:
        PrivlabError: if it is not, with the class that was found, its module, and what it lacks.
    """
    if lacks := _lacks(vit):
        kind = type(vit)
        whence = "" if kind.__module__ == "builtins" else f" of {kind.__module__}"
        raise PrivlabError(
            f"A victim is a ViT of timm. Found {kind.__name__}{whence}, {lacks}. Give a name of "
            "`privlab list victims`, timm:NAME, or what timm.create_model makes of a ViT."
        )


def _lacks(vit: object) -> str:
    """Return the first part of a ViT of timm that a model lacks; "" if it has them all."""
    parts: Any = vit
    if not isinstance(vit, nn.Module) or not isinstance(getattr(vit, "patch_embed", None), nn.Module):
        return "which has no patch embedding"
    if not isinstance(getattr(vit, "blocks", None), nn.ModuleList | nn.Sequential):
        if isinstance(getattr(vit, "layers", None), nn.Module):
            return "whose stages cut tokens into windows and merge them, so that no block sees all"
        return "which has no one sequence of blocks"
    if any(not hasattr(parts, name) for name in ("norm", "head", "embed_dim", "num_prefix_tokens", "num_classes")):
        return "whose tokens do not go through one norm into one head"
    if getattr(parts, "patch_drop", None) is not None and getattr(parts, "rope", None) is not None:
        return "which drops patches under a rotary embedding: build it with patch_drop_rate=0"
    return ""


@contextmanager
def layers_run_once(vit: nn.Module, images: int) -> Iterator[set[str]]:
    """Collect, within the context, the linear and normalising layers that run once, on something of each image.

    A layer that makes a bias of relative places, or the queries of a pooling, reads no image, and one whose weight is
    used without it does not run: the gradients of these are no sum over the tokens of an image. The model is run once
    within the context, on two or more images that are unlike each other.
    """
    runs: dict[str, list[bool]] = {}
    found: set[str] = set()

    def record(path: str, _: nn.Module, __: object, output: Tensor) -> None:
        each = isinstance(output, Tensor) and len(output) == images
        runs.setdefault(path, []).append(each and not torch.equal(output[0], output[1]))

    with ExitStack() as hooks:
        for path, module in vit.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                hooks.enter_context(module.register_forward_hook(partial(record, path)))
        yield found
        found |= {path for path, once in runs.items() if once == [True]}

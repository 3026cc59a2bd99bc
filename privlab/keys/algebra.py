"""Model keys: a Transformer's weights permuted so that they work only with features permuted in the same way.

With c = key.residual, (Z P_C)[..., j] = Z[..., c[j]] and T_(C)(Z P_C) = T(Z) P_C, where T_(C) are the weights that
`apply_key` returns (Permutation Equivariance, CVPR 2024, Eq. 5 to 7, 12, 13; Theorems 4.4, 4.5, 4.7). Gradients and the
state of element-wise optimisers are permuted in the same way. A key is index tensors; no permutation matrix is built.

What may be permuted in a block of width d with h heads of size e and m hidden units:

- `residual`: the d features of the residual stream, one order for the whole backbone: norms, layer scale, the inputs
  of qkv, gate and fc1, the outputs of proj and fc2.
- `heads`: the h heads of each layer.
- `qk`: the outputs of Q and K within each head, the same for both, since their dot product sums over them; one order
  for all heads of a layer where a norm of Q and K shares its weights among them.
- `value`: the outputs of V within each head, with the norm and the gate after them and the inputs of proj.
- `hidden`: the hidden units, fc1's outputs and fc2's inputs; both halves of a gated MLP.

No order mixes features of different heads. The space `full` draws all of these orders independently. `paper` is the
space of the reference generator: one order within heads, the same for all of them, and one order of the heads; together
they are P_C of every W_(C) = P_C⁻¹ W P_C. `residual` permutes the residual stream alone.

Which bits count depends on the adversary. An adversary who has the encrypted weights and wants to use them needs
`residual` only (`residual_bits`: log₂ d! in `full`, log₂ h! e! in `paper`). All other orders cancel inside the backbone
and only hide which of its units is which unit of a public model. None of this is encryption in the cryptographic sense:
against a public base, the weight-matching attack finds every order by assignment, whatever the number of bits.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import torch
from jaxtyping import Int
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.vision_transformer import Attention, Block, ResPostBlock, VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError, check_name, unknown_name
from privlab.keys.layouts import VIT, WeightLayout
from privlab.patches import bits, inverse

Space = Literal["full", "paper", "residual"]
SPACES = ("full", "paper", "residual")


@dataclass(frozen=True)
class ModelShape:
    """What a key must know of a backbone: its sizes, whether heads share a norm of Q and K, and if fc1 is gated."""

    width: int
    depth: int
    heads: int
    head_dim: int
    hidden: int
    qk_norm: bool = False
    glu: bool = False
    family: str = "vit"

    @classmethod
    def of(cls, vit: VisionTransformer) -> "ModelShape":
        """Read the shape of timm's VisionTransformer.

        Raises:
            PrivlabError: if the algebra of a block, attention or MLP is not known; the message names its type.
        """
        for block in vit.blocks:
            _check_type("block", block, (Block, ResPostBlock))
            _check_type("attention", block.get_submodule("attn"), (Attention,))
            _check_type("MLP", block.get_submodule("mlp"), (Mlp, GluMlp, SwiGLU))
        heads = next(module.num_heads for module in vit.modules() if isinstance(module, Attention))
        return cls.of_state(vit.state_dict(), heads)

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], heads: int) -> "ModelShape":
        """Read the shape of weights in timm's layout; they tell everything but the number of heads.

        Raises:
            PrivlabError: if the weights lack tensors of a block, or the number of heads does not divide the number of
                attention features.
        """
        layers = _layers(state)
        width, inner = _matrix(layers, "attn.proj.weight").shape
        hidden = _matrix(layers, "mlp.fc2.weight").shape[1]
        if heads < 1 or inner % heads:
            raise PrivlabError(f"A model of {inner} attention features cannot have {heads} heads: give a divisor.")
        return cls(
            width=width,
            depth=len(layers),
            heads=heads,
            head_dim=inner // heads,
            hidden=hidden,
            qk_norm="attn.q_norm.weight" in layers[0],
            glu="mlp.fc1.weight" in layers[0] and len(layers[0]["mlp.fc1.weight"]) == 2 * hidden,
        )

    @property
    def text(self) -> str:
        """Return the shape as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def fingerprint(self) -> str:
        """Return SHA-256 of the canonical JSON; a key and a model of different shapes differ in it."""
        return hashlib.sha256(f"privlab-shape/1\n{self.text}".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class ModelKey:
    """Orders of a backbone's features: place i holds what was at `order[i]`. The repr shows none of the orders."""

    residual: Int[Tensor, " d"] = field(repr=False)
    heads: Int[Tensor, "l h"] = field(repr=False)
    qk: Int[Tensor, "l h e"] = field(repr=False)
    value: Int[Tensor, "l h e"] = field(repr=False)
    hidden: Int[Tensor, "l m"] = field(repr=False)
    space: Space = "full"

    def orders(self) -> dict[str, Tensor]:
        """Return the index tensors by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "space"}


def new_key(shape: ModelShape, space: str = "full") -> ModelKey:
    """Draw a key uniformly from a space, with the operating system's CSPRNG.

    Raises:
        PrivlabError: if the space is unknown, or is `paper` and the width is not heads × head size.
    """
    d, n, h, e, m = shape.width, shape.depth, shape.heads, shape.head_dim, shape.hidden
    if space == "full":
        qk = _draw(e, n, 1).expand(n, h, e) if shape.qk_norm else _draw(e, n, h)
        return ModelKey(_draw(d), _draw(h, n), qk.contiguous(), _draw(e, n, h), _draw(m, n))
    if space == "residual":
        return residual_only(_draw(d), shape)
    if space != "paper":
        raise unknown_name("key space", space, SPACES)
    if d != h * e:
        raise PrivlabError(f"The paper's keys need width = heads × head size. Found {d} and {h} × {e}: use full.")
    heads, within = _draw(h), _draw(e)
    same = within.expand(n, h, e).contiguous()
    return ModelKey(
        residual=_flat(heads, within),
        heads=heads.expand(n, h).contiguous(),
        qk=same,
        value=same.clone(),
        hidden=torch.arange(m).expand(n, m).contiguous(),
        space="paper",
    )


def residual_only(columns: Int[Tensor, " d"], shape: ModelShape) -> ModelKey:
    """Return the key that permutes the residual stream by `columns` and nothing else (split learning's P_C)."""
    n, h, e, m = shape.depth, shape.heads, shape.head_dim, shape.hidden
    heads, within, hidden = (torch.arange(size, device=columns.device) for size in (h, e, m))
    same = within.expand(n, h, e).contiguous()
    return ModelKey(
        columns, heads.expand(n, h).contiguous(), same, same.clone(), hidden.expand(n, m).contiguous(), "residual"
    )


def key_bits(shape: ModelShape, space: str) -> float:
    """Return log₂ of the number of keys in a space, for a model of this shape.

    `full`: log₂ d! + l (log₂ h! + 2h log₂ e! + log₂ m!), with (h + 1) for 2h if heads share a norm of Q and K.
    """
    if space != "full":
        return residual_bits(shape, space)
    orders_within = shape.heads + (1 if shape.qk_norm else shape.heads)
    layer = bits(shape.heads, shape.hidden) + orders_within * bits(shape.head_dim)
    return bits(shape.width) + shape.depth * layer


def residual_bits(shape: ModelShape, space: str) -> float:
    """Return log₂ of the number of orders of the residual stream: what an unauthorised user has to guess."""
    check_name("key space", space, SPACES)
    return bits(shape.heads, shape.head_dim) if space == "paper" else bits(shape.width)


def apply_key(
    state: Mapping[str, Tensor], key: ModelKey, shape: ModelShape, layout: WeightLayout = VIT
) -> dict[str, Tensor]:
    """Return the weights of T_(C), W_(C)[i, j] = W[rows[i], columns[j]]; the owner's tensors are not changed.

    Gradients, and an optimiser's averages of them, are permuted in the same way (Eq. 6, 12, 13).

    Args:
        state: weights, gradients or averages by their names in `layout`; leading dimensions, such as one per image, are
            kept.
        key: the orders of the axes.
        shape: the sizes of the model that the key is for.
        layout: which axes of which tensors the key permutes.

    Raises:
        PrivlabError: if the key is for another shape, or a tensor is unknown or mis-shaped.
    """
    return _permute(state, key, shape, layout, lambda order: order)


def remove_key(
    state: Mapping[str, Tensor], key: ModelKey, shape: ModelShape, layout: WeightLayout = VIT
) -> dict[str, Tensor]:
    """Return the weights that `apply_key` was given, bit by bit: the inverse of `apply_key` with the same key.

    Args:
        state: weights, gradients or averages of T_(C) by their names in `layout`; leading dimensions are kept.
        key: the orders of the axes.
        shape: the sizes of the model that the key is for.
        layout: which axes of which tensors the key permutes.

    Raises:
        PrivlabError: if the key is for another shape, or a tensor is unknown or mis-shaped.
    """
    return _permute(state, key, shape, layout, inverse)


def check_fits(orders: Mapping[str, Tensor], shape: ModelShape) -> None:
    """Check that the orders of a key are permutations of the sizes that a shape asks for.

    Raises:
        PrivlabError: if an order does not fit; the message names it and says why.
    """
    n, h, e, m = shape.depth, shape.heads, shape.head_dim, shape.hidden
    want = {"residual": (shape.width,), "heads": (n, h), "qk": (n, h, e), "value": (n, h, e), "hidden": (n, m)}
    for name, order in orders.items():
        if tuple(order.shape) != want[name]:
            raise PrivlabError(
                f"The key is for another model: its order '{name}' has shape {tuple(order.shape)}, not {want[name]}."
            )
        if not torch.equal(order.sort(-1).values, torch.arange(order.shape[-1], device=order.device).expand_as(order)):
            raise PrivlabError(f"The key's order '{name}' is not a permutation: each index must occur once.")
    if shape.qk_norm and not (orders["qk"] == orders["qk"][:, :1]).all():
        raise PrivlabError("The key's order 'qk' differs between heads, but the heads share a norm of Q and K.")


def _check_type(kind: str, module: torch.nn.Module, types: tuple[type, ...]) -> None:
    if type(module) not in types:
        names = ", ".join(t.__name__ for t in types)
        raise PrivlabError(f"No key is known for the {kind} {type(module).__name__}. Known are: {names}.")


def _layers(state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each block, after a check that all blocks hold tensors of the same names."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if found := VIT.layer.fullmatch(name):
            layers.setdefault(int(found[1]), {})[found[2]] = tensor
    names = {name for layer in layers.values() for name in layer}
    for index in range(max(layers, default=0) + 1):
        if missing := sorted(names - layers.get(index, {}).keys()):
            raise PrivlabError(f"The weights lack a tensor that other blocks have: 'blocks.{index}.{missing[0]}'.")
    return [layers[index] for index in sorted(layers)] or [{}]


def _matrix(layers: list[dict[str, Tensor]], name: str) -> Tensor:
    if name not in layers[0] or layers[0][name].ndim != 2:
        found = f"shape {tuple(layers[0][name].shape)}" if name in layers[0] else "none"
        raise PrivlabError(f"Weights in timm's layout have a matrix 'blocks.0.{name}'. Found {found}.")
    return layers[0][name]


def _draw(n: int, *lead: int) -> Tensor:
    """Return uniformly random orders of n in the shape (*lead, n), from the operating system's CSPRNG."""
    system, drawn = random.SystemRandom(), []
    for _ in range(math.prod(lead)):
        order = list(range(n))
        system.shuffle(order)
        drawn.append(order)
    return torch.tensor(drawn).view(*lead, n)


def _flat(heads: Int[Tensor, " h"], within: Int[Tensor, "*h e"]) -> Int[Tensor, " he"]:
    """Return the order of all heads' features: place (a, j) holds feature (heads[a], within[a, j])."""
    return (heads[:, None] * within.shape[-1] + within).flatten()


def _axes(key: ModelKey, layer: int, shape: ModelShape) -> dict[str, Tensor]:
    """Return the order of each kind of axis in one layer."""
    qk, value = _flat(key.heads[layer], key.qk[layer]), _flat(key.heads[layer], key.value[layer])
    hidden = key.hidden[layer]
    return {
        "residual": key.residual,
        "head": key.qk[layer, 0],
        "qk": qk,
        "value": value,
        "qkv": torch.cat([qk, len(qk) + qk, 2 * len(qk) + value]),
        "hidden": hidden,
        "up": torch.cat([hidden, len(hidden) + hidden]) if shape.glu else hidden,
    }


def _permute(
    state: Mapping[str, Tensor],
    key: ModelKey,
    shape: ModelShape,
    layout: WeightLayout,
    direction: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    check_fits(key.orders(), shape)
    layers = [
        {name: direction(order) for name, order in _axes(key, layer, shape).items()} for layer in range(shape.depth)
    ]
    return {name: _gather(name, tensor, _orders(name, layers, layout)) for name, tensor in state.items()}


def _orders(name: str, layers: list[dict[str, Tensor]], layout: WeightLayout) -> list[Tensor]:
    """Return one order for each of a tensor's last axes; none for the owner's tensors."""
    if (found := layout.layer.fullmatch(name)) and found[2] in layout.inner and int(found[1]) < len(layers):
        return [layers[int(found[1])][axis] for axis in layout.inner[found[2]]]
    if name in layout.outer:
        return [layers[0][axis] for axis in layout.outer[name]]
    if not found and layout.owner.fullmatch(name):
        return []
    raise PrivlabError(f"The key says nothing of the tensor '{name}': no key for a {len(layers)}-layer model fits it.")


def _gather(name: str, tensor: Tensor, orders: list[Tensor]) -> Tensor:
    want = tuple(len(order) for order in orders)
    if want and tuple(tensor.shape[-len(want) :]) != want:
        raise PrivlabError(f"The key is for another model: '{name}' has shape {tuple(tensor.shape)}, not {want}.")
    for axis, order in enumerate(orders, -len(orders)):
        tensor = tensor.index_select(axis, order.to(tensor.device))
    return tensor

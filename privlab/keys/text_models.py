"""The algebra of model keys for transformers' BERT and GPT-2 (Permutation Equivariance, CVPR 2024, Tables 3 to 5).

    shape, layout = text_shape(model), text_layout(model)
    keyed = apply_key(model.state_dict(), key := new_key(shape), shape, layout)

Embeddings, the final norm of GPT-2, poolers and heads stay with the key's owner. In the columns, both models satisfy
T_(C)(Z P_C) = T(Z) P_C. In the rows, BERT's encoder is equivariant if no row is padding; GPT-2's causal mask admits no
order of rows but the original one.
"""

import re
from typing import Any

from torch import nn

from privlab.base import PrivlabError
from privlab.keys.algebra import ModelShape
from privlab.keys.layouts import WeightLayout, affine, linear

__all__ = ["BERT", "GPT2", "text_layout", "text_shape"]

BERT = WeightLayout(
    layer=re.compile(r"(?:.+\.)?encoder\.layer\.(\d+)\.(.+)"),
    inner={
        **linear("qk", "residual", "attention.self.query", "attention.self.key"),
        **linear("value", "residual", "attention.self.value"),
        **linear("residual", "value", "attention.output.dense"),
        **affine("residual", "attention.output.LayerNorm", "output.LayerNorm"),
        **linear("hidden", "residual", "intermediate.dense"),
        **linear("residual", "hidden", "output.dense"),
    },
    outer={},
    owner=re.compile(r".+"),
)
"""BERT: norms after the residual sums, separate Q, K and V."""

GPT2 = WeightLayout(
    layer=re.compile(r"(?:.+\.)?h\.(\d+)\.(.+)"),
    inner={
        **affine("residual", "ln_1", "ln_2"),
        **linear("qkv", "residual", "attn.c_attn", transposed=True),
        **linear("residual", "value", "attn.c_proj", transposed=True),
        **linear("hidden", "residual", "mlp.c_fc", transposed=True),
        **linear("residual", "hidden", "mlp.c_proj", transposed=True),
    },
    outer={},
    owner=re.compile(r".+"),
)
"""GPT-2: its Conv1D holds weights as inputs × outputs."""


def text_layout(model: nn.Module) -> WeightLayout:
    """Return the layout of a BERT or GPT-2 of transformers, with or without a head.

    Raises:
        PrivlabError: if it is another model; the message names its type.
    """
    return {"bert": BERT, "gpt2": GPT2}[_family(model)]


def text_shape(model: nn.Module) -> ModelShape:
    """Read the shape of a BERT or GPT-2 of transformers.

    Raises:
        PrivlabError: if it is another model; the message names its type.
    """
    family, config = _family(model), _config(model)
    width, heads = config.hidden_size, config.num_attention_heads
    hidden = config.intermediate_size if family == "bert" else config.n_inner or 4 * width
    return ModelShape(width, config.num_hidden_layers, heads, width // heads, hidden, family=family)


def _config(model: nn.Module) -> Any:  # noqa: ANN401
    return getattr(model, "config", None)


def _family(model: nn.Module) -> str:
    family = getattr(_config(model), "model_type", type(model).__name__)
    if family not in ("bert", "gpt2"):
        raise PrivlabError(f"Keys of text models are known for bert and gpt2. Found {family}.")
    return family

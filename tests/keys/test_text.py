"""The theorems on transformers' BERT and GPT-2, small and random, in float64 (Permutation Equivariance, CVPR 2024).

Embeddings, the final norm of GPT-2, poolers and heads stay with the key's owner. In the columns, both models satisfy
T_(C)(Z P_C) = T(Z) P_C. In the rows, BERT's encoder is equivariant if no row is padding; GPT-2's causal mask admits no
order of rows but the original one.
"""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.keys import ModelKey, ModelShape, WeightLayout, apply_key, new_key, remove_key, residual_only
from privlab.keys.layouts import affine, linear
from privlab.patches import draw_orders, permute_features, restore_features

transformers = pytest.importorskip("transformers")
exact = {"rtol": 1e-9, "atol": 1e-9}
SIZES = {"vocab_size": 11, "attn_implementation": "eager"}

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
    return {"bert": BERT, "gpt2": GPT2}[model.config.model_type]


def text_shape(model: nn.Module) -> ModelShape:
    config = model.config
    hidden = config.intermediate_size if config.model_type == "bert" else config.n_inner
    heads, width = config.num_attention_heads, config.hidden_size
    return ModelShape(width, config.num_hidden_layers, heads, width // heads, hidden, family=config.model_type)


def bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=24,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2Model(
        transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=8, n_inner=24, n_positions=8, bos_token_id=0, eos_token_id=0,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **SIZES,
        )
    )  # fmt: skip


@pytest.fixture(params=[bert, gpt2])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return seeded(request.param)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = make().double()
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made


def backbone(model: nn.Module, Z: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return T(Z). GPT-2 adds its positions and its last norm itself: the owner permutes these for it."""
    if text_shape(model).family == "bert":
        return model.encoder(Z).last_hidden_state
    owned = {"wpe.weight": model.wpe.weight * 0}
    if columns is not None:
        owned |= {f"ln_f.{kind}": getattr(model.ln_f, kind)[columns] for kind in ("weight", "bias")}
    return torch.func.functional_call(model, owned, kwargs={"inputs_embeds": Z}, strict=False).last_hidden_state


def features(seed: int = 1) -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def keyed(model: nn.Module, key: ModelKey) -> nn.Module:
    twin = copy.deepcopy(model)
    twin.load_state_dict(apply_key(model.state_dict(), key, text_shape(model), text_layout(model)), strict=True)
    return twin


def loss_of(model: nn.Module, columns: Tensor | None = None) -> Tensor:
    Z = permute_features(features(), columns=columns)
    return (restore_features(backbone(model, Z, columns), columns=columns) - features(2)).square().mean()


def layers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the layers: what the server holds and trains."""
    return {name: tensor for name, tensor in state.items() if "layer." in name or name.startswith("h.")}


def gradients(model: nn.Module, columns: Tensor | None = None) -> dict[str, Tensor]:
    parameters = layers(dict(model.named_parameters()))
    return dict(zip(parameters, torch.autograd.grad(loss_of(model, columns), list(parameters.values())), strict=True))


def trained(model: nn.Module, optimiser: str, columns: Tensor | None = None) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    parameters = list(layers(dict(model.named_parameters())).values())
    options = {"lr": 0.01, "weight_decay": 0.05} | ({"momentum": 0.9} if optimiser == "SGD" else {})
    steps = getattr(torch.optim, optimiser)(parameters, **options)
    for _ in range(4):
        steps.zero_grad()
        loss_of(model, columns).backward()
        steps.step()
    return layers(model.state_dict())


@pytest.mark.parametrize("space", ["full", "paper", "residual"])
def test_columns_go_through_the_keyed_backbone(model: nn.Module, space: str) -> None:
    """Theorem 4.4."""
    key, Z = new_key(text_shape(model), space), features()
    through = backbone(keyed(model, key), permute_features(Z, columns=key.residual), key.residual)
    assert_close(through, permute_features(backbone(model, Z), columns=key.residual), **exact)
    without = backbone(keyed(model, key), Z, key.residual)
    assert (without - permute_features(backbone(model, Z), columns=key.residual)).abs().max() > 0.1


def test_gradients_are_permuted_as_the_weights_are(model: nn.Module) -> None:
    """Theorem 4.5."""
    shape, layout = text_shape(model), text_layout(model)
    key = new_key(shape)
    found, expected = gradients(keyed(model, key), key.residual), gradients(model)
    assert max(tensor.abs().max() for tensor in expected.values()) > 1e-3
    for name, tensor in apply_key(expected, key, shape, layout).items():
        assert_close(found[name], tensor, **exact)


@pytest.mark.parametrize("optimiser", ["SGD", "AdamW"])
def test_what_is_learnt_is_permuted_as_the_weights_are(model: nn.Module, optimiser: str) -> None:
    """Corollary 4.6."""
    shape, layout = text_shape(model), text_layout(model)
    key = new_key(shape)
    found = remove_key(trained(keyed(model, key), optimiser, key.residual), key, shape, layout)
    for name, tensor in trained(model, optimiser).items():
        assert_close(found[name], tensor, **exact)
        assert not torch.equal(tensor, model.state_dict()[name])


def test_rows_go_through_bert_and_not_through_gpt2() -> None:
    """Theorem 4.1, without padding; GPT-2's causal mask forbids it."""
    Z, rows = features(), draw_orders(5, [torch.Generator().manual_seed(3)])[0]
    encoder, decoder = seeded(bert), seeded(gpt2)
    assert_close(backbone(encoder, permute_features(Z, rows)), permute_features(backbone(encoder, Z), rows), **exact)
    moved = backbone(decoder, permute_features(Z, rows)) - permute_features(backbone(decoder, Z), rows)
    assert moved.abs().max() > 0.1


@pytest.mark.parametrize(
    ("head", "make"), [("BertForSequenceClassification", bert), ("GPT2LMHeadModel", gpt2)]
)  # the names of a model with a head have a prefix
def test_models_with_heads_are_keyed_too(head: str, make: Callable[[], nn.Module]) -> None:
    model = getattr(transformers, head)(make().config)
    shape, layout, state = text_shape(model), text_layout(model), model.state_dict()
    key = residual_only(torch.arange(64).flip(0), shape)
    found = apply_key(state, key, shape, layout)
    moved = {name for name, tensor in state.items() if not torch.equal(found[name], tensor)}
    assert moved
    assert all(".layer." in name or ".h." in name for name in moved)
    again = remove_key(found, key, shape, layout)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_cross_attention_is_refused() -> None:
    config = bert().config
    config.is_decoder = config.add_cross_attention = True
    model = transformers.BertModel(config)
    shape = text_shape(model)
    with pytest.raises(PrivlabError, match=r"'encoder\.layer\.0\.crossattention"):
        apply_key(model.state_dict(), new_key(shape), shape, text_layout(model))

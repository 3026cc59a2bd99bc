"""LoRA's adapters in a victim: what the server of a federation sends to clients that train them alone."""

import copy

import torch

from privlab.base import PrivlabError
from privlab.victims.model import VictimModel

__all__ = ["adapted"]

_SEED = 0
"""The seed from which the server draws A. It is public, as A is."""


def adapted(model: VictimModel, rank: int) -> VictimModel:
    """Return a copy whose attention computes W u + b + B A u in each block's qkv, with A drawn by peft and B = 0.

    It gives the same logits. The base is `….qkv.base_layer`; A is `….qkv.lora_A.default.weight`, r × D, and B is
    `….qkv.lora_B.default.weight`, 3 D × r. A model that has adapters is returned as it is.

    Args:
        model: the victim; it is left as it is.
        rank: r, ≥ 1.

    Raises:
        PrivlabError: if peft is not installed, or no layer of the model is named qkv.

    Source: LoRA (Hu et al., ICLR 2022), Equation 3 with α = r; peft's `LoraConfig(target_modules=["qkv"])`.
    """
    if any(".lora_A." in name for name, _ in model.vit.named_parameters()):
        return model
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise PrivlabError("client.trains=lora needs peft: pip install 'privlab[peft]'.") from error
    twin = copy.deepcopy(model)
    if not any(path.endswith(".qkv") for path, _ in twin.vit.named_modules()):
        raise PrivlabError("client.trains=lora adapts the layers named qkv. This model has none.")
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.manual_seed(_SEED)
        inject_adapter_in_model(LoraConfig(target_modules=["qkv"], r=rank, lora_alpha=rank), twin.vit)
    return twin.requires_grad_(False)

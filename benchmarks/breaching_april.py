"""breaching's APRIL as it ships, on a model that it accepts: the reference of `privlab bench attack`."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.attacks.breaching.wrapper import Classifier, contain_breaching, require_breaching
from privlab.base import full_precision
from privlab.victims import VictimModel


class BreachingApril:
    """breaching's client and its attack `april_analytic`, one image at a time.

    The attack finds gradients by their position among the parameters (1: pos_embed, 4: the first qkv weight). The april
    block has these positions, because no norm precedes its attention.
    """

    def __init__(self, april: VictimModel) -> None:
        self.normalise = april.normalise
        self.model = Classifier(copy.deepcopy(april.vit)).requires_grad_(True)
        constants = {"mean": april.mean.flatten().tolist(), "std": april.std.flatten().tolist()}
        metadata = SimpleNamespace(modality="vision", shape=april.image_shape, task="classification", **constants)
        self.payload = {
            "parameters": [p.detach() for p in self.model.parameters()],
            "buffers": [],
            "metadata": metadata,
        }
        self.client, self.attacker = _breaching(self.model, april.mean.device)

    def gradient(self, image: Float[Tensor, "1 c h w"], label: Int[Tensor, " 1"]) -> dict[str, Any]:
        """Return what its client shares: the gradients of all parameters, in their order."""
        data = {"inputs": self.normalise(image), "labels": label}
        with full_precision():
            return self.client.compute_local_updates(self.payload, custom_data=data)[0]

    def attack(self, shared: dict[str, Any]) -> Float[Tensor, "1 c h w"]:
        """Return its reconstruction, normalised: the attack called as it ships."""
        return self.attacker.reconstruct([self.payload], [shared], {}, dryrun=False)[0]["data"]

    def solve(self, shared: dict[str, Any]) -> Tensor:
        """Return its patches: the two linear solves within its attack, alone."""
        return self.attacker.closed_form_april(self.model, shared, solver=self.attacker.cfg.solver)


def _breaching(model: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """Return breaching's client and attack with its own configuration."""
    require_breaching()
    with contain_breaching():
        import breaching
        from breaching.cases.users import UserSingleStep

        setup = {"device": device, "dtype": torch.float}
        loss = nn.CrossEntropyLoss()
        user = breaching.get_case_config("1_single_image_small").user
        user.num_data_points = 1
        client = UserSingleStep(model, loss, None, setup, 0, user)
        client.data_key = "inputs"  # set where it loads data of its own
        return client, breaching.attacks.prepare_attack(
            model, loss, breaching.get_attack_config("april_analytic"), setup
        )

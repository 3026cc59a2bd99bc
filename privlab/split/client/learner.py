"""The client's half: images, labels, F₁, ℓ blocks, F₂, the secret orders; only a `Sent` and a gradient leave it."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.keys import ModelShape, apply_key, residual_only
from privlab.split.protocol import checkpoint
from privlab.split.protocol.backbone import Backbone, own_parameters
from privlab.split.protocol.contract import Contract
from privlab.split.protocol.secret import batch_draws
from privlab.threat import Draws, Sent, Stack
from privlab.victims import VictimModel


class Learner:
    """F₁ and F₂ of a client with their optimiser, after `step` steps; they are a copy of the given model's.

    A step is `begin`, `grade`, `finish`. Its draws depend on the secret and its number alone, so that a step repeated
    after a crash is the same to the last bit. `losses` and `hits` hold the mean loss and the number of correct answers
    of every step.

    Args:
        model: the victim; it is not changed.
        stack: the client's defenses.
        contract: the terms of the session.
        secret: the secret that permutations and noise are drawn from.
        classes: the number of classes of a fresh head that replaces the victim's; None keeps the victim's head.
        seed: the seed of the fresh head's weights.
        device: where F₁ and F₂ compute.
    """

    def __init__(
        self,
        model: VictimModel,
        stack: Stack,
        contract: Contract,
        secret: str,
        *,
        classes: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        if classes is not None:
            self.model.vit.head = _fresh_head(self.model.vit.head, classes, seed)
            self.model.vit.num_classes = classes
        self.model.to(device, contract.torch_dtype)
        self.stack, self.contract, self.secret = stack, contract, secret
        self._own = own_parameters(self.model, contract.cut_layer)
        for parameter in self._own.values():
            parameter.requires_grad_(True)
        self._optimizer = contract.optimizer_of(self._own.values())
        self.step = 0
        self.losses, self.hits = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        self._begun: tuple[Sent, Tensor] | None = None  # what was sent, and its labels, until `finish`

    @property
    def device(self) -> torch.device:
        """Return the device on which F₁ and F₂ compute."""
        return self.model.mean.device

    @property
    def classes(self) -> int:
        """Return the number of classes of F₂."""
        return int(self.model.vit.num_classes)

    @property
    def key_bits(self) -> float:
        """Return the size of the orders that defenses on features draw for an image sent alone, in bits."""
        return self._blank().key_bits

    @property
    def columns(self) -> Int[Tensor, " d"] | None:
        """Return the secret P_C, the same for all batches; None if no defense permutes columns."""
        return self._blank().columns

    def initial_weights(self) -> dict[str, Tensor]:
        """Return T's initial weights permuted by P_C: the server learns neither the weights nor P_C (Eq. 6)."""
        state = self.backbone().state_dict()
        if (columns := self.columns) is None:
            return state
        shape, whole = ModelShape.of(self.model.vit), Backbone(self.model, self.contract.torch_dtype).state_dict()
        keyed = apply_key(whole, residual_only(columns, shape), shape)
        return {name: keyed[name] for name in state}

    def backbone(self) -> Backbone:
        """Return T with the weights that the client's own model has."""
        return Backbone(self.model, self.contract.torch_dtype, self.contract.cut_layer)

    def send(self, images: Float[Tensor, "b c h w"], draws: Draws) -> Sent:
        """Return what the client sends for images in [0, 1]: the tokens behind its ℓ blocks, as defended."""
        images = images.to(self.device, self.contract.torch_dtype)
        feed = self.stack.feed(images, self.model.patch, draws.images, len(images), draws.model)
        tokens = self.model.embed(feed.images, feed.masked_pe, feed.replacement)
        tokens = self.model.client_blocks(tokens, self.contract.cut_layer)
        return self.stack.send(tokens, self.model.vit.num_prefix_tokens, draws)

    def begin(self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"]) -> Float[Tensor, "b t d"]:
        """Return the features of the next step."""
        sent = self.send(images, batch_draws(self.secret, self.step + 1, len(images)))
        self._begun = sent, labels.to(self.device)
        return sent.features.detach()

    def grade(self, outputs: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return ∂ℓ/∂outputs; ℓ is the mean cross-entropy of F₂ on the server's outputs, restored to their order."""
        assert self._begun is not None
        sent, labels = self._begun
        outputs = outputs.detach().requires_grad_()
        logits = self.model.head(sent.restore(outputs))
        loss = F.cross_entropy(logits, labels)
        self._optimizer.zero_grad()
        loss.backward()
        hits = (logits.argmax(1) == labels).sum()
        self.losses = torch.cat([self.losses[: self.step], loss.detach().double().cpu()[None]])
        self.hits = torch.cat([self.hits[: self.step], hits.cpu()[None]])
        assert outputs.grad is not None
        return outputs.grad

    def finish(self, gradient: Float[Tensor, "b t d"]) -> None:
        """Update F₁ and F₂ by one step of the optimiser, given ∂ℓ/∂features."""
        assert self._begun is not None
        self._begun[0].features.backward(gradient)
        self._optimizer.step()
        self._begun = None
        self.step += 1

    def predict(self, outputs: Float[Tensor, "b t d"], sent: Sent) -> Float[Tensor, "b y"]:
        """Return the class probabilities of the server's outputs."""
        with torch.no_grad():
            return self.model.head(sent.restore(outputs)).softmax(1)

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write everything that a later client needs to continue after this step.

        Raises:
            PrivlabError: if the disk is full or the folder cannot be written.
        """
        history = {"losses": self.losses[: self.step], "hits": self.hits[: self.step]}
        state = {f"own.{name}": parameter for name, parameter in self._own.items()}
        averages = checkpoint.optimizer_state(self._optimizer)
        checkpoint.write(path, state | history | averages, facts | {"step": self.step})

    def restore(self, path: Path) -> None:
        """Restore the state that `save` wrote.

        Raises:
            PrivlabError: if it cannot be read.
        """
        tensors, facts = checkpoint.read(path)
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.copy_(tensors[f"own.{name}"])
        self._optimizer = self.contract.optimizer_of(self._own.values())
        checkpoint.restore_optimizer(self._optimizer, tensors)
        self.losses, self.hits = tensors["losses"], tensors["hits"]
        self.step, self._begun = facts["step"], None

    def _blank(self) -> Sent:
        """Return what the client would send for a black image."""
        with torch.no_grad():
            return self.send(torch.zeros(1, *self.model.image_shape), batch_draws(self.secret, 0, 1))


def _fresh_head(old: nn.Module, classes: int, seed: int) -> nn.Linear:
    """Return a new classifier; torch's global random state is not changed."""
    assert isinstance(old, nn.Linear)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(old.in_features, classes)

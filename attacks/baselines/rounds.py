"""A client's round of SGD, run again on guessed images so that these can be searched for; a round as a gradient."""

# A round of SGD is a known map of images: θ_0 ↦ θ_T by the client's public settings. `Round` makes it differentiable by
# the images, so that attacks can search for those that give the released update. `rate_sum`, `mean_gradient` and
# `labels_of_round` take a round for one gradient instead, and read the labels from it.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from privlab.base import PrivlabError
from privlab.release import Update, told_labels, trained_parameters, undecayed
from privlab.threat import Client, client_loss
from privlab.victims import VictimModel

_CLIP_EPS = 1e-6  # what torch adds to the norm that it clips by


def rate_sum(client: Client) -> float:
    """Return Σ_s a_s of −(θ_T − c θ_0) = Σ_s a_s g_s: what a round makes of a gradient of one in each step."""
    # One number stands for a weight that begins at 0 and has the gradient 1 in each step. Decay and momentum act on it
    # as on every weight, so that it ends at −Σ_s a_s.
    moved, buffer = 0.0, None
    for rate in client.rates:
        step = 1 + client.weight_decay * moved
        if client.momentum:
            buffer = step if buffer is None else client.momentum * buffer + (1 - client.dampening) * step
            step = step + client.momentum * buffer if client.nesterov else buffer
        moved -= rate * step
    return -moved


def mean_gradient(model: VictimModel, update: Update, client: Client) -> dict[str, Float[Tensor, "..."]]:
    """Return (θ_0 − θ_T less decay) / Σ_s a_s: the mean of a round's gradients, weighted as SGD weighs them.

    Args:
        model: the server's model with θ_0.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        client: the public settings, of SGD.
    """
    total = rate_sum(client)
    return {name: (u / total).to(update[name]) for name, u in undecayed(model, update, client).items()}


def labels_of_round(model: VictimModel, update: Update, client: Client) -> list[int]:
    """Return the labels of a client's m images in ascending order, guessed where the update does not tell them.

    The mean gradient of a round is taken for that of all images at the head's weights half way, (θ_0 + θ_T) / 2. That
    is exact for one step and for one image.

    Args:
        model: the server's model with θ_0.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        client: the public settings, of SGD.

    Raises:
        PrivlabError: if the update of the head's bias is not released.

    Source: Dimitrov et al. (TMLR 2022), who estimate what labels need at weights between θ_0 and θ_T.
    """
    if "head.bias" not in update:
        raise PrivlabError("Labels are needed, and the update of head.bias is not released to tell them.")
    # The head's mean gradient Σ_s a_s g_s / Σ_s a_s. For one image the label is the class
    # whose bias has a negative gradient.
    of_head = {name: u for name, u in update.items() if name in ("head.weight", "head.bias")}
    g = mean_gradient(model, of_head, client)
    if client.images == 1:
        return [int(g["head.bias"].argmin())]
    head = model.vit.head
    if isinstance(head, nn.Linear) and client.total_steps > 1 and "head.weight" in update:
        # Half of u = θ_0 − θ_T is subtracted from θ_0: the weights half way, at which the
        # mean of several steps' gradients fits.
        half = nn.Linear(head.in_features, head.out_features).to(head.weight)
        half.weight.data.copy_(head.weight - update["head.weight"] / 2)
        half.bias.data.copy_(head.bias - update["head.bias"] / 2)
        head = half
    told = told_labels(head, g, client.images)
    assert told is not None
    return list(told.labels)


@dataclass(frozen=True, eq=False)
class Round:
    """The round that a client makes of images, differentiable by them: (images, labels) ↦ −(θ_T − θ_0) less decay.

    Each pass over the data has its own images, e × m; a last pass may be cut short. Batches are taken in the order
    of the images. Rounding to other number formats is left out.

    Args:
        model: the server's model with θ_0, whose attention is not fused, and none of whose parameters is trained.
        client: the public settings, of SGD without dropout.
        names: the parameters that are returned.

    Raises:
        PrivlabError: if the client does not train by SGD, or draws dropout in private.
    """

    model: VictimModel
    client: Client
    names: Sequence[str]

    def __post_init__(self) -> None:
        """Refuse a client whose round cannot be run again."""
        client = self.client
        why = "" if client.optimiser == "sgd" else f"client.optimiser={client.optimiser}"
        why = f"client.dropout={client.dropout:g}" if client.dropout else why
        why = f"client.drop_path={client.drop_path:g}" if client.drop_path else why
        if why:
            raise PrivlabError(
                f"A round can be run again for SGD without dropout. Found {why}. That this does not apply is no "
                "evidence of privacy."
            )

    @property
    def passes(self) -> int:
        """Return how many passes have their own images: one, where no order distinguishes passes."""
        client = self.client
        if not client.shuffle or client.steps_per_epoch == 1:
            return 1
        return -(-client.total_steps // client.steps_per_epoch)

    @property
    def whole_passes(self) -> int:
        """Return how many of them feed all images; at least one, whose other images then stay as they began."""
        return min(self.passes, max(1, self.client.total_steps // self.client.steps_per_epoch))

    def __call__(
        self, images: Float[Tensor, "e m c h w"], labels: Int[Tensor, " m"]
    ) -> dict[str, Float[Tensor, "..."]]:
        """Return −(θ_T − c θ_0), which images of each pass, with the same labels in each, move through every step."""
        client, prefix = self.client, "vit."
        # θ starts as a leaf that requires a gradient, and each step makes a new θ: the whole round is one graph.
        trained = [name for name in trained_parameters(self.model, client) if name != "unk_embed"]
        start = {name: self.model.vit.get_parameter(name) for name in trained}
        θ = {name: each.detach().requires_grad_() for name, each in start.items()}
        buffer: dict[str, Tensor] = {}
        for s, rate in enumerate(client.rates):
            # Step s takes its batches, in their order, from the images of its pass, or
            # from the only images that there are.
            of_pass, step = divmod(s, client.steps_per_epoch)
            x = images[of_pass % len(images)]
            # Of `accumulation` batches the mean loss is differentiated in one step, as a
            # client accumulates their gradients.
            batches = torch.arange(len(labels)).split(client.batch_size)
            batches = batches[step * client.accumulation :][: client.accumulation]
            own = {prefix + name: each for name, each in θ.items()}
            losses = [
                client_loss(client, functional_call(self.model, own, (x[rows],)), labels[rows]) for rows in batches
            ]
            # The gradient stays in the graph, because the search needs the derivative of the update by the images.
            g = torch.autograd.grad(torch.stack(losses).mean(), list(θ.values()), create_graph=True)
            # Clipping, weight decay and momentum are those of torch.optim.SGD: d = g + λ θ, b ← μ b + (1 − τ) d from
            # b = d on, and θ ← θ − η b or, by Nesterov, θ − η (d + μ b).
            if client.clip is not None:
                norm = torch.stack([each.norm() for each in g]).norm()
                g = [each * (client.clip / (norm + _CLIP_EPS)).clamp(max=1) for each in g]
            for name, each in zip(trained, g, strict=True):
                d = each + client.weight_decay * θ[name]
                if client.momentum:
                    kept = buffer.get(name)
                    buffer[name] = d if kept is None else client.momentum * kept + (1 - client.dampening) * d
                    d = d + client.momentum * buffer[name] if client.nesterov else buffer[name]
                θ[name] = θ[name] - rate * d
        # u less decay: −(θ_T − c θ_0), with c the share of θ_0 that decay leaves.
        return {name: client.kept_share * start[name] - θ[name] for name in self.names}

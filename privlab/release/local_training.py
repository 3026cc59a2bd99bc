"""What clients of a federated round send: each is really trained, by torch's optimisers, on a copy of the victim."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from timm.layers import DropPath
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, full_precision, gradients_enabled, int8_step, to_int8
from privlab.release.effects import AnyDefense, effects_of
from privlab.release.releases import gradient_capabilities, released_names
from privlab.threat import Capability, Client, ClientData, Defense, Observation, Stack, client_loss, private_targets
from privlab.victims import VictimModel, adapted, bottlenecked, check_names, fusing, prompted

Update: TypeAlias = Mapping[str, Float[Tensor, "..."]]
"""What local training moved, or a part of it, by timm's parameter name."""

_FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def served(model: VictimModel, client: Client) -> VictimModel:
    """Return the model that the server sends to a client: with the adapters or prompts that it trains.

    Raises:
        PrivlabError: as in `adapted`, `bottlenecked` or `prompted`.
    """
    match client.trains:
        case "lora":
            return adapted(model, client.rank)
        case "adapters":
            return bottlenecked(model, client.rank)
        case "prompts":
            return prompted(model, client.prompts)
        case _:
            return model


def trained_parameters(model: VictimModel, client: Client, defense: Sequence[Defense] = ()) -> list[str]:
    """Return the timm names of the parameters that a client trains, in the model's order.

    E_unk, `unk_embed`, is the last one where all are trained and a defense of images feeds it; else none uses it.

    Args:
        model: the server's model.
        client: the public settings.
        defense: the defenses of images at work.

    Raises:
        PrivlabError: if the model has none of them, or none that a pattern matches, or freezes them, or can have no
            adapters or prompts.
    """
    model = served(model, client)
    every = [name for name, _ in model.vit.named_parameters()]
    client.check_trains([*every, "unk_embed"] if model.unk_embed is not None else every)
    names = [name for name in every if client.chooses(name) and name not in model.frozen]
    if not names:
        frozen = f"of {len(every)} parameters {len(model.frozen)} have requires_grad=False, call requires_grad_()"
        why = frozen if model.frozen else "this model has no such parameters"
        raise PrivlabError(f"client.trains={client.trains} leaves nothing to train: {why}.")
    if client.chooses("unk_embed") and effects_of(model, defense).pe == "unknown":
        names.append("unk_embed")
    return names


def run_client(
    model: VictimModel, client: Client, data: ClientData, defense: Sequence[Defense] = ()
) -> dict[str, Float[Tensor, "..."]]:
    """Return θ_T − θ_0 of one client by timm's parameter name, as the server has it after subtraction.

    The weights are stored, and their updates rounded, in the model's own number format; so is the difference. What is
    sent is then rounded to `client.sent_as`, and a server that gets weights subtracts θ_0 from them. Layers run as in
    evaluation, except for the client's dropout and drop path. Image defenses draw again for each batch of each step.
    The difference is not finite if the training diverges. A layer that fuses slices trains too, and is left out: it is
    no part of the victim.

    Args:
        model: the server's model with θ_0; it is left as it is.
        client: the public settings.
        data: the client's images, as many as `client.images`, their labels, and the draws of order and dropout.
        defense: the defenses of images at work.

    Raises:
        PrivlabError: if the data are not as many as the client's images, or the loss has labels and the model no
            classifier.
    """
    if not len(data.images) == len(data.labels) == client.images:
        raise PrivlabError(
            f"A client of client.images={client.images} needs as many images and labels. "
            f"Found {len(data.images)} and {len(data.labels)}."
        )
    model = served(model, client)
    names = trained_parameters(model, client, defense)
    own = copy.deepcopy(fusing(model, client.fusion)).eval().requires_grad_(False)
    trained = {name: _parameter(own, name).requires_grad_(True) for name in names}
    of_fusion = [] if own.fusion is None else list(own.fusion.requires_grad_(True).parameters())
    _set_dropout(own, client)
    device = model.mean.device
    targets = private_targets(model, client, data.images, data.labels, data.draw)
    seed = int(torch.randint(2**62, (), generator=data.draw))
    with gradients_enabled(), full_precision(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        _train(own, [*trained.values(), *of_fusion], client, data, targets, Stack(tuple(defense)))
    update = {}
    for name, after in trained.items():
        before, after = _parameter(model, name).detach(), after.detach()
        sent = _rounded(after - before if client.sends == "difference" else after, client.sent_as)
        update[name] = sent if client.sends == "difference" else sent - before
    return update


def update_on(
    model: VictimModel, client: Client, images: Float[Tensor, "b c h w"], target: int | Float[Tensor, "z y"]
) -> dict[str, Float[Tensor, "..."]]:
    """Return −(θ_T − θ_0) of a client that trains on these images: what reconstructions would make of its settings.

    Several images make one batch in each step. Dropout is drawn again.

    Args:
        model: the server's model with θ_0; it is left as it is.
        client: the public settings.
        images: the images, in [0, 1].
        target: the class index of all of them, or the targets of each, or of all slices of a volume, which
            hold smoothing and weights already.

    Raises:
        PrivlabError: as in `run_client`.
    """
    B = len(images)
    if isinstance(target, Tensor):
        client = replace(client, label_smoothing=0.0, class_weights=None)
        labels = target.to(images).expand(B, -1)
    else:
        labels = torch.full((B,), target, device=images.device)
    if B > 1:
        steps = client.total_steps
        client = replace(client, images=B, batch_size=B, accumulation=1, steps=steps, epochs=None, shuffle=False)
    moved = run_client(model, client, ClientData(images, labels, Generator()))
    return {name: -difference for name, difference in moved.items()}


class Replayed(NamedTuple):
    """The first steps of a round: the model after them, and the −(θ_T − θ_0) of a round without any later gradient."""

    model: VictimModel
    update: dict[str, Float[Tensor, "..."]]


def replay(model: VictimModel, client: Client, images: Float[Tensor, "t c h w"], labels: Int[Tensor, " t"]) -> Replayed:
    """Take the first t of T optimiser steps with batches of one, as a client that feeds these images in this order.

    What the client sends less `update` is what later gradients moved: momentum goes on from the first steps, and decay
    takes its share of all weights.

    Args:
        model: the server's model with θ_0; it is left as it is.
        client: the public settings, of batches of one without dropout.
        images: the images of the first t ≤ T steps, in [0, 1].
        labels: their class indices.
    """
    own = copy.deepcopy(model).eval().requires_grad_(False)
    trained = {name: _parameter(own, name).requires_grad_(True) for name in trained_parameters(model, client)}
    after, parameters = own, list(trained.values())
    with full_precision():
        for step in _optimiser_steps(parameters, client):
            if step == len(images):
                after = copy.deepcopy(own)
            if step < len(images):
                client_loss(client, own(images[step, None]), labels[step, None].to(images.device)).backward()
            else:
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
    update = {name: _parameter(model, name).detach() - end.detach() for name, end in trained.items()}
    return Replayed(after.requires_grad_(False), update)


def update_capabilities(
    model: VictimModel, client: Client, defense: Sequence[AnyDefense] = ()
) -> frozenset[Capability]:
    """Return the capabilities that the update of a client of a model grants, under a defense.

    The weights θ_0 and the public settings are known; images, labels, order and the draws of dropout are not.

    Args:
        model: the server's model.
        client: the public settings; they say what is trained and sent.
        defense: the defenses at work; those on gradients act on the update.

    Raises:
        PrivlabError: if the client has nothing to train, the defense withholds all of it, or it acts on the updates of
            several clients.
    """
    model = served(model, client)
    trained = frozenset(trained_parameters(model, client, Stack(tuple(defense)).on_images))
    client.check_filters([part.name for part in Stack(tuple(defense)).on_gradients])
    grants = gradient_capabilities(model, defense, client.released_images, trained=trained) | {Capability.CLIENT_UPDATE}
    of_labels = client.loss == "cross-entropy" and (client.class_weights is None or client.released_images == 1)
    of_labels = of_labels and not client.fuses
    return grants if of_labels else grants - {Capability.CLASS_LABELS}


def observe_updates(
    model: VictimModel,
    client: Client,
    clients: Sequence[ClientData],
    parameters: Collection[str] | None = None,
    defense: Sequence[AnyDefense] = (),
) -> Observation:
    """Return what the server sees of clients that train with the same public settings: their updates, or means of K.

    Secure aggregation shows the mean of K = `client.clients` updates, as federated averaging takes it over clients of
    equally many images; the masks that clients add cancel in it, and are not simulated. The first K clients make the
    first release, the next K the second.

    `gradients` of the observation are −(θ_T − θ_0), so that one step of SGD at rate η without momentum or decay gives
    η g: the gradient's sign, in units of weights. Weight decay is still in it. Defenses of gradients act on them, over
    all trained parameters, each client drawing on from its training.

    Args:
        model: the server's model with θ_0; the observation has it with the adapters or prompts that clients train.
        client: the public settings, which the observation holds.
        clients: the private data of each client.
        parameters: names of those whose updates the attacks read, if they are trained; None for all.
        defense: the public defenses: those of images in each step, those on gradients on the update, in turn.

    Raises:
        PrivlabError: as in `run_client` and `update_capabilities`, or if there is no client, or their number is no
            multiple of K.
    """
    check_names(parameters)
    if not clients:
        raise PrivlabError("An update needs at least one client. Found none.")
    if len(clients) % client.clients:
        raise PrivlabError(f"A mean needs a multiple of client.clients={client.clients} clients. Found {len(clients)}.")
    model = served(model, client)
    grants, stack = update_capabilities(model, client, defense), Stack(tuple(defense))
    trained = released_names(trained_parameters(model, client, stack.on_images), defense)
    sent: dict[str, list[Tensor]] = {name: [] for name in trained if parameters is None or name in parameters}
    for data in clients:
        moved = run_client(model, client, data, stack.on_images)
        update = stack.release({name: -u[None] for name, u in moved.items()}, [data.draw])
        for name, updates in sent.items():
            updates.append(update[name])
    K = client.clients
    gradients = {name: torch.cat(updates).unflatten(0, (-1, K)).mean(1) for name, updates in sent.items()}
    return Observation(model, gradients, grants, tuple(defense), client.released_images, client=client)


def without_decay(model: VictimModel, update: Update, lost: float) -> dict[str, Float[Tensor, "..."]]:
    """Return −(θ_T − θ_0) − lost · θ_0 in float64: what the gradients alone moved, with the sign of a gradient.

    Args:
        model: the server's model with θ_0.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        lost: 1 − c, the share of θ_0 that decay took (`Client.kept_share`).
    """
    return {name: u.double() - lost * _parameter(model, name).detach().double() for name, u in update.items()}


def undecayed(model: VictimModel, update: Update, client: Client) -> dict[str, Float[Tensor, "..."]]:
    """Return `without_decay` by a client's own settings; the update as it is where decay has no factor (Adam's).

    Args:
        model: the server's model with θ_0.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        client: the public settings, whose `kept_share` is taken.
    """
    return without_decay(model, update, 1 - client.kept_share if client.is_linear else 0.0)


def each_release(seen: Observation) -> list[dict[str, Float[Tensor, "..."]]]:
    """Return the releases of an observation one by one, each by parameter name."""
    return [dict(zip(seen.gradients, one, strict=True)) for one in zip(*seen.gradients.values(), strict=True)]


def as_gradients(seen: Observation) -> Observation:
    """Return the observation of gradients that updates of one step of SGD are except for a factor.

    Raises:
        PrivlabError: if the client has no `gradient_factor`, so that the updates are not gradients.
    """
    client = seen.client
    if client is None or (factor := client.gradient_factor) is None:
        raise PrivlabError(f"These updates are not gradients of one step. Found {client}.")
    moved = [undecayed(seen.model, one, client) for one in each_release(seen)]
    gradients = {name: (torch.stack([one[name] for one in moved]) / factor).to(u) for name, u in seen.gradients.items()}
    return replace(seen, gradients=gradients, grants=seen.grants - {Capability.CLIENT_UPDATE}, client=None)


def _rounded(x: Tensor, number: str) -> Tensor:
    """Return a parameter, or what moved of it, as it is sent, stored in the precision that it had."""
    return to_int8(x[None])[0] if number == "int8" else x.to(_FORMATS[number]).to(x.dtype)


def rounding_deviation(
    before: Tensor, update: Tensor, client: Client, sent: Tensor | None = None
) -> Float[Tensor, "..."]:
    """Return the standard deviation that rounding gives each entry of an update, in float64.

    Each of T steps rounds a stored weight to the nearest multiple of its ulp, an error of variance ulp² / 12. Weights
    that are sent in fewer bits are rounded to the ulp of that format once more. So is whatever is sent in int8, to one
    step for the whole parameter: rounding keeps the largest magnitude, so that what was sent shows its step. The
    rounding of the gradients, and of differences in bf16 or fp16, is relative to their own size and is not counted.

    Args:
        before: θ_0, in the number format in which the client stores its weights.
        update: −(θ_T − θ_0); the larger magnitude of θ_0 and θ_T gives an entry's ulp.
        client: the public settings.
        sent: ±(θ_T − θ_0) as it was sent, where `update` is a part of it; None where it is all.
    """
    after = before - update
    largest = torch.maximum(before.detach().abs(), after.detach().abs())
    variance = client.total_steps * _ulp(largest) ** 2 / 12
    if client.sent_as == "int8":
        moved = update if sent is None else sent
        rounded = after if client.sends == "weights" else moved
        variance = variance + int8_step(rounded.detach().double()[None])[0] ** 2 / 12
    elif client.sends == "weights":
        number = _FORMATS[client.sent_as]
        if torch.finfo(number).eps > torch.finfo(before.dtype).eps:
            variance = variance + _ulp(largest.to(number)) ** 2 / 12
    return variance.sqrt()


def rounding_of(seen: Observation, name: str) -> Float[Tensor, "..."]:
    """Return `rounding_deviation` of a parameter in the first release of a client's update."""
    assert seen.client is not None
    return rounding_deviation(seen.model.vit.get_parameter(name).detach(), seen.gradients[name][0], seen.client)


def _ulp(magnitudes: Tensor) -> Float[Tensor, "..."]:
    """Return ε 2^⌊log₂ |θ|⌋, the distance from each number of a format to the next; at 0, that of the least normal."""
    info = torch.finfo(magnitudes.dtype)
    _, exponent = magnitudes.double().clamp(min=info.tiny).frexp()
    return info.eps * torch.exp2(exponent.double() - 1)


def _parameter(model: VictimModel, name: str) -> nn.Parameter:
    """Return a parameter of timm's model by its name, or E_unk."""
    if name == "unk_embed" and model.unk_embed is not None:
        return model.unk_embed
    return model.vit.get_parameter(name)


def _train(
    model: VictimModel, parameters: list[Tensor], client: Client, data: ClientData, targets: Tensor, defense: Stack
) -> None:
    """Take the client's optimiser steps on its own copy of the model."""
    mixed, number = client.autocast != "float32", _FORMATS[client.autocast]
    for _, batches in zip(_optimiser_steps(parameters, client), _steps(client, data.draw), strict=True):
        for rows in batches:
            # Autocast keeps its copies of the weights until the outermost context ends, which is that of all steps.
            with torch.autocast(model.mean.device.type, number, cache_enabled=False) if mixed else nullcontext():
                feed = defense.feed(data.images[rows], model.patch, [data.draw] * len(rows), len(rows))
                loss = client_loss(client, model(feed.images, feed.masked_pe, feed.replacement), targets[rows])
            (loss / len(batches)).backward()


def _optimiser_steps(parameters: list[Tensor], client: Client) -> Iterator[int]:
    """Yield the number of each optimiser step, and take it with the gradients that the caller then computes."""
    optimiser: torch.optim.Optimizer
    if client.optimiser == "sgd":
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
        optimiser = torch.optim.SGD(parameters, **{name: getattr(client, name) for name in names})
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[client.optimiser]
        betas = (client.beta1, client.beta2)
        optimiser = kind(parameters, lr=client.lr, betas=betas, eps=client.eps, weight_decay=client.weight_decay)
    for step, rate in enumerate(client.rates):
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        yield step
        if client.clip is not None:
            nn.utils.clip_grad_norm_(parameters, client.clip)
        optimiser.step()


def _steps(client: Client, draw: Generator) -> Iterator[list[Tensor]]:
    """Yield the batches of each optimiser step, as rows of the client's images."""
    left = client.total_steps
    while left > 0:
        shuffled = client.shuffle and not client.fuses  # slices keep their places in the volume
        order = torch.randperm(client.images, generator=draw) if shuffled else torch.arange(client.images)
        batches = list(order.split(client.batch_size))
        for start in range(0, len(batches), client.accumulation)[:left]:
            yield batches[start : start + client.accumulation]
        left -= client.steps_per_epoch


def _set_dropout(model: VictimModel, client: Client) -> None:
    """Give a copy of the victim the client's dropout and drop path; all other layers stay in evaluation."""
    if client.dropout:
        for path, layer in model.vit.named_modules():
            if isinstance(layer, nn.Dropout) and path.rpartition(".")[2] in ("pos_drop", "proj_drop", "drop1", "drop2"):
                layer.p = client.dropout
                layer.train()
    if client.drop_path:
        rates = torch.linspace(0, client.drop_path, len(model.vit.blocks)).tolist()
        for block, rate in zip(model.vit.blocks, rates, strict=True):
            block.drop_path1, block.drop_path2 = DropPath(rate).train(), DropPath(rate).train()


def train_round(
    model: VictimModel, client: Client, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], draw: Generator
) -> dict[str, Tensor]:
    """Train a model as an honest client of a round does, and return its weights before.

    Args:
        model: the model, which is changed.
        client: the client, whose `images` are chosen at random.
        images: photographs in [0, 1].
        labels: their classes.
        draw: chooses the images and their order.
    """
    before = {name: p.detach().clone() for name, p in model.vit.named_parameters()}
    chosen = torch.randperm(len(images), generator=draw)[: client.images]
    data = ClientData(images[chosen], labels[chosen], draw)
    with torch.no_grad():
        for name, moved in run_client(model, client, data).items():
            model.vit.get_parameter(name).add_(moved)
    return before

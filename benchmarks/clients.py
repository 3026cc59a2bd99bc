"""`privlab bench clients`: clients that are trained one after the other against all at a time by torch.func."""

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from privlab.base import Progress, full_precision, pick_device
from privlab.benchmarks.common import Bench, machine, quiet, sample_images, time_rounds
from privlab.release import run_client
from privlab.threat import Client, ClientData
from privlab.victims import VictimModel, victim

_STEPS = (1, 5)


def bench_clients(
    *,
    model: str,
    img_size: int | None,
    clients: int,
    repeats: int,
    device: str,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time rounds of one and of five steps of SGD, of clients with one image each, in `repeats` rounds.

    `one_by_one_over_vmap` is the time of `run_client` for one client after the other over that of `all_at_a_time`, and
    `update_error` the largest norm of a difference of their updates of a parameter, over the norm of the update.

    Args:
        model: name of the victim; its weights may be random.
        img_size: side of the images; None for the victim's own.
        clients: number of clients.
        repeats: rounds that are timed, after one that warms up.
        device: "auto", "cpu", "cuda" or "cuda:N".
        progress: is called with the stages done and their number.

    Raises:
        PrivlabError: for a model or a device that is not there.
    """
    target = pick_device(device)
    with quiet():
        base = victim(model, img_size=img_size).to(target)
    own, images = base.model, sample_images(base, clients).to(target)
    labels = own(images).argmax(1)
    stages: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
    errors: dict[str, float] = {}
    for steps in _STEPS:
        client, of = Client(lr=0.01, steps=steps), f"{steps} step{'s' if steps > 1 else ''}"
        stages[f"{of}, one by one"] = partial(_one_by_one, own, client, images, labels)
        stages[f"{of}, vmap"] = partial(all_at_a_time, own, client, images, labels)
        first, other = (stages[f"{of}, {how}"]() for how in ("one by one", "vmap"))
        errors[of] = max(float((other[name] - u).norm() / u.norm().clamp_min(1e-30)) for name, u in first.items())
    seconds = time_rounds(stages, repeats, target, progress)
    speed = {f"one_by_one_over_vmap, {of}": seconds[f"{of}, one by one"] / seconds[f"{of}, vmap"] for of in errors}
    equal = {f"update_error, {of}": error for of, error in errors.items()}
    targets = dict.fromkeys(speed, "—") | dict.fromkeys(equal, "≤ 1e-3")
    per_client = {name: each / clients for name, each in seconds.items()}
    setup = {"model": model, "side": own.image_shape[1], "clients": clients, "repeats": repeats}
    return Bench(speed | equal, targets, per_client, setup | machine(target), unit="client")


def _one_by_one(
    model: VictimModel, client: Client, images: Float[Tensor, "k c h w"], labels: Int[Tensor, " k"]
) -> dict[str, Float[Tensor, "k ..."]]:
    """Return θ_T − θ_0 of clients of one image each, as privlab trains them."""
    updates = [
        run_client(model, client, ClientData(image[None], label[None], Generator()))
        for image, label in zip(images, labels, strict=True)
    ]
    return {name: torch.stack([update[name] for update in updates]) for name in updates[0]}


def all_at_a_time(
    model: VictimModel, client: Client, images: Float[Tensor, "k c h w"], labels: Int[Tensor, " k"]
) -> dict[str, Float[Tensor, "k ..."]]:
    """Return θ_T − θ_0 of clients of one image each, with all of them in one product of matrices.

    The clients take plain steps of SGD. In the first one they have the same weights, which are not copied. Attention is
    not fused: torch.func has no rule for the fused one on a CPU, and would compute one client after the other.

    Args:
        model: the server's model with θ_0.
        client: the public settings, of which the rate and the number of steps count.
        images: the image of each client, in [0, 1].
        labels: their class indices.
    """
    model = copy.deepcopy(model)
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            setattr(part, "fused_attn", False)  # noqa: B010  # timm's own switch, which no type declares
    start = {name: parameter.detach() for name, parameter in model.vit.named_parameters()}

    def loss(weights: Mapping[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        named = {f"vit.{name}": value for name, value in weights.items()}
        return F.cross_entropy(functional_call(model, named, (image[None],)), label[None])

    own = start
    with full_precision():
        for step, rate in enumerate(client.rates):
            gradients = vmap(grad(loss), in_dims=(0 if step else None, 0, 0))(own, images, labels)
            own = {name: own[name] - rate * g for name, g in gradients.items()}
    return {name: after - start[name] for name, after in own.items()}

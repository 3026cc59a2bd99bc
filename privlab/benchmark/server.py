"""The track `dishonest-server`: checks of the weights of a round, against chosen weights and honest ones."""

import copy
import math
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks import attacks
from privlab.attacks.dishonest.layout import mlp_inputs, noise_images
from privlab.attacks.dishonest.manipulations import MANIPULATIONS, manipulation_of, quotient_errors
from privlab.base import PrivlabError, draw_for, full_precision
from privlab.benchmark.cards import UNDEFENDED, Card, instances
from privlab.benchmark.measure import Photographs, as_kept, case_label, row_of
from privlab.benchmark.tracks import Track, TrackCase, TrackVictim, photographs, track
from privlab.evaluation import CONTROL, batch_of
from privlab.evaluation.observing import with_chosen_weights
from privlab.release import train_round
from privlab.threat import Client
from privlab.victims import Victim, VictimModel, victim

READ = 0.3
"""The largest distance of a quotient from a token that is read, by how little the server knew of the token."""

_LAYER = "blocks.0.mlp.fc1"
"""The layer whose gradient the server reads: the manipulations of the track let it show single tokens."""

_PUBLIC = 64
"""The images of noise by which a server chooses thresholds, and knows what a slot's token is on average."""

_TRIED_TWICE = 3
"""The honest weights that a check gets twice: it must return the same number."""


@dataclass(frozen=True, eq=False)
class SentWeights:
    """Weights that a server sent: the model that has them, and the last round's; `name` is for people alone."""

    name: str
    model: VictimModel
    last: Mapping[str, Tensor] | None = None

    @cached_property
    def known(self) -> Float[Tensor, "n d"]:
        """Return the token that each slot has on average, over the server's own images."""
        N = self.model.vit.patch_embed.num_patches
        return mlp_inputs(self.model, noise_images(_PUBLIC, self.model.image_shape))[:, -N:].mean(0)


@dataclass(frozen=True, eq=False)
class OneClient:
    """A client of a round: its photographs, their classes, and their rows."""

    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, " b"]
    names: Sequence[str]
    hashes: Sequence[str]


@dataclass(frozen=True, eq=False)
class Battery:
    """What every entry of the track meets, and what a server reads where nothing is defended.

    `sent` has the manipulations and the honest control of each case, and `honest` the weights that should not be
    refused. `plain` is the share of the patches of each photograph that is read undefended, by the key of `sent` and
    the place of the client.
    """

    clients: Sequence[OneClient]
    honest: Sequence[SentWeights]
    sent: Mapping[tuple[str, str], SentWeights]
    plain: Mapping[tuple[tuple[str, str], int], Float[Tensor, " b"]]


@lru_cache(maxsize=1)
def battery(track_name: str, victim_name: str, how: Photographs) -> Battery:
    """Return what every entry of a track meets, made once in a process.

    Args:
        track_name: the track.
        victim_name: its victim.
        how: the photographs.
    """
    of = track(track_name)
    own = of.victim(victim_name)
    clients = clients_of(of, own, how)
    rounds = list(_rounds(of, own, clients[0]))
    honest = [*_trained(of, own), *rounds]
    sent = {(case.name, name): made for case in of.cases for name, made in _chosen(of, own, case, rounds)}
    plain = {
        (key, place): _read(each, _gradients(each.model, client), client)
        for key, each in sent.items()
        for place, client in enumerate(clients)
    }
    return Battery(clients, honest, sent, plain)


def measure_checks(card: Card, how: Photographs) -> tuple[pd.DataFrame, float, list[str]]:
    """Return the records of an entry, what its honest rounds are worth, and the honest weights that it refuses.

    A record says which share of the patches of a photograph a server reads that sends one of the track's manipulations:
    0 where the client refuses. The control are the honest weights that the manipulation began with. What honest rounds
    are worth is the mean cosine of the released gradient with the undefended one, 0 where the client refuses.

    Raises:
        PrivlabError: if a check fails, or returns another number for the same weights.
    """
    parts, met = instances(card), battery(card.track, card.victim_name, how)
    count = len(met.clients)
    jobs: list[tuple[SentWeights, tuple[str, str] | None, int]] = []
    jobs += [(each, key, place) for key, each in met.sent.items() for place in range(count)]
    jobs += [(each, None, i % count) for i, each in enumerate(met.honest)]
    random.Random(secrets.randbits(64)).shuffle(jobs)  # a check must not recognise chosen weights by the order of calls
    rows: list[dict[str, Any]] = []
    worth: dict[str, float] = {}
    for sent, key, place in jobs:
        if key is None:
            worth[sent.name] = _worth(parts, sent, met.clients[place])
        else:
            rows += _records(card, parts, met, key, place)
    for i, each in enumerate(met.honest[:_TRIED_TWICE]):
        if len({_suspicion(parts, each, met.clients[i % count]) for _ in range(2)}) > 1:
            raise PrivlabError(f"Entry '{card.name}' must return one number for the same weights. Found two.")
    refused = sorted(name for name, value in worth.items() if value == 0)
    order = ["case", "attack", "image", "setting"]
    kept = as_kept(pd.DataFrame(rows), card.of).sort_values(order, ignore_index=True)
    return kept, round(sum(worth.values()) / len(worth), 4), refused


def clients_of(of: Track, own: TrackVictim, how: Photographs) -> list[OneClient]:
    """Return the clients of a track: about `client_batch` photographs of one part each.

    Args:
        of: the track.
        own: its victim.
        how: the photographs.
    """
    preprocessing, found = _victim(own, own.name).preprocessing, []
    for part in how.parts:
        names = photographs(part)
        hashes = list(names)
        images = batch_of(how.chosen(part, hashes), preprocessing).images
        for chosen in torch.arange(len(hashes)).tensor_split(max(1, round(len(hashes) / of.client_batch))):
            theirs = [hashes[i] for i in chosen]
            found.append(OneClient(images[chosen], chosen % 10, [names[each] for each in theirs], theirs))
    return found


def _victim(own: TrackVictim, name: str, seed: int = 0) -> Victim:
    """Return a model of the track by the name of its weights, or with random ones."""
    if name == "random":
        return victim(own.name, weights="random", seed=seed, img_size=own.img_size)
    found = victim(name, img_size=own.img_size)
    if name == own.name and found.weights.sha256 != own.weights_sha256:
        raise PrivlabError(f"The track has {name} with other weights than {found.weights.sha256[:12]}….")
    return found


def _trained(of: Track, own: TrackVictim) -> Iterator[SentWeights]:
    """Yield the honest weights of first rounds: trained and random ones."""
    for name in of.honest["trained"]:
        yield SentWeights(name, _victim(own, name).model)
    for seed in range(of.honest["random"]):
        yield SentWeights(f"random {seed}", _victim(own, "random", seed).model)


def _rounds(of: Track, own: TrackVictim, client: OneClient) -> Iterator[SentWeights]:
    """Yield the weights after each honest round; none is left out, as training that fails is honest too."""
    for start in of.honest["starts"]:
        for number, settings in enumerate(of.honest["client"]):
            model = copy.deepcopy(_victim(own, start).model)
            draw = draw_for(of.seed, f"{start} {number}", "rounds")
            for place in range(1, of.honest["rounds"] + 1):
                last = train_round(model, Client(**settings), client.images, client.labels, draw)
                yield SentWeights(f"{start}, client {number}, round {place}", copy.deepcopy(model), last)


def _chosen(
    of: Track, own: TrackVictim, case: TrackCase, rounds: Sequence[SentWeights]
) -> Iterator[tuple[str, SentWeights]]:
    """Yield the honest weights of a case, under the name of a control, and each manipulation of them.

    The last round's weights are those of the honest server: the manipulations come on top of honest aggregation.
    """
    start = str(case.given["start"])
    wanted = f"{start}, client 0, round {case.given['rounds']}"
    honest = next((each for each in rounds if each.name == wanted), None)
    honest = honest or SentWeights(start, _victim(own, start).model)
    yield f"{CONTROL}honest weights", honest
    public = noise_images(_PUBLIC, honest.model.image_shape)
    for name in of.attacks:
        if name in MANIPULATIONS or " " in name:
            model = copy.deepcopy(honest.model)
            manipulation_of(name)(model, public)
        else:
            kind: Any = attacks()[name]
            model = with_chosen_weights(honest.model, kind(), of.client_batch)
        yield name, replace(honest, name=name, model=model)


def _suspicion(parts: Sequence[Any], sent: SentWeights, client: OneClient) -> float:
    """Return the largest number of the checks among the parts of an entry; 0 where there is none."""
    found = 0.0
    sent.model.vit.requires_grad_(False)  # so that no flag distinguishes honest weights from chosen ones
    for part in parts:
        if hasattr(part, "suspicion"):
            number = part.suspicion(sent.model, client.images, client.labels, sent.last)
            if not isinstance(number, int | float) or math.isnan(number):
                raise PrivlabError(f"Check '{part.name}' must return a number. Found {number!r}.")
            found = max(found, float(number))
    return found


def _gradients(model: VictimModel, client: OneClient) -> dict[str, Tensor]:
    """Return the gradient of one step on all photographs of a client, by timm's names."""
    named = {name: p for name, p in model.vit.named_parameters() if p.is_floating_point()}
    with full_precision(), torch.enable_grad():
        for p in named.values():
            p.requires_grad_(True)
        loss = F.cross_entropy(model(client.images), client.labels)
        found = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def _released(parts: Sequence[Any], gradients: Mapping[str, Tensor], client: OneClient, what: str) -> dict[str, Tensor]:
    """Return what the defenses of gradients among the parts of an entry release, by a draw of their own."""
    found = {name: gradient[None] for name, gradient in gradients.items()}
    for part in parts:
        if hasattr(part, "release"):
            found = part.release(found, [draw_for(0, client.hashes[0], what)])
    return {name: gradient[0] for name, gradient in found.items()}


def _worth(parts: Sequence[Any], sent: SentWeights, client: OneClient) -> float:
    """Return the cosine of the released gradient with the undefended one; 0 where the client refuses."""
    if _suspicion(parts, sent, client) > 1:
        return 0.0
    if not any(hasattr(part, "release") for part in parts):
        return 1.0
    plain = _gradients(sent.model, client)
    seen = _released(parts, plain, client, sent.name)
    flat = [torch.cat([each[name].flatten().double() for name in plain]) for each in (plain, seen)]
    return float(F.cosine_similarity(flat[0], flat[1], dim=0))


def _records(card: Card, parts: Sequence[Any], met: Battery, key: tuple[str, str], place: int) -> list[dict[str, Any]]:
    """Return the records of one client who is sent one of the weights: undefended, and with the entry."""
    sent, client = met.sent[key], met.clients[place]
    case, attack = key
    shares = {"a": met.plain[key, place]}
    if card.parts != (UNDEFENDED,):
        if _suspicion(parts, sent, client) > 1:
            shares["c"] = torch.zeros(len(client.images))
        elif any(hasattr(part, "release") for part in parts):
            gradients = _gradients(sent.model, client)
            shares["c"] = _read(sent, _released(parts, gradients, client, f"{case} {attack}"), client)
        else:
            shares["c"] = shares["a"]
    own = card.of.victim(card.victim_name)
    stated = {"attack": attack, "attack_params": "{}", "weights_sha256": own.weights_sha256}
    rows: list[dict[str, Any]] = []
    for setting, found in shares.items():
        stated |= {"case": case_label(TrackCase(case, {}), setting), "setting": setting}
        stated |= {"defense": "none" if setting == "a" else "+".join(card.parts)}
        for name, sha256, share in zip(client.names, client.hashes, found.tolist(), strict=True):
            rows.append(row_of(card, name, sha256) | stated | {"patches_read": share})
    return rows


@torch.no_grad()
def _read(sent: SentWeights, released: Mapping[str, Tensor], client: OneClient) -> Float[Tensor, " b"]:
    """Return the share of the patches of each photograph that a server reads from the release of a client."""
    of_layer = (released[f"{_LAYER}.weight"], released[f"{_LAYER}.bias"])
    tokens = mlp_inputs(sent.model, client.images)[:, -len(sent.known) :]
    errors = quotient_errors(of_layer, tokens, sent.known)
    return (errors <= READ).double().mean(1)

"""What an adversary sees, and what an attack returns.

Everything in an `Observation` is public to the adversary: the model with its weights, the released gradients, and the
knowledge that the threat model grants. The private image has no field, so no attack can read it. A defense's algorithm
and its hyper-parameters are public (Kerckhoffs); its draws stay in the `Feed`, which only the client and the scorer
hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from privlab.base import PrivlabError
from privlab.images import facts_html, images_html
from privlab.threat.capabilities import Capability
from privlab.threat.client import Client
from privlab.threat.defense_protocols import Defense, FeatureDefense, GradientDefense
from privlab.threat.losses import client_loss
from privlab.victims import VictimModel
from privlab.victims.closed_form import released_gradients
from privlab.victims.feed import Feed


@dataclass(frozen=True, eq=False)
class Observation:
    """Everything that the adversary sees of r independent releases, and nothing else.

    `gradients` are the released ∂ℓ/∂θ by timm's parameter names (and `unk_embed`, MJP's E_unk), with a leading
    dimension r; `defense` holds the defenses at work with their public parameters, in their order.

    Each release is the gradient of the mean loss of `images_per_release` = B images, and its defense acts on that mean.
    An attack returns r·B images, release by release; those of one release may be in any order, since the evaluator
    assigns them. `batch_size_one` is granted for B = 1 alone. `photographs` names the bundled photographs that an image
    prior may learn from if not all are allowed: it must not learn from a private image or other crops of its file.
    `public` are the adversary's own images, in [0, 1] and as large as the model's input; None where it has none.

    With a `client`, each release is the update of a round of local training with these public settings, on B images,
    and `gradients` are −(θ_T − θ_0) in units of weights: of one step of SGD at rate η, η times the gradient. `model`
    has the weights θ_0.
    """

    model: VictimModel
    gradients: Mapping[str, Float[Tensor, "r ..."]]
    grants: frozenset[Capability]
    defense: tuple[Defense | FeatureDefense | GradientDefense, ...] = ()
    images_per_release: int = 1
    photographs: tuple[str, ...] | None = None
    client: Client | None = None
    public: Float[Tensor, "m c h w"] | None = None

    def take(self, releases: Sequence[int]) -> "Observation":
        """Return the observation of some of the releases."""
        return replace(self, gradients={name: g[releases] for name, g in self.gradients.items()})

    def each(self) -> list["Observation"]:
        """Return the observation of each release alone."""
        count = len(next(iter(self.gradients.values())))
        return [self] if count == 1 else [self.take([i]) for i in range(count)]

    def gradients_of(
        self, images: Float[Tensor, "n c h w"], labels: Int[Tensor, " n"] | Float[Tensor, "n y"]
    ) -> dict[str, Float[Tensor, "r ..."]]:
        """Return what images would release without a defense, differentiable by the images and by soft labels.

        Args:
            images: in [0, 1], B for each release.
            labels: the class index of each image, or a probability of each class; of a client with another loss than
                cross-entropy, its targets.

        Raises:
            PrivlabError: for the update of a client that is not one step of SGD without weight decay.
        """
        factor = 1.0 if self.client is None else self.client.gradient_factor
        if factor is None or (self.client is not None and self.client.weight_decay):
            raise PrivlabError("gradients_of is for gradients, and for one step of SGD without decay. Found an update.")
        names, B, client = list(self.gradients), self.images_per_release, self.client or Client()

        def loss(o: Tensor, y: Tensor) -> Tensor:  # of each release B times its mean
            means = [client_loss(client, *one) for one in zip(o.split(B), y.split(B), strict=True)]
            return B * torch.stack(means).sum()

        plain = client.loss == "cross-entropy" and client.class_weights is None
        given = {} if plain else {"loss": loss}
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivatives
            feed = Feed.undefended(images, self.model.patch)
            made = released_gradients(self.model, feed, labels, names, B, create_graph=True, **given)
        return {name: factor * g for name, g in made.items()}

    def _repr_html_(self) -> str:
        released = {name: _shape(gradient) for name, gradient in self.gradients.items()}
        facts = _public_facts(self) | {"images per release": self.images_per_release, "client": self.client}
        facts |= {} if self.public is None else {"public images": len(self.public)}
        what = "the gradients of" if self.client is None else "what a round of training changed in"
        return facts_html("Observation: what the adversary has", facts | _listed(what, released))


@dataclass(frozen=True, eq=False)
class FeatureObservation:
    """Everything that the server of split learning sees of a batch of b images, and nothing else.

    `model` is the public base: the embedding F₁ with its position embeddings, and the rest. The client holds the
    embedding and the first `cut_layer` = ℓ blocks of it. `defense` holds the defenses at work with their public
    parameters, in their order; `public` are the adversary's own images. The capabilities in `grants` say which of these
    an attack may use; for ℓ > 0 they lack `embedded_rows`.
    """

    model: VictimModel
    features: Float[Tensor, "b t d"]
    defense: tuple[Defense | FeatureDefense | GradientDefense, ...]
    public: Float[Tensor, "m c h w"]
    grants: frozenset[Capability]
    cut_layer: int = 0

    def each(self) -> list["FeatureObservation"]:
        """Return this observation: the features of a batch are one release."""
        return [self]

    def _repr_html_(self) -> str:
        facts = _public_facts(self) | {"public images": len(self.public)}
        facts["released"] = f"features, {_shape(self.features)}"
        return facts_html("FeatureObservation: what the server has", facts)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The result of an attack, with a row for each image of the batch.

    From features: `rows[i, s]` is the row, of the batch's b·t sent rows, that the adversary puts into patch slot s of
    image i; None if images are not made row by row. `columns` is the recovered column key, as in `Sent`.
    From gradients: `loose` marks the slots whose patches are in an order of the adversary's own choice. `tokens` is the
    number of tokens that were separated, `tokens_sure` the number of those that are certain.
    """

    images: Float[Tensor, "b c h w"]
    rows: Int[Tensor, "b n"] | None = None
    columns: Int[Tensor, " d"] | None = None
    loose: Bool[Tensor, "b n"] | None = None
    tokens: Int[Tensor, " b"] | None = None
    tokens_sure: Int[Tensor, " b"] | None = None

    @classmethod
    def of(cls, result: "Float[Tensor, 'b c h w'] | Reconstruction") -> "Reconstruction":
        """Return the result of an attack, which may be images alone, as `Reconstruction`."""
        return cls(result) if isinstance(result, Tensor) else result

    def take(self, i: int) -> "Reconstruction":
        """Return the part of image i alone; its rows still index those of the whole batch."""
        own = {name: value[i : i + 1] for name in _OF_IMAGES if (value := getattr(self, name)) is not None}
        return replace(self, **own)

    @classmethod
    def join(cls, parts: Sequence["Reconstruction"]) -> "Reconstruction":
        """Return the results for the images of one batch as one result."""
        own = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in _OF_IMAGES
            if getattr(parts[0], name) is not None
        }
        return cls(**own, columns=parts[0].columns)

    def _repr_html_(self) -> str:
        found = self.tokens, self.tokens_sure
        counts = [None if each is None else ", ".join(map(str, each.tolist())) for each in found]
        facts = facts_html("Reconstruction", {"tokens": counts[0], "of these certain": counts[1]})
        return images_html(self.images, "reconstruction") + (facts if any(counts) else "")


def _public_facts(seen: Observation | FeatureObservation) -> dict[str, object]:
    """Return what both observations hold, as text by name."""
    vit = seen.model.vit
    return {
        "model": f"{vit.patch_embed.num_patches} patches, width {vit.embed_dim}, {len(vit.blocks)} blocks",
        "granted": "; ".join(sorted(capability.meaning for capability in seen.grants)),
        "defense": ", ".join(map(repr, seen.defense)) or "none",
    }


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape))


def _listed(what: str, shapes: Mapping[str, str], most: int = 6) -> dict[str, str]:
    """Return the first parameters with the shapes of their releases, and how many more there are."""
    more = {"released besides": f"{what} {len(shapes) - most} more parameters"} if len(shapes) > most else {}
    return {f"{what} {name}": shape for name, shape in [*shapes.items()][:most]} | more


_OF_IMAGES = ("images", "rows", "loose", "tokens", "tokens_sure")
"""The fields of `Reconstruction` that have one row for each image."""

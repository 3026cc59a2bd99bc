"""Several defenses at once: those on images one after the other, then those on features or on gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import PrivlabError
from privlab.threat.client_data import Draws, Feed, Sent
from privlab.threat.declarations import defense_declarations
from privlab.threat.defense_protocols import Defense, FeatureDefense, GradientDefense
from privlab.threat.effects import Effects


@dataclass(frozen=True)
class Stack:
    """The defenses of a client, in the order in which they act; an empty stack is the undefended client.

    Parts on images act before the embedding, parts on features after it, and parts on gradients on the released
    gradients, however the three kinds are mixed in `parts`.
    """

    parts: tuple[Defense | FeatureDefense | GradientDefense, ...]

    @property
    def on_images(self) -> tuple[Defense, ...]:
        """Return the parts that act on images."""
        return tuple(part for part in self.parts if not isinstance(part, FeatureDefense | GradientDefense))

    @property
    def changes_images(self) -> bool:
        """Return whether a part on images is more than the control, which declares that it has no effect."""
        return any(defense_declarations(part).acts_as != Effects() for part in self.on_images)

    @property
    def mixes_images(self) -> bool:
        """Return whether what a part on images makes of one depends on the others of its batch."""
        return any(defense_declarations(part).mixes for part in self.on_images)

    @property
    def on_features(self) -> tuple[FeatureDefense, ...]:
        """Return the parts that act on features."""
        return tuple(part for part in self.parts if isinstance(part, FeatureDefense))

    @property
    def on_gradients(self) -> tuple[GradientDefense, ...]:
        """Return the parts that act on released gradients."""
        return tuple(part for part in self.parts if isinstance(part, GradientDefense))

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the variances that the parts on gradients state of the entries of a release; those of several add up.

        Args:
            released: gradients or updates by parameter name; they may be some of those that were released.
        """
        stated = [part.variance(released) for part in self.on_gradients]
        return {name: sum((each[name] for each in stated), torch.zeros_like(g)) for name, g in released.items()}

    @property
    def name(self) -> str:
        """Return the names of the parts, joined by +."""
        return "+".join(part.name for part in self.parts)

    def __repr__(self) -> str:
        """Return the parts as they are written, each with its remark if it has one, such as the ε of its noise."""
        remarks = ((part, defense_declarations(part).remark()) for part in self.parts)
        return " + ".join(f"{part!r} ({remark})" if remark else repr(part) for part, remark in remarks)

    def feed(
        self,
        images: Float[Tensor, "b c h w"],
        patch: int,
        draws: Sequence[Generator],
        images_per_release: int = 1,
        key: Generator | None = None,
    ) -> Feed:
        """Return what the clients feed their models: each part on images transforms the images of the part before.

        Args:
            images: the private images in [0, 1], release by release.
            patch: the side of a patch, in pixels.
            draws: the clients' secret generators, one for each image; a part with `per` = "batch" gets one for each
                release, that of its first image.
            images_per_release: the number of consecutive images that are released together.
            key: the client's generator for the model's lifetime, for a part with `per` = "model".

        Raises:
            PrivlabError: if a part has a key for the model's lifetime, and no generator is given for it.
        """
        feed = Feed.undefended(images, patch)
        for part in self.on_images:
            own = {"image": draws, "batch": draws[::images_per_release], "model": [key]}[defense_declarations(part).per]
            if None in own:
                raise PrivlabError(f"Defense '{part.name}' has one key for all images. Found no generator for it.")
            feed = _after(feed, part(feed.images, patch, own))
        return feed

    def release(
        self, gradients: Mapping[str, Float[Tensor, "r ..."]], draws: Sequence[Generator]
    ) -> Mapping[str, Float[Tensor, "r ..."]]:
        """Return what is released instead of gradients or updates: each part on gradients acts on that of the last.

        Args:
            gradients: those of r releases, by parameter name.
            draws: the secret generator of each release.

        Raises:
            PrivlabError: if a part leaves out a parameter that it does not declare to withhold, or changes its shape.
        """
        for part in self.on_gradients:
            made = part.release(gradients, draws)
            for name in gradients.keys() - defense_declarations(part).withholds(gradients.keys()):
                right = tuple(gradients[name].shape)
                if name not in made:
                    raise PrivlabError(
                        f"Defense '{part.name}' must return each parameter that it does not declare to withhold. "
                        f"Found no {name}."
                    )
                if tuple(made[name].shape) != right:
                    raise PrivlabError(
                        f"Defense '{part.name}' must return each parameter in its shape. Found {name} of "
                        f"{tuple(made[name].shape)} instead of {right}."
                    )
            gradients = made
        return gradients

    def send(self, tokens: Float[Tensor, "b t d"], prefix: int, draws: Draws) -> Sent:
        """Return what the client sends instead of its embedded tokens.

        Args:
            tokens: the embedded tokens of a batch.
            prefix: the number of class and register tokens, which come first in each image.
            draws: the client's secret generators for this batch.

        Raises:
            PrivlabError: if a part acts on gradients, which are not what is sent.
        """
        if self.on_gradients:
            raise PrivlabError(f"Defense '{self.on_gradients[0].name}' acts on gradients. Found features sent.")
        sent = Sent.plain(tokens, prefix)
        for part in self.on_features:
            sent = part.send(sent, draws)
        return sent


def _after(first: Feed, then: Feed) -> Feed:
    """Return the feed of two parts: slot i holds patch `then.order[i]` of what the first part fed."""
    moved = torch.gather(first.moved, 1, then.order) | then.moved
    if then.masked_pe is None:
        then = replace(then, masked_pe=first.masked_pe, replacement=first.replacement)
    return replace(then, order=torch.gather(first.order, 1, then.order), moved=moved)

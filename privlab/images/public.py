"""Public photographs without the private ones: nothing may learn from the image that it is compared with."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.images.photographs import kin
from privlab.images.twins import BLOCK, Thumbnails, thumbnails, twins


@dataclass(frozen=True, eq=False)
class Others:
    """Public photographs by the hash of their file, preprocessed as the private images are.

    A public photograph counts as a private one where the hashes agree, or where both show one photograph (`twins`):
    resized, mirrored, recompressed, made grey or cut a little differently. Of the bundled photographs all crops of a
    file go together.
    """

    images: Mapping[str, Float[Tensor, "c h w"]]

    def without(self, sha256: Iterable[str], private: Float[Tensor, "b c h w"]) -> list[str]:
        """Return the hashes of the public photographs that are none of the private images; there may be none."""
        private_ones = kin({*sha256}.union(*map(self._shown_by, private)))
        return [key for key in self.images if key not in private_ones]

    def copies(self, sha256: Iterable[str], private: Float[Tensor, "b c h w"]) -> list[str]:
        """Return the hashes of the public photographs that show a private image in another file."""
        found, known = set().union(*map(self._shown_by, private)), kin(sha256)
        return [key for key in self.images if key in found - known]

    def beside(self, sha256: str, private: Float[Tensor, "c h w"]) -> list[str]:
        """Return the hashes of the public photographs other than this private image; its controls are made of them.

        Raises:
            PrivlabError: if there is none.
        """
        left = self.without([sha256], private[None])
        if not left:
            raise PrivlabError(
                "--public needs a photograph other than the private image, for the controls. Found "
                f"{len(self.images)}, and no other: name more."
            )
        return left

    def _shown_by(self, private: Float[Tensor, "c h w"]) -> frozenset[str]:
        """Return the hashes of the public photographs that show this image; attacks and controls ask several times."""
        key = hashlib.sha256(private.cpu().numpy().tobytes()).digest()
        if key not in self._found:
            marked = twins(private[None], self._thumbnails)[0].tolist() if self.images else []
            self._found[key] = frozenset(name for name, is_twin in zip(self.images, marked, strict=True) if is_twin)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[bytes, frozenset[str]]:
        return {}

    @cached_property
    def _thumbnails(self) -> Thumbnails:
        """Return the thumbnails of all photographs, in blocks: there may be thousands."""
        images = [*self.images.values()]
        parts = [thumbnails(torch.stack(images[i : i + BLOCK])) for i in range(0, len(images), BLOCK)]
        return Thumbnails(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Thumbnails)))

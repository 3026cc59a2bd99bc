"""Public photographs without the private ones: nothing may learn from the image that it is compared with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.images.photographs import kin

__all__ = ["Others"]


@dataclass(frozen=True, eq=False)
class Others:
    """Public photographs by the hash of their file, preprocessed as the private images are.

    A public photograph counts as a private one where the hashes agree, or where all pixels do: a copy in another file
    format. One that was resized or compressed anew has other pixels, and is not recognised. Of the bundled photographs
    all crops of a file go together.
    """

    images: Mapping[str, Float[Tensor, "c h w"]]

    def without(self, sha256: Iterable[str], private: Float[Tensor, "b c h w"]) -> list[str]:
        """Return the hashes of the public photographs that are none of the private images; there may be none."""
        copies = {*sha256}
        for image in private:
            near = self._by_row.get(_middle_row(image), ())
            copies |= {key for key in near if torch.equal(self.images[key].to(image), image)}
        private_ones = kin(copies)
        return [key for key in self.images if key not in private_ones]

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

    @cached_property
    def _by_row(self) -> dict[bytes, list[str]]:
        """Return the photographs by their middle row: few of thousands are then compared as a whole."""
        found: dict[bytes, list[str]] = {}
        for key, image in self.images.items():
            found.setdefault(_middle_row(image), []).append(key)
        return found


def _middle_row(image: Float[Tensor, "c h w"]) -> bytes:
    return image[:, image.shape[1] // 2].float().cpu().numpy().tobytes()

"""What a defense does, whatever its name is."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Effects", "Rows"]


Rows = Literal["kept", "shared", "own", "mixed"]
"""Where rows may have gone: nowhere, by one order for the batch, by one for each image, or to other images too."""


@dataclass(frozen=True)
class Effects:
    """What a defense does, whatever its name is: the adversary can run it on images of its own and see.

    A defense may declare it as `acts_as`, a class attribute, or a property where it depends on options; `privlab admit`
    holds the release against it. Where nothing is declared it is measured: `privlab.release.effects`.

    Args:
        rows: where the rows of what is sent may have gone.
        columns: whether the entries of the tokens that are sent are in another order.
        noise_std: the standard deviation of the noise on each of them.
        patches: of the image that is fed: "kept" in their slots, moved among slots that are "masked", whose position
            embeddings are replaced, or "shuffled" beyond these.
        pe: what stands for the position embeddings that are replaced: "unknown" (E_unk) or "zero"; "slot": none is.
        one_order: whether images that are released together share one order of their patches, and one mask.
        gradients: "kept", "noisy", "pruned" (zero or as they were), or "rounded".
        other: whether anything else changes, pixels or features: blur, a scale, a clip.
    """

    rows: Rows = "kept"
    columns: bool = False
    noise_std: float = 0.0
    patches: Literal["kept", "masked", "shuffled"] = "kept"
    pe: Literal["slot", "unknown", "zero"] = "slot"
    one_order: bool = False
    gradients: Literal["kept", "noisy", "pruned", "rounded"] = "kept"
    other: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """Return what is done, without how far: two defenses of the same kinds are met by the same attacks."""
        done = {
            "mixed": self.rows == "mixed",
            "rows": self.rows in ("shared", "own"),
            "columns": self.columns,
            "noise": self.noise_std > 0,
            "shuffled": self.patches == "shuffled",
            "masked": self.patches == "masked" or self.pe != "slot",
            self.gradients: self.gradients != "kept",
            "other": self.other,
        }
        return frozenset(name for name, does in done.items() if does)

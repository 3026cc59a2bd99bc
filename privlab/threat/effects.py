"""The effects of a defense, whatever its name is."""

from dataclasses import dataclass
from typing import Literal

RowOrder = Literal["kept", "shared", "own", "mixed"]
"""How rows may have moved: not at all, by one order for the batch, by one for each image, or to other images too."""


@dataclass(frozen=True)
class Effects:
    """The effects of a defense, whatever its name is: the adversary can run it on its own images and see them.

    A defense may declare them as `acts_as`, a class attribute, or a property if they depend on options; `privlab admit`
    checks the release against them. Effects that are not declared are measured: `privlab.release.effects`.

    Args:
        rows: how the rows of the sent features may have moved.
        columns: whether the entries of the sent tokens are in another order.
        noise_std: the standard deviation of the noise on each of these entries.
        patches: the patches of the fed image: "kept" in their slots, moved among "masked" slots, whose position
            embeddings are replaced, or "shuffled" beyond these.
        pe: what replaces position embeddings: "unknown" (E_unk) or "zero"; "slot" if none is replaced.
        values: whether the values within every patch are in another order.
        one_order: whether images that are released together share one order of their patches, and one mask.
        gradients: "kept", "noisy", "pruned" (zero or unchanged), or "rounded".
        other: whether anything else changes pixels or features: blur, a scale, a clip.
    """

    rows: RowOrder = "kept"
    columns: bool = False
    noise_std: float = 0.0
    patches: Literal["kept", "masked", "shuffled"] = "kept"
    pe: Literal["slot", "unknown", "zero"] = "slot"
    one_order: bool = False
    values: bool = False
    gradients: Literal["kept", "noisy", "pruned", "rounded"] = "kept"
    other: bool = False

    @property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of effects without their strength: the same attacks answer defenses of the same kinds."""
        done = {
            "mixed": self.rows == "mixed",
            "rows": self.rows in ("shared", "own"),
            "columns": self.columns,
            "noise": self.noise_std > 0,
            "shuffled": self.patches == "shuffled",
            "masked": self.patches == "masked" or self.pe != "slot",
            "values": self.values,
            self.gradients: self.gradients != "kept",
            "other": self.other,
        }
        return frozenset(name for name, does in done.items() if does)

"""The weights before and after each fit of one model, in a folder for each."""

import copy
import re
from itertools import count
from pathlib import Path

from torch import Tensor, nn

from privlab.base import PrivlabError, first
from privlab.release.capture import capture_next
from privlab.victims import from_any_layout


class RoundRecorder:
    """Record `folder/round-1/before.safetensors`, `after.safetensors`, `round-2/…`, one for each fit.

    The numbers go on where an earlier recording into the folder ended.

    Args:
        model: the ViT of timm, transformers, torchvision or MONAI, or what wraps it; it is left as it is.
        folder: path of the folder.

    Raises:
        PrivlabError: if the names of the parameters are those of another model.
    """

    def __init__(self, model: nn.Module, folder: str | Path) -> None:
        names = [*model.state_dict()]
        if "patch_embed.proj.weight" not in from_any_layout(model.state_dict()):
            raise PrivlabError(
                "The model whose updates are recorded must have the parameter names of a ViT of timm, transformers, "
                f"torchvision or MONAI, such as patch_embed.proj.weight. Found {first(names, 3) or 'none'}."
            )
        self.model, self.folder = model, Path(folder)
        self.before: dict[str, Tensor] | None = None

    def begin(self) -> None:
        """Take a copy of the weights, which training changes in place."""
        self.before = copy.deepcopy(self.model.state_dict())

    def end(self) -> None:
        """Write the update of the fit.

        Raises:
            PrivlabError: if no fit has begun, nothing was trained, or a file cannot be written.
        """
        if self.before is None:
            raise PrivlabError("There is no update yet: its recording begins where a fit begins.")
        taken = [re.fullmatch(r"round-(\d+)", path.name) for path in self.folder.glob("round-*")]
        last = max((int(match[1]) for match in taken if match), default=0)
        capture_next(self.before, self.model, (self.folder / f"round-{number}" for number in count(last + 1)))
        self.before = None

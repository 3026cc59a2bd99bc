"""`RecordUpdate` for Lightning's Trainer; the extra `callbacks` brings Lightning."""

from pathlib import Path

from torch import nn

from privlab.base import PrivlabError
from privlab.callbacks.rounds import RoundRecorder

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise PrivlabError("privlab.callbacks.lightning needs Lightning: pip install 'privlab[callbacks]'.") from error


class RecordUpdate(Callback):
    """Record the weights of a ViT before and after each fit, as files that `privlab audit update` reads.

        trainer = Trainer(callbacks=[RecordUpdate(vit, "updates")])

    Args:
        model: the ViT within the LightningModule, of timm or another library, or the LightningModule.
        folder: path of the folder; a fit writes `round-N/before.safetensors` and `after.safetensors` there.

    Raises:
        PrivlabError: if it is not a ViT, or nothing was trained.
    """

    def __init__(self, model: nn.Module, folder: str | Path) -> None:
        self.recorder = RoundRecorder(model, folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the weights."""
        if trainer.is_global_zero:
            self.recorder.begin()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the update."""
        if trainer.is_global_zero:
            self.recorder.end()

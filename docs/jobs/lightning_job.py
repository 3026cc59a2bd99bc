"""A client that trains by Lightning: a callback records the update of the fit, which is audited before it leaves.

Run it as `python lightning_job.py FOLDER`. The exit status is 3 if a private image was reconstructed.
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import skimage.data
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import privlab
from privlab.callbacks.lightning import RecordUpdate


class Classifier(pl.LightningModule):
    """A ViT under cross-entropy, trained by SGD."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.vit((images - 0.5) / 0.5), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


folder = Path(sys.argv[1])
photograph = torch.from_numpy(skimage.data.astronaut()).permute(2, 0, 1)[None] / 255
images = TensorDataset(F.interpolate(photograph, (64, 64), mode="area"), torch.tensor([3]))
vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)

trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    callbacks=[RecordUpdate(vit, folder / "updates")],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Classifier(vit), DataLoader(images, batch_size=1))

before, after = (folder / "updates" / "round-1" / f"{name}.safetensors" for name in ("before", "after"))
client = privlab.Client(lr=0.01, steps=2)
audit = privlab.audit_update(before, after, model=vit, client=client, out=folder / "audit")
audit.to_html(folder / "evidence.html")
print(audit.verdict)
sys.exit(3 if audit.leaks else 0)

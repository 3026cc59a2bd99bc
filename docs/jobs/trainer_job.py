"""A client that trains by Hugging Face's Trainer: a callback records the update, which is audited before it leaves.

Run it as `python trainer_job.py FOLDER`. The exit status is 3 if a private image was reconstructed.
"""

import sys
from pathlib import Path

import skimage.data
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import privlab
from privlab.callbacks.transformers import RecordUpdate


class Classifier(nn.Module):
    """A ViT of timm whose forward pass returns what the Trainer reads."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.vit((pixel_values - 0.5) / 0.5)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


folder = Path(sys.argv[1])
photograph = torch.from_numpy(skimage.data.astronaut()).permute(2, 0, 1)[None] / 255
image = F.interpolate(photograph, (64, 64), mode="area")[0]
vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)

arguments = TrainingArguments(
    output_dir=str(folder / "trainer"),
    optim="sgd",
    learning_rate=0.01,
    lr_scheduler_type="constant",  # the default falls linearly to 0
    max_grad_norm=0,  # the default clips to 1, which is client.clip=1
    per_device_train_batch_size=1,
    num_train_epochs=2,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
)
record = RecordUpdate(vit, folder / "updates")
images = [{"pixel_values": image, "labels": torch.tensor(3)}]
Trainer(Classifier(vit), arguments, train_dataset=images, callbacks=[record]).train()

before, after = (folder / "updates" / "round-1" / f"{name}.safetensors" for name in ("before", "after"))
client = privlab.Client(lr=0.01, steps=2)
audit = privlab.audit_update(before, after, model=vit, client=client, out=folder / "audit")
audit.to_html(folder / "evidence.html")
print(audit.verdict)
sys.exit(3 if audit.leaks else 0)

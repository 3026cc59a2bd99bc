"""A client of a federation in plain PyTorch: one round, whose update is recorded and audited before it leaves.

Run it as `python pytorch_job.py FOLDER`. The exit status is 3 if a private image was reconstructed.
"""

import copy
import sys
from pathlib import Path

import skimage.data
import timm
import torch
import torch.nn.functional as F

import privlab

folder = Path(sys.argv[1])

# The private image, and the model that the server sent.
photograph = torch.from_numpy(skimage.data.astronaut()).permute(2, 0, 1)[None] / 255
image, label = F.interpolate(photograph, (64, 64), mode="area"), torch.tensor([3])
vit = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)

# The round: a copy of the weights, and two steps of SGD.
before = copy.deepcopy(vit.state_dict())
optimiser = torch.optim.SGD(vit.parameters(), lr=0.01)
for _ in range(2):
    optimiser.zero_grad()
    F.cross_entropy(vit((image - 0.5) / 0.5), label).backward()
    optimiser.step()

# What would leave the client, and what an adversary reads from it.
files = privlab.capture_update(before, vit, folder / "update")
client = privlab.Client(lr=0.01, steps=2)
audit = privlab.audit_update(*files, model=vit, client=client, out=folder / "audit")
audit.to_html(folder / "evidence.html")
print(audit.verdict)
sys.exit(3 if audit.leaks else 0)

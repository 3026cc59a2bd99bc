"""A client of NVFlare's simulator that takes one step on photographs: `audited_client.py sgd|adamw COUNT`."""

import sys

import nvflare.client as flare
import torch
import torch.nn.functional as F
from net import Net  # beside this script
from photographs import normalised, photographs  # beside this script

if __name__ == "__main__":
    optimiser, count = sys.argv[1], int(sys.argv[2])
    flare.init()
    vit = Net()
    while flare.is_running():
        received = flare.receive()
        assert received is not None and received.params is not None  # noqa: PT018
        vit.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        F.cross_entropy(vit(normalised(photographs(count))), torch.arange(count)).backward()
        if optimiser == "sgd":
            torch.optim.SGD(vit.parameters(), lr=0.01).step()
        else:
            torch.optim.AdamW(vit.parameters(), lr=1e-4, weight_decay=0).step()
        flare.send(flare.FLModel(params=vit.state_dict(), metrics={"accuracy": 0.0}))

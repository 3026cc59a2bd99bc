"""Train the image prior of `privlab.attacks.solvers` on public photographs, for a given time.

python -m privlab.experiments.training.denoiser tiny_imagenet_25k.parquet OUT.safetensors --seconds 205 --device cuda

Minimises E λ(σ) ‖D(x + σn, σ) − x‖² with ln σ ~ N(−1.8, 1.4²) and λ = (σ² + s²) / (σ s)² (Karras et al. 2022, table 1).
The number of steps depends on how fast the machine is: `denoiser.json`, next to the weights, states what was done.
"""

import argparse
import copy
import io
import json
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from privlab.attacks.solvers.denoiser import SIGMA_DATA, Denoiser
from privlab.base import write_whole

SIGMAS = (0.002, 10.0)
"""Least and greatest standard deviation of the noise, for pixels in [0, 1]."""

PHOTOGRAPHS, HELD_OUT = 12_000, 256
"""How many photographs of the training split are drawn, and how many of them are not trained on."""

say = logging.getLogger(__name__).info


def main() -> None:
    """Train until the time is over; write the average of the weights every half minute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photographs", type=Path, help="Parquet file with the columns split and jpeg")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(given.seed)
    device = torch.device(given.device)
    pixels = _read_pixels(given.photographs).to(device)
    held_out, pixels = pixels[:HELD_OUT], pixels[HELD_OUT:]
    network = Denoiser().to(device).to(memory_format=torch.channels_last)
    average = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.01, betas=(0.9, 0.99))
    began, step, saved = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - began) / given.seconds) < 1:
        # The rate rises over 500 steps, and falls as a cosine of the time that is gone.
        rate = 1e-3 * min(1.0, (step + 1) / 500) * (0.5 + 0.5 * math.cos(math.pi * share) + 0.01)
        for group in optimizer.param_groups:
            group["lr"] = rate
        x = _draw_batch(pixels, given.batch)
        loss = _weighted_error(network, x)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        step += 1
        decay = min(0.9995, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 1 - decay)
        if step % 500 == 0 or time.monotonic() - began - saved > 30:
            saved = time.monotonic() - began
            scores = _denoised_psnr(average, held_out)
            say(f"{saved:6.0f} s, step {step}, {step * given.batch} images, loss {loss.item():.4f}, {scores}")
            _save(average, given, step, scores)
    scores = _denoised_psnr(average, held_out)
    say(f"{step} steps, {scores}")
    _save(average, given, step, scores)


def _read_pixels(path: Path) -> Tensor:
    """Return photographs of the training split, all of one size, n × 3 × h × w bytes, in a fixed random order."""
    table = pq.read_table(path, columns=["split", "jpeg"]).to_pandas()
    rows = np.flatnonzero(table["split"] == "train")
    chosen = np.sort(np.random.default_rng(0).choice(rows, PHOTOGRAPHS, replace=False))
    order = np.random.default_rng(1).permutation(chosen)

    def decode(raw: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))

    with ThreadPoolExecutor() as pool:
        decoded = list(pool.map(decode, table["jpeg"][order]))
    return torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2)


def _draw_batch(pixels: Tensor, size: int) -> Tensor:
    """Return photographs in [0, 1], mirrored at random; four batches of ten are halved to the size of small victims."""
    x = pixels[torch.randint(len(pixels), (size,), device=pixels.device)].float() / 255
    x = torch.where(torch.rand(size, 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)
    if torch.rand(()) < 0.4:
        x = F.avg_pool2d(x, 2)
    return x.contiguous(memory_format=torch.channels_last)


def _weighted_error(network: Denoiser, x: Tensor) -> Tensor:
    """Return the mean of λ(σ) ‖D(x + σn, σ) − x‖² over a batch."""
    sigma = (1.4 * torch.randn(len(x), device=x.device) - 1.8).exp().clamp(*SIGMAS)
    y = x + sigma.view(-1, 1, 1, 1) * torch.randn_like(x)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        found = network(y, sigma)
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    return (weight.view(-1, 1, 1, 1) * (found.float() - x) ** 2).mean()


@torch.no_grad()
def _denoised_psnr(network: Denoiser, held_out: Tensor) -> dict[str, float]:
    """Return the mean PSNR of photographs that were not trained on, by the noise that was removed."""
    x = held_out.float() / 255
    draw = torch.Generator(x.device).manual_seed(1)
    found = {}
    for sigma in (0.01, 0.03, 0.1, 0.3, 1.0):
        noise = torch.randn(x.shape, generator=draw, device=x.device)
        clean = network(x + sigma * noise, torch.full((len(x),), sigma, device=x.device)).clamp(0, 1)
        found[f"{sigma}"] = round(float((-10 * ((clean - x) ** 2).mean((1, 2, 3)).log10()).mean()), 2)
    return found


def _save(network: Denoiser, given: argparse.Namespace, steps: int, scores: dict[str, float]) -> None:
    """Write the weights in half precision, with how they were made."""
    recipe = {"steps": steps, "batch": given.batch, "seed": given.seed, "seconds": given.seconds, "psnr": scores}
    weights = {name: value.half().contiguous().cpu() for name, value in network.state_dict().items()}
    write_whole(given.out, lambda path: save_file(weights, path, {"recipe": json.dumps(recipe)}))


if __name__ == "__main__":
    main()

"""`privlab bench attack`: the closed forms against a training step, and against breaching's APRIL."""

import copy
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageChops
from torch import Tensor

from privlab.attacks import April, PatchGradient
from privlab.base import (
    PrivlabError,
    Progress,
    full_precision,
    pick_device,
)
from privlab.benchmarks.breaching_april import BreachingApril
from privlab.benchmarks.common import Bench, machine, median_seconds, peak_gpu_memory, quiet, sample_images
from privlab.benchmarks.main_job import IMAGES, run_main_job
from privlab.benchmarks.searches import search_costs
from privlab.images import open_images
from privlab.metrics import score
from privlab.release import observe
from privlab.threat import Attack, Observation
from privlab.victims import ARCHITECTURES, Victim, VictimModel, victim

_BREACHING_IMAGES = 16
"""The most photographs that breaching's APRIL is timed on: it takes them one by one."""

_SCORED = ["mse", "psnr", "ssim", "fft2d"]


def bench_attack(
    *,
    model: str,
    n_images: int,
    repeats: int,
    memory: bool,
    main_job: bool,
    device: str,
    img_size: int | None = None,
    batch: int = 16,
    searches: bool = True,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time a training step, the observation, each solve, the scoring, and breaching's APRIL, in `repeats` rounds.

    Searches are measured once (`search_costs`), and in processor time, as is a training step next to them: other work
    on the machine hardly counts then. On a GPU all times are the GPU's own, between two events, and the most memory
    that each stage holds there is measured in another round.

    Each round times every stage once on all images, so that a noisy moment affects all equally; medians are taken over
    the rounds. "solve" is an attack's call, given the gradient, images included: ours against breaching's as it ships;
    the linear solves within breaching's attack are also timed on their own. Peak memory is that of `privlab attack`,
    with 400 and with 40 images, each in a separate process. The README's main job runs in one too, twice: alone, of
    which an image's share of the whole time is compared with a training step, and next to a process that keeps a core
    busy, of which the processor time is compared with that of the first.

    Args:
        model: name of the victim.
        n_images: number of photographs in each round; breaching gets the first 16 of them.
        repeats: rounds that are timed, after one that warms up.
        memory: whether the peak memory is measured too.
        main_job: whether the main job is, with MJP's variant of the victim where there is one.
        device: "auto", "cpu", "cuda" or "cuda:N".
        img_size: side of the victim's input in pixels, a multiple of its patch; None for its own.
        batch: number of photographs that are fed at a time, ≥ 1.
        searches: whether `mjp-subspace`, `mjp-full`, a decoder and gradient matching are measured too.
        progress: is called with the stages done and their number.

    Raises:
        PrivlabError: if the victim's gradients do not grant what both attacks need.
    """
    target = pick_device(device)
    with quiet():
        stock = victim(model, img_size=img_size).to(target)
        images = sample_images(stock, n_images).to(target)
        stages = _Stages(stock, stock.with_block("april"), images, batch)
        total, done = (repeats + 1) * len(stages.all()) + 2 * (memory + main_job) + searches, itertools.count(1)
        seconds = median_seconds(stages.all(), repeats, target, lambda: progress(next(done), total))
        gpu_memory = peak_gpu_memory(stages.all(), target)
        medians = {name: each / stages.count(name) for name, each in seconds.items()}
        ratios, targets = _ratios(medians), dict(_TARGETS)
        if searches:
            costs = search_costs(stock.model, images, stages.steps, target)
            progress(next(done), total)
            medians |= costs.seconds_per_image
            gpu_memory |= costs.gpu_memory
            ratios |= costs.ratios
        else:
            targets = {name: target for name, target in targets.items() if name not in _OF_SEARCHES}
    if memory:
        small, large = _peak_rss(model, 40), _peak_rss(model, 400)
        progress(total, total)
        ratios["peak_rss_400_over_40"] = large / small
    else:
        targets.pop("peak_rss_400_over_40")
    if main_job:
        attacked = f"{model}_mjp" if model in ARCHITECTURES else model
        alone, busy = (run_main_job(attacked, device, busy=busy) for busy in (False, True))
        progress(total, total)
        ratios["eight_images_wall_over_step_wall"] = alone.wall / IMAGES / medians[_STEP]
        ratios["busy_over_quiet"] = busy.processor / alone.processor
    else:
        targets = {name: target for name, target in targets.items() if name not in _OF_MAIN_JOB}
    setup = {"model": model, "img_size": images.shape[-1], "images": n_images, "batch": batch, "repeats": repeats}
    return Bench(ratios, targets, medians, setup | machine(target), gpu_memory=gpu_memory)


_TARGETS = {
    "observe_patch_gradient_over_step": "≤ 0.7",
    "breaching_over_privlab_april": "≥ 4",
    "breaching_solve_over_privlab_solve": "≥ 20",
    "breaching_linear_solves_over_privlab_solve": "—",
    "score_over_observe": "≤ 0.2",
    "mjp_full_over_step": "≤ 60",
    "breaching_matching_step_over_privlab": "—",
    "peak_rss_400_over_40": "≤ 1.1",
    "eight_images_wall_over_step_wall": "≤ 80",
    "busy_over_quiet": "≤ 1.3",
}
_OF_SEARCHES = ("mjp_full_over_step", "breaching_matching_step_over_privlab")
_OF_MAIN_JOB = ("eight_images_wall_over_step_wall", "busy_over_quiet")

_STEP, _OBSERVE, _SOLVE = "training step", "observe (patch-gradient)", "solve (patch-gradient)"
_OBSERVE_APRIL, _SOLVE_APRIL, _SCORE = "observe (april)", "solve (april)", "score (mse psnr ssim fft2d)"
_BREACHING, _BREACHING_CALL = "breaching: gradient + APRIL", "breaching: APRIL"
_BREACHING_SOLVE = "breaching: the two solves in it"


def _ratios(m: Mapping[str, float]) -> dict[str, float]:
    return {
        "observe_patch_gradient_over_step": (m[_OBSERVE] + m[_SOLVE]) / m[_STEP],
        "breaching_over_privlab_april": m[_BREACHING] / (m[_OBSERVE_APRIL] + m[_SOLVE_APRIL]),
        "breaching_solve_over_privlab_solve": m[_BREACHING_CALL] / m[_SOLVE_APRIL],
        "breaching_linear_solves_over_privlab_solve": m[_BREACHING_SOLVE] / m[_SOLVE_APRIL],
        "score_over_observe": m[_SCORE] / m[_OBSERVE],
    }


class _Stages:
    """The stages that are timed, each once over all images in the same batches."""

    def __init__(self, stock: Victim, april: Victim, images: Float[Tensor, "b c h w"], batch: int) -> None:
        self.stock, self.april = stock.model, april.model
        self.images = images
        self.batches = [(x, torch.arange(len(x), device=x.device) % stock.model.classes) for x in images.split(batch)]
        self.trained = copy.deepcopy(stock.model).requires_grad_(True).train()
        self.seen = self._observations(self.stock, PatchGradient())
        self.seen_april = self._observations(self.april, April())
        self.breaching = BreachingApril(self.april)
        self.reconstructed = [PatchGradient()(seen) for seen in self.seen]
        self.gradients = [self.breaching.gradient(x, y) for x, y in self._one_by_one()]

    def all(self) -> dict[str, Callable[[], object]]:
        return {
            _STEP: self.steps,
            _OBSERVE: lambda: self._observations(self.stock, PatchGradient()),
            _SOLVE: lambda: [PatchGradient()(seen) for seen in self.seen],
            _OBSERVE_APRIL: lambda: self._observations(self.april, April()),
            _SOLVE_APRIL: lambda: [April()(seen) for seen in self.seen_april],
            _SCORE: lambda: [
                score(rec, x, _SCORED) for rec, (x, _) in zip(self.reconstructed, self.batches, strict=True)
            ],
            _BREACHING: lambda: [self.breaching.attack(self.breaching.gradient(x, y)) for x, y in self._one_by_one()],
            _BREACHING_CALL: lambda: [self.breaching.attack(gradient) for gradient in self.gradients],
            _BREACHING_SOLVE: lambda: [self.breaching.solve(gradient) for gradient in self.gradients],
        }

    def count(self, name: str) -> int:
        """Return the number of photographs in one round of a stage."""
        of_breaching = name in (_BREACHING, _BREACHING_CALL, _BREACHING_SOLVE)
        return min(len(self.images), _BREACHING_IMAGES) if of_breaching else len(self.images)

    def steps(self) -> None:
        """Take a training step on each batch."""
        for x, y in self.batches:
            self.trained.zero_grad()
            with full_precision():
                F.cross_entropy(self.trained.vit(self.trained.normalise(x)), y).backward()

    def _one_by_one(self) -> Iterator[tuple[Tensor, Tensor]]:
        few = self.images[:_BREACHING_IMAGES]
        labels = torch.arange(len(few), device=few.device) % self.stock.classes
        yield from zip(few.split(1), labels.split(1), strict=True)

    def _observations(self, model: VictimModel, attack: Attack) -> list[Observation]:
        return [observe(model, x, y, attack.parameters) for x, y in self.batches]


def _peak_rss(model: str, n: int) -> int:
    """Return the peak memory, in kB, of a process that attacks n images in a folder."""
    samples = [image.pixels for image in open_images("samples") if image.pixels is not None]
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder, "images")
        inside.mkdir()
        for i in range(n):
            square: Image.Image = samples[i % len(samples)].resize((256, 256))
            ImageChops.offset(square, i).save(inside / f"{i:04d}.png", compress_level=1)
        program = (
            "from privlab.benchmarks.common import peak_memory; from privlab.grids import specify; "
            "from privlab.runs import execute; "
            f"spec = specify({model!r}, 'a', images={str(inside)!r}); "
            f"execute(spec, device='cpu', out={str(Path(folder, 'run'))!r}); "
            "print(peak_memory())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise PrivlabError(f"The run with {n} images failed: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.splitlines()[-1])

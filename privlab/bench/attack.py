"""`privlab bench attack`: the closed forms against a training step, and against breaching's APRIL."""

import copy
import itertools
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageChops
from torch import Tensor

from privlab.attacks import April, MjpFull, MjpSubspace, PatchGradient
from privlab.base import (
    PrivlabError,
    PrivlabWarning,
    Progress,
    draw_for,
    full_precision,
    hardware,
    pick_device,
    versions,
)
from privlab.bench.breaching_april import BreachingApril
from privlab.bench.common import Bench, median_seconds, peak_gpu_memory, sample_images, time_stage
from privlab.bench.main_job import IMAGES, run_main_job
from privlab.defenses import Mjp
from privlab.images import open_images
from privlab.metrics import score
from privlab.release import observe
from privlab.threat import Attack, Observation
from privlab.victims import ARCHITECTURES, Victim, VictimModel, victim

__all__ = ["bench_attack"]

_BATCH = 16
_MJP_IMAGES = 2
"""Photographs that `mjp-full` is measured on: one of DeiT-S takes as long as a hundred training steps."""

_SCORED = ["mse", "psnr", "ssim", "fft2d"]


def bench_attack(
    *,
    model: str,
    n_images: int,
    repeats: int,
    memory: bool,
    main_job: bool,
    device: str,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time a training step, the observation, each solve, the scoring, and breaching's APRIL, in `repeats` rounds.

    `mjp-full` alone is measured once, on a few of the photographs, and in processor time, as is a training step beside
    it: other work on the machine hardly counts then. On a GPU all times are the GPU's own, between two events, and the
    most memory that each stage holds there is measured in a round more.

    Each round times every stage once on all images, so that a noisy moment affects all alike; medians are taken over
    the rounds. "solve" is an attack's call, given the gradient, images included: ours against breaching's as it ships;
    the linear solves within breaching's attack are also timed on their own. Peak memory is that of `privlab attack`,
    with 400 and with 40 images, each in a process of its own. The README's main job runs in one too, twice: alone, of
    which an image's share of the whole time is compared with a training step, and beside a process that keeps a core
    busy, of which the processor time is compared with that of the first.

    Args:
        model: name of the victim.
        n_images: number of photographs in each round, fed in batches of 16.
        repeats: rounds that are timed, after one that warms up.
        memory: whether the peak memory is measured too.
        main_job: whether the main job is, with MJP's variant of the victim where there is one.
        device: "auto", "cpu", "cuda" or "cuda:N".
        progress: is called with the stages done and their number.

    Raises:
        PrivlabError: if the victim's gradients do not grant what both attacks need.
    """
    target = pick_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivlabWarning)  # random weights or N ≥ D weaken a verdict, but not the speed
        stock = victim(model).to(target)
        images = sample_images(stock, n_images).to(target)
        stages = _Stages(stock, stock.with_block("april"), images)
        total, done = (repeats + 1) * len(stages.all()) + 2 * (memory + main_job) + 1, itertools.count(1)
        seconds = median_seconds(stages.all(), repeats, target, lambda: progress(next(done), total))
        mjp_full, step = stages.mjp_full_and_step(target)
        progress(next(done), total)
        gpu_memory = peak_gpu_memory(stages.all(), target)
    medians = {name: each / n_images for name, each in seconds.items()}
    ratios = _ratios(medians) | {"mjp_full_over_step": mjp_full / step}
    targets = dict(_TARGETS)
    if memory:
        small, large = _peak_rss(model, 40), _peak_rss(model, 400)
        progress(total, total)
        ratios["peak_rss_400_over_40"] = large / small
    else:
        targets.pop("peak_rss_400_over_40")
    if main_job:
        attacked = f"{model}_mjp" if model in ARCHITECTURES else model
        quiet, busy = (run_main_job(attacked, device, busy=busy) for busy in (False, True))
        progress(total, total)
        ratios["eight_images_wall_over_step_wall"] = quiet.wall / IMAGES / medians[_STEP]
        ratios["busy_over_quiet"] = busy.processor / quiet.processor
    else:
        targets = {name: target for name, target in targets.items() if name not in _OF_MAIN_JOB}
    setup = {"model": model, "images": n_images, "batch": _BATCH, "repeats": repeats}
    setup |= {"hardware": hardware(target), "versions": versions()}
    return Bench(ratios, targets, medians, setup, gpu_memory=gpu_memory)


_TARGETS = {
    "observe_patch_gradient_over_step": "≤ 0.7",
    "breaching_over_privlab_april": "≥ 4",
    "breaching_solve_over_privlab_solve": "≥ 20",
    "breaching_linear_solves_over_privlab_solve": "—",
    "score_over_observe": "≤ 0.2",
    "mjp_full_over_step": "≤ 60",
    "peak_rss_400_over_40": "≤ 1.1",
    "eight_images_wall_over_step_wall": "≤ 80",
    "busy_over_quiet": "≤ 1.3",
}
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

    def __init__(self, stock: Victim, april: Victim, images: Float[Tensor, "b c h w"]) -> None:
        self.stock, self.april = stock.model, april.model
        self.batches = [(x, torch.arange(len(x), device=x.device)) for x in images.split(_BATCH)]
        self.trained = copy.deepcopy(stock.model).requires_grad_(True).train()
        self.seen = self._observations(self.stock, PatchGradient())
        self.seen_april = self._observations(self.april, April())
        self.breaching = BreachingApril(self.april)
        self.reconstructed = [PatchGradient()(seen) for seen in self.seen]
        self.gradients = [self.breaching.gradient(x, y) for x, y in self._one_by_one()]

    def all(self) -> dict[str, Callable[[], object]]:
        return {
            _STEP: self._steps,
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

    def mjp_full_and_step(self, device: torch.device) -> tuple[float, float]:
        """Return the seconds per image of `mjp-full`, observation aside, and of a training step.

        On a CPU it is processor time, in one thread: those that wait for each other on a busy machine would count as
        work. On a GPU it is the GPU's time.
        MJP leaves the masked slots without a position embedding, because not every victim has E_unk. What is learned
        once in a process, the prior of `mjp-subspace`, is learned before.
        """
        x, y = (part[:_MJP_IMAGES] for part in self.batches[0])
        defense = Mjp(masked_pe="none")
        feed = defense(x, self.stock.patch, [draw_for(0, str(i), "defense") for i in range(len(x))])
        seen = observe(self.stock, feed, y, MjpFull.parameters, (defense,))
        MjpSubspace()(seen)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            attacked = _cost(lambda: MjpFull()(seen), device)
            steps = _cost(self._steps, device)
        finally:
            torch.set_num_threads(threads)
        return attacked / len(x), steps / sum(len(x) for x, _ in self.batches)

    def _one_by_one(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.batches:
            yield from zip(x.split(1), y.split(1), strict=True)

    def _steps(self) -> None:
        for x, y in self.batches:
            self.trained.zero_grad()
            with full_precision():
                F.cross_entropy(self.trained.vit(self.trained.normalise(x)), y).backward()

    def _observations(self, model: VictimModel, attack: Attack) -> list[Observation]:
        return [observe(model, x, y, attack.parameters) for x, y in self.batches]


def _cost(stage: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the processor that a stage takes, or those of the GPU."""
    if device.type == "cuda":
        return time_stage(stage, device)
    began = time.process_time()
    stage()
    return time.process_time() - began


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
            "from privlab.bench.common import peak_memory; from privlab.runs.attack import execute, specify; "
            f"spec = specify({model!r}, 'a', images={str(inside)!r}); "
            f"execute(spec, device='cpu', out={str(Path(folder, 'run'))!r}); "
            "print(peak_memory())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise PrivlabError(f"The run with {n} images failed: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.splitlines()[-1])

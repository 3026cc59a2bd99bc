"""The steps of on_a_card.sh that are not commands of privlab: versions, equality with the CPU, memory, and the table.

python on_a_card.py site FOLDER [--wheels DIR]
python on_a_card.py machine OUT.json --device cuda
python on_a_card.py equality OUT.json --device cuda --images 10
python on_a_card.py search OUT.json --device cuda
python on_a_card.py limits OUT.json --device cuda
python on_a_card.py table OUT
"""

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from on_a_card_equality import compare_devices, print_equality, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """Take one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("site", "machine", "equality", "search", "limits", "first", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--seconds", type=float, help="of equality")
    parser.add_argument("--few", action="store_true", help="three cases alone")
    given = parser.parse_args()
    steps: dict[str, Callable[[argparse.Namespace], int]] = {
        "site": make_site,
        "machine": describe_machine,
        "equality": compare_devices,
        "search": profile_search,
        "limits": find_limits,
        "first": time_first_result,
        "table": print_table,
    }
    return steps[given.step](given)


# ------------------------------------------------------------------------------------------------ the site and machine


def make_site(given: argparse.Namespace) -> int:
    """Make a folder for PYTHONPATH: what the wheels hold, and the metadata of privlab, which runs from its checkout."""
    given.out.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = given.out / f"privlab-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: privlab\nVersion: {project['version']}\n")
    scripts = "\n".join(f"{name} = {place}" for name, place in project["scripts"].items())
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{scripts}\n")
    if given.wheels is None:
        return 0
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--find-links", str(given.wheels.resolve()), "--target", str(given.out)]
    return subprocess.run([*pip, "-r", str(HERE / "requirements-card.txt")], check=False).returncode


def describe_machine(given: argparse.Namespace) -> int:
    """Write what the results depend on: card, driver, versions, number formats and threads; and the first result."""
    import torch

    from privlab.base import hardware, pick_device, versions

    found: dict[str, Any] = {"nvidia_smi": command_output("nvidia-smi"), "python": platform.python_version()}
    query = "name,driver_version,memory.total,clocks.max.sm"
    found["card"] = command_output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").strip()
    found |= {"hardware": hardware(pick_device(given.device)), "versions": versions(), "cuda": torch.version.cuda}
    found["precision"] = {
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }
    write(given.out, found)
    print(found["card"] or "no card", "| torch", torch.__version__, "| Python", found["python"], flush=True)
    found["first_result"] = first_results(given.device)
    write(given.out, found)
    return 0


def command_output(*command: str) -> str:
    """Return what a command prints; nothing, if it is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def first_results(device: str) -> dict[str, float]:
    """Return the seconds from the start of a process to its first reconstruction, and to what happens on the way."""
    began = time.time()
    model = "deit_s" if device != "cpu" else "cifar_vit"
    program = [sys.executable, __file__, "first", model, "--device", device]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60 if device != "cpu" else 600)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {}
    return {name: at - began for name, at in json.loads(done.stdout.splitlines()[-1]).items()}


def time_first_result(given: argparse.Namespace) -> int:
    """Print when privlab is imported, when its victim is on the device, and when the first image is reconstructed."""
    warnings.simplefilter("ignore")
    import torch

    import privlab
    from privlab.attacks import PatchGradient
    from privlab.benchmarks.common import sample_images

    at = {"imported": time.time()}
    victim = privlab.victim(str(given.out)).to(torch.device(given.device))
    at["victim"] = time.time()
    images = sample_images(victim, 1).to(victim.model.mean)
    seen = privlab.observe(
        victim.model, images, torch.zeros(1, dtype=torch.long).to(images.device), PatchGradient.parameters
    )
    PatchGradient()(seen).cpu()
    at["first reconstruction"] = time.time()
    print(json.dumps(at))
    return 0


# ---------------------------------------------------------------------------------------------- what mjp-full costs


def profile_search(given: argparse.Namespace) -> int:
    """Say what `mjp-full` spends its time on, and what several images take that are searched together."""
    warnings.simplefilter("ignore")
    import torch

    import privlab
    from privlab.attacks import MjpFull, MjpSubspace
    from privlab.attacks.gradients import mjp_full
    from privlab.benchmarks import searches
    from privlab.benchmarks.common import sample_images

    gpu, device = given.device != "cpu", torch.device(given.device)
    victim = privlab.victim("vit_ti" if gpu else "cifar_vit", weights="random", img_size=160 if gpu else 16)
    victim = victim.to(device)
    seen = searches._seen_under_mjp(victim.model, sample_images(victim, 32 if gpu else 2).to(device))
    result: dict[str, Any] = {"operations": time_operations(device, 8 if gpu else 1)}
    write(given.out, result)
    MjpSubspace()(searches._first(seen))
    MjpFull()(searches._first(seen))  # warms up
    with timed_phases(device) as phases:
        took = seconds_of(lambda: MjpFull()(searches._first(seen)), device)[0]
    result["phases of one image"] = {"all": took} | phases
    print(result["phases of one image"], flush=True)
    write(given.out, result)
    count = len(seen.gradients["pos_embed"])
    for together in (1, 8, 32) if gpu else (1, 2):
        mjp_full._ON_CPU = mjp_full._ON_GPU = together
        took, found = seconds_of(lambda: MjpFull()(seen), device)
        row = {"together": together, "images_per_second": count / took, "tokens": found.tokens.tolist()}
        result.setdefault("together", []).append(row)
        print(row, flush=True)
        write(given.out, result)
    return 0


def seconds_of(work: Callable[[], Any], device: Any) -> tuple[float, Any]:
    """Return the seconds that work on a device takes, and what it returns."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    made = work()
    wait()
    return time.perf_counter() - began, made


def time_operations(device: Any, repeats: int) -> dict[str, float]:
    """Return the milliseconds of operations that `mjp-full` consists of, on the device and, of SVDs, on the CPU."""
    import torch

    draw = torch.Generator().manual_seed(0)
    small = torch.randn(24, 100, generator=draw).to(device)
    N = torch.randn(24, 100, 100, generator=draw)
    N = (N @ N.mT + 100 * torch.eye(100)).to(device)
    works: dict[str, Callable[[], Any]] = {
        "24 x 100 product": lambda: small * 2,
        "24 Cholesky factors of 100": lambda: torch.linalg.cholesky_ex(N),
    }
    for m, n in ((768, 192), (768, 100), (192, 100), (100, 100)):
        G = torch.randn(m, n, generator=draw, dtype=torch.float64)
        on = G.to(device)
        works[f"SVD of {m} x {n}"] = lambda on=on: torch.linalg.svd(on, full_matrices=False)
        works[f"SVD of {m} x {n} on the CPU"] = lambda G=G: torch.linalg.svd(G, full_matrices=False)
        works[f"QR of {m} x {n}"] = lambda on=on: torch.linalg.qr(on)
    found = {}
    for name, work in works.items():
        work()
        found[name] = 1000 / repeats * seconds_of(lambda work=work: [work() for _ in range(repeats)], device)[0]
        print(f"{name}: {found[name]:.3f} ms", flush=True)
    return found


@contextlib.contextmanager
def timed_phases(device: Any) -> Iterator[dict[str, float]]:
    """Measure the parts of `mjp-full`, inner ones also as parts of outer ones; waiting for each slows it."""
    from privlab.attacks.gradients import mjp_full
    from privlab.attacks.tokens import equations, search, slots

    found: dict[str, float] = {}
    parts = [(mjp_full, name) for name in ("subspace", "guesses", "sharpen_patches", "place_patches")]
    parts += [(search, "separate"), (slots, "slots_of_tokens"), (slots, "sharpen_coordinates")]
    parts += [(equations, name) for name in ("_refine_guesses", "refine", "settle", "_distinct", "backward", "_start")]
    before = [(module, name, getattr(module, name)) for module, name in parts]

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            took, made = seconds_of(lambda: work(*args, **options), device)
            found[name] = found.get(name, 0) + took
            return made

        return run

    for module, name, work in before:
        setattr(module, name, timed(name, work))
    try:
        yield found
    finally:
        for module, name, work in before:
            setattr(module, name, work)


# ------------------------------------------------------------------------------------------------------------- memory


def find_limits(given: argparse.Namespace) -> int:
    """Double the batch until the memory ends, and see what the command line says beyond it."""
    warnings.simplefilter("ignore")
    import torch

    import privlab
    from privlab.attacks import PatchGradient
    from privlab.benchmarks.common import peak_gpu_memory, sample_images, time_stage

    gpu = given.device != "cpu"
    device = torch.device(given.device)
    model = "deit_s" if gpu else "cifar_vit"
    victim = privlab.victim(model).to(device)
    result: dict[str, Any] = {"model": model, "batches": []}
    some = sample_images(victim, 16)
    batch, most = (64, 1 << 14) if gpu else (2, 4)
    while batch <= most:
        images = some.repeat(-(-batch // len(some)), 1, 1, 1)[:batch].to(device)
        labels = torch.zeros(batch, dtype=torch.long, device=device)

        def observe_and_solve(images: Any = images, labels: Any = labels) -> None:
            PatchGradient()(privlab.observe(victim.model, images, labels, PatchGradient.parameters))

        try:
            observe_and_solve()
            seconds = time_stage(observe_and_solve, device)
            held = peak_gpu_memory({"all": observe_and_solve}, device).get("all")
        except torch.OutOfMemoryError as error:
            result["beyond"] = {"batch": batch, "error": str(error).splitlines()[0]}
            break
        result["batches"].append({"batch": batch, "images_per_second": batch / seconds, "peak_mib": held})
        print(result["batches"][-1], flush=True)
        write(given.out, result)
        batch *= 2
    del images, labels, observe_and_solve
    result["message"] = beyond_memory(given.device)
    write(given.out, result)
    print(result["message"], flush=True)
    said = result["message"]
    return 0 if said["status"] == 2 and said["lines"] == 1 and "memory" in said["error"] else 1


def beyond_memory(device: str) -> dict[str, Any]:
    """Return how `privlab attack` ends where memory does: little of the card's is allowed, or a CPU pretends it."""
    import torch

    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.005)
        pretended: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    else:
        pretended = memory_ends()
    from privlab.cli import _status

    written = io.StringIO()
    command = ["attack", "--model", "vit_b" if device != "cpu" else "cifar_vit", "--weights", "random", "--limit", "8"]
    command += ["--attack", "patch-gradient", "--metrics", "psnr", "--device", device, "--quiet", "--no-strips"]
    command += ["--workers", "1", "--out", str(Path(os.environ.get("PRIVLAB_CACHE", ".")) / "beyond")]
    with pretended, contextlib.redirect_stderr(written):
        status = _status(command)
    lines = [line for line in written.getvalue().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error")]
    return {"status": status, "lines": len(errors), "error": errors[-1] if errors else "", "all": lines[-3:]}


@contextlib.contextmanager
def memory_ends() -> Iterator[None]:
    """Let the first block of every model run out of memory."""
    import torch
    from timm.models.vision_transformer import Block

    def forward(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")

    before = Block.forward
    Block.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Block.forward = before


# ---------------------------------------------------------------------------------------------------------- the table


def print_table(given: argparse.Namespace) -> int:
    """Print what the steps found, in a few lines."""
    print("\nstep              limit s   took s   status")
    for line in (given.out / "steps.tsv").read_text().splitlines():
        name, limit, took, status = line.split("\t")
        print(f"{name:18}{limit:>7}{took:>9}   {'ok' if status == '0' else 'too long' if status == '124' else status}")
    for path in sorted(given.out.glob("bench-*.json")):
        bench = read(path)
        held = bench.get("peak_gpu_memory_mib", {})
        print(f"\n{path.stem}: {json.dumps(bench.get('setup', {}).get('model'))}, images per second, peak MiB")
        for name, speed in bench.get("images_per_second", {}).items():
            print(f"  {name:42}{speed:>12.1f}{held.get(name, float('nan')):>10.0f}")
        both = [bench.get("seconds_per_image", {}).get(f"{part} (patch-gradient)") for part in ("observe", "solve")]
        if None not in both:
            print(f"  {'observe + patch-gradient':42}{1 / sum(both):>12.1f}")
    search = read(given.out / "search.json")
    print(f"\nmjp-full: {search.get('phases of one image')}, {search.get('threads')}")
    machine, limits, equality = (read(given.out / f"{name}.json") for name in ("machine", "limits", "equality"))
    print(f"\n{machine.get('card')}; first result after {machine.get('first_result')}")
    print_equality(equality)
    print(f"limits: {limits.get('batches', [])[-1:]}, beyond: {limits.get('beyond')}, {limits.get('message')}")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return a result; nothing, if its step did not come so far."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())

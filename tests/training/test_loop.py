"""Both training loops: they learn, epochs make one stream, and a run that goes on ends where one in one go ends."""

import csv
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lightning_fabric import Fabric
from safetensors.torch import load_file
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, PrivlabWarning
from privlab.experiments.training.checkpoint import Checkpoints
from privlab.experiments.training.loop import train
from privlab.experiments.training.plan import Compute, Plan
from privlab.training import Plan as ShortPlan
from privlab.training import TrainingProgress, listening, loop


class Regression:
    """y = A x with dropout, and noise on the inputs: every source of randomness that a recipe may have."""

    identity = "regression"

    def __init__(self, n: int = 40, *, poisoned: int | None = None) -> None:
        rng = Generator().manual_seed(7)
        self.x = torch.randn(n, 6, generator=rng)
        self.y = self.x @ torch.randn(6, 2, generator=rng)
        if poisoned is not None:
            self.x[poisoned] = torch.nan
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2))
        self.taken: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows: Tensor, draw: Generator) -> tuple[Tensor, Tensor]:
        """Return noisy inputs and outputs."""
        self.taken.append(rows.tolist())
        return self.x[rows] + 0.01 * torch.randn(len(rows), 6, generator=draw), self.y[rows]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], draw: Generator) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(model(batch[0]), batch[1])


PLAN = Plan(steps=24, batch_size=16, learning_rate=0.02, warmup=4)
OFTEN = Compute(log_every=4, save_every=8)


def weights(recipe: Regression) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in recipe.model.state_dict().items()}


def uninterrupted(plan: Plan = PLAN) -> dict[str, Tensor]:
    recipe = Regression()
    train(recipe, plan)
    return weights(recipe)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_hundred_steps_learn_a_linear_map() -> None:
    seen: list[TrainingProgress] = []
    train(Regression(), Plan(steps=200, batch_size=16, learning_rate=0.02), progress=seen.append)
    assert seen[-1].loss < 0.05 * seen[0].loss
    assert [now.step for now in seen] == list(range(20, 201, 20))
    assert seen[-1].seconds_left == 0
    assert seen[-1].learning_rate < 0.01 * seen[0].learning_rate  # cosine


@given(n=st.integers(1, 30), size=st.integers(1, 70), seed=st.integers(0, 99))
def test_examples_come_as_a_stream_of_shuffled_epochs(n: int, size: int, seed: int) -> None:
    """Whatever the batch size, each epoch's n places hold every example once; the order is the seed's."""
    stream = torch.cat([loop.rows_of(seed, size, step, n) for step in range(-(-3 * n // size))])
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    if n > 10:
        assert not torch.equal(stream[:n], stream[n : 2 * n])
        assert not torch.equal(stream[:n], torch.cat([loop.rows_of(seed + 1, size, 0, n)] * n)[:n])


def test_accumulated_parts_make_the_gradient_of_the_whole() -> None:
    """Without randomness of its own, a step in three parts is the step in one, unequal parts included."""
    ends = []
    for accumulate in (1, 3):
        recipe = Regression()
        recipe.batch = lambda rows, draw, r=recipe: (r.x[rows], r.y[rows])
        recipe.model[2] = nn.Identity()
        train(recipe, replace(PLAN, accumulate=accumulate, optimiser="sgd"))
        ends.append(weights(recipe))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=1e-6)


def test_the_loop_of_attacks_ends_with_the_same_bits_and_reports() -> None:
    """Without Fabric: the same order, draws, clipping, decay and schedule."""
    long, short = Regression(), Regression()
    heard: list[list[TrainingProgress]] = [[], []]
    train(long, replace(PLAN, steps=50), progress=heard[0].append)
    before = torch.random.get_rng_state()
    with listening(heard[1].append):
        loop.train(short, ShortPlan(steps=50, batch_size=16, learning_rate=0.02, warmup=4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert same(weights(long), weights(short))
    assert long.taken == short.taken
    ours, theirs = ([replace(now, seconds=0.0, seconds_left=0.0) for now in each] for each in heard)
    assert ours == theirs
    assert [now.step for now in ours] == [20, 40, 50]
    assert not short.model.training


def test_the_loop_of_attacks_refuses_what_cannot_be_trained() -> None:
    with pytest.raises(PrivlabError, match="no examples"):
        loop.train(Regression(0), ShortPlan(steps=1))
    with pytest.raises(PrivlabError, match="the loss is nan at step 1"):
        loop.train(Regression(poisoned=0), ShortPlan(steps=2, batch_size=40))
    with pytest.raises(PrivlabError, match=r"batch_size .* Found 0"):
        ShortPlan(steps=1, batch_size=0)


def test_the_caller_keeps_its_random_state() -> None:
    before = torch.random.get_rng_state()
    train(Regression(), replace(PLAN, steps=2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_does_not_depend_on_the_callers_random_state() -> None:
    torch.manual_seed(1)
    first = uninterrupted()
    torch.manual_seed(2)
    assert same(first, uninterrupted())
    assert not same(first, uninterrupted(replace(PLAN, seed=1)))


def test_bf16_trains_weights_that_stay_float32() -> None:
    recipe, seen = Regression(), list[TrainingProgress]()
    train(recipe, replace(PLAN, steps=100, precision="bf16-mixed"), progress=seen.append)
    assert {tensor.dtype for tensor in weights(recipe).values()} == {torch.float32}
    assert seen[-1].loss < 0.3 * seen[0].loss


def test_lightning_keeps_to_itself_that_it_is_set_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would tell of the precision that was asked for; afterwards it speaks as before."""
    monkeypatch.setattr(logger := logging.getLogger("lightning_fabric"), "handlers", [caplog.handler])
    logger.setLevel(logging.INFO)
    train(Regression(), replace(PLAN, steps=1, precision="bf16-mixed"))
    assert caplog.messages == []
    assert logger.level == logging.INFO
    Fabric(accelerator="cpu", precision="bf16-mixed")
    assert "Automatic Mixed Precision" in caplog.text


@pytest.mark.gpu
def test_it_trains_on_a_gpu() -> None:
    recipe, seen = Regression(), list[TrainingProgress]()
    train(recipe, replace(PLAN, steps=100, precision="16-mixed"), compute=Compute("cuda:0"), progress=seen.append)
    assert next(recipe.model.parameters()).is_cuda
    assert seen[-1].loss < 0.3 * seen[0].loss


class Interrupted(Exception):
    """What a listener raises to stop a run."""


@pytest.mark.parametrize("at", [8, 12, 20])
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path: Path, at: int) -> None:
    """Interrupted at a checkpoint, or some steps after it, which are then done again."""

    def stop(now: TrainingProgress) -> None:
        if now.step == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(Regression(), PLAN, compute=OFTEN, out=tmp_path, progress=stop)
    resumed = Regression()
    train(resumed, PLAN, compute=OFTEN, out=tmp_path)
    assert len(resumed.taken) == PLAN.steps - (at - 1) // 8 * 8  # the checkpoint of step 8 comes after its report
    assert same(weights(resumed), uninterrupted())


def test_the_log_holds_each_report_once(tmp_path: Path) -> None:
    def stop(now: TrainingProgress) -> None:
        if now.step == 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(Regression(), PLAN, compute=OFTEN, out=tmp_path / "a", progress=stop)
    train(Regression(), PLAN, compute=OFTEN, out=tmp_path / "a")
    train(Regression(), PLAN, compute=OFTEN, out=tmp_path / "b")
    of_a, of_b = (list(csv.DictReader((tmp_path / run / "log.csv").read_text().splitlines())) for run in "ab")
    assert [row["step"] for row in of_a] == ["4", "8", "12", "16", "20", "24"]
    assert [row["loss"] for row in of_a] == [row["loss"] for row in of_b]
    assert float(of_a[0]["epoch"]) == 4 * 16 / 40


def test_a_finished_run_is_loaded(tmp_path: Path) -> None:
    first, again = Regression(), Regression()
    train(first, PLAN, out=tmp_path)
    train(again, PLAN, out=tmp_path)
    assert again.taken == []
    assert same(weights(first), weights(again))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import test_loop
from privlab.experiments.training.loop import train

renames = []
def rename(self, target, real=Path.rename):
    renames.append(target)
    if len(renames) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)

Path.rename = rename
train(test_loop.Regression(), test_loop.PLAN, compute=test_loop.OFTEN, out=Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(tmp_path: Path) -> None:
    """SIGKILL when the second checkpoint's files are written, and not yet in place."""
    code = KILLED.format(folder=str(Path(__file__).parent))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name[:6] for path in folder.iterdir()) == [".unfin", "step-0"]
    resumed = Regression()
    train(resumed, PLAN, compute=OFTEN, out=tmp_path)
    assert len(resumed.taken) == PLAN.steps - 8
    assert same(weights(resumed), uninterrupted())
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000016", "step-00000024"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, {"recipe": "a"})
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.full((3,), float(step))}, {"averages": torch.zeros(2)})
    torn = tmp_path / "step-00000002" / name
    content = bytearray(torn.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        torn.unlink()
    else:
        torn.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    with pytest.warns(PrivlabWarning, match=r"step-00000002.*\(.*\)"):
        found = checkpoints.last()
    assert found is not None
    assert found[0] == 1
    assert found[1]["w"].tolist() == [1, 1, 1]


def test_only_two_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {})
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": torch.zeros(1)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_loss_that_is_not_finite_stops_and_names_the_step(tmp_path: Path) -> None:
    """An example that step 11 takes is poisoned: the step is named, and what was saved before it stays."""
    plan = replace(PLAN, batch_size=2, steps=50)
    recipe = Regression(100, poisoned=int(loop.rows_of(plan.seed, 2, 10, 100)[0]))
    with pytest.raises(PrivlabError, match=r"11.*checkpoint.*8"):
        train(recipe, plan, compute=Compute(log_every=100, save_every=4), out=tmp_path)
    found = Checkpoints(tmp_path / "checkpoints", {}).last()
    assert found is not None
    assert found[0] == 8
    assert all(bool(tensor.isfinite().all()) for tensor in found[1].values())


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """The last loss before the checkpoint was fine; the step after it was not."""

    class Explodes(Regression):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], draw: Generator) -> Tensor:
            nothing = 0 * next(model.parameters()).sum()
            if len(self.taken) == 4:
                nothing.register_hook(lambda gradient: gradient * torch.nan)
            return super().loss(model, batch, draw) + nothing

    with pytest.raises(PrivlabError, match=r"weights.*4"):
        train(Explodes(), replace(PLAN, steps=4), out=tmp_path)
    assert Checkpoints(tmp_path / "checkpoints", {}).last() is None


def test_another_trainings_checkpoint_is_refused(tmp_path: Path) -> None:
    train(Regression(), PLAN, out=tmp_path)
    with pytest.raises(PrivlabError, match=r"learning_rate.*0\.02.*0\.5"):
        train(Regression(), replace(PLAN, learning_rate=0.5), out=tmp_path)
    other = Regression()
    other.identity = "classification"
    with pytest.raises(PrivlabError, match="classification"):
        train(other, PLAN, out=tmp_path)


def test_a_checkpoint_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(PrivlabError, match=r"2.*checkpoints"):
        Checkpoints(tmp_path / "checkpoints", {}).save(2, {"w": torch.zeros(1)}, {})


def test_nothing_to_train_on() -> None:
    with pytest.raises(PrivlabError, match="the data hold no examples"):
        train(Regression(0), PLAN)


@pytest.mark.parametrize(("wrong", "match"), [({"steps": 0}, "steps .* Found 0"), ({"clip": -1.0}, "clip .* Found -1")])
def test_impossible_plans_are_refused(wrong: dict[str, float], match: str) -> None:
    with pytest.raises(PrivlabError, match=match):
        replace(PLAN, **wrong)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"optimiser": "adamww"}, "adamww"), ({"schedule": "cosin"}, "cosin"), ({"precision": "31"}, "31")],
)
def test_unknown_names_are_refused_in_one_line(wrong: dict[str, str], match: str) -> None:
    with pytest.raises(PrivlabError, match=f"The training cannot be set up: .*{match}") as caught:
        train(Regression(), replace(PLAN, **wrong))  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(PrivlabError, match="training"):
        train(Regression(), PLAN, compute=Compute("cuda:99"))


def test_a_listener_hears_of_trainings_inside() -> None:
    heard: list[TrainingProgress] = []
    with listening(heard.append):
        train(Regression(), replace(PLAN, steps=2))
    train(Regression(), replace(PLAN, steps=2))
    assert [now.step for now in heard] == [2]


def test_missing_fabric_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(PrivlabError, match=r"pip install 'privlab\[training\]'"):
        train(Regression(), PLAN)


DDP = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
sys.path.insert(0, {folder!r})
import test_loop
from privlab.experiments.training.loop import train

torch.set_num_threads(1)
recipe = test_loop.Regression()
train(recipe, test_loop.PLAN, compute=test_loop.OFTEN, out=Path({out!r}))
"""


@pytest.mark.slow
def test_two_processes_are_two_parts_of_a_batch(tmp_path: Path) -> None:
    """DDP over gloo, as torchrun starts it: the weights of one process that accumulates; only one of them writes."""
    script = tmp_path / "ddp.py"
    script.write_text(DDP.format(folder=str(Path(__file__).parent), out=str(tmp_path / "two")))
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    one = Regression()
    train(one, replace(PLAN, accumulate=2), compute=OFTEN, out=tmp_path / "one")
    two = load_file(tmp_path / "two" / "checkpoints" / "step-00000024" / "model.safetensors")
    for name, tensor in weights(one).items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-5)
    logs = [(tmp_path / run / "log.csv").read_text().splitlines() for run in ("one", "two")]
    assert [row.split(",")[0] for row in logs[1]] == [row.split(",")[0] for row in logs[0]]


def test_fewer_examples_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "32")
    with pytest.raises(PrivlabError, match=r"32.*processes.*16"):
        train(Regression(), PLAN)


def test_the_moving_average_is_the_result_and_goes_on(tmp_path: Path) -> None:
    """After each step a ← d a + (1 − d) w, from the first weights on; a run that goes on ends with the same."""
    plan, once, decay = replace(PLAN, steps=3, ema=0.8), Compute(save_every=1), 0.8
    average = weights(Regression())
    train(Regression(), replace(plan, ema=0.0), compute=Compute(keep=(1, 2, 3)), out=tmp_path / "plain")
    for path in sorted((tmp_path / "plain" / "kept").iterdir()):
        average = {name: decay * average[name] + (1 - decay) * w for name, w in load_file(path).items()}
    first, again = Regression(), Regression()
    train(first, plan, compute=once, out=tmp_path / "a")
    for name, tensor in weights(first).items():
        torch.testing.assert_close(tensor, average[name])
    rmtree(tmp_path / "a" / "checkpoints" / "step-00000003")
    train(again, plan, compute=once, out=tmp_path / "a")
    assert len(again.taken) == 1
    assert same(weights(first), weights(again))

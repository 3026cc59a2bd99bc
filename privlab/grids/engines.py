"""Where tasks run: this process, several processes, or a Ray cluster. Results come back as they are finished."""

import contextlib
import importlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from loky import ProcessPoolExecutor
from loky.backend import get_context
from loky.process_executor import TerminatedWorkerError

from privlab.base import PrivlabError, core_count, one_line
from privlab.grids.engine import Engine
from privlab.grids.tasks import Result, Task, run_task

_MOST_FAILURES = 3
"""Deaths of workers in a row, with no task finished in between, or unanswered calls of the head, that end a run."""

_START = "loky"
"""How workers are started: as new interpreters, without running the user's script again."""

_HEARTBEAT = 5.0  # seconds between two checks of a Ray cluster's head, and the longest that it may take to answer


def run_tasks(tasks: Sequence[Task], engine: Engine, say: Callable[[str], object]) -> Generator[Result, None, None]:
    """Yield the results of the tasks, in the order in which they are finished; workers end with the generator.

    Args:
        tasks: those to run; a worker that is free takes the next one.
        engine: where they run, and with how many workers.
        say: called with a line of text when a worker process has died and its tasks are run again.

    Raises:
        PrivlabError: if a task cannot be run at all, or workers keep dying.
    """
    if engine.name == "ray":
        return _on_ray(tasks, engine, say)
    if engine.workers == 1:
        return (run_task(task) for task in tasks)
    return _in_processes(tasks, engine, say)


def _in_processes(tasks: Sequence[Task], engine: Engine, say: Callable[[str], object]) -> Generator[Result, None, None]:
    """Run tasks in worker processes; when one dies, new ones take what was not finished."""
    left, deaths = dict(enumerate(tasks)), 0
    while left:
        try:
            for number, result in _one_pool(left, engine):
                del left[number]
                deaths = 0
                yield result
        except TerminatedWorkerError as error:
            deaths, how = deaths + 1, _how_it_died(str(error))
            if deaths == _MOST_FAILURES:
                raise PrivlabError(
                    f"Workers died {deaths} times in a row; the last one {how}. What was finished is kept."
                ) from None
            say(f"A worker died: it {how}. What it had begun is run again.")


def _one_pool(tasks: Mapping[int, Task], engine: Engine) -> Iterator[tuple[int, Result]]:
    """Yield (number, result) from one pool of processes, until it is done or breaks.

    Raises:
        TerminatedWorkerError: if a worker dies.
    """
    context = get_context(_START)
    count = min(engine.workers, len(tasks))
    names = context.SimpleQueue()
    for name in range(count):
        names.put(name)
    pool = ProcessPoolExecutor(
        count, context=context, initializer=_begin, initargs=(names, engine.workers, os.getpid())
    )
    waiting = iter(list(tasks.items()))
    running: dict[Future[Result], int] = {}
    try:
        while True:
            for number, task in islice(waiting, 2 * count - len(running)):  # a few ahead, so that no worker waits
                running[pool.submit(_work, task)] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    finally:  # an interrupted run does not wait for its workers
        pool.shutdown(wait=not running, kill_workers=bool(running))


def _how_it_died(error: str) -> str:
    """Return how a pool's workers ended, from loky's error, which has their exit codes as "{SIGKILL(-9)}"."""
    codes = re.search(r"\{(\w.*)\}", error)
    if codes is None:
        return "ended for a reason that the system does not tell"
    if "SIGKILL" in codes[1]:
        return "was killed by SIGKILL: by somebody, or by the system if memory ran out (then use fewer --workers)"
    status = re.sub(r"EXIT\((\d+)\)", r"exit status \1", codes[1])
    return f"ended with {status}, and its standard error says more"


_DEVICE: list[str] = []


def _begin(names: Any, workers: int, parent: int) -> None:  # noqa: ANN401
    """Give a new worker its share of the processor's threads, and its GPU."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(max(1, core_count() // workers))
    name = names.get()
    gpus = torch.cuda.device_count()
    _DEVICE[:] = [f"cuda:{name % gpus}"] if gpus else []


def _end_with(parent: int) -> None:
    """End this worker when its parent process is killed; otherwise it would wait for tasks for ever."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(parent).wait()
    os._exit(1)


def _work(task: Task) -> Result:
    if _DEVICE and task.options.device in ("auto", "cuda"):
        task = replace(task, options=replace(task.options, device=_DEVICE[0]))
    return run_task(task)


def _on_ray(tasks: Sequence[Task], engine: Engine, say: Callable[[str], object]) -> Generator[Result, None, None]:
    """Run tasks on a Ray cluster, which runs those of lost workers again; results go to this process's store."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise PrivlabError("--engine ray needs the extra: pip install 'privlab[ray]'.") from None
    own = {"env_vars": {"RAY_worker_niceness": "0"}}  # Ray's default of 15 lets everything else go first
    options: dict[str, Any] = (
        {"address": engine.address}
        if engine.address
        else {"address": "local", "num_cpus": engine.workers, "runtime_env": own}
    )
    started, client = not ray.is_initialized(), (engine.address or "").startswith("ray://")
    try:
        if started:
            ray.init(**options, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        remote = ray.remote(num_cpus=engine.cpus, num_gpus=engine.gpus, max_retries=_MOST_FAILURES)(_on_worker)
        waiting, running, head = iter(tasks), [], _Head(None if client else ray.get_runtime_context().gcs_address)
        here = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        if engine.address is None and (engine.cpus > here["CPU"] or engine.gpus > here["GPU"]):
            raise PrivlabError(
                f"A task asks for {engine.cpus:g} cores and {engine.gpus:g} GPUs, which would never come: there are "
                f"{here['CPU']:g} (--workers) and {here['GPU']:g}."
            )
        ahead = 2 * max(1, int(here["CPU"] / engine.cpus))
        while True:
            for task in waiting:
                running.append(remote.remote(task, engine.cpus, str(Path.cwd())))
                if len(running) >= ahead:
                    break
            if not running:
                return
            done, running = ray.wait(running, timeout=_HEARTBEAT)
            for reference in done:
                yield ray.get(reference)
            head.check()
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, PrivlabError) else error) from None
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise PrivlabError(
            f"The Ray cluster failed: {one_line(error)}. What was finished is kept; run again."
        ) from error
    except _HeadLost as error:
        started = False  # without its head, Ray takes a minute to shut down and then ends the process
        raise PrivlabError(f"The Ray cluster failed: {error}. What was finished is kept; run again.") from None
    finally:
        if started:
            with contextlib.suppress(Exception):  # shutting down fails if the head has died
                ray.shutdown()


class _HeadLost(Exception):
    """The head of a Ray cluster does not answer."""


@dataclass
class _Head:
    """The head of a Ray cluster. A minute after losing it, Ray ends the whole process without an error of ours."""

    address: str | None
    asked: float = field(default_factory=time.monotonic)
    silent: int = 0

    def check(self) -> None:
        """Ask every few seconds whether the head answers; it may be restarted in between.

        Raises:
            _HeadLost: if it has not answered several times in a row.
        """
        if self.address is None or time.monotonic() - self.asked < _HEARTBEAT:
            return
        self.asked, (host, _, port) = time.monotonic(), self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEARTBEAT).close()
            self.silent = 0
        except OSError:
            self.silent += 1
        if self.silent == _MOST_FAILURES:
            raise _HeadLost(f"its head at {self.address} does not answer")


def _on_worker(task: Task, cpus: float, folder: str) -> Result:
    with contextlib.suppress(OSError):  # where this node has it, paths are relative to the driver's
        os.chdir(folder)
    torch.set_num_threads(max(1, int(cpus)))
    return run_task(task)

"""What of a grid is missing: as properties, on cells that nobody runs; and how an experiment is laid out."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from privlab.base import PrivlabError
from privlab.evaluation import COLUMNS, CONTROLS, GEOMETRIES, SCHEMA
from privlab.grids import Experiment, Grid, Layout, Options, Task, joined, specify
from privlab.grids import missing as missing_of
from privlab.images import NamedImage
from privlab.stores import Store
from privlab.threat import Features, Gradient

ATTACKS = ("april", "patch-gradient", "least-squares")
METRICS = ("mse", "psnr", "ssim")
CPU = torch.device("cpu")
Unit = tuple[str, str, str]
"""A cell, an image and a metric: the least that can be missing."""


@dataclass(frozen=True)
class World:
    """Cases that nobody runs. `images` are numbers; those that are negative cannot be read."""

    images: Sequence[int]
    attacks: Sequence[Sequence[str]] = (ATTACKS[:2],)
    metrics: Sequence[str] = METRICS[:2]
    client_batch: int | None = None
    shared: bool = False
    """Whether the first attack's cell is the same in all cases, as setting a is for all γ."""

    def grid(self) -> Grid:
        """Return the cases laid out."""
        images = tuple(
            NamedImage(f"{number}.png", "" if number < 0 else f"{number:064x}", None, place=place)
            for place, number in enumerate(self.images)
        )
        tasks = [self._task(case, names, images) for case, names in enumerate(self.attacks)]
        return Grid(Experiment("x", "x", None, (), Layout()), tuple(tasks), (), {}, ())

    def _task(self, case: int, names: Sequence[str], images: tuple[NamedImage, ...]) -> Task:
        size = self.client_batch
        how = {"release": Gradient() if size is None else Features(batch=size), "gamma": case / 64}
        spec = specify("vit_ti", "a", attack=list(names), metrics=list(self.metrics), **how)
        cells = {name: f"{case}/{name}" for name in (*names, *CONTROLS)}
        if self.shared:
            cells |= {name: f"0/{name}" for name in (names[0], *CONTROLS)}
        return Task(case, spec, spec.settings, images, cells, tuple(self.metrics))

    def units(self) -> set[Unit]:
        """Return everything that there is to measure."""
        return {
            (cell, image.sha256 or image.name, metric)
            for task in self.grid().tasks
            for cell in task.cells.values()
            for image in task.images
            for metric in task.metrics
        }


def missing(grid: Grid, store: Store, *, size: int = 16, **options: Any) -> list[Task]:
    return missing_of(grid, store.path, Options(chunk=size, **options))


def units(grid: Grid, tasks: Iterable[Task]) -> Counter[Unit]:
    """Return what tasks measure, and how often."""
    return Counter(
        (cell, image.sha256 or image.name, metric)
        for task in tasks
        for name, cell in grid.tasks[task.case].cells.items()
        if name in task.attacks or (task.controls and name in CONTROLS)
        for image in task.images
        for metric in task.metrics
    )


def work(grid: Grid, task: Task, failing: Iterable[int] = ()) -> pa.Table:
    """Return the rows that a task would leave."""
    whole, bad = grid.tasks[task.case], {f"{number}.png" for number in failing}
    names = [name for name in whole.cells if name in task.attacks or (task.controls and name in CONTROLS)]
    rows = []
    for image in task.images:
        failed = image.name in bad or not image.sha256
        batch = None if failed or whole.batches is None else whole.batches[image.key]
        for name in names:
            if failed and name in CONTROLS:
                continue  # there is no image to make one of
            row = {"cell": whole.cells[name], "image": image.name, "image_sha256": image.sha256, "attack": name}
            row |= {
                "schema": SCHEMA,
                "status": "failed" if failed else "ok",
                "batch": None if name in CONTROLS else batch,
            }
            row |= {"metrics": None if failed else " ".join(task.metrics)}
            for geometry in GEOMETRIES[:1] if name in CONTROLS else GEOMETRIES:
                rows.append(row | {"geometry": geometry})  # noqa: PERF401
    return pa.Table.from_pylist(rows, schema=COLUMNS)


@contextmanager
def a_store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.records.mkdir()
        yield store


def run(store: Store, grid: Grid, tasks: Iterable[Task], failing: Iterable[int] = ()) -> None:
    for task in tasks:
        store.add(work(grid, task, failing))


def once(store: Store) -> bool:
    """Return whether every record lies in the store once."""
    rows = store.read(["cell", "image", "geometry", "batch", "metrics"]).to_pylist()
    return max(Counter(map(repr, rows)).values(), default=0) <= 1


numbers = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)
names = st.lists(st.sampled_from(ATTACKS), min_size=1, max_size=3, unique=True)
worlds = st.builds(
    World,
    images=numbers,
    attacks=st.lists(names, min_size=1, max_size=3),
    metrics=st.lists(st.sampled_from(METRICS), min_size=1, unique=True),
    client_batch=st.none() | st.integers(1, 5),
)
quick = settings(max_examples=20)


def test_an_attack_under_one_key_gets_all_images_in_one_batch(tmp_path: Path) -> None:
    store, world = Store(tmp_path), World(range(20))
    grid = world.grid()
    grid = replace(grid, tasks=tuple(replace(task, one_key=frozenset(ATTACKS[:1])) for task in grid.tasks))
    tasks = missing(grid, store, size=8)
    assert units(grid, tasks) == Counter(world.units())
    (whole,) = (task for task in tasks if ATTACKS[0] in task.attacks)
    assert (len(whole.images), whole.options.batch_size, whole.attacks) == (20, 20, ATTACKS[:1])
    assert [(len(task.images), task.options.batch_size) for task in tasks if task is not whole] == [
        (8, None),
        (8, None),
        (4, None),
    ]
    shards = [missing(grid, store, size=8, share=(n, 2)) for n in (1, 2)]
    assert [[len(task.images) for task in shard if ATTACKS[0] in task.attacks] for shard in shards] == [[20], []]
    assert sum((units(grid, shard) for shard in shards), Counter()) == Counter(world.units())
    asked = missing(grid, store, size=8, batch_size=8)
    assert {(len(task.images), task.options.batch_size) for task in asked} == {(8, 8), (4, 8)}


@pytest.mark.slow
@quick
@given(world=worlds, size=st.integers(1, 20))
def test_empty_store_lacks_everything_once(world: World, size: int) -> None:
    grid = world.grid()
    with a_store() as store:
        tasks = missing(grid, store, size=size)
        assert units(grid, tasks) == Counter(world.units())
        assert all(len(task.images) <= max(size, world.client_batch or 1) for task in tasks)
        assert all(task.spec is grid.tasks[task.case].spec for task in tasks)
        run(store, grid, tasks)
        assert once(store)
        assert missing(grid, store, size=size) == []


@pytest.mark.slow
@quick
@given(world=worlds, count=st.integers(1, 6), size=st.integers(1, 4))
def test_shards_are_disjoint_and_make_the_whole(world: World, count: int, size: int) -> None:
    grid = world.grid()
    with a_store() as store:
        shards = [missing(grid, store, size=size, share=(n, count)) for n in range(1, count + 1)]
        assert sum((units(grid, shard) for shard in shards), Counter()) == Counter(world.units())
        run(store, grid, shards[0])
        assert missing(grid, store, size=size, share=(1, count)) == []
        left = [task for shard in shards[1:] for task in shard]
        assert units(grid, missing(grid, store, size=size)) == units(grid, left)


@pytest.mark.slow
@quick
@given(world=worlds, data=st.data())
def test_any_interleaving_of_kill_and_resume_gives_the_whole(world: World, data: st.DataObject) -> None:
    grid = world.grid()
    with a_store() as store:
        for _ in range(data.draw(st.integers(1, 5))):
            size, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
            share = (data.draw(st.integers(1, count)), count)
            tasks = data.draw(st.permutations(missing(grid, store, size=size, share=share)))
            run(store, grid, tasks[: data.draw(st.integers(0, len(tasks)))])  # and here it is killed
        run(store, grid, missing(grid, store))
        assert once(store)
        assert missing(grid, store) == []
        images = {number: f"{number:064x}" for number in world.images}
        wanted = {
            (cell, images[number], geometry)
            for whole in grid.tasks
            for name, cell in whole.cells.items()
            for number in world.images
            for geometry in (GEOMETRIES[:1] if name in CONTROLS else GEOMETRIES)
        }
        found = store.read(["cell", "image_sha256", "geometry"]).to_pylist()
        assert Counter(tuple(row.values()) for row in found) == Counter(wanted)


@pytest.mark.slow
@quick
@given(world=worlds, data=st.data())
def test_what_is_added_later_is_run_alone(world: World, data: st.DataObject) -> None:
    """Images, attacks, cases and metrics."""
    more = replace(
        world,
        images=[*world.images, *data.draw(st.lists(st.integers(41, 60), max_size=4, unique=True))],
        attacks=[
            [*given_, *data.draw(st.lists(st.sampled_from(ATTACKS), unique=True).map(lambda new: without(new, given_)))]  # noqa: B023
            for given_ in world.attacks
        ]
        + data.draw(st.lists(names, max_size=1)),
        metrics=[
            *world.metrics,
            *data.draw(st.sets(st.sampled_from(METRICS)).map(lambda n: without(n, world.metrics))),
        ],
    )
    with a_store() as store:
        run(store, world.grid(), missing(world.grid(), store))
        tasks = missing(more.grid(), store, size=3)
        new = more.units() - world.units()
        if world.client_batch is not None:  # a batch that an image joins is another batch
            touched = len(world.images) - len(world.images) % world.client_batch
            again = (
                {f"{number:064x}" for number in more.images[touched:]} if len(more.images) > len(world.images) else {}
            )
            new |= {unit for unit in more.units() if unit[1] in again}
        assert units(more.grid(), tasks) == Counter(new)
        run(store, more.grid(), tasks)
        assert missing(more.grid(), store) == []
        assert world.client_batch or once(store)


def without(new: Iterable[str], old: Iterable[str]) -> list[str]:
    return [name for name in new if name not in old]


@pytest.mark.slow
@quick
@given(world=worlds, data=st.data())
def test_failed_counts_as_done_unless_told_otherwise(world: World, data: st.DataObject) -> None:
    world = replace(world, images=[*world.images, -1])
    failing = data.draw(st.sets(st.sampled_from(world.images)))
    grid = world.grid()
    bad = {"-1.png", *(f"{number:064x}" for number in failing if number >= 0)}
    with a_store() as store:
        run(store, grid, missing(grid, store), failing)
        assert missing(grid, store) == []
        again = missing(grid, store, retry_failed=True)
        of_bad = {unit for unit in world.units() if unit[1] in bad}
        assert {unit for unit in units(grid, again) if unit[1] in bad} == of_bad
        assert world.client_batch or set(units(grid, again)) == of_bad
        run(store, grid, again)
        left = set(units(grid, missing(grid, store, retry_failed=True)))  # what still cannot be read
        assert world.client_batch or left == {unit for unit in of_bad if unit[1] == "-1.png"}


def test_metric_that_comes_after_a_retry() -> None:
    """An image that failed once, and was finished later, lacks a new metric as all others do."""
    early, late = World([1, 2]).grid(), World([1, 2], metrics=METRICS).grid()
    with a_store() as store:
        run(store, early, missing(early, store), failing=[2])
        run(store, early, missing(early, store, retry_failed=True))
        (task,) = missing(late, store)
        assert (task.metrics, task.attacks, len(task.images)) == (("ssim",), ATTACKS[:2], 2)


@pytest.mark.slow
@quick
@given(world=worlds.map(lambda w: replace(w, shared=True)), size=st.integers(1, 20))
def test_cells_that_cases_have_in_common_are_planned_once(world: World, size: int) -> None:
    grid = world.grid()
    with a_store() as store:
        tasks = missing(grid, store, size=size)
        assert units(grid, tasks) == Counter(world.units())
        run(store, grid, tasks)
        assert missing(grid, store) == []


@quick
@given(
    world=worlds.map(lambda w: replace(w, client_batch=w.client_batch or 3)),
    size=st.integers(1, 20),
    data=st.data(),
)
def test_clients_batches_are_planned_whole(world: World, size: int, data: st.DataObject) -> None:
    grid, b = world.grid(), world.client_batch or 1
    whole = {tuple(task.images[first : first + b]) for task in grid.tasks for first in range(0, len(task.images), b)}
    count = data.draw(st.integers(1, 4))
    with a_store() as store:
        done = missing(grid, store, size=1)
        run(store, grid, data.draw(st.permutations(done))[: data.draw(st.integers(0, len(done)))])
        if rows := store.read(["image"]).num_rows:  # a row was lost: its batch is run again as a whole
            parts = sorted(store.parts())
            torn = pq.read_table(parts[0]).slice(1) if rows > 1 else None
            if torn is not None:
                pq.write_table(torn, parts[0])
        for share in range(1, count + 1):
            for task in missing(grid, store, size=size, share=(share, count)):
                assert {task.images[first : first + b] for first in range(0, len(task.images), b)} <= whole


@pytest.mark.parametrize(("number", "count"), [(0, 1), (2, 1), (-1, 3), (1, 0), (0, 0)])
def test_no_such_share(number: int, count: int) -> None:
    with pytest.raises(PrivlabError, match=rf"--shard must be I/N with 1 ≤ I ≤ N. Found {number}/{count}."):
        Options(share=(number, count))


# What was kept of an earlier run


def keep(store: Store, units_: Mapping[str, Sequence[str]]) -> None:
    (store.path / "kept").mkdir()
    for file, keys in units_.items():
        tensors = {f"{key}/images": torch.zeros(1, 3, 2, 2) for key in keys}
        save_file(tensors, store.path / "kept" / f"{file}.safetensors")


def test_later_metrics_are_scored_from_what_was_kept() -> None:
    early, late = World([1, 2, 3]), World([1, 2, 3], metrics=METRICS)
    grid = late.grid()
    with a_store() as store:
        run(store, early.grid(), missing(early.grid(), store))
        one, two, three = (image.sha256 for image in grid.tasks[0].images)
        keep(store, {"x": [f"0/april/{one}", f"0/patch-gradient/{one}", f"0/april/{two}"], "y": [f"0/april/{three}"]})
        wanted = {(("april", "patch-gradient"), one): ["x"]}
        found = {(task.attacks, task.images[0].sha256): task for task in missing(grid, store, size=1)}
        assert {key: [Path(file).stem for file in task.kept] for key, task in found.items() if task.kept} == wanted
        assert all(task.metrics == ("ssim",) for task in found.values())
        alone = World([1, 2, 3], attacks=(("april",),), metrics=METRICS).grid()
        (task,) = missing(alone, store, size=3)
        assert [Path(file).stem for file in task.kept] == ["x", "y"]


def test_nothing_is_scored_from_what_was_kept_of_images_that_have_no_record() -> None:
    grid = World([1]).grid()
    with a_store() as store:
        sha256 = grid.tasks[0].images[0].sha256
        keep(store, {"x": [f"0/april/{sha256}", f"0/patch-gradient/{sha256}"]})
        assert [task.kept for task in missing(grid, store)] == [()]  # no record says what that was


def test_kept_file_that_is_torn_is_left_out() -> None:
    grid = World([1], metrics=METRICS).grid()
    with a_store() as store:
        run(store, World([1]).grid(), missing(World([1]).grid(), store))
        (store.path / "kept").mkdir()
        (store.path / "kept" / "x.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0torn")
        with pytest.warns(UserWarning, match=r"x.safetensors"):
            (task,) = missing(grid, store)
        assert task.kept == ()


def test_settings_b_and_c_of_the_same_images_are_one_task() -> None:
    """What they release is the same; a task of other images, of another attack or of what was kept stays alone."""
    images = (NamedImage("0.png", "0" * 64, None),)
    specs = [specify(model=("vit_ti",), setting=(setting,)) for setting in "bca"]
    b, c, a = (
        Task(i, spec, spec.settings, images, dict.fromkeys((ATTACKS[0], *CONTROLS), str(i)), METRICS)
        for i, spec in enumerate(specs)
    )
    (both,) = joined([b, c])
    assert (both.spec.settings, both.case, both.images) == (("b", "c"), b.case, images)
    for other in (a, replace(c, images=()), replace(c, cells={**c.cells, ATTACKS[1]: "1"}), replace(c, kept=("file",))):
        assert joined([b, other]) == [b, other]
    first, other = joined([a, b, c])
    assert (first, vars(other)) == (a, vars(both))

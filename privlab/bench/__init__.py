"""Benches: speeds as ratios, measured in one run on the same inputs and threads; one bench, one file."""

from collections.abc import Callable

from privlab.bench.attack import bench_attack
from privlab.bench.clients import bench_clients
from privlab.bench.common import Bench
from privlab.bench.permutation import bench_permutation
from privlab.bench.split import bench_split
from privlab.bench.startup import bench_startup
from privlab.bench.table import bench_table
from privlab.bench.train import bench_train

__all__ = [
    "BENCHES",
    "Bench",
    "bench_attack",
    "bench_clients",
    "bench_permutation",
    "bench_split",
    "bench_startup",
    "bench_table",
    "bench_train",
]

BENCHES: dict[str, Callable[..., Bench]] = {
    "attack": bench_attack,
    "clients": bench_clients,
    "permutation": bench_permutation,
    "split": bench_split,
    "startup": bench_startup,
    "table": bench_table,
    "train": bench_train,
}

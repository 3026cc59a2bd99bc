"""Speed as ratios, measured side by side in one run on the same inputs and threads: one bench, one file."""

from collections.abc import Callable

from privlab.bench.attack import bench_attack
from privlab.bench.common import Bench
from privlab.bench.permutation import bench_permutation
from privlab.bench.split import bench_split

__all__ = ["BENCHES", "Bench", "bench_attack", "bench_permutation", "bench_split"]

BENCHES: dict[str, Callable[..., Bench]] = {
    "attack": bench_attack,
    "permutation": bench_permutation,
    "split": bench_split,
}

"""The fast permutations equal a plain index to the last bit, and the bench's figures are the ratios that it says."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabWarning
from privlab.benchmarks import permutation
from privlab.benchmarks.common import Bench, median_seconds, peak_memory
from privlab.metrics import placement_accuracy
from privlab.patches import draw_orders, permute_features, restore_features
from privlab.victims import victim

few = settings(max_examples=40)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
shapes = st.sampled_from([(0, 5, 4), (5, 4), (1, 5, 4), (6, 1, 1), (8, 7, 9), (12, 3, 2), (2, 3, 5, 4), (3, 17, 130)])


def naive(Z: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return the permuted features by torch's index, one axis after the other."""
    if rows is not None:
        each = rows.reshape(-1, rows.shape[-1]).expand(Z[..., 0, 0].numel(), -1)
        Z = Z.gather(-2, each.reshape(*Z.shape[:-1], 1).expand_as(Z))
    return Z if columns is None else Z[..., columns]


@given(shape=shapes, dtype=dtypes, seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["none", "batch", "image"]))
@few
def test_it_is_an_index_to_the_last_bit(shape: tuple[int, ...], dtype: torch.dtype, seed: int, kind: str) -> None:
    draw = Generator().manual_seed(seed)
    Z = torch.randn(shape, generator=draw).to(dtype)
    images, (n, d) = Z[..., 0, 0].numel(), shape[-2:]
    columns = draw_orders(d, [draw])[0]
    rows = None if kind == "none" else draw_orders(n, [draw])[0]
    if kind == "image" and images:
        rows = draw_orders(n, [draw] * images)
    for c in (columns, None):
        moved = permute_features(Z, rows, c)
        assert moved.dtype == dtype
        assert torch.equal(moved, naive(Z, rows, c))
        assert torch.equal(restore_features(moved, rows, c), Z)


def test_it_keeps_infinities_nans_and_the_smallest_numbers() -> None:
    Z = torch.tensor([[[float("inf"), float("nan"), -0.0, 1e-45, 3.4e38, -float("inf")]]])
    order = torch.tensor([3, 1, 0, 5, 2, 4])
    moved = permute_features(Z, torch.tensor([0]), order)
    assert torch.equal(moved.view(torch.int32), Z[..., order].view(torch.int32))


@pytest.mark.parametrize("shape", [(2, 3, 2**18), (2, 2**18, 3), (1, 2, 2**20 + 1)])
def test_it_stays_exact_where_places_come_close_to_single_precision(shape: tuple[int, int, int]) -> None:
    draw = Generator().manual_seed(0)
    Z, (_, n, d) = torch.randn(shape, generator=draw), shape
    rows, columns = draw_orders(n, [draw])[0], draw_orders(d, [draw])[0]
    assert torch.equal(permute_features(Z, rows, columns), naive(Z, rows, columns))


def test_it_takes_features_that_are_not_contiguous() -> None:
    draw = Generator().manual_seed(1)
    Z = torch.randn(7, 4, 6, generator=draw).transpose(0, 1)
    rows, columns = draw_orders(7, [draw] * 4), draw_orders(6, [draw])[0]
    assert torch.equal(permute_features(Z, rows, columns), naive(Z, rows, columns))
    assert torch.equal(permute_features(Z, rows[0], columns), naive(Z, rows[0], columns))


def test_threads_do_not_change_it() -> None:
    draw = Generator().manual_seed(2)
    Z, rows, columns = torch.randn(12, 5, 6, generator=draw), *(draw_orders(k, [draw])[0] for k in (5, 6))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            assert torch.equal(permute_features(Z, rows, columns), naive(Z, rows, columns))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["columns", "rows", "both", "rows of each image", "both, rows of each image"])
def test_gradients_of_first_and_second_order(kind: str) -> None:
    draw = Generator().manual_seed(3)
    Z = torch.randn(3, 4, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    orders = draw_orders(4, [draw] * 3)
    rows = None if kind == "columns" else orders if "each" in kind else orders[0]
    columns = None if kind.startswith("rows") else draw_orders(5, [draw])[0]
    weight = torch.randn(3, 4, 5, generator=draw, dtype=torch.float64)
    found = torch.autograd.grad((permute_features(Z, rows, columns) * weight).sum(), Z)[0]
    assert torch.equal(found, torch.autograd.grad((naive(Z, rows, columns) * weight).sum(), Z)[0])
    assert torch.autograd.gradcheck(lambda z: permute_features(z, rows, columns), Z)
    assert torch.autograd.gradgradcheck(lambda z: permute_features(z, rows, columns).pow(3), Z)


def test_it_goes_through_functional_gradients() -> None:
    Z, order = torch.arange(12.0).view(1, 3, 4), torch.tensor([2, 0, 1])
    found = torch.func.grad(lambda z: (permute_features(z, order)[0, 0]).sum())(Z)
    assert torch.equal(found, torch.tensor([0.0, 0, 1])[None, :, None].expand(1, 3, 4))


# ---- the bench


def test_matrices_indices_and_copies_bring_the_features_back() -> None:
    """All stages do the same work: P⁻¹ P Z = Z, but for the keyed weights, the attack and the model."""
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        subject = victim("vit_ti", weights="random", img_size=32)
    seen, sent = permutation._observe_permuted(subject, 2)
    stages = permutation._stages(subject, seen, 2)
    others = {permutation._PLACED, permutation._ENCRYPTED, permutation._FORWARD}
    results = [stages[name]() for name in stages if name not in others]
    assert len(results) == 7
    assert results[0].shape == (2, 5, 192)
    for result in results:
        assert_close(result, results[0], rtol=0, atol=0)
    assert seen.features.shape == (2, 5, 192)
    assert len(seen.public) == 8
    assert placement_accuracy(sent, permutation.PEAssignment()(seen)).tolist() == [1, 1]


def test_figures_are_ratios_of_the_medians() -> None:
    primes = [2.0, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    names = ["copies", "dense row", "row", "dense column", "column", "both", "apart", "placed", "encrypted", "forward"]
    keys = [f"_{name.upper().replace(' ', '_')}" for name in names]
    seconds = {getattr(permutation, key): prime for key, prime in zip(keys, primes, strict=True)}
    assert permutation._figures(seconds, 4) == {
        "dense_over_index_row": 3 / 5,
        "dense_over_index_column": 7 / 11,
        "index_row_over_copies": 5 / 2,
        "index_column_over_copies": 11 / 2,
        "index_both_over_copies": 13 / 2,
        "both_over_row_then_column": 13 / 17,
        "permutation_over_forward": 13 / 29,
        "key_encryption_seconds": 23,
        "pe_assignment_ms_per_image": 1000 * 19 / 4,
    }


def test_every_round_times_every_stage_once_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0, 100, 0, 100, 0, 1, 0, 10, 0, 2, 0, 30, 0, 9, 0, 20])  # two stages, four rounds
    monkeypatch.setattr("privlab.benchmarks.common.time.perf_counter", lambda: float(next(clock)))
    called: list[str] = []
    stages = {name: lambda name=name: called.append(name) for name in "ab"}
    steps: list[int] = []
    found = median_seconds(stages, 3, torch.device("cpu"), lambda: steps.append(1))
    assert found == {"a": 2, "b": 20}
    assert called == list("abababab")
    assert len(steps) == 8


def test_small_figures_are_not_shown_as_zero() -> None:
    table = Bench({"loss_gap": 1.2e-6, "half": 0.5}, {"loss_gap": "≤ 0.0001", "half": "—"}, {}, {}).tables()[1]
    assert list(table.columns[1].cells) == ["1.2e-06", "0.500"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_is_that_of_the_process_itself() -> None:
    """A child's ru_maxrss would be that of this process, which holds torch."""
    program = f"from pathlib import Path\n{inspect.getsource(peak_memory)}\nprint(peak_memory())"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 1_000 < int(child.stdout) < 60_000 < peak_memory()

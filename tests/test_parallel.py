"""Parts on the cores of the machine: in one thread each, in their order, and without a trace."""

from collections.abc import Iterator

import pytest
import torch

from privlab.base import PrivlabError, one_per_core

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_parts_come_in_order_and_have_one_thread_each(threads: int) -> None:
    with torch.no_grad():
        found = one_per_core(lambda i: (i, torch.get_num_threads(), torch.is_grad_enabled()), 5, CPU)
    assert found == [(i, 1, False) for i in range(5)]
    assert torch.get_num_threads() == threads
    assert one_per_core(lambda i: torch.is_grad_enabled(), 1, CPU) == [True]
    assert one_per_core(lambda i: i, 0, CPU) == []


def test_an_error_of_a_part_comes_through(threads: int) -> None:
    def part(i: int) -> int:
        if i == 1:
            raise PrivlabError("part 1 is wrong")
        return i

    with pytest.raises(PrivlabError, match="part 1 is wrong"):
        one_per_core(part, 3, CPU)
    assert torch.get_num_threads() == threads


def test_on_another_device_parts_follow_one_another_in_all_threads(threads: int) -> None:
    assert one_per_core(lambda i: torch.get_num_threads(), 2, torch.device("meta")) == [threads, threads]

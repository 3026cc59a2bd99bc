"""`privlab bench clients`: both ways train the same clients, and the figures are the ratios that it says."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from privlab.benchmarks.clients import all_at_a_time, bench_clients
from privlab.release import run_client
from privlab.threat import Client, ClientData
from privlab.victims import VictimModel


@pytest.mark.parametrize("steps", [1, 3])
def test_clients_of_torch_func_are_those_of_torchs_optimiser(
    tiny_model: Callable[..., VictimModel], crops: Tensor, steps: int
) -> None:
    model, images, labels = tiny_model(), crops[:3].double(), torch.tensor([3, 1, 4])
    client = Client(lr=0.1, steps=steps)
    found = all_at_a_time(model, client, images, labels)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        expected = run_client(model, client, ClientData(image[None], label[None], Generator()))
        assert found.keys() == expected.keys()
        for name, update in expected.items():
            torch.testing.assert_close(found[name][i], update, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_its_figures_are_ratios_of_its_medians() -> None:
    found = bench_clients(model="cifar_vit", img_size=16, clients=2, repeats=1, device="cpu")
    for of in ("1 step", "5 steps"):
        ratio = found.seconds_per_image[f"{of}, one by one"] / found.seconds_per_image[f"{of}, vmap"]
        assert found.ratios[f"one_by_one_over_vmap, {of}"] == pytest.approx(ratio)
        assert 0 < found.ratios[f"update_error, {of}"] < 1e-3
    assert found.setup["side"] == 16

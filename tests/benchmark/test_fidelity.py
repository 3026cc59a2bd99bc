"""What a release keeps of the gradient, and how often an entry is drawn."""

from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import cosine_similarity

from privlab.benchmark.cards import parse_card
from privlab.benchmark.submit import fidelity
from privlab.defenses import ExcludeVars, GradientPruning
from privlab.grids import specify
from privlab.images import open_images
from privlab.release import observe, released_parameters
from privlab.victims import victim


@pytest.fixture(scope="module")
def undefended() -> dict[str, Tensor]:
    """Return the gradients of the bundled photographs by parameter name."""
    base = victim("cifar_vit")
    images = torch.stack([base.preprocessing(image.pixels) for image in open_images("samples") if image.pixels])
    with torch.no_grad():
        labels = base.model(images).argmax(1)
    return dict(observe(base.model, images, labels, sorted(released_parameters(base.model))).gradients)


def cosine(plain: dict[str, Tensor], released: dict[str, Tensor]) -> float:
    """Return the mean cosine over all parameters; what is not released counts as zero."""
    whole = torch.cat([g.flatten(1).double() for g in plain.values()], 1)
    seen = torch.cat([released.get(name, torch.zeros_like(g)).flatten(1).double() for name, g in plain.items()], 1)
    return float(cosine_similarity(whole, seen).mean())


@pytest.mark.slow
def test_what_is_withheld_counts_as_lost(undefended: dict[str, Tensor]) -> None:
    spec, withheld = specify(model=("cifar_vit",), metrics=("psnr",)), ExcludeVars("^blocks")
    left = {name: g for name, g in undefended.items() if not name.startswith("blocks")}
    kept = fidelity(spec, [withheld])
    assert kept == pytest.approx(cosine(undefended, left), abs=1e-3)
    assert kept < 0.99
    assert fidelity(spec, []) == 1


@pytest.mark.slow
def test_what_is_pruned_counts_as_lost(undefended: dict[str, Tensor]) -> None:
    spec, pruning = specify(model=("cifar_vit",), metrics=("psnr",)), GradientPruning(0.1)
    released = pruning.release(undefended, [Generator() for _ in range(14)])
    assert fidelity(spec, [pruning]) == pytest.approx(cosine(undefended, dict(released)), abs=1e-3)


CARD = """
track = "gradients"
version = "privlab/1"
kind = "defense"
name = "{name}"
uses = "{name}"
paper = "a paper"
secret_bits = 0
epsilon = "none"
[utility]
measure = "top-1"
how = "not measured"
[reported]
claim = "it holds"
"""


@pytest.mark.parametrize(("name", "once"), [("gradient-sign", True), ("svt-privacy", False), ("mjp", False)])
def test_a_random_defense_is_drawn_as_often_as_the_track_says(name: str, once: bool) -> None:
    card = parse_card(CARD.format(name=name), Path("card"))
    assert card.of.draws > 1
    assert card.draws == (1 if once else card.of.draws)

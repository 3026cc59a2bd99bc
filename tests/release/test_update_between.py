"""Which integers stand in the place of weights, and which are counters that nothing is asked of."""

import pytest
import torch
from torch import Tensor

from privlab.base import PrivlabError, PrivlabWarning
from privlab.release.update_files import update_between

NAMES = ("before", "after")
OLD, NEW = {"pos_embed": torch.ones(2, 2)}, {"pos_embed": torch.tensor([[1.0, 0.5], [1.0, 1.0]])}
COUNTER = "bn.num_batches_tracked"


def test_integers_that_are_no_weights_are_left_aside_in_either_file() -> None:
    counted: list[dict[str, Tensor]] = [{COUNTER: torch.tensor(count)} for count in (3, 8)]
    alone = update_between(OLD, NEW, 1, NAMES, ["pos_embed"]).gradients
    assert float(alone["pos_embed"][0, 1]) == 0.5
    both = update_between(OLD | counted[0], NEW | counted[1], 1, NAMES, ["pos_embed"]).gradients
    assert (
        both.keys() == update_between(OLD | counted[0], NEW, 1, NAMES, ["pos_embed"]).gradients.keys() == alone.keys()
    )
    with pytest.warns(PrivlabWarning, match=r"bn\.num_batches_tracked"):
        assert update_between(OLD, NEW | counted[1], 1, NAMES, ["pos_embed"]).gradients.keys() == alone.keys()


def test_integers_in_the_place_of_weights_are_refused_and_not_called_the_same() -> None:
    whole = [{name: (tensor * 8).int() for name, tensor in state.items()} for state in (OLD, NEW)]
    for old, new, file in ((OLD, whole[1], "after"), (whole[0], NEW, "before"), (*whole, "before")):
        with pytest.raises(
            PrivlabError,
            match=rf"^The weights of '{file}' must be floating-point numbers\. Found pos_embed of torch\.int32",
        ):
            update_between(old, new, 1, NAMES, ["pos_embed"])
    with pytest.raises(PrivlabError, match=r"^Nothing was trained"):
        update_between(OLD, OLD, 1, NAMES, ["pos_embed"])

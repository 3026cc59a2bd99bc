"""What every audit runs on."""

import pytest
import torch

from privlab.grids import specify
from privlab.runs.audits import audited_victim
from privlab.victims.names import NORMALISATIONS

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@pytest.mark.parametrize("name", ["imagenet", "clip"])
def test_the_audited_victim_is_normalised_as_stated(name: str) -> None:
    spec = specify(model=("vit_ti",), weights="random", img_size=32, normalisation=name)
    base = audited_victim(spec, torch.device("cpu"))
    mean, std = NORMALISATIONS[name]
    torch.testing.assert_close(base.model.mean.flatten(), torch.tensor(mean))
    torch.testing.assert_close(base.model.std.flatten(), torch.tensor(std))

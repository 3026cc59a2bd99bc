"""Pictures of a run: what is written of each image."""

import pytest
import torch

from privlab.grids import tasks


def test_equal_pictures_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[torch.Tensor] = []
    monkeypatch.setattr(tasks, "to_png", lambda image: encoded.append(image) or bytes(len(encoded)))
    private, reconstruction = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)
    names = {"cell-private": private, "cell-fed": private.clone(), "attack": reconstruction}
    strip = [[(name, image, "") for name, image in names.items()]]
    assert dict(tasks._pngs(strip)) == {"cell-private": bytes(1), "cell-fed": bytes(1), "attack": bytes(2)}

"""F-SIM: the cosine of a named network's embeddings, never of a random network's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.metrics import load_embedding, score

NAME = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with weights of a timm model, classifier included."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(NAME, num_classes=5)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path_factory.mktemp("weights") / "embedding.safetensors"
    save_file(model.state_dict(), path)
    return path


def test_f_sim_is_the_cosine_of_the_pooled_features(weights: Path, photographs: Callable[[int, int], Tensor]) -> None:
    x, y = photographs(2, 224), photographs(2, 224).flip(0)
    embedding = load_embedding(f"timm:{NAME}@{weights}")
    model = timm.create_model(NAME, num_classes=0, checkpoint_path="").eval()
    model.load_state_dict(embedding.module.state_dict())
    with torch.no_grad():
        f, g = (model((images - 0.5) / 0.5) for images in (x, y))  # this model's mean and deviation
    expected = (f * g).sum(1) / (f.norm(dim=1) * g.norm(dim=1))
    assert_close(embedding(x, y), expected, atol=1e-5, rtol=0)
    assert_close(embedding(x, x), torch.ones(2))
    scores = score(x, y, ["mse", "f_sim"], {"f_sim": embedding})
    assert_close(scores["f_sim"].float(), expected, atol=1e-5, rtol=0)
    assert not torch.equal(expected, torch.ones(2))


def test_images_of_another_size_are_resized(weights: Path, photographs: Callable[[int, int], Tensor]) -> None:
    large = photographs(1, 224)
    small = torch.nn.functional.interpolate(large, (112, 112), mode="bilinear", antialias=True)
    again = torch.nn.functional.interpolate(small, (224, 224), mode="bilinear", antialias=True)
    embedding = load_embedding(f"timm:{NAME}@{weights}")
    assert_close(embedding(small, small.flip(3)), embedding(again, again.flip(3)), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{NAME}@", "--embedding must be timm:NAME@FILE"),
        (f"timm:{NAME}", "--embedding must be timm:NAME@FILE"),
        ("timm:vit_tinny@x.safetensors", "Unknown timm model 'vit_tinny'. Did you mean"),
        (f"timm:{NAME}@absent.safetensors", "No weights file at 'absent.safetensors'"),
    ],
)
def test_what_names_no_embedding_is_refused(text: str, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        load_embedding(text)


def test_weights_of_another_network_are_refused(weights: Path) -> None:
    with pytest.raises(PrivlabError, match=r"embedding\.safetensors.*resnet18"):
        load_embedding(f"timm:resnet18@{weights}")
    with pytest.raises(PrivlabError, match=r"embedding\.safetensors do not fit vit_small_patch16_224: "):
        load_embedding(f"timm:vit_small_patch16_224@{weights}")

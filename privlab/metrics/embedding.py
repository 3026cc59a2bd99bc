"""F-SIM: the similarity of two images as a network sees it, the cosine of their embeddings."""

from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from privlab.base import PrivlabError, one_line, unknown_name
from privlab.victims import hash_of, read_state


@dataclass(frozen=True, eq=False)
class Embedding:
    """A network with trained weights that embeds images; called as `embedding(x, y)`."""

    module: nn.Module
    name: str
    sha256: str
    file: str
    size: tuple[int, int]
    mean: Float[Tensor, "c 1 1"]
    std: Float[Tensor, "c 1 1"]

    def __call__(self, x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
        """Return the cosine of the embeddings per image: ⟨f(x), f(y)⟩ / (‖f(x)‖ ‖f(y)‖).

        Images are resized to the network's input by an antialiased bilinear filter. Range [−1, 1]; higher leaks.

        Source: F-SIM in Table 6 of Permutation Equivariance (CVPR 2024), with the embedding that a user names.
        """
        with torch.no_grad():
            return F.cosine_similarity(self.embed(x), self.embed(y))

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        """Return the features of images in [0, 1], which are resized to the network's input."""
        images = F.interpolate(images.to(self.mean), self.size, mode="bilinear", antialias=True)
        return self.module((images - self.mean) / self.std).flatten(1)


def load_embedding(text: str, device: torch.device | str = "cpu") -> Embedding:
    """Return the embedding that "timm:NAME@FILE" names: a timm model without its classifier, with the weights of FILE.

    Raises:
        PrivlabError: if the text has another form, timm has no such model, or the file does not fit the model.
    """
    name, _, file = text.removeprefix("timm:").partition("@")
    if not (text.startswith("timm:") and name and file):
        raise PrivlabError(f"--embedding must be timm:NAME@FILE, a timm model and its weights. Found '{text}'.")
    if not timm.is_model(name.split(".")[0]):
        raise unknown_name("timm model", name, timm.list_models())
    state = read_state(Path(file))
    with torch.random.fork_rng(devices=[]):
        module = timm.create_model(name, num_classes=0).eval().requires_grad_(False)
    try:
        found = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise PrivlabError(f"The weights of {Path(file).name} do not fit {name}: {one_line(error)}.") from error
    if found.missing_keys:
        raise PrivlabError(f"The weights of {Path(file).name} do not fit {name}. missing: {found.missing_keys[0]} …")
    config = resolve_model_data_config(module)
    mean, std = (torch.tensor(config[key], device=device).view(-1, 1, 1) for key in ("mean", "std"))
    size: tuple[int, int] = config["input_size"][1:]
    return Embedding(module.to(device), name, hash_of(state), Path(file).name, size, mean, std)

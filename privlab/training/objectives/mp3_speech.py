"""MP3 on speech: the frames of a second of sound are the patches of an image that is one patch high.

MP3 gives 5 % of the frames their positions, since without any the task is too hard, and uses η = 0. That is DropPos
with γ = 0, γ_pos = 0.95 and no blocks in the decoder, save that frames without a position carry a learnt vector.
"""

import math

import torch
from jaxtyping import Float, UInt8
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from privlab.base import PrivlabError
from privlab.patches import unpatchify
from privlab.training.objectives.droppos import TrainDropPos
from privlab.victims import VictimModel

__all__ = ["SPEECH", "as_images", "log_mel", "speech_model"]

PATCH, WIDTH = 4, 32
PATCH_VALUES = 3 * PATCH**2
"""The number of values that one patch holds."""

SPEECH = TrainDropPos(
    gamma=0.0,
    gamma_pos=0.95,
    sigma=0.0,
    temperature=math.inf,
    decoder_width=WIDTH,
    decoder_depth=0,
    decoder_heads=1,
)
"""The objective: 5 % of the positions are given. Source: MP3 (Zhai et al., ICML 2022), Section 4.3."""


def speech_model(frames: int = 100, depth: int = 8, heads: int = 4) -> VictimModel:
    """Return the Transformer of MP3's Section 4.3, untrained: width 32, MLPs of 64.

    Args:
        frames: the number of frames of a sound, each of which is one patch.
        depth: the number of blocks.
        heads: the number of attention heads, a divisor of 32; the paper does not tell it.
    """
    vit = VisionTransformer(
        img_size=(PATCH, frames * PATCH),
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=depth,
        num_heads=heads,
        mlp_ratio=2,
        num_classes=12,
    )
    return VictimModel(vit, (0.5,) * 3, (0.25,) * 3)


def log_mel(
    sound: Float[Tensor, "b samples"], rate: int = 16_000, bands: int = 40, window: float = 0.03, hop: float = 0.01
) -> Float[Tensor, "b t bands"]:
    """Return log max(e, 1e-6) of the energies e of mel bands (HTK's scale), one row for each hop.

    There are t = samples // round(hop · rate) rows. The cepstral coefficients of MP3 are these rows times an orthogonal
    matrix, which a linear patch embedding learns.

    Args:
        sound: the amplitudes of b sounds of one length.
        rate: the sampling rate, in Hz.
        bands: the number of triangular bands, evenly spaced on the mel scale from 0 Hz to half the rate.
        window: the length of the Hann window of a frame, in seconds.
        hop: the time from one frame to the next, in seconds.
    """
    wide, step = round(window * rate), round(hop * rate)
    size = 2 ** math.ceil(math.log2(wide))
    shape = torch.hann_window(wide, dtype=sound.dtype, device=sound.device)
    power = torch.stft(sound, size, step, wide, shape, return_complex=True).abs().square()
    energies = power.mT[:, : sound.shape[1] // step] @ _filters(size // 2 + 1, rate, bands).to(sound)
    return energies.clamp(min=1e-6).log()


def _filters(lines: int, rate: int, bands: int) -> Float[Tensor, "lines bands"]:
    """Return triangular filters that are evenly spaced on the mel scale, from 0 Hz to half the rate."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2, dtype=torch.float64) / 2595) - 1)
    hertz = torch.linspace(0, rate / 2, lines, dtype=torch.float64)[:, None]
    rise, fall = (hertz - edges[:-2]) / edges.diff()[:-1], (edges[2:] - hertz) / edges.diff()[1:]
    return torch.minimum(rise, fall).clamp(min=0)


def as_images(frames: Float[Tensor, "b t k"]) -> UInt8[Tensor, "b 3 h w"]:
    """Return sequences as images of t patches in a row, scaled to 0 to 255; a patch holds a frame, and zeros after it.

    Raises:
        PrivlabError: if a frame has more numbers than a patch.
    """
    _, t, k = frames.shape
    if k > PATCH_VALUES:
        raise PrivlabError(f"A frame must have at most {PATCH_VALUES} numbers, to fit into a patch. Found {k}.")
    low, high = frames.amin((1, 2), keepdim=True), frames.amax((1, 2), keepdim=True)
    scaled = (frames - low) / (high - low).clamp(min=torch.finfo(frames.dtype).tiny)
    return (255 * unpatchify(F.pad(scaled, (0, PATCH_VALUES - k)), (3, PATCH, t * PATCH))).round().byte()

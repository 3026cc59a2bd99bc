"""`privlab study adam`: its counts against plain ones of torch's own step, and mistakes as one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from privlab.base import PrivlabError
from privlab.experiments.studies.adam import AdamStudy, to_rows
from privlab.images import batches, open_images
from privlab.victims import victim

Cli = Callable[..., Any]
PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
SMALL = ("--model", "cifar_vit", "--limit", 2, "--labels", "predicted")


def counted(rate: float) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the loss, and the magnitudes that a step of torch.optim.AdamW shows, by the spacing of float32 alone."""
    base, rows = victim("cifar_vit"), []
    (chunk,) = batches(open_images("samples", limit=2), base.preprocessing, 2)
    for pixels in chunk.images:
        model = victim("cifar_vit").model
        vit = model.vit.requires_grad_(True)
        before = {name: p.detach().clone() for name, p in vit.named_parameters()}
        logits = model(pixels[None])
        loss = F.cross_entropy(logits, logits.argmax(1))
        loss.backward()
        torch.optim.AdamW(vit.parameters(), lr=rate, weight_decay=0.0).step()
        known = {}
        for name, p in vit.named_parameters():
            moved, old = (before[name].double() - p.detach().double()).abs(), before[name].abs()
            ulp = torch.nextafter(torch.maximum(old, p.detach().abs()), torch.tensor(torch.inf)).double()
            ulp = ulp - torch.maximum(old, p.detach().abs()).double()
            error = ((ulp / 12**0.5) ** 2 + (2.0**-23 * moved) ** 2).sqrt()
            known[name] = rate - moved > 3 * error
        rows.append((float(loss.detach()), known))
    return rows


@pytest.mark.parametrize("rate", [1e-4, 1e-2])
def test_magnitudes_are_counted_as_in_torch_s_own_step(cli: Cli, rate: float) -> None:
    facts = cli("study", "adam", *SMALL, "--rate", rate, "--json").json
    for of, (loss, known) in zip(facts, counted(rate), strict=True):
        places, W = known["pos_embed"][:, -64:], known["patch_embed.proj.weight"]
        blocks = [known[f"blocks.{i}.{part}.weight"] for i in (0, 1) for part in PARTS]
        shares = [float(each.double().mean()) for each in (places, W)]
        assert of["loss"] == pytest.approx(loss, rel=1e-4)
        assert [of["known_positions"], of["known_projection"]] == pytest.approx(shares, rel=0.02)
        whole = sum(int(each.sum()) for each in known.values())
        assert of["known_all"] == pytest.approx(whole / sum(each.numel() for each in known.values()), rel=0.02)
        embedding = int(places.sum() + W.sum())
        assert of["equations_embedding"] == pytest.approx(embedding / (64 * (128 + 48)), rel=0.02)
        behind = 64 * 48 + 65 * 128
        counts = embedding + sum(int(each.sum()) for each in blocks)
        assert of["equations_blocks"] == pytest.approx(counts / behind, rel=0.02)
        entries = places.numel() + W.numel() + sum(each.numel() for each in blocks)
        assert of["signs_blocks"] == pytest.approx(entries / behind)


def test_a_table_has_a_row_for_each_photograph(cli: Cli) -> None:
    told = cli("study", "adam", *SMALL)
    assert told.status == 0
    assert "equations per unknown" in " ".join(told.out.split())
    facts = {"image": "a", "loss": 0.12345, "known_positions": 0.5, "known_projection": 0.25, "known_all": 0.125}
    more = {"equations_embedding": 0.5, "equations_blocks": 2.0, "signs_blocks": 10.93}
    (row,) = to_rows([facts | more])
    assert list(row.values()) == ["a", "0.123", "50.0%", "25.0%", "12.5%", "0.50", "2.00", "10.9"]


def test_mistakes_are_one_line(cli: Cli) -> None:
    assert "rate must be above 0 and finite. Found 0" in cli("study", "adam", *SMALL, "--rate", 0).error
    with pytest.raises(PrivlabError, match="blocks must be at least 0"):
        AdamStudy(blocks=-1)
    rotary = ("--model", "timm:vit_small_patch16_rope_224", "--weights", "random", "--img-size", 32)
    assert "needs a learned position embedding" in cli("study", "adam", *rotary, "--limit", 1).error

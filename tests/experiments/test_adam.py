"""`privlab study adam`: its counts against plain ones of torch's own step, and mistakes as one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from privlab.attacks.solvers import Shown
from privlab.base import PrivlabError
from privlab.evaluation import batches
from privlab.experiments.studies.adam import AdamStudy, to_rows, told_features
from privlab.experiments.studies.adam_pairs import GUESSES
from privlab.experiments.studies.adam_pairs import to_rows as pairs_to_rows
from privlab.images import open_images
from privlab.metrics import psnr
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
        assert of["known_classes"] == int(known["head.bias"].sum())
        q, k, v = known["blocks.0.attn.qkv.weight"].chunk(3)
        hidden = torch.cat([known["blocks.0.mlp.fc1.weight"], known["blocks.0.mlp.fc2.weight"].T])
        for name, rows in (("whole_qk", torch.cat([q, k])), ("whole_v", v), ("whole_mlp", hidden)):
            assert of[name] == pytest.approx(int((rows.double().mean(1) >= 0.95).sum()), abs=2)
        entries = places.numel() + W.numel() + sum(each.numel() for each in blocks)
        assert of["signs_blocks"] == pytest.approx(entries / behind)


def test_a_table_has_a_row_for_each_photograph(cli: Cli) -> None:
    told = cli("study", "adam", *SMALL)
    assert told.status == 0
    assert "equations" in told.out
    facts = {"image": "a", "loss": 0.12345, "known_positions": 0.5, "known_projection": 0.25, "known_all": 0.125}
    more = {"equations_embedding": 0.5, "equations_blocks": 2.0, "signs_blocks": 10.93}
    head = {"known_classes": 9, "features_error": 1.24e-5, "label_told": True}
    (row,) = to_rows([facts | more | head | {"whole_qk": 3, "whole_v": 2, "whole_mlp": 1}])
    shown = ["a", "0.123", "50.0%", "25.0%", "12.5%", "0.50", "2.00", "10.9", "1.2e-05", "3, 2, 1"]
    assert list(row.values()) == shown


def test_features_are_quotients_weighed_by_their_errors() -> None:
    r, f = torch.tensor([[-0.5, 0.25, 0.25]]).double(), torch.tensor([2.0, -3.0]).double()
    bias = Shown(r, torch.full_like(r, 1e-6), r.abs(), torch.ones_like(r, dtype=torch.bool), r.sign(), 1e-8)
    g = r.T * f
    known = torch.tensor([[True, True], [True, False], [True, False]])
    weight = Shown(g.clone(), torch.full_like(g, 1e-6), g.abs(), known, g.sign(), 1e-8)
    weight.value[1:, 1] = 7.0  # is not known
    torch.testing.assert_close(told_features(weight, bias), f)
    weight.value[0, 0], weight.deviation[0, 0] = 5.0, 1e3
    torch.testing.assert_close(told_features(weight, bias), f)
    none = weight._replace(known=torch.zeros_like(known))
    assert told_features(none, bias).isnan().all()


def test_the_features_of_a_step_are_those_that_the_head_read(cli: Cli) -> None:
    for of in cli("study", "adam", *SMALL, "--rate", 1e-2, "--json").json:
        assert of["features_error"] < 0.1
        assert of["label_told"] is True


@pytest.mark.slow
def test_a_pair_is_one_step_on_two_photographs(cli: Cli) -> None:
    facts = cli("study", "adam-pairs", "--model", "cifar_vit", "--limit", 3, "--labels", "predicted", "--json").json
    assert len(facts) == 2
    assert sorted(of["louder"] for of in facts) == [False, True]
    base = victim("cifar_vit")
    (chunk,) = batches(open_images("samples", limit=2), base.preprocessing, 2)
    logits = base.model(chunk.images)
    vit = base.model.vit.requires_grad_(True)
    F.cross_entropy(base.model(chunk.images), logits.argmax(1)).backward()
    optimiser = torch.optim.AdamW(vit.parameters(), lr=1e-4, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in vit.named_parameters()}
    optimiser.step()
    moved = {name: (before[name] - p.detach())[None] for name, p in vit.named_parameters()}
    again = victim("cifar_vit").model
    places, W = moved["pos_embed"][0, 0, -again.grid[0] * again.grid[1] :], moved["patch_embed.proj.weight"][0]
    patches = torch.linalg.lstsq(places.T.double(), W.flatten(1).double()).solution
    for of, image in zip(facts, chunk.images, strict=True):
        assert of["patch-gradient"] == pytest.approx(float(psnr(again.to_images(patches[None]), image[None])), abs=0.02)
        assert of["mean of both"] == pytest.approx(float(psnr(chunk.images.mean(0)[None], image[None])), abs=1e-3)
        assert of["one colour"] == pytest.approx(float(psnr(torch.full_like(image, 0.5)[None], image[None])), abs=1e-3)


def test_pairs_take_two_photographs_and_a_rate(cli: Cli) -> None:
    few = ("study", "adam-pairs", "--model", "cifar_vit", "--labels", "predicted", "--offset", 13)
    assert "A pair takes two photographs that can be used. 'samples' has fewer." in cli(*few).error
    assert "rate must be above 0 and finite. Found -1" in cli("study", "adam-pairs", "--rate", -1).error
    (row,) = pairs_to_rows([{"image": "a", "louder": True} | dict.fromkeys(GUESSES, 12.34)])
    assert list(row.values()) == ["a", "yes", *["12.3"] * 5]


@pytest.mark.slow
def test_mistakes_are_one_line(cli: Cli) -> None:
    assert "rate must be above 0 and finite. Found 0" in cli("study", "adam", *SMALL, "--rate", 0).error
    with pytest.raises(PrivlabError, match=r"blocks.*0"):
        AdamStudy(blocks=-1)
    rotary = ("--model", "timm:vit_small_patch16_rope_224", "--weights", "random", "--img-size", 32)
    assert "needs a learned position embedding" in cli("study", "adam", *rotary, "--limit", 1).error

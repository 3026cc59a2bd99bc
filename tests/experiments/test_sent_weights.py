"""The study of the audit of a server's weights: its manipulations, its rows and its figure."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from privlab.attacks.dishonest.imprint_bins import bins
from privlab.attacks.dishonest.layout import STEEP
from privlab.attacks.dishonest.manipulations import faint, mixed
from privlab.base import PrivlabError
from privlab.experiments.figures.sent_weights import draw_sent_weights
from privlab.experiments.methods import honest_weights
from privlab.experiments.methods import sent_weights as study
from privlab.experiments.methods.hidden_backbone import HiddenBackbone, rotation
from privlab.runs.sent_weights import RANGES, audit_sent_weights
from privlab.victims import victim


def test_what_is_mixed_is_between_trained_and_manipulated_weights(photographs: Callable[[int, int], Tensor]) -> None:
    base, images = victim("cifar_vit").model, photographs(2, 32)
    models = {}
    for strength in (0.0, 0.5, 1.0):
        models[strength] = copy.deepcopy(base)
        mixed(faint, strength)(models[strength], images)
    heads = {strength: model.vit.head.weight for strength, model in models.items()}
    assert torch.equal(heads[0.0], base.vit.head.weight)
    torch.testing.assert_close(heads[1.0], 1e-8 * base.vit.head.weight)
    torch.testing.assert_close(heads[0.5], (heads[0.0] + heads[1.0]) / 2)


def test_rows_say_what_the_server_reads_and_what_the_audit_counts(
    photographs: Callable[[int, int], Tensor], tmp_path: Path
) -> None:
    base, images = victim("cifar_vit").model, photographs(6, 32)
    honest = study.audit_row("trained", "cifar_vit", audit_sent_weights(base, images))
    found = study._manipulated("steepness", "bins", base, bins, images, STEEP)
    assert (honest["by_test"], honest["by_statistics"], found["by_test"], found["by_statistics"]) == (False,) * 2 + (
        True,
    ) * 2
    assert 0 < found["read"] < found["recognisable"] < 1
    first, second = study.summary([honest, found])
    assert (first["weights"], first["by either"], first["most recognised"]) == ("honest, trained", "0", "–")
    assert (second["weights"], second["number"], second["by either"]) == ("steepness bins", "1", "1")
    with pytest.raises(PrivlabError, match="run `privlab study sent-weights`"):
        draw_sent_weights(tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps([honest, found]), encoding="utf-8")
    assert [path.name for path in draw_sent_weights(tmp_path)] == ["sent_weights.svg"]
    hidden = honest | {"kind": "hidden", "read": 0.9, "dependence by slot": 0.1}
    (tmp_path / "facts.json").write_text(json.dumps([hidden]), encoding="utf-8")
    assert [path.name for path in draw_sent_weights(tmp_path)] == ["hidden_weights.svg"]
    assert all(path.stat().st_size > 1000 for path in tmp_path.glob("*.svg"))


def test_a_rotation_that_keeps_the_ones_commutes_with_layer_norm() -> None:
    draw = torch.Generator().manual_seed(0)
    R, z = rotation(12, draw), torch.randn(5, 12, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(R @ R.mT, torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(F.layer_norm(z @ R.mT, (12,)), F.layer_norm(z, (12,)) @ R.mT)
    assert float((R - torch.eye(12)).abs().max()) > 0.3


@pytest.mark.parametrize("noise", [None, 0.001])
def test_hidden_versions_read_and_hide(noise: float | None, photographs: Callable[[int, int], Tensor]) -> None:
    """The rotation alone leaves empty rows. With noise only the dependence on the image is not that of a model."""
    pytest.importorskip("peft", reason="needs privlab[peft]")
    base, images = victim("cifar_vit").model, photographs(2, 32)
    hidden = HiddenBackbone(30.0, noise)
    found = study.hidden_row("hidden", base, hidden, images, 1.0)
    assert (found["read"], found["psnr"] > 40) == (1, True)
    assert found["by_test"] == (noise is None)
    assert (found["largest row / median row"] > 100, found["parallel rows"] > 0.2) == (noise is None,) * 2
    honest = study.audit_row("trained", "cifar_vit", audit_sent_weights(base, images))
    assert found["dependence on the image"] < RANGES["dependence on the image"][0] < honest["dependence on the image"]


def test_a_hidden_version_whose_attention_depends_on_the_image_is_read(
    photographs: Callable[[int, int], Tensor],
) -> None:
    """Its gradients depend on the image by factors of slots, which a constant row of A shows."""
    pytest.importorskip("peft", reason="needs privlab[peft]")
    base, images = victim("cifar_vit").model, photographs(2, 32)
    found = study.hidden_row("hidden", base, HiddenBackbone(30.0, attention=1.0), images, 1.0)
    assert (found["read"], found["by_test"], found["by_statistics"]) == (1, False, False)
    assert found["dependence on the image"] > 0.3  # 0.02 without it
    assert found["dependence by slot"] < 0.1


def test_the_study_measures_the_kinds_that_are_asked_for_and_keeps_another_study(
    tmp_path: Path, cli: Callable[..., Any]
) -> None:
    rows = study.SentWeightsStudy(kinds=["steepness", "noise"], limit=4, offset=2)(tmp_path)
    assert [row["kind"] for row in rows] == ["steepness"] * 7 + ["noise"] * 12
    assert "give a new folder" in cli("study", "sent-weights", "--out", tmp_path).error
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8")) == rows
    assert "kind of weights 'none'" in cli("study", "sent-weights", "--kind", "none", "--out", tmp_path / "new").error
    assert not (tmp_path / "new").exists()
    (tmp_path / "facts.json").write_text("[", encoding="utf-8")
    with pytest.raises(PrivlabError, match="no JSON"):
        draw_sent_weights(tmp_path)


def test_the_study_of_honest_weights_resumes_and_states_the_interval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(honest_weights, "_STARTS", ("cifar_vit",))
    monkeypatch.setattr(honest_weights, "_CLIENTS", honest_weights._CLIENTS[-1:])
    monkeypatch.setattr(honest_weights, "_ROUNDS", 2)
    monkeypatch.setattr(honest_weights, "_ARCHITECTURES", ())
    rows = honest_weights.HonestWeightsStudy()(tmp_path)
    assert [row["name"] for row in rows] == ["cifar_vit, client 0, round 1", "cifar_vit, client 0, round 2"]
    assert rows[0]["loss"] > rows[1]["loss"]  # it trains
    monkeypatch.setattr(honest_weights, "_rounds", lambda *_: pytest.fail("it ran once more"))
    assert honest_weights.HonestWeightsStudy()(tmp_path) == rows
    line = honest_weights.summary([rows[0] | {"by_test": False, "by_statistics": False}] * 370)[-1]
    assert (line["number"], line["refused"]) == ("370", "0")
    assert line["95 % interval of the share"] == "0.00 to 0.99 %"  # 1 − 0.025^(1 / 370)

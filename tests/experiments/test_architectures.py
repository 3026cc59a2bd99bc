"""`privlab study architectures`: a row for each kind, reasons in words, and mistakes as one line."""

from collections.abc import Callable
from typing import Any

import pytest
import timm

from privlab.base import PrivlabError
from privlab.experiments.studies.architectures import ARCHITECTURES, ATTACKS, ArchitectureStudy, reasons, to_rows

Cli = Callable[..., Any]


@pytest.mark.slow
def test_each_model_has_a_row_and_each_refusal_a_reason(cli: Cli) -> None:
    models = ("deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224")
    facts = cli("study", "architectures", "--models", ",".join((*models, "no_such")), "--limit", 1, "--json").json
    assert [of["model"] for of in facts] == list(models)
    distilled, eva, swin = facts
    assert (distilled["patch"], distilled["width"], distilled["tokens"]) == (16, 192, 18)
    assert distilled["input"] == [3, 64, 64]
    found = {name: of["outcome"] for name, of in distilled["attacks"].items()}
    assert found["patch-gradient"] == "exact"
    assert found["least-squares"] == "partial"
    assert distilled["attacks"]["patch-gradient"]["psnr"] > 100
    assert distilled["attacks"]["least-squares"]["exact"] == 0
    assert eva["attacks"]["token-separation"]["outcome"] == "refused"
    assert "whose stages cut tokens into windows" in swin["refused"]
    rows = to_rows(facts)
    assert rows[0]["patch-gradient"].startswith("exact, 1")
    assert [rows[2][name] for name in ATTACKS] == ["refused"] * 3
    assert len(reasons(facts)) == 2
    assert "has the MLP GluMlp" in reasons(facts)[0]


@pytest.mark.slow
def test_models_of_transformers_have_rows_of_their_own() -> None:
    pytest.importorskip("transformers")
    names = ("transformers:clip", "transformers:vit-4-channels", "transformers:vit-rectangle")
    clip, channels, rectangle = ArchitectureStudy(models=names, limit=1)()
    assert (clip["input"], clip["patch"], clip["width"], clip["tokens"]) == ((3, 128, 128), 32, 768, 17)
    assert "a pre-norm" in clip["attacks"]["token-separation"]["reason"]
    assert (channels["input"], rectangle["input"], rectangle["tokens"]) == ((4, 64, 64), (3, 48, 80), 16)
    for of in (clip, channels, rectangle):
        assert of["attacks"]["patch-gradient"]["outcome"] == "exact"


def test_models_of_transformers_are_left_out_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PrivlabError, match="transformers:vit"):
        ArchitectureStudy(models=("transformers:vit",))


def test_partial_success_counts_the_exact_images() -> None:
    cell = {"outcome": "partial", "psnr": 90.25, "exact": 2, "images": 4, "flat": 10.0}
    facts = [{"model": "m", "patch": 16, "width": 8, "tokens": 4, "attacks": dict.fromkeys(ATTACKS, cell)}]
    assert to_rows(facts)[0]["token-separation"] == "partial, 90.2 (2 of 4 exact)"
    assert reasons(facts) == []


def test_the_models_of_the_study_are_timm_s() -> None:
    assert any(map(timm.is_model, ARCHITECTURES))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 0}, "limit must be a positive number. Found 0"),
        ({"layer_scale": 0.0}, "layer_scale must be a finite number > 0"),
        ({"classes": 1}, "classes must be at least 2"),
        ({"models": ("resnet_none",)}, "timm has none of these models. Found resnet_none"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        ArchitectureStudy(**options)

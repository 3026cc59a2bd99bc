"""What an audit is evidence of: on the page and as Markdown, in the words of the verdict, and no wider."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

import privlab
from privlab.attacks import April, attacks
from privlab.base import PrivlabError
from privlab.evaluation import Adversary
from privlab.report.evidence import _left_out, evidence_of
from privlab.report.run import LEAKS, Run
from privlab.report.tables import Results
from privlab.threat import AttackDeclarations, Client

HOSTILE = "<b>|`$"
ONCE = Client(lr=0.01)


def update(image: Tensor, folder: Path, optimiser: Any = torch.optim.SGD) -> tuple[Path, Path]:
    """Return the files of one step by cifar_vit, which is fed pixels in [0, 1], on an image of label 3."""
    vit = privlab.victim("cifar_vit").model.vit.requires_grad_(True)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    F.cross_entropy(vit(image), torch.tensor([3])).backward()
    optimiser(vit.parameters(), lr=ONCE.lr).step()
    return privlab.capture_update(before, vit, folder)


def audited(files: tuple[Path, Path], out: Path, **options: Any) -> Run:
    given = {"client": ONCE, "normalisation": "none", "attacks": "patch-update"} | options
    return privlab.audit_update(*files, model="cifar_vit", out=out, **given)


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory, photographs: Callable[[int, int], Tensor]) -> Run:
    """Return the audit of a client's step on one photograph, whose files have names that markup would read."""
    folder = tmp_path_factory.mktemp("audit")
    image = photographs(1, 32)
    before, after = (path.rename(path.with_name(f"{HOSTILE}{path.name}")) for path in update(image, folder))
    to_pil_image(image[0]).save(folder / "x.png")
    return audited((before, after), folder / "run", reference=folder / "x.png", metrics="psnr")


def test_the_evidence_has_the_words_of_the_verdict_and_the_hashes_of_the_files(leaking: Run, tmp_path: Path) -> None:
    text = leaking.to_markdown(tmp_path / "evidence.md")
    assert (tmp_path / "evidence.md").read_text("utf-8") == text
    assert f"\nleaks: {LEAKS[True]} (patch-update).\n" in text
    assert leaking.verdict.startswith(f"leaks: {LEAKS[True]}")
    for path in leaking.path.parent.glob("*.safetensors"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    assert "C, parameter-aware eavesdropper" in text
    assert "| patch-update |" in text
    assert re.search(r"\| reads features \| .*inversion-conv", text)
    assert "holds the private image" in text
    assert "The folder …/run holds" in text  # not where it is on this machine
    assert str(leaking.path.parent) not in text


def test_it_supports_an_assessment_and_claims_no_compliance(leaking: Run) -> None:
    text = leaking.to_markdown()
    clauses = re.findall(r"^\| (EDPB|AI Act|OWASP).*It supports an assessment of", text, re.MULTILINE)
    assert clauses == ["EDPB", "AI Act", "OWASP"]
    assert not re.search(r"compl(y|ies|iant)|secure|safe\b", text, re.IGNORECASE)


def test_no_name_of_a_file_is_read_as_markup(leaking: Run, tmp_path: Path) -> None:
    assert HOSTILE not in leaking.to_markdown()
    assert HOSTILE not in leaking.to_html(tmp_path / "page.html").read_text("utf-8").partition("<body>")[2]


def test_the_page_of_an_audit_begins_with_it_and_holds_the_reconstructions(
    leaking: Run, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(leaking.to_html(tmp_path / "page.html"))
    assert page.complaints() == []
    assert page.requests() == [(tmp_path / "page.html").as_uri()]
    assert page.run("document.querySelector('main > section').id") == "evidence"
    assert page.run("[...document.querySelectorAll('.found img')].map((one) => one.naturalWidth)") == [32]
    titles = [section.title for section in evidence_of(leaking.results)]
    assert page.run("[...document.querySelectorAll('#evidence h3')].map((one) => one.textContent)") == titles


def test_what_is_not_known_may_not_be_quoted_as_privacy(
    photographs: Callable[[int, int], Tensor], tmp_path: Path
) -> None:
    files = update(photographs(1, 32), tmp_path, torch.optim.Adam)
    run = audited(files, tmp_path / "run", client=Client(optimiser="adam", lr=0.01), attacks="patch-gradient")
    assert run.leaks is None
    sections = {section.title: section for section in evidence_of(run.results)}
    assert LEAKS[None] in sections["What may be quoted"].lines[0]
    assert sections["What may not be quoted"].lines[0].startswith("“This does not leak”")
    assert "private image and" not in sections["Keep it as you keep the private image"].lines[0]  # no reference
    left = [name for _, names in sections["What was not tried"].rows[:-1] for name in names.split(", ")]
    assert sorted([*left, "patch-gradient"]) == sorted(attacks())


def test_an_attack_that_did_not_run_has_the_reason_that_holds_for_it() -> None:
    declared = AttackDeclarations(effort="full", stands_in_for=("april",))
    named, unnamed = Adversary(attacks=(April(),), effort="quick"), Adversary(effort="quick")
    assert _left_out(declared, named, ["april"]) == "was not asked for"
    assert _left_out(declared, unnamed, ["april"]) == "needs --effort full"
    assert _left_out(declared, Adversary(effort="full"), ["april"]) == "stands in for an attack that ran"


def test_a_run_that_is_no_audit_has_none(page_results: Callable[..., Results], tmp_path: Path) -> None:
    results = page_results()
    assert evidence_of(results) == []
    run = Run(results.path)
    object.__setattr__(run, "results", results)
    with pytest.raises(PrivlabError, match="is not an audit"):
        run.to_markdown(tmp_path / "evidence.md")
    assert [*tmp_path.iterdir()] == []


def test_an_entry_of_a_checkpoint_is_audited(photographs: Callable[[int, int], Tensor], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    named = []
    for path in update(photographs(1, 32), tmp_path):
        state = load_file(path)
        torch.save({"model": state, "model_ema": state}, path.with_suffix(".pt"))
        named.append(path.with_name(f"{path.stem}.pt#model_ema"))
    run = audited((named[0], named[1]), tmp_path / "run")
    assert run.leaks
    assert "read 'model_ema'" in run.warnings[0]

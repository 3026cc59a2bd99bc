"""The README's and the site's blocks of code run as printed, in their order; what does not run says why."""

import ast
import copy
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from privlab import capture, victim
from privlab.cli import cli as command_line
from privlab.cli.common import EXAMPLES
from privlab.threat import Client
from privlab.victims import save

ROOT = Path(__file__).parents[2]
MADE = {"_build", "generated", "jupyter_execute"}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not MADE & set(path.relative_to(ROOT).parts)
}
"""The pages that are written by hand. Generated ones hold the examples of commands, which are checked below."""

SLOW = {f"docs/how-to/{name}.md" for name in ("tables", "gradients", "updates", "run", "images", "choose", "benchmark")}
SLOW |= {"README.md", "docs/how-to/victims.md", "docs/how-to/which_file.md", "docs/reference/functions.md"}
"""Pages whose blocks take longer than some seconds."""


NEEDS = {f"docs/how-to/{name}.md": "flwr" for name in ("flower", "weights")} | {"docs/tutorials/update.md": "flwr"}
"""Pages whose blocks need an extra."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the word that says what it is, the rest of that line, and the lines inside."""

    kind: str
    about: str
    text: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = re.findall(r"^(```+)([^\n`]*)\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE)
    return [Block(*f"{head.strip()} ".split(" ", 1), text=inside) for _, head, inside in found]


def commands(text: str) -> list[list[str]]:
    """Return the words of each line that calls privlab."""
    lines = [line.strip().removeprefix("!") for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("privlab ")]


def refused(words: list[str]) -> list[str]:
    """Return what of a command line privlab does not know: commands and options."""
    command: click.Command = command_line
    unknown = []
    for word in words[1:]:
        if isinstance(command, click.Group):
            if word not in command.commands:
                return [word]
            command = command.commands[word]
        elif word.startswith("--"):
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            unknown += [] if word.partition("=")[0] in {*known, "--help"} else [word]
    return unknown


RUN = {"python", "console", "toml"}
SPHINX = {"{include}", "{literalinclude}", "{toctree}"}
EXECUTED = [name for name, text in PAGES.items() if any(block.kind in RUN for block in blocks(text))]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Go where a reader might be: beside a model, an update and a list of images; return names that pages may use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / "cache"))
    save(victim("cifar_vit").model.vit.state_dict(), tmp_path / "model.safetensors")
    pd.DataFrame({"file": ["a.png"], "class_index": [3], "sha256": ["0" * 64]}).to_csv("list.csv", index=False)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    images, labels = torch.rand(1, 3, 64, 64), torch.tensor([4])
    loss = F.cross_entropy(model(images), labels)
    loss.backward(retain_graph=True)
    capture(model, "update.safetensors", batch_size=1, reduction="mean")
    save_file(model.state_dict(), "client.safetensors")
    model.zero_grad()

    def train(trained: torch.nn.Module) -> None:
        """Make a client's round of five steps of SGD on one image, as the commands of the pages say."""
        optimiser = torch.optim.SGD(trained.parameters(), lr=0.01)
        for _ in range(5):
            optimiser.zero_grad()
            F.cross_entropy(trained(images), labels).backward()
            optimiser.step()

    after = copy.deepcopy(model)
    train(after)
    save_file(model.state_dict(), "before.safetensors")
    save_file(after.state_dict(), "after.safetensors")
    return {"model": model, "images": images, "loss": loss, "train": train}


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EXECUTED]
)
def test_every_block_runs(
    name: str, given: dict[str, Any], cli: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = blocks(PAGES[name])
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.kind == "python":
            module = ModuleType("block")
            vars(module).update(given)
            capsys.readouterr()
            exec(compile(ast.parse(block.text), name, "exec"), vars(module))
            if after is not None and after.kind == "":
                assert capsys.readouterr().out == after.text
        elif block.kind == "console":
            for words in commands(block.text):
                run(words, cli)
        elif block.kind == "toml":
            assert tomllib.loads(block.text)


def run(words: list[str], cli: Callable[..., Any]) -> None:
    """Run a command line of privlab, whose output may go to a file."""
    target = words[words.index(">") + 1] if ">" in words else ""
    told = cli(*(words[1 : words.index(">")] if target else words[1:]))
    assert told.status == 0, (words, told.err)
    if target:
        assert told.out.startswith("\\documentclass")
        Path(target).write_text(told.out, "utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_what_does_not_run_says_why_and_names_real_options(name: str) -> None:
    assert not re.search(r"^```[^\n]+`", PAGES[name], re.MULTILINE), "a backtick after a fence ends it"
    for block in blocks(PAGES[name]):
        assert block.kind in {*RUN, "text", "", "{code-cell}", "{not-run}", *SPHINX}, block
        if block.kind == "{not-run}":
            assert len(block.about.strip()) > 10, block
        elif block.kind in ("text", ""):
            assert not commands(block.text), block
        elif block.kind == "console":
            assert len(commands(block.text)) == len(block.text.splitlines()), block
        assert [refused(words) for words in commands(block.text) if refused(words)] == []
    outside = re.sub(r"^(```+)[^\n`]*\n.*?^\1$", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (.+)", outside, re.MULTILINE)
    assert [line for line in indented if "privlab " in line and not line.startswith("python3 -m venv")] == []


def test_each_setting_of_a_trainer_leads_to_one_of_a_client() -> None:
    table = PAGES["docs/how-to/which_file.md"].partition("| your training |")[2]
    right = [line.split("|")[2] for line in table.splitlines()[2:] if line.startswith("| ")]
    named = {name.partition("=")[0] for cell in right for name in re.findall(r"`([a-z_0-9]+(?:=[^`]*)?)`", cell)}
    assert {"loss", "clip", "autocast", "accumulation", "schedule", "trains"} <= named
    assert named - {"betas"} <= {field.name for field in fields(Client)}


def test_every_command_has_examples_with_real_options() -> None:
    leaves = []

    def walk(group: click.Group, above: str) -> None:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                walk(command, f"{above}{name} ")
            else:
                leaves.append(f"{above}{name}")

    walk(command_line, "")
    assert sorted(leaves) == sorted(EXAMPLES)
    for words, lines in EXAMPLES.items():
        for line in lines:
            assert line.startswith(f"privlab {words}")
            assert refused(shlex.split(line)) == []


def test_help_shows_the_examples(cli: Callable[..., Any]) -> None:
    for words, lines in EXAMPLES.items():
        shown = "".join(cli(*words.split(), "--help").out.split())
        assert all("".join(line.split()) in shown for line in lines)


def test_links_between_pages_and_pictures_exist() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / name).parent / target).exists() or name.startswith("docs/studies/notes"), (name, target)


def test_the_readme_is_one_page() -> None:
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 120
    assert len(text) <= 8_000

"""What needs no torch imports none: help, completion, and a name or a file that is not there."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from privlab.base import plugins as registry
from privlab.cli import cli as commands
from privlab.defenses import Mjp
from privlab.evaluation import known_names
from privlab.reassembly import REASSEMBLIES
from privlab.victims.names import NORMALISATIONS

LIGHT = {"click", "cloup", "lazy_loader", "privlab", "rich", "typing_extensions"}
"""What may be imported besides Python's own modules and those that are there when Python has started."""

IMAGES = LIGHT | {"numpy", "PIL"}
"""What may be imported to refuse files: their readers say what is wrong."""

NOT_THERE = [
    ("attack --model nope --setting c", "Unknown model 'nope'. Did you mean vit_s_nope"),
    ("attack --model vit_ti,swin_t", "This needs a plain ViT, timm's VisionTransformer. Found swin_t"),
    (
        "attack --model vit_ti --attack april,xyz",
        "Unknown attack 'xyz'. Choose from: adam-update, adapter-separation, ",
    ),
    ("attack --model vit_ti --defense row-permutation+nope", "Unknown defense 'nope'."),
    ("attack --model vit_ti --defense row-permutation+auto", "Unknown defense 'auto'."),
    ("attack --model vit_ti --metrics psnr,nope", "Unknown metric 'nope'. Choose from: correlation, "),
    ("attack --model vit_ti --setting d", "Unknown setting 'd'. Choose from: a, b, c."),
    (
        "attack --model cifar_vit --img-size 34",
        "--img-size 34 does not fit cifar_vit: an image is cut into patches",
    ),
    ("attack --model vit_ti --weights nope.pth", "No weights file at 'nope.pth'."),
    ("audit features nope --model vit_ti", "'nope' holds no recording: "),
    ("audit gradients nope --model vit_ti", "Cannot read the gradients 'nope': No such file"),
    ("table NOPE", "Unknown experiment 'NOPE'. Choose from: FILE.toml, "),
    ("table nope.toml", "Cannot read the experiment 'nope.toml': No such file or directory."),
    ("table quick --weights nope.pth", "No weights file at 'nope.pth'."),
    ("admit nope", "Unknown defense, attack or metric 'nope'."),
    ("explain nope", "Unknown attack, defense, metric or flag 'nope'. Did you mean none"),
    ("admit mjp --model nope", "Unknown model 'nope'."),
    ("split serve --model nope", "Unknown model 'nope'."),
    ("split infer --server localhost:1 --defense nope", "Unknown defense 'nope'."),
    ("train classify --model nope --data d --out o", "Unknown model 'nope'."),
    ("evaluate --model swin_t,nope", "Unknown model 'nope'."),
    ("models fetch nope", "Unknown model 'nope'."),
    ("study pe --model nope --out o", "Unknown model 'nope'."),
    ("bench attack --model nope", "Unknown model 'nope'."),
    ("bench nope", "Unknown bench 'nope'."),
    ("benchmark list --track nope", "Unknown track 'nope'."),
]
UPDATE = f"audit update {__file__} {__file__} --model vit_ti --client sgd"
GRADIENTS = f"audit gradients {__file__} --model vit_ti"
NOT_THERE += [
    ("attack --model vit_ti --attack april,worst-case", "'worst-case' already includes "),
    ("attack --model vit_ti --limit 0", "Invalid value for '--limit'"),
    ("attack --model vit_ti --gamma 7", "gamma (γ) must be in [0, 1]. Found 7.0"),
    ("attack --model vit_ti --geometry nope", "Unknown geometry 'nope'."),
    ("attack --model vit_ti --block nope", "Unknown block 'nope'."),
    ("attack --model vit_ti --release nope", "Unknown release 'nope'."),
    ("attack --model vit_ti --reassembly nope", "Unknown reassembly 'nope'."),
    ("attack --model vit_ti --masked-pe nope", "Unknown masked_pe 'nope'."),
    ("attack --model vit_ti --normalisation nope", "A normalisation is imagenet, "),
    ("attack --model vit_ti --device nope", "Unknown device 'nope'."),
    ("attack --model vit_ti --batch-size 0", "--batch-size must be auto or a positive number."),
    ("attack --model vit_ti --workers 0", "--workers must be a positive number."),
    ("attack --model vit_ti --engine nope", "Unknown engine 'nope'."),
    ("attack --model vit_ti --lpips-weights nope", "No backbone of LPIPS: found no file nope."),
    ("attack --model vit_ti --embedding nope", "--embedding must be timm:NAME@FILE"),
    ("attack --model vit_ti --embedding timm:vit@nope", "--embedding must be timm:NAME@FILE, with a file "),
    ("attack --model vit_ti --set nope", "--set takes KEY=VALUE or NAME.KEY=VALUE."),
    ("attack --model vit_ti --set client.lr=1", "An update is released by a client."),
    ("attack --model vit_ti --release update", "An update is released by a client."),
    ("attack --model vit_ti --force", "force runs attacks on a block that is named."),
    ("attack --model vit_ti --seed 9223372036854775808", "seed must be in "),
    ("attack --model vit_ti --client sgd --set client.lr=-1", "client.lr must be a finite number > 0. Found -1."),
    ("attack --model vit_ti --client sgd --set client.nope=1", "Unknown option 'nope'."),
    ("attack --model vit_ti --client sgd --release features", "A client releases its update."),
    ("attack --model vit_ti --client sgd --gradient-batch 2", "gradient_batch applies only to released gradients."),
    ("attack --model vit_ti --client sgd --setting b", "Setting b compares with the image that is fed"),
    ("attack --model vit_ti --reference nope", "--reference is no longer an option of `privlab attack`."),
    ("attack --update before after", "--update is no longer an option of `privlab attack`. Use `privlab audit update "),
    (
        "attack --gradients=nope",
        "--gradients is no longer an option of `privlab attack`. Use `privlab audit gradients ",
    ),
    (
        "attack --model vit_ti --features",
        "--features is no longer an option of `privlab attack`. Use `privlab audit fea",
    ),
    ("audit update nope nope --model vit_ti", "An update needs --client"),
    ("audit update nope nope --model vit_ti --client sgd", "No file at 'nope'. Give the weights before"),
    ("audit update nope --model vit_ti --client sgd", "Missing argument 'AFTER'."),
    ("audit update nope nope --client sgd", "Missing option '--model'."),
    ("audit gradients --model vit_ti", "Missing argument 'FILE'."),
    ("audit features --model vit_ti", "Missing argument 'DIR'."),
    ("audit weights nope --model vit_ti", "No file at 'nope'. Give the weights that the server sent."),
    ("audit nope", "No such command 'nope'."),
    (f"{UPDATE} --set client.lr=-1", "client.lr must be a finite number > 0. Found -1."),
    (f"{UPDATE} --limit 3", "No such option '--limit'."),
    (f"{UPDATE} --weights random", "No such option '--weights'."),
    (f"{UPDATE} --metrics psnr", "--metrics needs a --reference to score by. Found none."),
    (f"{UPDATE} --public samples", "--public needs a --reference to score by. Found none."),
    (f"{UPDATE} --reference nope", "No file at 'nope'. --reference is the private image."),
    (f"{UPDATE} --model vit_ti,vit_s", "An audit has one victim. Found 2: vit_ti, vit_s."),
    (f"{UPDATE} --model nope", "Unknown model 'nope'."),
    (f"{GRADIENTS} --reference nope", "No file at 'nope'. --reference is the private image."),
    (f"{GRADIENTS} --metrics psnr", "--metrics needs a --reference to score by. Found none."),
    (f"{GRADIENTS} --model vit_ti,vit_s", "An audit has one victim."),
    (f"{GRADIENTS} --device nope", "Unknown device 'nope'."),
    (f"{GRADIENTS} --client sgd", "No such option '--client'."),
    (f"{GRADIENTS} --force", "force runs attacks on a block that is named."),
    (f"audit features {Path(__file__).parent} --model vit_ti --reference nope", "No such option '--reference'."),
    (f"audit features {Path(__file__).parent} --model vit_ti --fail-on-leak", "No such option '--fail-on-leak'."),
]
WORKING = ["benchmark list", "benchmark list --track gradients --json"]
if importlib.util.find_spec("grpc") is None:  # `privlab split` says that its extra is missing
    NOT_THERE = [each for each in NOT_THERE if not each[0].startswith("split")]
FILES = [
    ("attack --model vit_ti --images nope", "No file or folder 'nope'. Give samples, a folder, files"),
    ("attack --model vit_ti --public nope", "No file or folder 'nope'."),
    ("attack --model vit_ti --manifest nope.csv", "Cannot read the manifest 'nope.csv': "),
    ("attack --model vit_ti --labels nope.csv", "Cannot read the labels 'nope.csv': "),
    ("table quick --images nope", "No file or folder 'nope'."),
    (f"attack --model vit_ti --manifest {__file__} --limit 3", "A manifest names its photographs one by one."),
]
COMPLETED = [
    ("attack --model", "deit_s_m", ["deit_s_mjp"]),
    ("attack --model", "vit_ti,deit_s_m", ["vit_ti,deit_s_mjp"]),
    ("attack --setting", "c,", ["c,a", "c,b"]),
    ("attack --attack", "mjp-subspace,mjp-", ["mjp-subspace,mjp-full", "mjp-subspace,mjp-unrolling"]),
    ("attack --attack", "worst", ["worst-case"]),
    ("attack --defense", "row-", ["row-permutation"]),
    ("attack --defense", "row-permutation+col", ["row-permutation+column-permutation"]),
    ("attack --metrics", "psnr,ssim_", ["psnr,ssim_skimage"]),
    ("attack --weights", "pre", ["pretrained"]),
    ("table", "mjp_table5_c", ["mjp_table5_cifar"]),
    ("admit", "batch", ["batch-shuffle"]),
    ("explain", "mjp-", ["mjp-subspace", "mjp-full", "mjp-unrolling"]),
    ("list", "exp", ["experiments"]),
    ("split train --defense", "low-pass+gauss", ["low-pass+gaussian-noise"]),
    ("train mjp --model", "cifar_sw", ["cifar_swin"]),
    ("evaluate --model", "vit_ti,swin_b", ["vit_ti,swin_b"]),
    ("bench train --model", "tiny_vit_m", ["tiny_vit_mjp"]),
]


def every_command(command: click.Command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of each command and each group."""
    below = command.commands.items() if isinstance(command, click.Group) else ()
    return [words, *(path for name, each in below for path in every_command(each, (*words, name)))]


def offered(words: str, incomplete: str) -> list[CompletionItem]:
    """Return what a shell would offer."""
    return ShellComplete(commands, {}, "privlab", "_PRIVLAB_COMPLETE").get_completions(words.split(), incomplete)


def complete(words: str, incomplete: str) -> list[str]:
    """Return the names that a shell would offer."""
    return [item.value for item in offered(words, incomplete) if item.type == "plain"]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what each task was the first to import, in one process of its own that does all of them in turn."""
    helps = [" ".join((*path, "--help")) for path in every_command(commands)]
    tasks = [*helps, *(f"complete {words} {text}" for words, text, _ in COMPLETED)]
    tasks += [*WORKING, *(task for task, _ in (*NOT_THERE, *FILES))]
    code = f"""
import contextlib, io, json, sys
there, found = set(sys.modules), {{}}
import privlab.cli
from click.shell_completion import ShellComplete
for task in ["import", *{tasks!r}]:
    words = task.split()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if words[0] == "complete":
            shell = ShellComplete(privlab.cli.cli, {{}}, "privlab", "_PRIVLAB_COMPLETE")
            assert shell.get_completions(words[1:-1], words[-1]), task
        elif task != "import":
            assert privlab.cli._status(words) == (0 if words[-1] == "--help" or task in {WORKING!r} else 2), task
    new = {{name.partition(".")[0] for name in set(sys.modules) - there}} - sys.stdlib_module_names
    there |= set(sys.modules)
    found[task] = sorted(new)
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path_factory.mktemp("empty"), check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"import", *tasks}
    assert len(helps) > 40
    return found


def test_what_a_specification_names_is_known_by_name() -> None:
    assert known_names("reassembly") == [*REASSEMBLIES]
    assert [Mjp(masked_pe=name).masked_pe for name in known_names("masked_pe")] == known_names("masked_pe")
    timm = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD), (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert (NORMALISATIONS["clip"], NORMALISATIONS["imagenet"]) == timm


def test_no_help_no_completion_and_no_wrong_name_imports_what_is_heavy(imported: dict[str, list[str]]) -> None:
    of_files = {task for task, _ in FILES}
    assert {task: heavy for task, new in imported.items() if task not in of_files and (heavy := set(new) - LIGHT)} == {}
    assert {task: heavy for task in of_files if (heavy := set(imported[task]) - IMAGES)} == {}


@pytest.mark.parametrize(("task", "message"), [*NOT_THERE, *FILES])
def test_what_is_not_there_is_refused_in_one_line(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(*task.split()).error.startswith(message)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("words", "incomplete", "expected"), COMPLETED)
def test_the_shell_completes_the_last_name(words: str, incomplete: str, expected: list[str]) -> None:
    assert complete(words, incomplete) == expected


def test_what_completes_to_no_name_may_be_a_file() -> None:
    for words in ("table", "attack --model vit_ti --weights", "attack --model vit_ti --images"):
        assert [(item.value, item.type) for item in offered(words, "some/whe")] == [("some/whe", "file")]


def test_a_plugin_is_known_by_its_name_and_not_imported(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [EntryPoint(f"own-{kind}", "nowhere_at_all:Own", f"privlab.{kind}s") for kind in ("attack", "defense")]
    points += [EntryPoint("own_metric", "nowhere_at_all:Own", "privlab.metrics")]
    points += [EntryPoint("own_victim", "nowhere_at_all:Own", "privlab.victims")]
    monkeypatch.setattr(registry, "installed_plugins", lambda group: [p for p in points if p.group == group])
    assert complete("attack --attack", "own") == ["own-attack"]
    assert complete("attack --defense", "mjp+own") == ["mjp+own-defense"]
    assert complete("attack --metrics", "own") == ["own_metric"]
    assert complete("attack --model", "own") == ["own_victim"]
    named = ("--attack", "own-attack", "--defense", "own-defense", "--metrics", "own_metric", "--model", "own_victim")
    assert cli("attack", *named, "--setting", "d").error == "Unknown setting 'd'. Choose from: a, b, c."


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_installed_command_serves_each_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_PRIVLAB_COMPLETE", f"{shell}_complete")
    typed = "row-permutation+col"
    monkeypatch.setenv("COMP_WORDS", f"privlab attack --defense {typed}")
    monkeypatch.setenv("COMP_CWORD", typed if shell == "fish" else "3")
    with pytest.raises(SystemExit) as stop:
        commands.main([], prog_name="privlab", standalone_mode=False)
    assert stop.value.code == 0
    assert "row-permutation+column-permutation" in capsys.readouterr().out


def test_python_m_privlab_works_like_the_command() -> None:
    command = (sys.executable, "-m", "privlab", "explain", "nope")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: Unknown attack, defense, metric or flag 'nope'.")

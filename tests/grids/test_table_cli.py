"""`privlab table` as users type it: every option, and every mistake in one line."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.grids import read_experiment
from privlab.stores import Store

CASES = """
[[case]]
label = "plain [x]"
group = "(1)"
setting = "a"
published = { psnr = 19.27 }

[[case]]
label = "shuffled"
group = "(2)"
setting = "c"
gamma = 0.5

[table]
columns = ["mse", "psnr"]
paper_attack = "april"

[[figure]]
kind = "claim"
name = "claim"

[[figure]]
kind = "sheet"
name = "sheet"
"""
BOTH = {"attack": ["april", "patch-gradient"]}
CPU = ("--device", "cpu")


def files(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def facts(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_bytes())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, written: Any, done: Any) -> tuple[Path, Path]:
    """Return an experiment's file and its finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    file = written(folder / "two.toml", CASES, metrics=None, title=None, **BOTH)
    done(read_experiment(file), folder / "run", chunk=4, pictures=4)
    return file, folder / "run"


@pytest.fixture
def table(cli: Any, finished: Any) -> Callable[..., Any]:
    """Run `privlab table` on the finished run."""
    return lambda *options: cli("table", finished[0], "--out", finished[1], *CPU, *options)


# The table


@pytest.mark.slow
def test_first_run_and_second(cli: Any, finished: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = cli("table", finished[0], "--out", path, *CPU)
    assert first.status == 0
    for word in ("plain [x]", "shuffled", "PSNR ↑", "worst", "patch-gradient", "(1)", f"run: {path}"):
        assert word in first.out
    assert "Warning: vit_ti has RANDOM weights" in first.err
    assert "8 of 8: " in first.err  # images of all cases
    assert facts(path)["command"] == f"privlab table {finished[0]} --out {path} {' '.join(CPU)}"
    before = files(path)
    second = cli("table", finished[0], "--out", path, *CPU)
    assert (second.status, second.out) == (0, first.out)
    assert "8 of 8: " not in second.err
    assert files(path) == before


def test_default_directory(cli: Any, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("table", write(name="mine"), *CPU, "--limit", 1).out.endswith("run: runs/mine\n")
    assert facts(tmp_path / "runs" / "mine")["status"] == "finished"


@pytest.mark.slow
def test_experiment_of_ours_by_its_name(cli: Any, photos: Path, tmp_path: Path) -> None:
    said = cli(
        *("table", "quick", "--out", tmp_path, *CPU, "--images", photos, "--limit", 1, "--pictures", 0),
        *("--set", f'run.public=["{photos}"]', "--set", "grid.gamma=[0.27]"),
    )
    assert said.status == 0
    assert facts(tmp_path)["experiment"]["title"] == "MJP on a small trained victim"
    assert "verdict: c with MJP, gamma 0.27: leaks by mjp-full (1 of 1 image" in " ".join(said.out.split())


@pytest.mark.slow
def test_writers(table: Any) -> None:
    latex = table("--format", "latex").out
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1
    assert r"\documentclass" not in latex
    assert r"\documentclass" in table("--format", "latex", "--standalone").out
    rows = list(csv.DictReader(io.StringIO(table("--format", "csv").out)))
    assert len({row["case"] for row in rows}) == 2
    assert "plain" in table("--format", "markdown").out
    assert table("--json").out == table("--format", "json").out
    assert "plain [x]" in json.dumps(json.loads(table("--json").out), ensure_ascii=False)


@pytest.mark.slow
def test_all_attacks(table: Any) -> None:
    some, every = (table("--format", "csv", *more).out for more in ((), ("--all-attacks",)))
    assert "patch-gradient" not in {row["attack"] for row in csv.DictReader(io.StringIO(some))}
    assert {"april", "patch-gradient"} <= {row["attack"] for row in csv.DictReader(io.StringIO(every))}
    assert len(every.splitlines()) > len(some.splitlines())


@pytest.mark.slow
def test_layout_that_changes_is_shown_and_nothing_is_run(cli: Any, finished: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished[1], path)
    asked = ("table", finished[0], "--out", path, *CPU)
    parts = Store(path).parts()
    said = cli(*asked, "--set", "table.columns=['psnr']", "--set", "table.decimals={psnr = 7}", "--json")
    assert said.status == 0
    assert facts(path)["experiment"]["layout"]["decimals"] == {"psnr": 7}
    assert Store(path).parts() == parts
    file = tmp_path / "two.toml"
    file.write_text('title = "Another title"\n' + finished[0].read_text())
    cli("table", file, "--out", path, *CPU)
    assert facts(path)["experiment"]["title"] == "Another title"
    assert "vit_ti has RANDOM weights" in "".join(facts(path)["warnings"])
    assert Store(path).parts() == parts


# --plan


def test_plan(cli: Any, finished: Any, tmp_path: Path) -> None:
    measured = ("--plan", "--measure")
    said = cli("table", finished[0], "--out", tmp_path / "run", *CPU, *measured, "--chunk", 3)
    assert said.status == 0
    for word in ("(1) plain [x]", "april, patch-gradient", "4 tasks, about ", " cost "):
        assert word in said.out
    plan = json.loads(cli("table", finished[0], "--out", tmp_path / "run", *CPU, *measured, "--json").out)
    assert [(row["images"], row["done"]) for row in plan["cases"]] == [(4, 0), (4, 0)]
    assert plan["tasks"] == 2
    assert plan["seconds"] > 0
    assert not (tmp_path / "run").exists()


def test_plan_runs_nothing_unless_it_is_to_measure(
    cli: Any, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlab.grids.fill.run_task", None)
    asked = ("table", finished[0], "--out", tmp_path / "run", *CPU)
    said = cli(*asked, "--plan")
    assert said.status == 0
    assert said.out.endswith("2 tasks; --measure runs one image of each kind, and says what they cost\n")
    assert " cost " not in said.out.splitlines()[1]
    plan = json.loads(cli(*asked, "--plan", "--json").out)
    assert ([row["seconds"] for row in plan["cases"]], plan["seconds"], plan["tasks"]) == ([None, None], None, 2)
    assert cli(*asked, "--measure").error == "--measure says what a --plan costs. Give both, or neither."


def test_plan_of_what_is_finished(table: Any, finished: Any) -> None:
    before = files(finished[1])
    plan = json.loads(table("--plan", "--measure", "--json").out)
    assert ([row["done"] for row in plan["cases"]], plan["tasks"], plan["seconds"]) == ([4, 4], 0, 0)
    assert files(finished[1]) == before


def test_plan_of_an_attack_that_cannot_run(cli: Any, write: Any, tmp_path: Path) -> None:
    mixed = '[[case]]\n[[case]]\nlabel = "without"\nmodel = "vit_ti_nope"'
    said = cli("table", write(mixed), "--out", tmp_path / "run", *CPU, "--plan", "--json", "--limit", 1)
    assert list(json.loads(said.out)["cases"][1]["refused"]) == ["patch-gradient"]


# What is added later, and what is kept for it


@pytest.mark.slow
def test_what_is_added_is_run_alone(cli: Any, write: Any, tmp_path: Path, rows: Any) -> None:
    path = tmp_path / "run"

    def run(*options: object, **given: Any) -> int:
        before = rows(path) if path.exists() else 0
        assert cli("table", write(**given), "--out", path, *CPU, "--pictures", 0, *options).status == 0
        return rows(path) - before

    assert run("--limit", 2) == 2 * 6
    assert run("--limit", 3) == 6
    assert run("--limit", 3, attack=["april", "patch-gradient"]) == 3 * 2
    assert run("--limit", 3, attack=["april"]) == 0
    assert run("--limit", 3, seeds=[0, 1], attack=["april"]) == 3 * 6
    assert run("--limit", 3, draws=2) == 3 * 6
    assert run("--limit", 3, metrics=["mse", "psnr", "ssim"]) == 3 * 6  # rows with the new metric, joined when read
    frame = Store(path).frame()
    assert len(frame) == 3 * (6 + 2 + 6 + 6)
    assert frame[(frame.attack == "patch-gradient") & (frame.draw == 0)].ssim.notna().all()


@pytest.mark.slow
def test_later_metric_is_scored_from_what_was_kept(
    cli: Any, write: Any, tmp_path: Path, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = """[[case]]\nsetting = "c"\ngamma = 0.5
[[case]]\nlabel = "features"\nsetting = "c"\ndefense = "row-permutation"
attack = ["pe-assignment"]\nclient_batch = 2"""
    early, late = (write(cases, name=name, metrics=m) for name, m in (("e", ["mse"]), ("l", ["mse", "psnr", "ssim"])))
    options = (*CPU, "--pictures", 0, "--chunk", 4)
    assert cli("table", late, "--out", tmp_path / "once", *options).status == 0
    assert cli("table", early, "--out", tmp_path / "twice", *options, "--keep", "reconstructions").status == 0

    def never(*_: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:  # no attack runs again
        patch.setattr("privlab.evaluation.check.attack_batch", never)
        assert cli("table", late, "--out", tmp_path / "twice", *options).status == 0
    same(tmp_path / "twice", tmp_path / "once")


# The other options


def test_options_that_override_the_file(cli: Any, write: Any, image: Any, tmp_path: Path) -> None:
    for seed in (50, 51, 52):
        image(tmp_path / "others" / f"{seed}.png", seed)
    said = cli(
        *("table", write(weights="auto"), "--out", tmp_path / "run", *CPU, "--batch-size", 1, "--chunk", 2),
        *("--images", tmp_path / "others", "--limit", 2, "--weights", "random", "--set", "run.metrics=['ssim']"),
    )
    assert said.status == 0
    frame = Store(tmp_path / "run").frame()
    assert set(frame.image) == {"50.png", "51.png"}
    assert set(frame.weights) == {"random"}
    assert set(frame.metrics) == {"ssim"}
    assert len(Store(tmp_path / "run").parts()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 1), (100, 4)])
def test_pictures(cli: Any, write: Any, tmp_path: Path, count: int, kept: int) -> None:
    assert cli("table", write(), "--out", tmp_path / "run", *CPU, "--pictures", count).status == 0
    folders = list((tmp_path / "run").glob("pictures/*"))
    assert len(folders) == kept
    assert all(len(list(folder.glob("*.png"))) == 3 for folder in folders)  # private, fed, and one reconstruction


@pytest.mark.slow
def test_shards_that_are_merged_are_the_whole(cli: Any, finished: Any, tmp_path: Path, same: Any, rows: Any) -> None:
    for number in (1, 2, 3):
        asked = ("table", finished[0], *CPU, "--shard", f"{number}/3", "--out", tmp_path / f"part-{number}")
        assert cli(*asked).status == 0
        assert cli(*asked, "--plan", "--json").out.count('"tasks": 0') == 1
    sources = [tmp_path / f"part-{number}" for number in (1, 2, 3)]
    said = cli("store", "merge", tmp_path / "all", *sources)
    assert (said.status, said.out) == (0, f"{rows(finished[1])} records: {tmp_path / 'all'}\n")
    same(tmp_path / "all", finished[1], 1e-4)
    assert rows(tmp_path / "all") == rows(finished[1])
    assert cli("table", finished[0], *CPU, "--out", tmp_path / "all", "--plan", "--json").out.count('"tasks": 0') == 1


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning", "ignore:`fork` start method")
def test_workers(cli: Any, finished: Any, tmp_path: Path, same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlab.grids.engines._START", "fork")
    said = cli("table", finished[0], "--out", tmp_path / "run", *CPU, "--workers", 2, "--chunk", 2)
    assert said.status == 0
    assert said.err.count(" of 8: ") == 8
    same(tmp_path / "run", finished[1], 1e-4)
    assert facts(tmp_path / "run")["workers"] == 2


@pytest.mark.slow
def test_failed_images(cli: Any, write: Any, image: Any, tmp_path: Path, rows: Any) -> None:
    image(tmp_path / "some" / "a.png", 1)
    (tmp_path / "some" / "b.png").write_bytes(b"no image")
    asked = ("table", write(images=[str(tmp_path / "some")]), "--out", tmp_path / "run", *CPU)
    for _ in range(2):
        said = cli(*asked)
        assert said.status == 2
        assert [line for line in said.err.splitlines() if line.startswith("Failed")] == [
            "Failed: b.png: Not an image in one of the formats JPEG, PNG, BMP, WEBP, TIFF, GIF, PPM, JPEG2000."
        ]
        assert rows(tmp_path / "run") == 6 + 2
    assert cli(*asked, "--retry-failed").status == 2
    assert rows(tmp_path / "run") == 6 + 2 * 2


@pytest.mark.slow
def test_missing_backbones_of_lpips(cli: Any, write: Any, tmp_path: Path) -> None:
    file = write("[table]\ncolumns = ['psnr', 'lpips_alex']", metrics=None)
    said = cli("table", file, "--out", tmp_path / "run", *CPU)
    assert said.status == 0
    assert "Warning: lpips_alex is n/a: " in said.err
    assert "n/a" in said.out
    assert Store(tmp_path / "run").frame().lpips_alex.isna().all()
    again = cli("table", file, "--out", tmp_path / "run", *CPU)
    assert (again.status, again.out) == (0, said.out)


@pytest.mark.slow
def test_compare(cli: Any, finished: Any, table: Any, tmp_path: Path) -> None:
    assert table("--compare", finished[1]).err.splitlines()[-1] == "No cell moved by more than its interval."
    other = tmp_path / "other"
    assert cli("table", finished[0], "--out", other, *CPU, "--chunk", 1, "--set", "run.eight_bit=true").status == 0
    said = table("--compare", other)
    assert said.status == 0
    moved = [line for line in said.err.splitlines() if not line.startswith("Warning: ")]
    assert any("plain [x]" in line and "PSNR" in line for line in moved)


# Mistakes: one line, exit status 2, and nothing is written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--format", "pdf"],
            "Invalid value for '--format': 'pdf' is not one of 'latex', 'csv', 'markdown', 'json', 'html'.",
        ),
        (["--limit", 0], "Invalid value for '--limit': 0 is not in the range x>=1."),
        (["--pictures", -1], "Invalid value for '--pictures': -1 is not in the range x>=0."),
        (["--keep", "all"], "Invalid value for '--keep': 'all' is not 'reconstructions'."),
        (["--workers", 0], "--workers must be a positive number. Found 0."),
        (["--workers", "two"], "Invalid value for '--workers': 'two' is not a valid integer."),
        (["--engine", "rey"], "Unknown engine 'rey'. Did you mean ray?"),
        (["--ray-address", "auto"], "--ray-address is for --engine ray. Found --engine local."),
        (["--task-cpus", 0], "--task-cpus must be positive, --task-gpus not negative. Found 0 and 0."),
        (["--shard", "3/2"], "--shard must be I/N with 1 ≤ I ≤ N. Found 3/2."),
        (["--shard", "0/2"], "--shard must be I/N with 1 ≤ I ≤ N. Found 0/2."),
        (["--shard", "2"], "--shard must be I/N, such as 1/4. Found '2'."),
        (["--shard", "a/b"], "--shard must be I/N, such as 1/4. Found 'a/b'."),
        (["--chunk", 0], "--chunk must be a positive number. Found 0."),
        (["--batch-size", -1], "--batch-size must be a positive number. Found -1."),
        (["--device", "tpu"], "Unknown device 'tpu'"),
        (["--images", "/nowhere"], "No file or folder '/nowhere'."),
        (["--weights", "/nowhere"], "No weights file at '/nowhere'."),
        (
            ["--lpips-weights", "/nowhere", "--set", "run.metrics=['lpips_alex']"],
            "No backbone of LPIPS: found no file /nowhere.",
        ),
        (["--set", "limit=3"], "--set must be TABLE.KEY=VALUE, such as run.limit=4. Found 'limit=3'."),
        (["--set", "rn.limit=3"], "Unknown table of --set 'rn'. Did you mean run"),
        (["--set", "run.limt=2"], "--set run.limt: Unknown key of [run] 'limt'. Did you mean limit"),
        (["--set", "run.model=vit_tii"], "Unknown model 'vit_tii'. Did you mean vit_ti"),
        (["--set", "run.attack=aprl"], "--set run.attack: Unknown attack 'aprl'. Did you mean april or spear?"),
        (["--compare", "/nowhere"], "'/nowhere' is not the directory of a run: it has no run.json."),
        (["--out", "/dev/null/run"], "'/dev/null/run' cannot be written: Not a directory. Give another --out."),
        (["--nothing"], "No such option"),
    ],
)
def test_mistake(cli: Any, write: Any, tmp_path: Path, options: list[object], message: str) -> None:
    file, path = write(), tmp_path / "run"
    error = cli("table", file, "--out", path, *CPU, *options).error
    assert error.startswith(message.replace("FILE", str(file)))
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mjp_tabel5", "Unknown experiment 'mjp_tabel5'. Did you mean mjp_table5"),
        ("none.toml", "Cannot read the experiment 'none.toml': No such file or directory."),
    ],
)
def test_no_such_experiment(cli: Any, name: str, message: str) -> None:
    assert cli("table", name).error.startswith(message)


def test_directory_of_something_else(cli: Any, write: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    error = cli("table", write(), "--out", tmp_path / "mine", *CPU).error
    assert error == f"'{tmp_path / 'mine'}' holds files of something else (thesis.tex). Give a new or empty directory."
    assert files(tmp_path / "mine") == {"thesis.tex": b"mine"}


@pytest.mark.slow
def test_directory_of_privlab_attack(cli: Any, write: Any, photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    tiny = ("--model", "vit_ti", "--weights", "random", "--img-size", 32, "--images", photos, "--limit", 1)
    assert cli("attack", *tiny, "--metrics", "psnr", "--no-strips", "--out", path).status == 0
    before = files(path)
    error = cli("table", write(), "--out", path, *CPU).error
    assert error == f"'{path}' holds a run of privlab attack. Give another --out."
    assert files(path) == before

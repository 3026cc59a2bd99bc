"""`privlab table` on chosen photographs: positions and manifests, and what a store that goes on makes of them."""

import csv
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from privlab.base import PrivlabError
from privlab.evaluation import COLUMNS
from privlab.grids import Experiment, lay_out, read_experiment
from privlab.report.tables import apart, apart_lines, load_results
from privlab.stores import Store, merge

CPU = torch.device("cpu")


def manifest(path: Path, images: Path, rows: Sequence[Sequence[str]], columns: str = "label,member") -> Path:
    """Write a manifest of pictures of a folder; a row is a name and the cells of further columns."""
    hashes = [hashlib.sha256((images / row[0]).read_bytes()).hexdigest() for row in rows]
    lines = [",".join([row[0], sha256, *row[1:]]) for row, sha256 in zip(rows, hashes, strict=True)]
    path.write_text("\n".join([f"name,sha256,{columns}", *lines]) + "\n")
    return path


def listed(path: Path) -> list[tuple[str, str, str]]:
    with path.open(newline="") as file:
        return [(row["name"], row["label"], row["member"]) for row in csv.DictReader(file)]


def names(experiment: Experiment) -> list[list[str]]:
    return [[image.name for image in task.images] for task in lay_out(experiment, CPU).tasks]


def test_positions_in_a_file(experiment: Callable[..., Experiment]) -> None:
    assert names(experiment(every=2, offset=1)) == [["b.png", "d.png"]]
    assert names(experiment("[grid]\noffset = [0, 1, 3]", every=3)) == [["a.png", "d.png"], ["b.png"], ["d.png"]]
    assert names(experiment(every=2, limit=1)) == [["a.png"]]


def test_options_replace_the_file(write: Callable[..., Path], photos: Path, tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.csv", photos, [["c.png", "", ""]])
    file = write(limit=3, every=2)
    assert names(read_experiment(file, every=3)) == [["a.png", "d.png"]]
    assert names(read_experiment(file, ["run.every=1"])) == [["a.png", "b.png", "c.png"]]
    assert names(read_experiment(file, manifest=str(path))) == [["c.png"]]
    with pytest.raises(PrivlabError, match=r"photographs.*3"):
        read_experiment(file, [f"run.manifest={path}"])
    with pytest.raises(PrivlabError, match=r"photographs.*2"):
        read_experiment(file, manifest=str(path), limit=2)


def test_round_trip_computes_nothing(
    write: Callable[..., Path], done: Callable[..., int], photos: Path, tmp_path: Path, same: Callable[..., None]
) -> None:
    assert done(read_experiment(write(every=2, offset=1)), tmp_path / "run") == 2
    written = tmp_path / "run" / "manifest.csv"
    assert listed(written) == [("b.png", "", "unknown"), ("d.png", "", "unknown")]
    before = written.read_text()
    again = read_experiment(write(manifest=str(written)))
    assert done(again, tmp_path / "run") == 0
    assert written.read_text() == before
    assert done(again, tmp_path / "again") == 2
    same(tmp_path / "run", tmp_path / "again")


def test_image_that_is_added_later_is_computed_alone(
    write: Callable[..., Path], done: Callable[..., int], photos: Path, tmp_path: Path
) -> None:
    path = manifest(tmp_path / "m.csv", photos, [["c.png", "3", ""], ["a.png", "5", ""]])
    experiment = read_experiment(write(manifest=str(path)))
    assert done(experiment, tmp_path / "run") == 2
    manifest(path, photos, [["b.png", "4", ""], ["c.png", "3", ""], ["a.png", "5", ""]])
    assert done(experiment, tmp_path / "run") == 1
    table = Store(tmp_path / "run").frame().drop_duplicates("image").set_index("image")
    assert table.label.to_dict() == {"c.png": 3, "a.png": 5, "b.png": 4}
    assert set(table.label_origin) == {"file"}
    assert listed(tmp_path / "run" / "manifest.csv") == [
        (f"{n}.png", label, "unknown") for n, label in ("b4", "c3", "a5")
    ]


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [("3", "4", "is 4, and 3 in the records"), ("", "4", "is 4, and none in"), ("3", "", "is none, and 3 in")],
)
def test_label_that_changes_is_refused(
    write: Callable[..., Path],
    done: Callable[..., int],
    photos: Path,
    tmp_path: Path,
    first: str,
    later: str,
    message: str,
) -> None:
    """The key of a cell does not name the labels that images come with: the records would stay those of the old one."""
    path = manifest(tmp_path / "m.csv", photos, [["a.png", first, ""]])
    experiment = read_experiment(write(manifest=str(path)))
    assert done(experiment, tmp_path / "run") == 1
    manifest(path, photos, [["a.png", later, ""]])
    with pytest.raises(PrivlabError, match=rf"^The label of 'a\.png' {message}.*Give another --out"):
        done(experiment, tmp_path / "run")
    assert done(experiment, tmp_path / "other") == 1
    assert done(read_experiment(write(manifest=str(path), labels="predicted")), tmp_path / "run") == 1


def test_membership_that_changes_is_told_without_computing(
    write: Callable[..., Path], done: Callable[..., int], photos: Path, tmp_path: Path
) -> None:
    run, layout = tmp_path / "run", '[table]\ncolumns = ["psnr"]'
    assert done(read_experiment(write(layout)), run) == 4
    assert apart_lines(apart(load_results(run))) == []
    rows = [["a.png", "seen"], ["b.png", "not seen"], ["c.png", "seen"], ["d.png", ""]]
    path = manifest(tmp_path / "m.csv", photos, rows, columns="member")
    assert done(read_experiment(write(layout, manifest=str(path))), run) == 0
    results = load_results(run)
    assert results.records.groupby("image").member.first().dropna().to_dict() == {
        **{"a.png": "seen", "c.png": "seen"},
        "b.png": "not seen",
    }
    found = [(row.member, row.attack, row.images) for row in apart(results)]
    assert found == [("seen", "worst case", 2), ("not seen", "worst case", 1), ("unknown", "worst case", 1)]
    own = results.records.query("attack == 'patch-gradient' and geometry == 'in_place' and member == 'seen'").psnr
    assert apart(results)[0].mean == pytest.approx(own.mean())
    assert apart(results)[0].std == pytest.approx(own.std())


@pytest.mark.slow
def test_members_under_the_table(
    cli: Callable[..., Any], write: Callable[..., Path], photos: Path, tmp_path: Path
) -> None:
    rows = [["a.png", "seen"], ["b.png", "not seen"]]
    path = manifest(tmp_path / "m.csv", photos, rows, columns="member")
    file = write('[table]\ncolumns = ["psnr"]\npaper_attack = "april"', limit=3, attack=["april", "patch-gradient"])
    options = ("--manifest", path, "--out", tmp_path / "run", "--device", "cpu", "--pictures", "0")
    said = cli("table", file, *options, "--json")
    assert said.status == 0
    (line,) = (line for line in json.loads(said.out)["remarks"] if line.startswith("members and others"))
    assert line.startswith(
        "members and others, as the manifest states them (PSNR, mean ± standard deviation): seen in training"
    )
    for part in ("seen in training: april ", ", worst case ", "; not seen: april ", "(1 image)"):
        assert part in line
    assert line in cli("table", file, *options, "--format", "markdown").out
    assert "members and others" in cli("table", file, *options).out
    error = cli("table", file, *options, "--limit", "2").error
    assert "A manifest names its photographs one by one. Found limit 2" in error


def test_several_lists_have_a_manifest_each(
    write: Callable[..., Path], done: Callable[..., int], photos: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done(read_experiment(write("[grid]\nlimit = [1, 2]")), run)
    assert [file.name for file in sorted(run.glob("*.csv"))] == ["manifest-1.csv", "manifest.csv"]
    assert [name for name, *_ in listed(run / "manifest-1.csv")] == ["a.png", "b.png"]
    done(read_experiment(write(limit=2)), run)
    assert [file.name for file in sorted(run.glob("*.csv"))] == ["manifest.csv"]
    assert [name for name, *_ in listed(run / "manifest.csv")] == ["a.png", "b.png"]
    (run / "manifest-mine.csv").write_text("mine")
    merge(tmp_path / "merged", [run])
    assert (tmp_path / "merged" / "manifest.csv").read_text() == (run / "manifest.csv").read_text()
    assert not (tmp_path / "merged" / "manifest-mine.csv").exists()
    mine = run / "manifest-mine.csv"
    mine.write_text((run / "manifest.csv").read_text())
    with pytest.raises(PrivlabError, match=r"manifest-mine\.csv'.*'"):
        done(read_experiment(write(manifest=str(mine))), run)
    assert mine.exists()


def test_older_store_without_the_column_goes_on(
    write: Callable[..., Path], done: Callable[..., int], photos: Path, tmp_path: Path
) -> None:
    experiment = read_experiment(write())
    assert done(experiment, tmp_path / "run") == 4
    for part in Store(tmp_path / "run").parts():
        pq.write_table(pq.read_table(part).drop_columns("member"), part)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    del facts["members"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    assert load_results(tmp_path / "run").records.member.isna().all()
    assert Store(tmp_path / "run").read().cast(COLUMNS)["member"].null_count > 0
    assert done(experiment, tmp_path / "run") == 0


def test_picture_that_changes_under_way_is_a_failure_of_its_own(
    write: Callable[..., Path], options: Callable[..., Any], image: Callable[..., Path], tmp_path: Path
) -> None:
    from privlab.grids import prepare
    from privlab.grids.fill import fill

    for seed, name in enumerate("ab"):
        image(tmp_path / "own" / f"{name}.png", seed)
    path = manifest(tmp_path / "m.csv", tmp_path / "own", [["b.png", ""], ["a.png", ""]], columns="member")
    experiment = read_experiment(write(images=[str(tmp_path / "own")], manifest=str(path)))
    grid, tasks = prepare(experiment, tmp_path / "run", options())
    image(tmp_path / "own" / "b.png", 99)
    fill(grid, tasks, tmp_path / "run", options())
    table = (
        Store(tmp_path / "run").frame().query("attack == 'patch-gradient'").drop_duplicates("image").set_index("image")
    )
    assert table.status.to_dict() == {"b.png": "failed", "a.png": "ok"}
    with pytest.raises(PrivlabError, match=r"m\.csv.*2.*SHA-256.*'b\.png'"):
        prepare(experiment, tmp_path / "run", options())

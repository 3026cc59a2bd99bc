"""`privlab attack --every`, `--offset` and `--manifest`: which photographs, and members told apart."""

import csv
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import privlab
from privlab.base import PrivlabError

FAST = ("--attack", "april,patch-gradient", "--metrics", "mse,psnr")
TIMES = ["seconds_observe", "seconds_attack", "seconds_score"]


@pytest.fixture
def classes(picture: Callable[..., Path]) -> Path:
    """Return a folder of two classes with three pictures each."""
    paths = [picture(f"classes/{name}.png") for name in ("x/1", "x/2", "x/3", "y/4", "y/5", "y/6")]
    return paths[0].parents[1]


def manifest(path: Path, images: Path, *rows: tuple[str, ...], columns: str = "label,member") -> Path:
    """Write a manifest of pictures of a folder; a row is a name and the cells of further columns."""
    lines = [
        f"{name},{hashlib.sha256((images / name).read_bytes()).hexdigest()},{','.join(rest)}" for name, *rest in rows
    ]
    path.write_text("\n".join([f"name,sha256,{columns}", *lines]) + "\n")
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def untimed(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns=TIMES).sort_values(["image", "attack", "geometry"]).reset_index(drop=True)


# Positions


@pytest.mark.slow
def test_positions_count_from_zero(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], classes: Path
) -> None:
    """By turns the order is x/1, y/4, x/2, y/5, x/3, y/6."""
    assert attack(*FAST, "--images", classes, "--every", "2", "--offset", "1", "--limit", "2").status == 0
    table = records()
    assert list(dict.fromkeys(table.image)) == ["y/4.png", "y/5.png"]
    assert set(table.label) == {1}


@pytest.mark.slow
def test_what_chose_stands_in_the_run(attack: Callable[..., Any], classes: Path, tmp_path: Path) -> None:
    assert attack(*FAST, "--images", classes, "--every", "3", "--offset", "1").status == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    wanted = {"limit": None, "every": 3, "offset": 1, "manifest": None}
    assert {name: facts["specification"][name] for name in wanted} == wanted
    assert facts["images"]["count"] == 2
    assert facts["images"]["source"].endswith("; one in 3, from position 1 on")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--every", "0"), "Invalid value for '--every': 0 is not in the range x>=1."),
        (("--every", "2.5"), "Invalid value for '--every': '2.5' is not a valid integer range."),
        (("--offset", "-1"), "Invalid value for '--offset': -1 is not in the range x>=0."),
        (("--offset", "6"), "offset must be less than the number of images, 6. Found 6."),
        (("--every", "2", "--offset", "99"), "offset must be less than the number of images, 6. Found 99."),
    ],
)
def test_positions_that_there_are_not(
    attack: Callable[..., Any], classes: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    error = attack(*options, "--images", classes).error
    assert error.startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("features", "x", "--every", "2"), "No such option '--every'."),
        (("gradients", "x", "--manifest", __file__), "No such option '--manifest'."),
    ],
)
def test_audits_choose_no_images(cli: Callable[..., Any], options: tuple[str, ...], message: str) -> None:
    assert cli("audit", *options, "--model", "vit_ti").error.startswith(message)


# Manifests


@pytest.mark.slow
def test_round_trip_gives_the_same_records(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], classes: Path, tmp_path: Path
) -> None:
    """A broken picture and labels of folders, too; whatever chose them first."""
    (classes / "x" / "2.png").write_bytes(b"no picture")
    chosen = ("--images", classes, "--every", "2", "--limit", "2", "--seed", "3", "--gamma", "1", "--setting", "c")
    first = attack(*chosen, *FAST)
    written = tmp_path / "run" / "manifest.csv"
    rows = [(row["name"], row["label"], row["label_origin"], row["member"]) for row in read(written)]
    assert rows == [("x/1.png", "0", "folder", "unknown"), ("x/2.png", "0", "folder", "unknown")]
    again = attack(
        *("--images", classes, "--manifest", written, "--seed", "3", "--gamma", "1", "--setting", "c", *FAST),
        *("--out", tmp_path / "again"),
    )
    assert first.status == again.status == 2  # of the broken one
    pd.testing.assert_frame_equal(untimed(records()), untimed(records(tmp_path / "again")))
    assert (tmp_path / "again" / "manifest.csv").read_text() == written.read_text()
    assert set(records().status) == {"ok", "failed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--limit", "3"), ("--limit", "2", "--labels", "predicted"), ("--images", "samples")]
)
def test_round_trip_of_other_sources(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path, options: tuple[str, ...]
) -> None:
    if "samples" in options:
        options = (*options, "--every", "5")
    assert attack(*FAST, *options).status == 0
    kept = [word for word in options if word not in ("--limit", "--every", "2", "3", "5")]
    written = tmp_path / "run" / "manifest.csv"
    assert attack(*FAST, *kept, "--manifest", written, "--out", tmp_path / "again").status == 0
    pd.testing.assert_frame_equal(untimed(records()), untimed(records(tmp_path / "again")))


@pytest.mark.slow
def test_manifest_gives_order_labels_and_memberships(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    rows = (("c.png", "7", "seen"), ("a.png", "", "not seen"), ("b.png", "999", ""))
    path = manifest(tmp_path / "m.csv", photos, *rows)
    assert attack(*FAST, "--manifest", path).status == 0
    table = records().drop_duplicates("image").set_index("image")
    assert list(table.index) == ["c.png", "a.png", "b.png"]
    assert table.label.drop("a.png").to_dict() == {"c.png": 7, "b.png": 999}
    assert table.label_origin.to_dict() == {"c.png": "file", "a.png": "predicted", "b.png": "file"}
    assert table.member.dropna().to_dict() == {"c.png": "seen", "a.png": "not seen"}
    assert [row["member"] for row in read(tmp_path / "run" / "manifest.csv")] == ["seen", "not seen", "unknown"]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["specification"]["manifest"] == str(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert facts["images"]["source"].endswith(f"; 3 of them chosen by m.csv (SHA-256 {digest})")


@pytest.mark.slow
def test_cells_are_not_of_images(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    path = manifest(tmp_path / "m.csv", photos, ("b.png", "seen"), columns="member")
    attack(*FAST)
    attack(*FAST, "--manifest", path, "--out", tmp_path / "one")
    one, all_ = records(tmp_path / "one"), records()
    assert set(one.cell) == set(all_.cell)
    named = ["image_sha256", "attack", "geometry", "cell", "label", "conditions"]
    alike = untimed(all_.query("image == 'b.png'"))
    pd.testing.assert_frame_equal(alike.loc[:, named], untimed(one).loc[:, named])


@pytest.mark.slow
def test_labels_beside_a_manifest(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    path = manifest(tmp_path / "m.csv", photos, ("a.png", "7", "seen"), ("b.png", "2000", "seen"))
    (tmp_path / "labels.csv").write_text("file,label\na.png,5\nb.png,6\n")
    assert attack(*FAST, "--manifest", path, "--labels", tmp_path / "labels.csv").status == 0
    assert records().drop_duplicates("image").label.tolist() == [5, 6]
    assert attack(*FAST, "--manifest", path, "--labels", "predicted", "--overwrite").status == 0
    assert set(records().label_origin) == {"predicted"}


@pytest.mark.parametrize("option", [("--limit", 2), ("--every", 2), ("--offset", 1)])
def test_manifest_beside_positions(
    attack: Callable[..., Any], photos: Path, tmp_path: Path, option: tuple[str, int]
) -> None:
    path = manifest(tmp_path / "m.csv", photos, ("a.png", "", ""))
    error = attack("--manifest", path, *option).error
    name, value = option
    assert error == f"A manifest names its photographs one by one. Found {name.removeprefix('--')} {value} with it."
    assert not (tmp_path / "run").exists()


ZERO = "0" * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["name,sha256", f"z.png,{ZERO}"], "line 2: no image 'z.png' in folder "),
        (["name,sha256", f"a.png,{ZERO}"], "line 2: the SHA-256 of 'a.png' is "),
        (["name,sha256", f"a.png,{ZERO}", f"a.png,{ZERO}"], "line 3: the name 'a.png' stands in line 2 already."),
        (["name,sha256", f"a.png,{ZERO}", f"b.png,{ZERO}"], "line 3: the SHA-256 '00000"),
        (["name,sha256,size", f"a.png,{ZERO},3"], "line 1: Unknown column of a manifest 'size'."),
        (["name", "a.png"], "line 1: a manifest has the columns name and sha256. Found: name; add sha256."),
        (
            ["name,sha256,member", f"a.png,{ZERO},maybe"],
            "line 2: member must be seen, not seen or unknown.",
        ),
        (
            ["name,sha256,label", f"a.png,{ZERO},x"],
            "line 2: label must be an integer from 0 on, of 64",
        ),
        (
            ["name,sha256,label", f"a.png,{ZERO},-3"],
            "line 2: label must be an integer from 0 on, of 64",
        ),
        (
            ["name,sha256,label", "a.png,OWN,1000"],
            "line 2: Label 1000 is out of range: the victim has 1000 classes (0 to 999).",
        ),
    ],
)
def test_line_that_is_refused(
    attack: Callable[..., Any], photos: Path, tmp_path: Path, rows: list[str], message: str
) -> None:
    own = hashlib.sha256((photos / "a.png").read_bytes()).hexdigest()
    (tmp_path / "m.csv").write_text("\n".join(rows).replace("OWN", own) + "\n")
    error = attack("--manifest", tmp_path / "m.csv").error
    assert error.startswith(f"{tmp_path / 'm.csv'}, {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"name,sha256\n", b"\xff\xfe\x00", None])
def test_file_that_is_no_manifest(attack: Callable[..., Any], tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.csv"
    if content is not None:
        path.write_bytes(content)
    assert f"{path}" in attack("--manifest", path).error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_manifest_within_the_run_that_gives_way(attack: Callable[..., Any], tmp_path: Path) -> None:
    assert attack(*FAST).status == 0
    path = tmp_path / "run" / "manifest.csv"
    error = attack(*FAST, "--manifest", path, "--overwrite").error
    assert error.startswith(f"'{path}' would give way")
    assert len(read(path)) == 3
    moved = path.rename(tmp_path / "m.csv")
    assert attack(*FAST, "--manifest", moved, "--overwrite").status == 0
    assert path.read_text() == moved.read_text()


def test_interrupted_run_has_the_manifest_of_all_its_images(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from privlab.stores import Store

    add, calls = Store.add, []

    def interrupted(store: Store, rows: Any) -> None:
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        add(store, rows)

    monkeypatch.setattr(Store, "add", interrupted)
    assert attack(*FAST, "--batch-size", "1").status == 130
    assert [row["name"] for row in read(tmp_path / "run" / "manifest.csv")] == ["a.png", "b.png", "c.png"]


# Members


@pytest.mark.slow
def test_members_are_told_apart(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    path = manifest(
        tmp_path / "m.csv", photos, ("a.png", "seen"), ("b.png", "not seen"), ("c.png", "seen"), columns="member"
    )
    said = " ".join(attack(*FAST, "--manifest", path, "--details").out.split())
    line = said[said.index("members and others") :]
    told = json.loads(attack(*FAST, "--manifest", path, "--json", "--overwrite").out)["members"]
    table = records().query("geometry == 'in_place'")
    assert [(row["member"], row["attack"], row["images"]) for row in told] == [
        *(("seen", "april", 2), ("seen", "worst case", 2)),
        *(("not seen", "april", 1), ("not seen", "worst case", 1)),
    ]
    best = table[~table.attack.str.startswith("control")].groupby(["member", "image"]).psnr.max()
    for row in told:
        own = table[(table.attack == "april") & (table.member == row["member"])].psnr
        own = best[row["member"]] if row["attack"] == "worst case" else own
        assert row["mean"] == pytest.approx(own.mean())
        assert (row["std"] is None) == (len(own) == 1)
        assert row["std"] is None or row["std"] == pytest.approx(own.std())
        spread = "" if row["std"] is None else f" ± {row['std']:.2f}"
        images = "1 image" if row["images"] == 1 else "2 images"
        assert f"{row['attack']} {row['mean']:.2f}{spread} ({images})" in line
    assert line.startswith(
        "members and others, as the manifest states them (PSNR, mean ± standard deviation): seen in training: april "
    )
    assert "; not seen: april " in line
    assert "unknown" not in line


@pytest.mark.slow
def test_nothing_is_said_where_no_membership_is_known(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path, tmp_path: Path
) -> None:
    path = manifest(tmp_path / "m.csv", photos, ("a.png", "unknown"), ("b.png", ""), columns="member")
    assert "members and others" not in attack(*FAST, "--manifest", path, "--details").out
    assert records().member.isna().all()
    assert json.loads(attack(*FAST, "--json", "--overwrite").out)["members"] == []


@pytest.mark.slow
def test_members_stand_on_the_page(
    cli: Callable[..., Any], attack: Callable[..., Any], photos: Path, tmp_path: Path
) -> None:
    path = manifest(tmp_path / "m.csv", photos, ("a.png", "seen"), ("b.png", "unknown"), columns="member")
    attack(*FAST, "--manifest", path)
    page = tmp_path / "page.html"
    assert cli("report", tmp_path / "run", "--out", page).status == 0
    assert "<p>Members and others, as the manifest states them (PSNR, " in page.read_text()
    assert "; unknown: april " in page.read_text()


# Python


def test_in_python(photos: Path, tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.csv", photos, ("b.png", "3", "not seen"))
    options: dict[str, Any] = {"weights": "random", "img_size": 32, "attacks": "patch-gradient", "metrics": "mse"}
    with pytest.warns(UserWarning, match="RANDOM"):
        frame = privlab.attack("vit_ti", settings="a", images=photos, manifest=path, **options).records
    assert set(zip(frame.image, frame.label, frame.member, strict=True)) == {("b.png", 3, "not seen")}
    with pytest.warns(UserWarning, match="RANDOM"):
        frame = privlab.attack("vit_ti", settings="a", images=photos, every=2, offset=1, **options).records
    assert set(frame.image) == {"b.png"}
    assert all(value is None or math.isnan(value) for value in frame.member)
    for wrong in ({"every": 0}, {"offset": -1}, {"manifest": path, "limit": 1}, {"manifest": tmp_path / "no.csv"}):
        with pytest.raises(PrivlabError):
            privlab.attack("vit_ti", settings="a", images=photos, **wrong, **options)


@pytest.mark.slow
def test_photographs_of_imagenet(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], shared: Callable[[str], Path], tmp_path: Path
) -> None:
    """What the docs name "no. 23, 48, 73 … of 500 by name", and the same by a manifest made of the list beside them."""
    images, table = shared("data/imagenet_samples"), pd.read_csv(shared("data/imagenet_samples.csv"))
    path = tmp_path / "m.csv"
    own = table.rename(columns={"file": "name", "class_index": "label"}).sort_values("name").iloc[22::25].iloc[:3]
    own[["name", "sha256", "label"]].assign(member="seen").to_csv(path, index=False)
    assert attack(*FAST, "--images", images, "--every", "25", "--offset", "22", "--limit", "3").status == 0
    assert attack(*FAST, "--images", images, "--manifest", path, "--out", tmp_path / "m").status == 0
    one, other = (frame.drop_duplicates("image") for frame in (records(), records(tmp_path / "m")))
    assert one.image_sha256.tolist() == other.image_sha256.tolist() == own.sha256.tolist()
    assert other.label.tolist() == own.label.tolist()
    assert set(other.member) == {"seen"}

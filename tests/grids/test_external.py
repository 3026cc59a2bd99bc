"""Results measured elsewhere: what a file may state, how reconstructions are scored, and where the records end up."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from privlab.base import PrivlabError
from privlab.grids import Experiment, add_external, case_names
from privlab.grids.external import _Stated, check_score, preprocessing_of
from privlab.images import read_image, to_png
from privlab.metrics import METRICS, LpipsUnavailable, score
from privlab.report.tables import Results, load_results
from privlab.report.tables.rows import leakage
from privlab.stores import RunDirectory, Store, check
from privlab.victims import victim

CASES = """
[[case]]
label = "plain"

[[case]]
label = "MJP"
group = "(2)"
setting = "c"
gamma = 0.5

[[case]]
label = "MJP"
group = "(3)"
setting = "b"
gamma = 0.5

[table]
columns = ["mse", "psnr", "ssim_skimage"]
paper_attack = "patch-gradient"
"""
SHORT = 'reference = "Doe 2025, Table 3"\ncase = "plain"\nattack = "theirs"\n'
NUMBERS = SHORT + "[scores]\npsnr = 21.3\nmse = 0.01\n"
FOLDERS = SHORT + 'reconstructions = "theirs"\nimages = "photos"\n'

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hold the run of this module, once it is made."""
    return {"path": tmp_path_factory.mktemp("finished")}


@pytest.fixture
def run(
    finished: dict[str, Path],
    tmp_path: Path,
    experiment: Callable[..., Experiment],
    done: Callable[..., int],
    photos: Path,
) -> Path:
    """Return a finished run of the cases, with the pictures of one image, and the photographs beside it."""
    source = finished["path"]
    if not (source / "run.json").exists():
        made = experiment(CASES, metrics=["mse", "psnr", "ssim_skimage", "lpips_alex"])
        done(made, source, pictures=1)
    shutil.copytree(source, tmp_path / "run")
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "run"


@pytest.fixture
def add(run: Path, tmp_path: Path) -> Callable[[str], int]:
    """Add what a text states to the run."""

    def put(text: str) -> int:
        (tmp_path / "theirs.toml").write_text(text)
        return add_external(run, tmp_path / "theirs.toml")

    return put


@pytest.fixture
def refused(add: Callable[[str], int], run: Path) -> Callable[[str], str]:
    """Return how a text is refused, in one line; nothing is added then."""

    def error(text: str) -> str:
        before = sorted(run.rglob("*"))
        with pytest.raises(PrivlabError) as caught:
            add(text)
        assert "\n" not in str(caught.value)
        assert sorted(run.rglob("*")) == before
        return str(caught.value)

    return error


def preprocessed(path: Path) -> torch.Tensor:
    """Return a photograph as the tiny victim takes it."""
    pixels = read_image(path).pixels
    assert pixels is not None
    return victim("vit_ti", weights="random", img_size=32).preprocessing(pixels)


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[..., Path]:
    """Write a reconstruction of a photograph, darkened; another size or suffix may be given."""

    def save(name: str, darker: float = 0.8, size: int = 32, suffix: str = ".png") -> Path:
        image = preprocessed(tmp_path / "photos" / f"{name}.png") * darker
        path = tmp_path / "theirs" / f"{name}{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(to_png(image))
        if size != 32:
            with Image.open(path) as image:
                image.resize((size, size)).save(path)
        return path

    return save


def external(path: Path) -> pd.DataFrame:
    """Return the records of a store that were measured elsewhere."""
    frame = Store(path).frame()
    return frame.loc[frame.external.notna()].reset_index(drop=True)


def rows_of(results: Results, attack: str) -> Iterator[Any]:
    return (row for row in leakage(results) if row.attack == attack)


# ---- numbers


def test_numbers_belong_to_a_case_and_to_no_image(add: Callable[[str], int], run: Path) -> None:
    assert add(NUMBERS) == 1
    [row] = external(run).to_dict("records")
    assert (row["image"], row["image_sha256"], row["status"], row["attack"]) == ("", "", "ok", "theirs")
    assert (row["psnr"], row["mse"], row["metrics"]) == (21.3, 0.01, "mse psnr")
    assert (row["external"], json.loads(row["conditions"])) == ("Doe 2025, Table 3", {"case": "plain"})
    assert (row["victim"], row["setting"], row["release"], row["geometry"]) == ("vit_ti", "a", "gradients", "in_place")
    assert (row["seed"], row["draw"], len(row["cell"])) == (0, 0, 32)
    for unknown in ("weights", "weights_sha256", "block", "defense", "label", "device", "ssim_skimage", "grad_norm"):
        assert pd.isna(row[unknown]), unknown


def test_the_store_counts_no_image_for_them(add: Callable[[str], int], cli: Callable[..., Any], run: Path) -> None:
    before = check(run)
    assert add(NUMBERS) == 1
    after = check(run)
    assert (after.images, after.external) == (before.images, 1)
    assert cli("store", "check", run).out.rstrip().endswith(f"{before.images} images; 1 external")
    shown = json.loads(cli("store", "show", run, "--limit", after.records, "--json").out)
    assert [row["case"] for row in shown if row["attack"] == "theirs"] == ["plain"]
    assert {row["case"] for row in shown} == {"plain", "(2) MJP", "(3) MJP"}


def test_tables_show_them_as_external(add: Callable[[str], int], run: Path) -> None:
    before = leakage(load_results(run))
    assert add(NUMBERS) == 1
    [row] = rows_of(results := load_results(run), "theirs")
    assert (row.label, row.kind, row.external, row.images) == ("plain", "attack", "Doe 2025, Table 3", 0)
    assert (row.scores["psnr"].mean, row.scores["mse"].mean) == (21.3, 0.01)
    assert math.isnan(row.scores["ssim_skimage"].mean)
    assert math.isnan(row.scores["psnr"].low)
    kept = [row for row in leakage(results) if row.attack != "theirs"]
    assert [row.scores for row in kept] == [row.scores for row in before]  # no image, no part in the worst case


def test_the_same_file_twice_changes_nothing(add: Callable[[str], int], run: Path) -> None:
    assert add(NUMBERS) == 1
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert add(NUMBERS) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_metric_may_come_later_but_none_may_change(add: Callable[[str], int], refused: Any, run: Path) -> None:
    add(NUMBERS)
    assert refused(NUMBERS.replace("21.3", "21.4")) == (
        "theirs (Doe 2025, Table 3): psnr is 21.3 in the store. Found 21.4: give a reference of its own."
    )
    assert add(NUMBERS + "ssim_skimage = 0.5\n") == 1
    [row] = external(run).to_dict("records")
    assert (row["psnr"], row["mse"], row["ssim_skimage"]) == (21.3, 0.01, 0.5)
    assert row["metrics"] == "mse psnr ssim_skimage"
    assert add(NUMBERS.replace("Doe 2025", "Roe 2026").replace("21.3", "21.4")) == 1


def test_the_setting_may_differ_from_the_case(add: Callable[[str], int], run: Path) -> None:
    assert add('setting = "b"\n' + NUMBERS) == 1
    assert add(NUMBERS) == 1  # another cell
    assert sorted(external(run).setting) == ["a", "b"]
    assert external(run).cell.nunique() == 2


@given(st.data())
def test_any_value_in_range_is_taken_and_none_outside(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(METRICS)))
    value = data.draw(st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5))
    low, high = METRICS[name].range
    if low <= value <= high:
        check_score(name, value)
    else:
        with pytest.raises(PrivlabError, match=rf"{name} must be in \["):
            check_score(name, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reference = 3", "reference must be a text. Found 3."),
        ('reference = ""', "does not state reference."),
        ('case = "plain"\nattack = "x"', "does not state reference. Give reference, case, attack."),
        ('reference = "r"\nattack = "x"', "does not state case."),
        ('reference = "r"\ncase = "plain"', "does not state attack."),
        (SHORT, "must hold [scores], or reconstructions with images. Found none of them."),
        (SHORT + "[scores]", "scores must be a table of METRIC = NUMBER. Found {}."),
        (SHORT + "scores = 3", "scores must be a table of METRIC = NUMBER. Found 3."),
        (SHORT + 'images = "x"', "must hold [scores], or reconstructions with images. Found images."),
        (SHORT + 'reconstructions = "x"', "or reconstructions with images. Found reconstructions."),
        (SHORT + 'images = "x"\n[scores]\npsnr = 3', "Found scores, images."),
        (FOLDERS + "[scores]\npsnr = 3", "Found scores, reconstructions, images."),
        (SHORT + "images = 3", "images must be a text. Found 3."),
        (SHORT + 'refrence = "x"', "'refrence'. Did you mean reference?"),
        (SHORT + "[score]\npsnr = 3", "'score'. Did you mean scores"),
        (SHORT + "[scores]\npnsr = 3", "Unknown metric 'pnsr'. Did you mean psnr"),
        (SHORT + '[scores]\npsnr = "3"', "psnr must be a number. Found '3'."),
        (SHORT + "[scores]\npsnr = true", "psnr must be a number. Found True."),
        (SHORT + "[scores]\nmse = 1.5", "mse must be in [0, 1]. Found 1.5."),
        (SHORT + "[scores]\npsnr = -1", "psnr must be in [0, inf]. Found -1."),
        (SHORT + "[scores]\npsnr = nan", "psnr must be in [0, inf]. Found nan."),
        (SHORT + "[scores]\ncorrect = 97", "correct must be in [0, 1]. Found 97."),
        (NUMBERS.replace("plain", "plan"), "Unknown case 'plan'. Did you mean plain?"),
        (NUMBERS.replace("plain", "MJP"), "Unknown case 'MJP'. Did you mean (3) MJP or (2) MJP?"),
        ('setting = "d"\n' + NUMBERS, "Unknown setting 'd'. Choose from: a, b, c."),
        (NUMBERS.replace("theirs", "control:mean"), "'control:mean' is a name of ours. Give the attack another name."),
        (NUMBERS.replace("theirs", "worst case"), "'worst case' is a name of ours."),
        ("reference = ", "theirs.toml is no TOML:"),
        ('setting = "b"\n' + FOLDERS, "setting b is scored against the shuffled image, which nobody else has."),
        (FOLDERS.replace('"plain"', '"(3) MJP"'), "setting b is scored against the shuffled image"),
        (FOLDERS, "theirs' is not a folder of images."),
        (FOLDERS.replace('"photos"', '"nowhere"').replace('"theirs"\ni', '"photos"\ni'), "nowhere' is not a folder of"),
        (FOLDERS.replace('"theirs"\ni', '"photos"\ni').replace('"photos"', '"run/records"'), "not bytes of images"),
    ],
)
def test_a_mistake_is_refused_in_one_line(refused: Callable[[str], str], text: str, message: str) -> None:
    error = refused(text)
    assert message in error
    assert any(word in error for word in ("theirs.toml", "folder", "column"))


def test_infinity_is_a_psnr(add: Callable[[str], int], run: Path) -> None:
    assert add(SHORT + "[scores]\npsnr = inf\n") == 1
    assert external(run).psnr.tolist() == [math.inf]


def test_a_file_that_cannot_be_read(run: Path, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"'.*none\.toml'"):
        add_external(run, tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PrivlabError, match=r"'.*binary\.toml'.*'utf-8'"):
        add_external(run, tmp_path / "binary.toml")


def test_a_file_that_windows_wrote(add: Callable[[str], int], run: Path, tmp_path: Path) -> None:
    assert add(NUMBERS) == 1
    (tmp_path / "windows.toml").write_text(f"\ufeff{NUMBERS}", encoding="utf-8", newline="\r\n")
    assert add_external(run, tmp_path / "windows.toml") == 0  # the same numbers


def test_a_directory_without_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"run\.json"):
        add_external(tmp_path, tmp_path / "theirs.toml")
    RunDirectory(tmp_path).write_run({"specification": {}})
    with pytest.raises(PrivlabError, match=r"`privlab.*table`"):
        add_external(tmp_path, tmp_path / "theirs.toml")


def test_cases_of_one_label_are_named_with_their_group() -> None:
    cases: list[dict[str, object]] = [
        {"label": "ViT-S", "group": "(1)"},
        {"label": "ViT-S", "group": "(2)"},
        {"label": "DeiT-S", "group": "(1)"},
        {"label": "twin", "group": None},
        {"label": "twin", "group": None},
    ]
    assert case_names(cases) == {"(1) ViT-S": 0, "(2) ViT-S": 1, "DeiT-S": 2}


def test_the_command_says_how_many(cli: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_text(NUMBERS)
    told = cli("store", "add-external", run, tmp_path / "theirs.toml")
    assert (told.status, told.out) == (0, f"1 external records: {run}\n")
    assert json.loads(cli("store", "add-external", run, tmp_path / "theirs.toml", "--json").out) == {"records": 0}


# ---- reconstructions


def test_reconstructions_are_scored_by_our_metrics(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path], tmp_path: Path
) -> None:
    levels = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}
    for name, level in levels.items():
        theirs(name, level)
    assert add(FOLDERS) == 4
    found = external(run).set_index("image")
    own = Store(run).frame()
    hashes = own[own.external.isna()].groupby("image").image_sha256.first()
    for name, level in levels.items():
        row = found.loc[f"{name}.png"]
        y = preprocessed(tmp_path / "photos" / f"{name}.png")[None]
        x = (y * level * 255).round() / 255
        for metric, values in score(x, y, ["mse", "psnr", "ssim_skimage"]).items():
            assert row[metric] == pytest.approx(float(values), rel=1e-5), (name, metric)
        assert row.image_sha256 == hashes[f"{name}.png"]
        assert (row.status, row.metrics) == ("ok", "mse psnr ssim_skimage")  # no backbone of LPIPS is here
        assert pd.isna(row.lpips_alex)
    assert found.cell.nunique() == 1
    assert found.victim_params.tolist() == [own.victim_params[0]] * 4


def test_they_have_their_part_in_the_worst_case(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path]
) -> None:
    for name in "abcd":
        theirs(name, 1.0)
    text = FOLDERS.replace('"plain"', '"(2) MJP"')
    assert add(text) == 4
    [row] = external(run).conditions.unique()
    assert json.loads(row) == {"case": "(2) MJP"}
    assert add(FOLDERS) == 4
    [row] = [row for row in rows_of(load_results(run), "theirs") if row.label == "plain"]
    assert (row.external, row.images, row.failed) == ("Doe 2025, Table 3", 4, 0)
    assert row.scores["psnr"].mean == math.inf  # an image has eight bits, and so had the victim's input
    assert row.scores["mse"].mean == 0
    worst = next(row for row in rows_of(load_results(run), "worst case") if row.label == "plain")
    assert worst.leakiest["psnr"]["theirs"] == 4
    assert worst.scores["psnr"].mean == math.inf
    assert worst.external == "Doe 2025, Table 3"


def test_what_does_not_match_is_a_failure_with_its_reason(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path], tmp_path: Path
) -> None:
    theirs("a")
    theirs("b", size=64)
    theirs("c").write_bytes(b"no image")
    theirs("d").rename(tmp_path / "theirs" / "stranger.png")
    assert add(FOLDERS) == 5
    found = external(run).set_index("image")
    assert found.status.to_dict() == {
        **{"a.png": "ok", "b.png": "failed", "c.png": "failed", "d.png": "failed", "stranger.png": "failed"}
    }
    assert found.reason["b.png"] == "The reconstruction has 64×64 pixels; the victim takes 32×32."
    assert found.reason["c.png"].startswith("Not an image in one of the formats")
    assert found.reason["d.png"] == "There is no reconstruction of that name."
    assert found.reason["stranger.png"] == "There is no private image of that name."
    assert found.image_sha256["stranger.png"] == ""
    [row] = rows_of(load_results(run), "theirs")
    assert (row.images, row.failed) == (1, 4)


def test_a_private_image_that_cannot_be_read_is_a_failure(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path], tmp_path: Path
) -> None:
    theirs("a")
    theirs("b")
    (tmp_path / "photos" / "b.png").write_bytes(b"")
    add(FOLDERS)
    reasons = external(run).set_index("image").reason
    assert reasons["b.png"] == "Empty file: 0 bytes."


@pytest.mark.slow
def test_what_failed_is_scored_once_it_is_mended(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path]
) -> None:
    for name in "abcd":
        theirs(name)
    theirs("b", size=64)
    assert add(FOLDERS) == 4
    assert add(FOLDERS) == 0
    theirs("b")
    assert add(FOLDERS) == 1
    found = external(run)
    assert len(found) == 4
    assert set(found.status) == {"ok"}
    assert found.reason.isna().all()
    theirs("b", size=64)
    assert add(FOLDERS) == 0  # what was scored stays


def test_another_picture_under_the_same_reference_is_refused(
    add: Callable[[str], int], refused: Any, theirs: Callable[..., Path]
) -> None:
    for name in "abcd":
        theirs(name)
    add(FOLDERS)
    theirs("b", 0.5)
    assert "of b.png is" in refused(FOLDERS)


def test_none_that_matches_is_an_error(refused: Callable[[str], str], theirs: Callable[..., Path]) -> None:
    path = theirs("a")
    path.rename(path.with_name("z.png"))
    assert "no reconstruction has the name of a private image. Found 'z' … and 'a' …." in refused(FOLDERS)


def test_two_pictures_of_one_name_are_refused(
    refused: Callable[[str], str], theirs: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(theirs("a"), tmp_path / "theirs" / "a.bmp")
    assert "has two images of one name: 'a.bmp' and 'a.png'." in refused(FOLDERS)


def test_suffixes_may_differ_and_samples_are_known(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path], tmp_path: Path
) -> None:
    theirs("a").rename(tmp_path / "theirs" / "coffee-0.webp")
    assert add(FOLDERS.replace('"photos"', '"samples"')) == 14
    found = external(run).set_index("image")
    assert found.status["samples/coffee-0"] == "ok"
    assert set(found.reason.dropna()) == {"There is no reconstruction of that name."}


def test_pictures_are_kept_beside_those_of_the_run(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path]
) -> None:
    files = [theirs(name) for name in "abcd"]
    add(FOLDERS)
    found, results = external(run).set_index("image"), load_results(run)
    place = results.picture(0, found.image_sha256["a.png"], "theirs")
    assert place is not None
    assert place.file.read_bytes() == files[0].read_bytes()
    assert results.picture(0, found.image_sha256["b.png"], "theirs") is None  # the run kept one image's


def test_a_case_without_records_says_so(run: Path, refused: Callable[[str], str], theirs: Callable[..., Path]) -> None:
    theirs("a")
    for part in Store(run).parts():
        part.unlink()
    assert "case 'plain' has no records yet" in refused(FOLDERS)


@pytest.mark.parametrize("name", ["vit_ti", "deit_s", "vit_s_mjp", "timm:vit_tiny_patch16_224.augreg_in21k"])
@pytest.mark.parametrize("size", [None, 64])
def test_the_preprocessing_is_the_victims_own(name: str, size: int | None) -> None:
    base = victim(name, weights="random", img_size=size)
    assert preprocessing_of(base.params()) == base.preprocessing


def test_a_model_that_timm_does_not_know_is_preprocessed_by_its_defaults(tiny_vit: Callable[..., Any]) -> None:
    base = victim(tiny_vit().float())
    assert preprocessing_of(base.params()) == base.preprocessing


def test_lpips_is_scored_where_its_backbone_is(
    add: Callable[[str], int], run: Path, theirs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = RunDirectory(run).read_run()
    RunDirectory(run).write_run(facts | {"missing_metrics": {}})
    theirs("a")

    def none(net: str, weights: Path | None, device: torch.device) -> None:
        raise LpipsUnavailable(net)

    monkeypatch.setattr("privlab.evaluation.setup.load_lpips", none)
    add(FOLDERS)
    assert external(run).set_index("image").metrics["a.png"] == "mse psnr ssim_skimage"
    constant = lambda x, y: torch.full((len(x),), 0.25, dtype=torch.double)  # noqa: E731
    monkeypatch.setattr("privlab.evaluation.setup.load_lpips", lambda net, weights, device: constant)
    assert add(FOLDERS) == 1  # a metric that came later
    assert external(run).set_index("image").lpips_alex["a.png"] == 0.25


def test_stated_knows_its_case(run: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_text(NUMBERS)
    assert set(case_names(RunDirectory(run).read_run()["cases"])) == {"plain", "(2) MJP", "(3) MJP"}
    stated = _Stated.read(tmp_path / "theirs.toml", RunDirectory(run))
    assert "lpips_alex" not in stated.metrics
    assert len(stated.cells) == 5

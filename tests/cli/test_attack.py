"""`privlab attack` as it should go: what it prints, what it writes, and that it does so again."""

import html
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from PIL import Image

import privlab
from privlab.attacks import ATTACKS
from privlab.base import PrivlabError
from privlab.evaluation import COLUMNS, GEOMETRIES, applicable
from privlab.grids import specify
from privlab.metrics import EXACT_DB
from privlab.victims import victim

TIMES = ["seconds_observe", "seconds_attack", "seconds_score"]
CONTROLS = ["control:mean", "control:other", "control:shuffled", "control:flat"]


def test_worst_case_is_what_runs_where_no_attack_is_named() -> None:
    assert specify(model=("vit_ti",), attack=("worst-case",)) == specify(model=("vit_ti",))
    with pytest.raises(PrivlabError, match=r"'worst-case'.*april,worst-case"):
        specify(model=("vit_ti",), attack=("april", "worst-case"))
    with pytest.raises(PrivlabError, match="Did you mean worst-case"):
        specify(model=("vit_ti",), attack=("worst-cas",))


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_attacks_run_cheapest_first_and_the_block_of_the_dearest_last() -> None:
    spec = specify(model=("vit_ti_mjp",), setting=("c",), weights="random", img_size=32)
    cells, _ = applicable(spec, victim("vit_ti_mjp", weights="random", img_size=32))
    first, last = ([attack.name for attack in cell.attacks] for cell in cells)
    assert first == ["april"]
    assert last == sorted(last, key=list(ATTACKS).index)
    assert {"patch-gradient", "mjp-subspace"} <= {*last[: last.index("mjp-full")]}


@pytest.mark.slow
def test_data_go_to_stdout_and_messages_to_stderr(attack: Callable[..., Any], tmp_path: Path) -> None:
    done = attack("--details")
    assert done.status == 0
    for word in ("april", "patch-gradient", *CONTROLS, "MSE ↓", "FFT2D (MJP) ↓", "PSNR ↑", "SSIM ↑", "LPIPS squeeze ↓"):
        assert word.replace("control:", "control: ") in done.out
    assert "stock" in done.out
    assert "vit_ti: weights random (SHA-256" in done.out
    assert "seed 0" in done.out
    assert done.out.splitlines()[-1] == f"run: {tmp_path / 'run'}"
    assert "Warning" not in done.out
    assert "Warning: vit_ti has RANDOM weights (seed 0), as asked." in done.err
    assert "n/a" not in done.out
    assert done.err.count("Warning: LPIPS is by SqueezeNet, not AlexNet; see `privlab explain lpips`.\n") == 1
    assert "3 of 3: " in done.err


@pytest.mark.slow
def test_the_result_is_one_screen_with_the_verdict_first(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    done = cli(*["attack", "--model", "cifar_vit_mjp27", "--defense", "mjp", "--setting", "a,c", "--limit", "2"])
    assert done.status == 0
    lines = done.out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    (run,) = (tmp_path / "runs").iterdir()
    assert lines[0] == "Verdict"
    assert lines[1].startswith("  cifar_vit_mjp27, setting a, none: leaks by ")
    parts = ("cifar_vit_mjp27, setting c, mjp: leaks by ", "paper's attack", "Weakened by: ", "Pictures: ", "run: ")
    places = [next(i for i, line in enumerate(lines) if part in line) for part in parts]
    assert places == sorted(places)
    assert lines[-2:] == [f"Pictures: runs/{run.name}/strips", f"run: runs/{run.name}"]
    (weak,) = (line for line in lines if line.startswith("Weakened by: "))
    assert weak.endswith(" (privlab explain flags)")
    explained = cli("explain", "flags").out
    assert all(flag.head in explained for flag in privlab.load(run).flags)
    assert str(privlab.load(run)) in done.out.replace(f"runs/{run.name}", str(run))
    (offline,) = (line for line in done.err.splitlines() if "LPIPS" in line)
    assert len(offline) <= 80


def test_names_and_figures_are_not_cut_on_a_narrow_terminal(
    attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = attack("--metrics", "mse,psnr,ssim", "--attack", "april,patch-gradient")
    *shown, weak, pictures, path = done.out.splitlines()
    assert max(map(len, shown)) <= 60
    assert weak.startswith("Weakened by")
    assert pictures == "Pictures: none were kept"
    assert path.startswith("run: ")  # as long as it is
    details = attack("--metrics", "mse,psnr,ssim", "--attack", "april,patch-gradient", "--details")
    assert "…" not in details.out
    assert re.search(r"\d\.\de-\d\d", details.out)  # 0.0000 would not tell 85 dB from 140 dB


def test_json_is_all_of_stdout(attack: Callable[..., Any], tmp_path: Path) -> None:
    done = attack("--json")
    assert done.status == 0
    told = json.loads(done.out)
    assert list(told) == [
        *("run", "title", "source", "remarks", "verdicts", "metrics", "interval", "geometry", "worst_case", "rows"),
        *("verdict", "flags", "members", "explained", "warnings", "admit", "missing_metrics", "failed"),
    ]
    assert told["flags"] == [
        {"head": "Random weights", "items": ["vit_ti"]},
        {"head": "Predicted labels", "items": ["of 3 images"]},
        {"head": "Few images", "items": ["3 images"]},
    ]
    assert told["verdict"][-1].startswith("Threat model: an honest-but-curious server")
    assert [said["word"] for said in told["verdicts"]] == ["leaks"]
    assert told["verdicts"][0]["measure"]["exact"] == 3
    assert told["geometry"] == "in_place"
    assert told["worst_case"] == "the best attack of each image, chosen by the evaluator: an upper bound"
    assert told["metrics"]["psnr"] == "higher leaks"
    assert "fft2d_mjp" in told["metrics"]  # the one that MJP prints
    assert "fft2d" not in told["metrics"]
    assert told["run"] == str(tmp_path / "run")
    assert told["failed"] == {}
    assert told["missing_metrics"] == {}
    assert any(message.startswith("LPIPS is by SqueezeNet") for message in told["warnings"])
    ours = ["patch-gradient", "patch-gradient-prior", "mjp-subspace", "mjp-full"]
    attacks = ["april", "worst case", "best single attack", *ours]
    expected = [*attacks, *CONTROLS]
    assert {row["attack"] for row in told["rows"]} == {*expected}
    by_attack = {row["attack"]: row for row in told["rows"]}
    means = {name: {m: score["mean"] for m, score in row["scores"].items()} for name, row in by_attack.items()}
    assert means["patch-gradient"]["psnr"] > 100
    assert 0 < means["patch-gradient"]["mse"] < 1e-10  # a small number is not nought
    assert "lpips_alex" not in told["metrics"]
    assert 0 <= means["patch-gradient"]["lpips_squeeze"] < 1e-6 < means["control:mean"]["lpips_squeeze"]
    assert by_attack["patch-gradient"]["images"] == 3
    assert by_attack["patch-gradient"]["exact"] == by_attack["worst case"]["exact"] == 3
    assert by_attack["control:mean"]["exact"] == 0
    ((single, count),) = by_attack["best single attack"]["leakiest"]["psnr"].items()
    assert count == 3
    assert means["best single attack"]["psnr"] == max(means[name]["psnr"] for name in ours) == means[single]["psnr"]


@pytest.mark.slow
def test_perfect_scores_are_no_missing_ones(attack: Callable[..., Any], records: Callable[..., pd.DataFrame]) -> None:
    """Rounded to 8 bits, the exact reconstruction is the image: PSNR is infinite, which JSON has no number for."""
    done = attack("--eight-bit", "--attack", "patch-gradient", "--json")
    row = json.loads(done.out, parse_constant=pytest.fail)["rows"][0]
    assert (row["scores"]["mse"]["mean"], row["scores"]["psnr"]["mean"]) == (0, "Infinity")
    assert (records().query("attack == 'patch-gradient'").psnr == float("inf")).all()
    shown = attack("--eight-bit", "--attack", "patch-gradient", "--overwrite", "--details").out
    assert " ∞ " in next(line for line in shown.splitlines() if re.match(" *patch-gradient +stock ", line))


@pytest.mark.slow
def test_records_have_every_column_and_row(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], photos: Path
) -> None:
    attack("--setting", "a,b,c", "--gamma", "1")
    table = records()
    assert list(table.columns) == COLUMNS.names
    attacked = table[~table.attack.str.startswith("control:")]
    cells = attacked.groupby(["image", "setting", "attack", "geometry"]).size()
    assert (cells == 1).all()
    assert len(cells) == 3 * 5 * (2 + 2 + len(GEOMETRIES))  # only in setting c is there something to re-assemble
    assert set(attacked.image) == {path.name for path in photos.iterdir()}
    assert set(table.weights) == {"random"}
    assert set(table.label_origin) == {"predicted"}
    assert set(table.status) == {"ok"}
    assert table.lpips_alex.isna().all()
    assert attacked[["mse", "psnr", "ssim", "fft2d", "lpips_squeeze", "grad_norm", *TIMES]].notna().all(axis=None)
    stock = ("patch-gradient", "patch-gradient-prior", "mjp-subspace", "mjp-full")
    blocks = {"april": "april"} | dict.fromkeys(stock, "stock")
    assert dict(zip(attacked.attack, attacked.block, strict=True)) == blocks
    assert dict(zip(table.setting, table.defense, strict=True)) == {"a": "none", "b": "jigsaw", "c": "jigsaw"}
    shuffled = attacked[attacked.setting != "a"]
    assert shuffled.psnr_masked.notna().all()
    assert json.loads(shuffled.defense_params.iloc[0]) == {"gamma": 1.0}
    exact = attacked[attacked.attack == "patch-gradient"].set_index(["setting", "geometry"]).psnr
    assert exact["b", "in_place"].min() > 100  # scored against what was fed
    assert exact["c", "oracle"].min() > 100  # every patch put where it belongs
    assert exact["c", "in_place"].max() < 30


@pytest.mark.slow
def test_run_json_states_the_run(attack: Callable[..., Any], tmp_path: Path) -> None:
    attack("--seed", "7", "--limit", "2")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "finished"
    assert facts["specification"] | {"seed": 7, "limit": 2, "models": ["vit_ti"]} == facts["specification"]
    assert facts["images"]["count"] == 2
    assert facts["victims"][0]["weights"]["origin"] == "random"
    assert {"versions", "hardware", "commit", "warnings", "missing_metrics", "seconds"} <= set(facts)


@pytest.mark.slow
def test_the_command_of_a_run_is_what_was_typed_and_runs_again(
    attack: Callable[..., Any], cli: Callable[..., Any], photos: Path, tmp_path: Path
) -> None:
    assert attack("--attack", "april", "--metrics", "psnr", f"--out={tmp_path / 'my run'}").status == 0
    command = json.loads((tmp_path / "my run" / "run.json").read_text())["command"]
    given = f"--model vit_ti --weights random --img-size 32 --no-strips --images {photos} --out {tmp_path / 'run'}"
    assert command == f"privlab attack {given} --attack april --metrics psnr '--out={tmp_path / 'my run'}'"
    assert cli("report", tmp_path / "my run").status == 0
    page = (tmp_path / "my run" / "report.html").read_text("utf-8")
    (written,) = re.findall('<pre class="command".*?>(.*?)</pre>', page, re.DOTALL)
    assert shlex.split(html.unescape(written)) == shlex.split(command.replace(f"{tmp_path}/", "…/"))
    assert "<title>vit_ti, undefended" in page
    again = cli(*shlex.split(command)[1:], "--overwrite", "--json")
    assert (again.status, json.loads(again.out)["run"]) == (0, str(tmp_path / "my run"))


@pytest.mark.slow
def test_the_verdict_of_the_page_stands_in_the_terminal_and_in_json(
    attack: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("--model", "vit_ti_mjp", "--setting", "a,c", "--attack", "april,patch-gradient", "--overwrite")
    shown, told = attack(*options, "--details"), json.loads(attack(*options, "--json").out)
    assert cli("report", tmp_path / "run").status == 0
    page = " ".join(html.unescape((tmp_path / "run" / "report.html").read_text("utf-8")).split())
    sentence = told["verdict"][0]
    assert sentence.startswith("By PSNR, ")
    assert "the paper's" in sentence
    assert sentence in page
    printed = " ".join(shown.out.split())
    assert sentence in printed
    for cell in told["verdicts"]:
        assert f"verdict: {cell['label']}: {cell['word']}{cell['why']}" in printed
        assert f"{cell['word']}{cell['why']}" in page


@pytest.mark.slow
def test_an_undefined_score_has_its_reason(attack: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    """FFT2D as MJP has it is a correlation, and a black picture has none: that is said where other n/a's are told."""
    Image.new("RGB", (40, 36)).save(photos / "black.png")
    done = attack("--attack", "april,patch-gradient", "--metrics", "psnr,fft2d,fft2d_mjp", "--details")
    assert done.status == 0
    why = "undefined where a reconstruction or its image is black"
    assert f"fft2d_mjp: n/a (for 8 of 32 records: {why})" in " ".join(done.out.split())
    assert f"fft2d_mjp is n/a for some images: {why}." in " ".join(done.err.split())
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert f"fft2d_mjp is n/a for some images: {why}." in facts["warnings"]
    assert attack("--metrics", "psnr", "--overwrite", "--details").out.count("fft2d") == 0


@pytest.mark.slow
def test_one_strip_for_each_image_and_victim(attack: Callable[..., Any], tmp_path: Path) -> None:
    done = attack("--strips", "--model", "vit_ti,vit_ti_mjp", "--setting", "a,c")
    assert done.status == 0
    strips = sorted((tmp_path / "run" / "strips").iterdir())
    assert [path.name for path in strips] == [
        f"{victim}-0000{i}-{name}.png" for victim in ("vit_ti", "vit_ti_mjp") for i, name in enumerate("abc")
    ]
    with Image.open(strips[0]) as strip:
        assert strip.width > 4 * 224  # private image, what was fed, two reconstructions
        assert strip.height > 2 * 224  # two settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "settings", "defense"),
    [
        ("vit_ti", (), {"a"}, {"none"}),
        ("vit_ti_mjp", (), {"c"}, {"mjp"}),
        ("vit_ti,vit_ti_mjp", (), {"c"}, {"jigsaw", "mjp"}),
        ("vit_ti", ("--defense", "jigsaw"), {"c"}, {"jigsaw"}),
        ("vit_ti", ("--defense", "none"), {"a"}, {"none"}),
        ("vit_ti", ("--defense", "mjp", "--masked-pe", "none"), {"c"}, {"mjp"}),
        ("vit_ti", ("--setting", " a, b,a"), {"a", "b"}, {"none", "jigsaw"}),
    ],
)
def test_setting_is_c_where_a_defense_is_at_work(
    attack: Callable[..., Any],
    records: Callable[..., pd.DataFrame],
    model: str,
    options: tuple[str, ...],
    settings: set[str],
    defense: set[str],
) -> None:
    assert attack("--model", model, "--limit", "1", *options).status == 0
    table = records()
    assert set(table.setting) == settings
    assert set(table.defense) == defense
    assert set(table.victim) == set(model.split(","))


@pytest.mark.slow
def test_table_shows_the_geometry_asked_for(attack: Callable[..., Any]) -> None:
    def psnr(geometry: str) -> float:
        told = attack("--setting", "c", "--gamma", "1", "--geometry", geometry, "--json", "--overwrite").out
        return {row["attack"]: row["scores"]["psnr"]["mean"] for row in json.loads(told)["rows"]}["patch-gradient"]

    assert psnr("oracle") > 100 > psnr("in_place")


@pytest.mark.slow
def test_same_command_gives_the_same_scores(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    options = ("--model", "vit_ti_mjp", "--setting", "b,c", "--seed", "3")
    attack(*options)
    attack(*options, "--out", tmp_path / "again")
    first, again = records().drop(columns=TIMES), records(tmp_path / "again").drop(columns=TIMES)
    assert_frame_equal(first, again, check_exact=True)
    attack(*options, "--attack", "patch-gradient", "--seed", "4", "--out", tmp_path / "other")
    other = records(tmp_path / "other").psnr_masked.dropna()
    assert not set(other) <= set(first.psnr_masked[first.attack == "patch-gradient"])


@pytest.mark.slow
def test_batch_size_changes_no_draw_and_no_score(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    """The masks are drawn for each image by itself; only float32 rounding depends on the batch."""
    options = ("--model", "vit_ti_mjp", "--setting", "b,c", "--images", "samples", "--limit", "4", "--img-size", "64")
    attack(*options, "--batch-size", "1")
    attack(*options, "--batch-size", "3", "--out", tmp_path / "three")
    keys = ["image", "setting", "attack", "geometry"]
    one, three = (table.set_index(keys).sort_index() for table in (records(), records(tmp_path / "three")))
    assert len(list((tmp_path / "run" / "records").iterdir())) == 4
    assert len(list((tmp_path / "three" / "records").iterdir())) == 2
    controls = one.index.get_level_values("attack").str.startswith("control:")
    exact = ["image_sha256", "label", "mse", "psnr", "ssim"]
    assert_frame_equal(one.loc[controls, exact], three.loc[controls, exact], check_exact=True)
    scores = ["mse", "ssim", "fft2d", "psnr_masked", "psnr_unmasked"]
    placed = one.index.get_level_values("geometry") == "reassembled"  # a rounding may tip an assignment of noise
    ours, theirs = (table[~controls & ~placed][scores].clip(upper=EXACT_DB) for table in (one, three))
    assert_frame_equal(ours, theirs, rtol=2e-2, atol=1e-4)


@pytest.mark.slow
def test_default_directory_is_new_each_time(
    cli: Callable[..., Any], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "attack --model timm:vit_tiny_patch16_224 --weights random --img-size 32 --no-strips --images photos"
    for _ in range(2):
        assert cli(*command.split()).status == 0
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all(name.split("-", 2)[2].startswith("timm_vit_tiny_patch16_224-a") for name in runs)

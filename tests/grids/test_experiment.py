"""An experiment in TOML: what it states, and that every mistake is refused by file, line and nearest name."""

import itertools
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privlab.attacks import ATTACKS
from privlab.base import PrivlabError, read_text
from privlab.defenses import Blur
from privlab.experiments.tables.named import experiment_names, find_experiment
from privlab.grids import KNOWN, Experiment, Layout, read_experiment
from privlab.metrics import METRICS, STRUCTURE

SHORT = '[run]\nmodel = "vit_ti"\n'
SHUFFLED = SHORT + 'setting = "c"\n'


# What a file states


def test_shortest_file(parse: Callable[..., Experiment]) -> None:
    found = parse(SHORT)
    assert (found.name, found.title, found.source, found.figures, found.conditions) == ("mine", "mine", None, (), {})
    assert found.layout == Layout()
    (case,) = found.cases
    assert (case.label, case.group, case.options, case.published) == ("vit_ti", None, {}, {})
    (spec,) = case.runs
    assert (spec.victim.models, spec.settings, spec.metrics) == (("vit_ti",), ("a",), (*Layout().columns, *STRUCTURE))
    with pytest.raises(FrozenInstanceError):
        found.title = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_grid_is_the_product_of_its_values(parse: Callable[..., Experiment]) -> None:
    grid = '[grid]\nmodel = ["vit_ti", "deit_ti"]\ngamma = [0.1, 1]\nsetting = ["b", "c"]\n'
    found = parse(grid)
    wanted = list(itertools.product(("vit_ti", "deit_ti"), (0.1, 1.0), ("b", "c")))
    specs = [case.runs[0] for case in found.cases]
    assert [(*spec.victim.models, spec.words.gamma, *spec.settings) for spec in specs] == wanted
    assert found.cases[0].label == "model vit_ti, gamma 0.1, setting b"
    assert found.cases[0].options == {"model": "vit_ti", "gamma": 0.1, "setting": "b"}


def test_cases_times_grid(parse: Callable[..., Experiment]) -> None:
    cases = '[grid]\ngamma = [0.1, 0.2]\n[[case]]\nlabel = "plain"\ngroup = "(1)"\nsetting = "a"\n[[case]]\nsetting="c"'
    found = parse(SHORT + cases)
    assert [(case.label, case.group) for case in found.cases] == [
        ("plain, gamma 0.1", "(1)"),
        ("plain, gamma 0.2", "(1)"),
        ("gamma 0.1, setting c", None),
        ("gamma 0.2, setting c", None),
    ]
    assert [case.options["gamma"] for case in found.cases] == [0.1, 0.2, 0.1, 0.2]


def test_case_says_itself_what_the_grid_varies(parse: Callable[..., Experiment]) -> None:
    found = parse(
        SHUFFLED + '[grid]\ngamma = [0.1, 0.2]\n[[case]]\nlabel = "fixed"\ngamma = 0.9\n[[case]]\nlabel = "all"'
    )
    assert [(case.label, case.runs[0].words.gamma) for case in found.cases] == [
        ("fixed", 0.9),
        ("all, gamma 0.1", 0.1),
        ("all, gamma 0.2", 0.2),
    ]


@pytest.mark.slow
@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4, unique=True),
    draws=st.integers(1, 4),
    gammas=st.lists(st.floats(0, 1), min_size=1, max_size=4, unique=True),
)
def test_every_seed_and_draw_of_every_case(
    tmp_path_factory: pytest.TempPathFactory, seeds: list[int], draws: int, gammas: list[float]
) -> None:
    path = tmp_path_factory.getbasetemp() / "seeds.toml"
    path.write_text(f"{SHUFFLED}seeds = {seeds}\ndraws = {draws}\n[grid]\ngamma = {gammas}\n")
    cases = read_experiment(path).cases
    assert [case.options["gamma"] for case in cases] == gammas
    for case, gamma in zip(cases, gammas, strict=True):
        wanted = [(gamma, seed, draw) for seed in seeds for draw in range(draws)]
        assert [(run.words.gamma, run.seed, run.draw) for run in case.runs] == wanted
        assert len(set(case.runs)) == len(wanted)


def test_texts_and_lists_of_texts(parse: Callable[..., Experiment]) -> None:
    run = parse(SHORT + 'attack = "april"\nimages = "samples"\npublic = ["x", "y"]\nmetrics = "psnr"').cases[0].runs[0]
    assert (run.data.images, run.adversary.public, run.metrics) == (("samples",), ("x", "y"), ("psnr",))
    assert run.adversary.attacks == (ATTACKS["april"](),)


def test_options_of_attacks_and_defenses(parse: Callable[..., Experiment]) -> None:
    run = parse(SHORT + 'setting = "c"\ndefense = "blur"\nset = ["sigma=2"]').cases[0].runs[0]
    assert run.defense == (Blur(sigma=2.0),)


def test_columns_are_measured_unless_metrics_are_named(parse: Callable[..., Experiment]) -> None:
    table = '[table]\ncolumns = ["psnr", "correct", "ssim"]\n'
    assert parse(SHORT + table).cases[0].runs[0].metrics == ("psnr", "ssim", *STRUCTURE)  # the other comes of itself
    assert parse(SHORT + 'metrics = ["mse"]\n' + table).cases[0].runs[0].metrics == ("mse",)
    assert parse(SHORT + table).layout.columns == ("psnr", "correct", "ssim")


def test_layout_and_figures(parse: Callable[..., Experiment]) -> None:
    found = parse(
        'title = "T"\nsource = "S"\n' + SHUFFLED + "[grid]\ngamma = [0.1, 0.2]\n[table]\n"
        'decimals = { psnr = 1 }\nbold = false\ninterval = 0.9\ngeometry = "oracle"\npaper_attack = "april"\n'
        '[[figure]]\nkind = "curve"\nx = "gamma"\ny = "ssim"\nname = "mine"\n[[figure]]\nkind = "sheet"\n'
        '[paper.conditions]\nimages = "many"\n'
    )
    assert (found.title, found.source, found.conditions) == ("T", "S", {"images": "many"})
    layout = found.layout
    assert (layout.decimals, layout.bold, layout.interval) == ({"psnr": 1}, False, 0.9)
    assert (layout.geometry, layout.paper_attack) == ("oracle", "april")
    assert [(f.kind, f.name, f.x, f.y) for f in found.figures] == [
        ("curve", "mine", "gamma", "ssim"),
        ("sheet", "sheet-2", None, "psnr"),
    ]


# What a paper printed


def test_published_figures(parse: Callable[..., Experiment]) -> None:
    assert parse(SHORT + "[[case]]\npublished = { psnr = 19.27, ssim = 1 }").cases[0].published == {
        **{"psnr": 19.27, "ssim": 1.0}
    }


CSV = "# Source: a paper\nmodel,setting,acc,psnr,lpips,other\nViT,a,78.1,19.27,0.36,3\nViT,b,18.7,,0.28,3\n"
PAPER = '[paper]\nfile = "paper.csv"\n'


def test_published_row_of_a_file(parse: Callable[..., Experiment], tmp_path: Path) -> None:
    (tmp_path / "paper.csv").write_text(CSV)
    cases = '[[case]]\npublished = { model = "ViT", setting = "a" }\n[[case]]\npublished = { setting = "b" }\n'
    found = parse(SHORT + PAPER + cases)
    assert found.cases[0].published == {"correct": 78.1, "psnr": 19.27, "lpips_alex": 0.36}
    assert found.cases[1].published == {"correct": 18.7, "lpips_alex": 0.28}  # an empty field is no figure


def test_files_that_windows_wrote(tmp_path: Path) -> None:
    """Lines end in CR LF, and a mark (BOM) comes first."""
    text = SHORT + PAPER + '[[case]]\npublished = { model = "ViT", setting = "a" }\n'
    for name, content in (("paper.csv", CSV), ("theirs.toml", text)):
        (tmp_path / name).write_text(f"\ufeff{content}", encoding="utf-8", newline="\r\n")
    assert read_text(tmp_path / "theirs.toml", "experiment") == text
    assert read_experiment(tmp_path / "theirs.toml").cases[0].published["correct"] == 78.1


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ('{ model = "ViT" }', "2 rows of paper.csv have {'model': 'ViT'}. Give what names one."),
        ('{ model = "DeiT" }', "0 rows of paper.csv have {'model': 'DeiT'}. Give what names one."),
        ("3", "published must be a table. Found 3."),
    ],
)
def test_no_such_row(refused: Callable[..., Any], tmp_path: Path, wanted: str, message: str) -> None:
    (tmp_path / "paper.csv").write_text(CSV)
    assert refused(f"{SHORT}{PAPER}[[case]]\nsetting = 'a'\npublished = {wanted}\n") == (7, message)


def test_file_of_a_paper_that_cannot_be_used(refused: Callable[..., Any], tmp_path: Path) -> None:
    line, reason = refused(SHORT + PAPER)
    assert line == 4
    assert "paper.csv': No such file or directory." in reason
    (tmp_path / "paper.csv").write_bytes(b"\xff\xfe")
    assert "paper.csv': 'utf-8' codec" in refused(SHORT + PAPER)[1]
    assert refused(f"{SHORT}[paper]\nfile = 3\n") == (4, "file must be the name of a CSV file. Found 3.")
    (tmp_path / "paper.csv").write_text("model,psnr\nViT,n/a\n")
    line, message = refused(f'{SHORT}{PAPER}[[case]]\npublished = {{ model = "ViT" }}\n')
    assert (line, message) == (6, "paper.csv must hold numbers: could not convert string to float: 'n/a'.")


# --set, and the options of the command line


def test_overrides(parse: Callable[..., Experiment]) -> None:
    text = SHUFFLED + "limit = 9\n[grid]\ngamma = [0.1]\n"
    found = parse(
        text, "run.limit=4", "grid.gamma=[0.2, 0.3]", "run.weights=random", 'run.attack=["april"]', "table.bold=false"
    )
    assert [case.runs[0].words.gamma for case in found.cases] == [0.2, 0.3]
    run = found.cases[0].runs[0]
    assert (run.data.limit, run.victim.weights, run.words.attacks) == (4, "random", ("april",))
    assert not found.layout.bold


def test_fields_of_run_that_are_given(parse: Callable[..., Experiment]) -> None:
    found = parse(SHORT + "limit = 9\n", limit=2, images=["mine"], weights=None)
    assert (found.cases[0].runs[0].data.limit, found.cases[0].runs[0].data.images) == (2, ("mine",))
    assert found.cases[0].runs[0].victim.weights == "auto"


@pytest.mark.parametrize("override", ["run.limit", "limit=3", "=3", "run.=3", "", "run"])
def test_override_of_another_form(parse: Callable[..., Experiment], override: str) -> None:
    with pytest.raises(PrivlabError, match=r"^--set.*TABLE.KEY=VALUE.*run.limit=4.*'"):
        parse(SHORT, override)


def test_override_of_an_unknown_table(parse: Callable[..., Experiment]) -> None:
    with pytest.raises(PrivlabError, match=r"--set.*'tabel'.*table?"):
        parse(SHORT, "tabel.bold=false")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.limt=3", "--set run.limt: Unknown key of [run] 'limt'. Did you mean limit"),
        ("run.limit=x", "--set run.limit: limit must be a whole number. Found 'x'."),
        ("grid.gamma=0.3", "--set grid.gamma: gamma must be a list of the values to try. Found 0.3."),
        ("grid.gamma=[0.1", "--set grid.gamma: gamma must be a list of the values to try. Found '[0.1'."),
        ("grid.gamma=[2.0]", "--set grid.gamma: gamma (γ) must be in [0, 1]. Found 2.0."),
        ("grid.gama=[0.1]", "--set grid.gama: Unknown key of [grid] 'gama'. Did you mean gamma"),
        ("table.columns=[]", "--set table.columns: columns must be a list of metrics. Found []."),
        ("table.colums=['psnr']", "--set table.colums: Unknown key of [table] 'colums'. Did you mean columns"),
    ],
)
def test_bad_override(parse: Callable[..., Experiment], override: str, message: str) -> None:
    """The option is blamed, which stands on no line of the file."""
    with pytest.raises(PrivlabError) as caught:
        parse(SHORT, override)
    assert str(caught.value).startswith(message)


def test_what_the_file_itself_has_wrong_is_on_its_line(refused: Callable[..., Any]) -> None:
    assert refused(SHORT + "limt = 3\n", "run.seeds=[1]")[0] == SHORT.count("\n") + 1


# The experiments that come with privlab


@pytest.mark.parametrize("name", experiment_names())
def test_ours(name: str) -> None:
    found = read_experiment(find_experiment(name))
    assert found.cases
    for case in found.cases:
        assert set(case.published) <= set(KNOWN)
        for run in case.runs:
            asked = [column for column in found.layout.columns if column in {*METRICS, "lpips"}]
            assert "lpips_alex" not in asked  # without a network it would be n/a
            assert run.metrics == tuple(dict.fromkeys([*asked, *STRUCTURE]))


def test_table_5_of_mjp() -> None:
    found = read_experiment(find_experiment("mjp_table5"))
    assert [case.group for case in found.cases] == ["(1)"] * 4 + ["(2)"] * 4 + ["(3)", "(4)"]
    assert found.cases[0].published["psnr"] == 19.27
    assert found.cases[0].published["fft2d_mjp"] == 0.0039  # by the authors' formula, as printed
    assert all("fft2d" not in case.published for case in found.cases)
    printed = {"lpips_alex" if column == "lpips" else column for column in found.layout.columns}
    assert all(set(case.published) == {"correct", *printed} for case in found.cases)


def test_name_of_no_experiment() -> None:
    with pytest.raises(PrivlabError, match=r"'mjp_tabel5'.*mjp_table5"):
        find_experiment("mjp_tabel5")


def test_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_experiment("quick") != Path("quick")
    Path("quick").write_text(SHORT)
    assert find_experiment("quick") == Path("quick")

"""An experiment in TOML: what it states, and that every mistake is refused by file, line and nearest name."""

import itertools
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privlab.errors import PrivlabError
from privlab.experiment import KNOWN, Experiment, Layout, read_experiment
from privlab.experiments.named import experiment_names, find_experiment
from privlab.metrics import METRICS

SHORT = '[run]\nmodel = "vit_ti"\n'


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Experiment]:
    """Parse the text of an experiment."""

    def read(text: str, *overrides: str, **run: Any) -> Experiment:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_experiment(path, overrides, **run)

    return read


@pytest.fixture
def refused(parse: Callable[..., Experiment]) -> Callable[..., str]:
    """Return how an experiment is refused: the line, counted from 1, and what is wrong, in one line."""

    def error(text: str, *overrides: str) -> tuple[int, str]:
        with pytest.raises(PrivlabError) as caught:
            parse(text, *overrides)
        where, _, message = str(caught.value).partition(": ")
        file, _, line = where.rpartition(", line ")
        assert Path(file).name == "mine.toml"
        assert "\n" not in message
        return int(line), message

    return error


# What a file states


def test_shortest_file(parse: Callable[..., Experiment]) -> None:
    found = parse(SHORT)
    assert (found.name, found.title, found.source, found.figures, found.conditions) == ("mine", "mine", None, (), {})
    assert found.layout == Layout()
    (case,) = found.cases
    assert (case.label, case.group, case.options, case.published) == ("vit_ti", None, {}, {})
    (spec,) = case.runs
    assert (spec.models, spec.settings, spec.metrics) == (("vit_ti",), ("a",), Layout().columns)
    with pytest.raises(FrozenInstanceError):
        found.title = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_grid_is_the_product_of_its_values(parse: Callable[..., Experiment]) -> None:
    grid = '[grid]\nmodel = ["vit_ti", "deit_ti"]\ngamma = [0.1, 1]\nsetting = ["b", "c"]\n'
    found = parse(grid)
    wanted = list(itertools.product(("vit_ti", "deit_ti"), (0.1, 1.0), ("b", "c")))
    specs = [case.runs[0] for case in found.cases]
    assert [(*spec.models, spec.gamma, *spec.settings) for spec in specs] == wanted
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
    found = parse(SHORT + '[grid]\ngamma = [0.1, 0.2]\n[[case]]\nlabel = "fixed"\ngamma = 0.9\n[[case]]\nlabel = "all"')
    assert [(case.label, case.runs[0].gamma) for case in found.cases] == [
        ("fixed", 0.9),
        ("all, gamma 0.1", 0.1),
        ("all, gamma 0.2", 0.2),
    ]


@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4, unique=True),
    draws=st.integers(1, 4),
    gammas=st.lists(st.floats(0, 1), min_size=1, max_size=4, unique=True),
)
def test_every_seed_and_draw_of_every_case(
    tmp_path_factory: pytest.TempPathFactory, seeds: list[int], draws: int, gammas: list[float]
) -> None:
    path = tmp_path_factory.getbasetemp() / "seeds.toml"
    path.write_text(f"{SHORT}seeds = {seeds}\ndraws = {draws}\n[grid]\ngamma = {gammas}\n")
    cases = read_experiment(path).cases
    assert [case.options["gamma"] for case in cases] == gammas
    for case, gamma in zip(cases, gammas, strict=True):
        wanted = [(gamma, seed, draw) for seed in seeds for draw in range(draws)]
        assert [(run.gamma, run.seed, run.draw) for run in case.runs] == wanted
        assert len(set(case.runs)) == len(wanted)


def test_texts_and_lists_of_texts(parse: Callable[..., Experiment]) -> None:
    run = parse(SHORT + 'attack = "april"\nimages = "samples"\npublic = ["x", "y"]\nmetrics = "psnr"').cases[0].runs[0]
    assert (run.attacks, run.images, run.public, run.metrics) == (("april",), ("samples",), ("x", "y"), ("psnr",))


def test_options_of_attacks_and_defenses(parse: Callable[..., Experiment]) -> None:
    run = parse(SHORT + 'setting = "c"\ndefense = "blur"\nset = ["sigma=2"]').cases[0].runs[0]
    assert run.options == ("sigma=2",)


def test_columns_are_measured_unless_metrics_are_named(parse: Callable[..., Experiment]) -> None:
    table = '[table]\ncolumns = ["psnr", "correct", "ssim"]\n'
    assert parse(SHORT + table).cases[0].runs[0].metrics == ("psnr", "ssim")  # the other comes of itself
    assert parse(SHORT + 'metrics = ["mse"]\n' + table).cases[0].runs[0].metrics == ("mse",)
    assert parse(SHORT + table).layout.columns == ("psnr", "correct", "ssim")


def test_layout_and_figures(parse: Callable[..., Experiment]) -> None:
    found = parse(
        'title = "T"\nsource = "S"\n' + SHORT + "[grid]\ngamma = [0.1, 0.2]\n[table]\n"
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
    assert refused(SHORT + PAPER) == (4, "cannot read 'paper.csv': No such file or directory.")
    (tmp_path / "paper.csv").write_bytes(b"\xff\xfe")
    assert refused(SHORT + PAPER)[1].startswith("cannot read 'paper.csv': ")
    assert refused(f"{SHORT}[paper]\nfile = 3\n") == (4, "file must be the name of a CSV file. Found 3.")
    (tmp_path / "paper.csv").write_text("model,psnr\nViT,n/a\n")
    line, message = refused(f'{SHORT}{PAPER}[[case]]\npublished = {{ model = "ViT" }}\n')
    assert (line, message) == (6, "paper.csv must hold numbers: could not convert string to float: 'n/a'.")


# --set, and the options of the command line


def test_overrides(parse: Callable[..., Experiment]) -> None:
    text = SHORT + "limit = 9\n[grid]\ngamma = [0.1]\n"
    found = parse(
        text, "run.limit=4", "grid.gamma=[0.2, 0.3]", "run.weights=random", 'run.attack=["april"]', "table.bold=false"
    )
    assert [case.runs[0].gamma for case in found.cases] == [0.2, 0.3]
    run = found.cases[0].runs[0]
    assert (run.limit, run.weights, run.attacks) == (4, "random", ("april",))
    assert not found.layout.bold


def test_fields_of_run_that_are_given(parse: Callable[..., Experiment]) -> None:
    found = parse(SHORT + "limit = 9\n", limit=2, images=["mine"], weights=None)
    assert (found.cases[0].runs[0].limit, found.cases[0].runs[0].images) == (2, ("mine",))
    assert found.cases[0].runs[0].weights == "auto"


@pytest.mark.parametrize("override", ["run.limit", "limit=3", "=3", "run.=3", "", "run"])
def test_override_of_another_form(parse: Callable[..., Experiment], override: str) -> None:
    with pytest.raises(PrivlabError, match=r"^--set must be TABLE.KEY=VALUE, such as run.limit=4. Found '"):
        parse(SHORT, override)


def test_override_of_an_unknown_table(parse: Callable[..., Experiment]) -> None:
    with pytest.raises(PrivlabError, match=r"^Unknown table of --set 'tabel'. Did you mean table?"):
        parse(SHORT, "tabel.bold=false")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.limt=3", "Unknown key of [run] 'limt'. Did you mean limit"),
        ("run.limit=x", "limit must be a whole number. Found 'x'."),
        ("grid.gamma=0.3", "gamma must be a list of the values to try. Found 0.3."),
        ("grid.gamma=[0.1", "gamma must be a list of the values to try. Found '[0.1'."),
        ("table.columns=[]", "columns must be a list of metrics. Found []."),
    ],
)
def test_bad_override(refused: Callable[..., Any], override: str, message: str) -> None:
    assert refused(SHORT, override)[1].startswith(message)


# Mistakes: (text, line, how the message starts)

MISTAKES = {
    # keys and tables that there are not
    "table": ("[run]\n[tabel]\n", 2, "Unknown table or key 'tabel'. Did you mean table"),
    "tables": (SHORT + "\n[[cases]]\n", 4, "Unknown table or key 'cases'. Did you mean case"),
    "top": ("\ntitel = 'x'\n" + SHORT, 2, "Unknown table or key 'titel'. Did you mean title"),
    "run key": (SHORT + "weigths = 'random'\n", 3, "Unknown key of [run] 'weigths'. Did you mean weights"),
    "quoted key": (SHORT + "# limt = 3\n'limt' = 3\n", 4, "Unknown key of [run] 'limt'. Did you mean limit"),
    "plural": ("[run]\nmodels = ['vit_ti']\n", 2, "Unknown key of [run] 'models'. Did you mean model"),
    "seed": (SHORT + "seed = 3\n", 3, "Unknown key of [run] 'seed'. Did you mean seeds"),
    "force": (SHORT + "force = true\n", 3, "Unknown key of [run] 'force'."),
    "grid key": (SHORT + "[grid] # all\ngama = [0.1]\n", 4, "Unknown key of [grid] 'gama'. Did you mean gamma"),
    "attack in the grid": (SHORT + "[grid]\nattack = ['april']\n", 4, "Unknown key of [grid] 'attack'."),
    "case key": (SHORT + "[[case]]\nlabel = 'x'\n[[case]]\nlable = 'y'\n", 6, "Unknown key of [case] 'lable'. Did you"),
    "table key": (SHORT + "[table]\ncolums = []\n", 4, "Unknown key of [table] 'colums'. Did you mean columns"),
    "figure key": (SHORT + "[[figure]]\nkind='sheet'\n[[figure]]\nknd = ''\n", 6, "Unknown key of [figure] 'knd'. Did"),
    "paper key": (SHORT + "[paper]\nfiel = 'x'\n", 4, "Unknown key of [paper] 'fiel'. Did you mean file?"),
    # types
    "title": ("title = 3\n" + SHORT, 1, "title must be a text. Found 3."),
    "title is a table": (SHORT + "[title]\nx = 1\n", 3, "title must be a text. Found {'x': 1}."),
    "run": ("\nrun = 3\n", 2, "run must be a table. Found 3."),
    "runs": ("\n[[run]]\nmodel = 'vit_ti'\n", 2, "run must be a table. Found ["),
    "grid": (SHORT + "\n[[grid]]\n", 4, "grid must be a table. Found ["),
    "case": (SHORT + "[case]\nmodel = 'vit_ti'\n", 3, "cases are written as [[case]]."),
    "no case": ("case = []\n" + SHORT, 1, "cases are written as [[case]]."),
    "case is a number": ("case = [1]\n" + SHORT, 1, "cases are written as [[case]]."),
    "figure": (SHORT + "[figure]\nkind = 'sheet'\n", 3, "figures are written as [[figure]]."),
    "figure is a text": ("figure = ['sheet']\n" + SHORT, 1, "figures are written as [[figure]]."),
    "limit": (SHORT + "limit = '4'\n", 3, "limit must be a whole number. Found '4'."),
    "limit is true": (SHORT + "limit = true\n", 3, "limit must be a whole number. Found True."),
    "eight_bit": (SHORT + "eight_bit = 1\n", 3, "eight_bit must be true or false. Found 1."),
    "gamma": (SHORT + "gamma = '0.1'\n", 3, "gamma must be a number. Found '0.1'."),
    "gamma in the grid": (SHORT + "[grid]\ngamma = [0.1, '0.2']\n", 4, "gamma must be a number. Found '0.2'."),
    "grid value": (SHORT + "[grid]\ngamma = 0.1\n", 4, "gamma must be a list of the values to try. Found 0.1."),
    "empty grid": (SHORT + "[grid]\ngamma = []\n", 4, "gamma must be a list of the values to try. Found []."),
    "weights": (SHORT + "weights = 3\n", 3, "weights must be a text. Found 3."),
    "model": ("[run]\nmodel = ['vit_ti', 'vit_s']\n", 2, "model must be the name of one victim. Found ['vit_ti', 'v"),
    "no model": ("\n[run]\ngamma = 0.1\n", 2, "model must be the name of one victim. Found None."),
    "setting's type": (SHORT + "setting = ['a', 'c']\n", 3, "setting must be a, b or c. Found ['a', 'c']."),
    "attack": (SHORT + "attack = 3\n", 3, "attack must be a list of texts. Found 3."),
    "attacks": (SHORT + "attack = ['april', 3]\n", 3, "attack must be a list of texts. Found ['april', 3]."),
    "metrics": (SHORT + "metrics = 3\n", 3, "metrics must be a list of texts. Found 3."),
    "metric": (SHORT + "metrics = [['psnr']]\n", 3, "metrics must be a list of texts. Found [['psnr']]."),
    "images": (SHORT + "images = [1]\n", 3, "images must be a list of texts. Found [1]."),
    "seeds": (SHORT + "seeds = 3\n", 3, "seeds must be a list of whole numbers. Found 3."),
    "no seeds": (SHORT + "[[case]]\nseeds = []\n", 4, "seeds must be a list of whole numbers. Found []."),
    "seeds are true": (SHORT + "seeds = [true]\n", 3, "seeds must be a list of whole numbers. Found [True]."),
    "draws": (SHORT + "draws = 0\n", 3, "draws must be a positive whole number. Found 0."),
    "label": (SHORT + "[[case]]\nlabel = 3\n", 4, "label must be a text. Found 3."),
    "columns": (SHORT + "[table]\ncolumns = 'psnr'\n", 4, "columns must be a list of metrics. Found 'psnr'."),
    "decimals": (SHORT + "[table]\ndecimals = { psnr = -1 }\n", 4, "decimals must be a table of METRIC = 0 … 12."),
    "bold": (SHORT + "[table]\nbold = 'yes'\n", 4, "bold must be true or false. Found 'yes'."),
    "interval": (SHORT + "[table]\ninterval = 95\n", 4, "interval must be a number in (0, 1). Found 95."),
    "conditions": (SHORT + "[paper]\nconditions = 3\n", 4, "conditions must be a table of texts. Found 3."),
    "condition": (SHORT + "[paper.conditions]\nimages = 3\n", 3, "conditions must be a table of texts. Found {"),
    "figure's name": (SHORT + "[[figure]]\nkind = 'sheet'\nname = 3\n", 5, "name must be a text. Found 3."),
    # values that there are not
    "column": (SHORT + "[table]\ncolumns = ['psrn']\n", 4, "Unknown metric 'psrn'. Did you mean psnr?"),
    "decimal": (SHORT + "[table]\ndecimals = { sim = 1 }\n", 4, "Unknown metric 'sim'. Did you mean ssim"),
    "geometry": (SHORT + "[table]\ngeometry = 'orcale'\n", 4, "geometry must be in_place or oracle. Found 'orcale'."),
    "paper_attack": (SHORT + "[table]\npaper_attack = 'aprl'\n", 4, "Unknown attack 'aprl'. Did you mean april?"),
    "paper_attacks": (SHORT + "[table]\npaper_attack = ['april']\n", 4, "paper_attack must be an attack"),
    "kind": (SHORT + "[[figure]]\nkind = 'curv'\n", 4, "Unknown figure 'curv'. Did you mean curve?"),
    "kinds": (SHORT + "[[figure]]\nkind = ['curve']\n", 4, "Unknown figure '['curve']'."),
    "no kind": (SHORT + "[[figure]]\nname = 'x'\n", 3, "Unknown figure 'None'."),
    "x": (
        SHORT + "[[figure]]\nkind = 'curve'\nx = 'gama'\n[grid]\ngamma=[0.1]",
        5,
        "Unknown x 'gama'. Did you mean gam",
    ),
    "y": (SHORT + "[[figure]]\nkind = 'claim'\ny = 'pnsr'\n", 5, "Unknown y 'pnsr'. Did you mean psnr"),
    "no x": (SHORT + "[[figure]]\nkind = 'curve'\n", 3, "a curve needs x, an option that its cases differ in."),
    "published": (SHORT + "[[case]]\npublished = { psrn = 3 }\n", 4, "published holds figures by metric, or names a"),
    "attack's name": (SHORT + "attack = ['aprl']\n", 3, "Unknown attack 'aprl'. Did you mean april?"),
    "attack of a case": (SHORT + "[[case]]\n[[case]]\nlabel='x'\nattack = 'aprl'\n", 6, "Unknown attack 'aprl'. Did"),
    "attack of all cases": (SHORT + "attack = 'aprl'\n[[case]]\n", 3, "Unknown attack 'aprl'. Did you mean april?"),
    "setting": (SHORT + "[grid]\nsetting = ['a', 'd']\n", 4, "Unknown setting 'd'. Choose from: a, b, c."),
    "metric's name": (SHORT + "metrics = ['psnr', 'sim']\n", 3, "Unknown metric 'sim'. Did you mean ssim"),
    "defense": (SHORT + "[[case]]\ndefense = 'bluhr'\n", 4, "Unknown defense 'bluhr'. Did you mean blur?"),
    "defenses": (SHORT + "defense = 'blur+mpj'\n", 3, "Unknown defense 'mpj'. Did you mean mjp?"),
    "block": (SHORT + "block = 'stok'\n", 3, "Unknown block 'stok'. Did you mean stock"),
    "release": (SHORT + "release = 'feature'\n", 3, "Unknown release 'feature'. Did you mean features?"),
    "gamma's range": (SHORT + "gamma = 1.5\n", 3, "gamma (γ) must be in [0, 1]. Found 1.5."),
    "gamma's range in the grid": (SHORT + "[grid]\ngamma = [0.5, -1]\n", 4, "gamma (γ) must be in [0, 1]. Found -1"),
    "gamma is nan": (SHORT + "gamma = nan\n", 3, "gamma (γ) must be in [0, 1]. Found nan."),
    "masked_pe": (SHORT + "masked_pe = 'non'\n", 3, "Unknown masked_pe 'non'. Did you mean none"),
    "seed's range": (SHORT + "seeds = [0, -1]\n", 3, "seed must be in [0, 2^63 − 1]. Found -1."),
    "client_batch": (SHORT + "client_batch = 0\n", 3, "client_batch must be a positive number. Found 0."),
    "no attack": (SHORT + "attack = []\n", 3, "At least one of attacks is needed. Found none."),
    "option": (SHORT + "set = ['sigm=1']\n", 3, "Unknown option 'sigm'."),
    # cases that cannot be
    "april on features": (
        *(SHORT + "release = 'features'\nblock = 'april'\n", 4),
        "Features leave the client before any block. Found --block april: leave it out.",
    ),
    "feature defense on gradients": (
        *(SHORT + "[[case]]\nlabel = 'x'\nrelease = 'gradients'\ndefense = 'row-permutation'\n", 5),
        "Defense 'row-permutation' acts on features. Found --release gradients: use features.",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(refused: Callable[..., Any], name: str) -> None:
    text, line, message = MISTAKES[name]
    found = refused(text)
    assert found[1].startswith(message)
    assert found[0] == line


def test_no_toml(parse: Callable[..., Experiment], tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"mine\.toml is no TOML: .*\(at line 2, column 9\)\.$"):
        parse("[run]\nmodel = vit_ti\n")
    with pytest.raises(PrivlabError, match=r"^Cannot read the experiment '.*none\.toml': No such file or directory\.$"):
        read_experiment(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(PrivlabError, match=r"^Cannot read the experiment '.*bytes\.toml': "):
        read_experiment(tmp_path / "bytes.toml")


@given(text=st.text(max_size=60), table=st.sampled_from(["run", "grid", "case", "table", "figure", "paper"]))
def test_no_text_breaks_the_parser(tmp_path_factory: pytest.TempPathFactory, text: str, table: str) -> None:
    """Whatever stands in the file: it is an experiment, or refused in one line."""
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(f"{SHORT}[{table}]\n{text}\n", "utf-8", "replace")
    try:
        assert read_experiment(path).cases
    except PrivlabError as error:
        assert str(error)  # noqa: PT017


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-2, 3), st.floats(), st.sampled_from(["", "psnr", "a", "vit_ti", "april"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("xy"), inner, max_size=2)),
    max_leaves=4,
)
KEYS = {
    "run": "model setting attack metrics images public set seeds draws gamma limit weights eight_bit defense release",
    "grid": "model setting gamma limit img_size defense",
    "case": "label group published attack metrics seeds gamma",
    "table": "columns decimals bold interval geometry paper_attack",
    "figure": "kind name x y",
    "paper": "file conditions",
}


@given(st.data())
def test_no_value_breaks_the_parser(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A value of any type, of any key, is taken or refused in one line that names the file."""
    table = data.draw(st.sampled_from(sorted(KEYS)))
    key = data.draw(st.sampled_from(KEYS[table].split()))
    value = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "value.toml"
    head = SHORT if table != "run" else "[run]\nmodel = 'vit_ti'\n" * (key != "model") or "[run]\n"
    header = {"run": "", "case": "[[case]]\n", "figure": "[[figure]]\n"}.get(table, f"[{table}]\n")
    path.write_text(f"{head}{header}{key} = {toml(value)}\n")
    try:
        read_experiment(path)
    except PrivlabError as error:
        assert "value.toml, line " in str(error)  # noqa: PT017


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool | float) else repr(value)


# The experiments that come with privlab


@pytest.mark.parametrize("name", experiment_names())
def test_ours(name: str) -> None:
    found = read_experiment(find_experiment(name))
    assert found.cases
    for case in found.cases:
        assert set(case.published) <= set(KNOWN)
        for run in case.runs:
            assert run.metrics == tuple(column for column in found.layout.columns if column in METRICS)


def test_table_5_of_mjp() -> None:
    found = read_experiment(find_experiment("mjp_table5"))
    assert [case.group for case in found.cases] == ["(1)"] * 4 + ["(2)"] * 4 + ["(3)", "(4)"]
    assert found.cases[0].published["psnr"] == 19.27
    assert all(set(case.published) == {"correct", *found.layout.columns} for case in found.cases)


def test_name_of_no_experiment() -> None:
    with pytest.raises(PrivlabError, match=r"^Unknown experiment 'mjp_tabel5'. Did you mean mjp_table5"):
        find_experiment("mjp_tabel5")


def test_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_experiment("quick") != Path("quick")
    Path("quick").write_text(SHORT)
    assert find_experiment("quick") == Path("quick")

"""Whatever is wrong with an experiment is refused by file, line and nearest name, before anything is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privlab.base import PrivlabError
from privlab.grids import Experiment, read_experiment
from privlab.grids.fill import joined_warnings

SHORT = '[run]\nmodel = "vit_ti"\n'

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
    "limit 0": (SHORT + "limit = 0\n", 3, "limit must be a positive integer. Found 0."),
    "every 0": (SHORT + "limit = 3\nevery = 0\n", 4, "every must be a positive integer. Found 0."),
    "offset": (SHORT + "offset = -1\n", 3, "offset must be an integer from 0 on. Found -1."),
    "offsets": (SHORT + "[grid]\noffset = [0, -1]\n", 4, "offset must be an integer from 0 on. Found -1."),
    "manifest": (SHORT + "manifest = 3\n", 3, "manifest must be a text. Found 3."),
    "manifest and limit": (
        SHORT + "limit = 3\nmanifest = 'm.csv'\n",
        3,
        "A manifest names its photographs one by one.",
    ),
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
    "column": (SHORT + "[table]\ncolumns = ['psrn']\n", 4, "Unknown metric 'psrn'. Did you mean psnr"),
    "decimal": (SHORT + "[table]\ndecimals = { sim = 1 }\n", 4, "Unknown metric 'sim'. Did you mean ssim"),
    "geometry": (
        SHORT + "[table]\ngeometry = 'orcale'\n",
        4,
        "geometry must be in_place, oracle or reassembled. Found 'orcale'.",
    ),
    "paper_attack": (SHORT + "[table]\npaper_attack = 'aprl'\n", 4, "Unknown attack 'aprl'. Did you mean april"),
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
    "attack's name": (SHORT + "attack = ['aprl']\n", 3, "Unknown attack 'aprl'. Did you mean april"),
    "attack of a case": (SHORT + "[[case]]\n[[case]]\nlabel='x'\nattack = 'aprl'\n", 6, "Unknown attack 'aprl'. Did"),
    "attack of all cases": (SHORT + "attack = 'aprl'\n[[case]]\n", 3, "Unknown attack 'aprl'. Did you mean april"),
    "setting": (SHORT + "[grid]\nsetting = ['a', 'd']\n", 4, "Unknown setting 'd'. Choose from: a, b, c."),
    "metric's name": (SHORT + "metrics = ['psnr', 'sim']\n", 3, "Unknown metric 'sim'. Did you mean ssim"),
    "defense": (SHORT + "[[case]]\ndefense = 'bluhr'\n", 4, "Unknown defense 'bluhr'. Did you mean blur?"),
    "defenses": (SHORT + "defense = 'blur+mpj'\n", 3, "Unknown defense 'mpj'. Did you mean mjp?"),
    "block": (SHORT + "block = 'stok'\n", 3, "Unknown block 'stok'. Did you mean stock"),
    "release": (SHORT + "release = 'feature'\n", 3, "Unknown release 'feature'. Did you mean features"),
    "gamma's range": (SHORT + "gamma = 1.5\n", 3, "gamma (γ) must be in [0, 1]. Found 1.5."),
    "gamma in setting a": (
        SHORT + "[grid]\ngamma = [0.1, 0.5]\n",
        3,
        "gamma applies only to defenses that shuffle patches, in settings b and c. Found gamma=0.1, setting a",
    ),
    "gamma's range in the grid": (SHORT + "[grid]\ngamma = [0.5, -1]\n", 4, "gamma (γ) must be in [0, 1]. Found -1"),
    "gamma is nan": (SHORT + "gamma = nan\n", 3, "gamma (γ) must be in [0, 1]. Found nan."),
    "masked_pe": (SHORT + "masked_pe = 'non'\n", 3, "Unknown masked_pe of mjp 'non'. Did you mean none"),
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
    with pytest.raises(PrivlabError, match=r"mine\.toml.*TOML.*\(at.*2.*9\)"):
        parse("[run]\nmodel = vit_ti\n")
    with pytest.raises(PrivlabError, match=r"'.*none\.toml'"):
        read_experiment(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(PrivlabError, match=r"^Cannot read the experiment '.*bytes\.toml': "):
        read_experiment(tmp_path / "bytes.toml")


@pytest.mark.slow
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


def test_a_case_may_have_seeds_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "seeds.toml"
    path.write_text(f"{SHORT}[[case]]\nseeds = [0, 3]\n")
    (case,) = read_experiment(path).cases
    assert [run.seed for run in case.runs] == [0, 3]


def test_a_warning_that_several_attacks_give_is_one_line() -> None:
    text = "some position embeddings received no gradient"
    messages = [f"april: {text}", "images: 2 were left out", f"mjp-full: {text}", f"april: {text}", "april: slow"]
    assert joined_warnings(messages, ["april", "mjp-full"]) == [
        f"april, mjp-full: {text}",
        "images: 2 were left out",
        "april: slow",
    ]

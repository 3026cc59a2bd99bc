"""The stored pictures of the pages: each strip has its caption, and each figure of a study its table."""

import json

import pytest
from PIL import Image

from privlab.experiments.figures.tables import FIGURES, NOTES, PAGES, Drawn, _table, _values
from privlab.inventory.explain import known

FOLDER = NOTES / "strips"


def test_each_strip_has_a_caption_and_three_panels() -> None:
    captions = json.loads((FOLDER / "captions.json").read_text("utf-8"))
    shown = {name.replace(":", "-") for name, caption in captions.items() if "missing" not in caption}
    assert {path.stem for path in FOLDER.glob("*.png")} == shown
    pages = {name.partition("+")[0] for name in captions}
    assert pages <= {name for name, kind in known().items() if kind in ("attack", "defense")}
    for name in shown:
        with Image.open(FOLDER / f"{name}.png") as strip:
            assert strip.size == (102, 32)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000


@pytest.mark.parametrize("drawn", FIGURES, ids=lambda drawn: drawn.page)
def test_each_figure_of_a_table_is_stored_and_shown(drawn: Drawn) -> None:
    head, *rows = _table(drawn)
    assert any(_values(row[head.index(column)])[0] for row in rows for column in drawn.columns)
    assert (NOTES / f"study_{drawn.page}.svg").is_file()
    assert f"notes/study_{drawn.page}.svg" in (PAGES / f"{drawn.page}.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("cell", "values", "ends"),
    [
        ("23.5 [21.9, 25.1]", [23.5], [21.9, 25.1]),
        ("31.2 (17.2, 52.7)", [31.2], [17.2, 52.7]),
        ("149.2 (131.3 to 160.8), 4 of 4", [149.2], [131.3, 160.8]),
        ("partial, 105.0 (3 of 4 exact)", [105.0], []),
        ("133.8 on average of 12", [133.8], []),
        ("37,967", [37967.0], []),
        ("8.2e-7", [8.2e-7], []),
        ("13.4 to 13.5", [13.4, 13.5], []),
        ("none: no position embedding", [], []),
    ],
)
def test_numbers_of_a_cell(cell: str, values: list[float], ends: list[float]) -> None:
    assert _values(cell) == (values, ends)

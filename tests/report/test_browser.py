"""The page in a real Chromium: it sorts, filters and slides by mouse and by keyboard, in dark and light, on a phone."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from privlab.evaluation import CONTROLS
from privlab.report.page import write_page
from privlab.report.tables import Results

Maker = Callable[..., Results]
Open = Callable[..., Any]

COMMAND = "privlab table mjp_table5 --out runs/t5"
ROWS = "[...document.querySelectorAll('#rows tbody tr')]"
CHANGE = """(id, value) => {
  const one = document.getElementById(id);
  one.value = value;
  for (const kind of ["input", "change"]) one.dispatchEvent(new Event(kind));
}"""
CONTRAST = """(selector) => {
  const levels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => {
    const level = [r, g, b][i] / 255;
    return sum + part * (level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4);
  }, 0);
  const one = document.querySelector(selector);
  let behind = one;
  while (levels(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const colours = [getComputedStyle(one).color, getComputedStyle(behind).backgroundColor];
  const pair = colours.map((text) => light(levels(text)));
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""


@pytest.fixture(scope="module")
def file(page_results: Maker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page of 14 images with pictures of 144 pixels."""
    return write_page(page_results(14, side=144), tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def tab(file: Path, open_page: Open) -> Any:
    """Return a tab that all tests share which put back what they change."""
    return open_page(file)


def change(tab: Any, control: str, value: str) -> None:
    tab.run(f"({CHANGE})('{control}', '{value}')")
    tab.settle()


def column(tab: Any, key: str) -> list[str]:
    """Return what a column of the table shows, without the intervals."""
    at = f"[...document.querySelectorAll('#rows thead th')].findIndex((head) => head.dataset.key === '{key}')"
    return tab.run(
        f"(() => {{ const at = {at}; return {ROWS}.map((row) => row.cells[at].firstChild.textContent); }})()"
    )


def value(shown: str) -> float:
    return float(shown.replace("∞", "inf").replace("−", "-"))


# What it asks for, and how it looks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "look"), [("light", {}), ("dark", {"dark": True}), ("phone", {"width": 390, "height": 844})]
)
def test_looks(
    file: Path, open_page: Open, keep_screenshot: Callable[[str, bytes], None], name: str, look: Any
) -> None:
    tab = open_page(file, **look)
    assert tab.first_paint() < 2
    for part in ("verdict", "table", "images", "distribution", "specification", "reproduce"):
        tab.run(f"document.getElementById('{part}').scrollIntoView()")
        tab.settle()
        keep_screenshot(f"page-{name}-{part}", tab.screenshot())
        assert tab.run("document.scrollingElement.scrollWidth") == tab.run("innerWidth")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(22, 24, 27)" if name == "dark" else "rgb(253, 252, 250)"
    )
    for selector in (
        "h1",
        ".flags dd",
        ".flags h3",
        "td.claim",
        "td.worst",
        ".spread",
        ".by",
        "small",
        "nav a",
        "footer",
    ):
        assert tab.run(f"({CONTRAST})('{selector}')") >= 4.5, selector
    assert tab.complaints() == []
    assert tab.requests() == [file.as_uri()]


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390])
def test_nothing_sticks_out_on_a_phone(file: Path, open_page: Open, width: int) -> None:
    tab = open_page(file, width=width, height=700)
    change(tab, "t-level", "images")
    tab.run("document.getElementById('distribution').scrollIntoView()")
    tab.settle()
    outside = tab.run(
        "[...document.querySelectorAll('body *')]"
        ".filter((one) => !one.closest('.wide, nav, .away, .skip, pre, .verdict thead')"
        f" && one.getBoundingClientRect().right > {width} + 1).map((one) => one.outerHTML.slice(0, 99))"
    )
    assert outside == []
    assert tab.run("document.scrollingElement.scrollWidth") == width


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 760, 880, 1000, 1280])
def test_no_head_or_plot_of_the_verdict_is_cut_off(
    page_results: Maker, open_page: Open, tmp_path: Path, width: int
) -> None:
    """Means over 100 dB with their intervals, and attacks of long names behind them."""

    def long(records: pd.DataFrame) -> pd.DataFrame:
        names = {name: f"patch-gradient-{name}" for name in records.attack if name not in ("april", *CONTROLS)}
        return records.assign(attack=records.attack.replace(names), psnr=100 + records.psnr)

    tab = open_page(write_page(page_results(6, change=long), tmp_path / "page.html"), width=width)
    cut = "(one) => one.scrollWidth > one.clientWidth || [...one.querySelectorAll('.plot')].some(beyond(one))"
    beyond = "(one) => (plot) => plot.getBoundingClientRect().right > one.getBoundingClientRect().right + 1"
    shown = "[...document.querySelectorAll('.verdict:not([hidden])')]"
    assert tab.run(f"(() => {{ const beyond = {beyond}; return {shown}.map({cut}); }})()") == [False]


@pytest.mark.slow
def test_hostile_names_do_nothing(page_results: Maker, open_page: Open, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror='window.harm = 1'><script>window.harm = 2</script>"
    results = page_results(
        2, side=32, names=(evil, f"2{evil}"), title=evil, facts={"warnings": [evil], "command": evil}
    )
    tab = open_page(write_page(results, tmp_path / "page.html"))
    change(tab, "t-level", "images")
    assert set(column(tab, "image")) == {evil, f"2{evil}"}
    assert tab.run("document.querySelector('.tile .name').textContent.endsWith('</script>')")
    assert tab.run("window.harm ?? null") is None
    assert tab.complaints() == []


@pytest.mark.slow
def test_page_without_pictures_and_page_without_records(page_results: Maker, open_page: Open, tmp_path: Path) -> None:
    empty = page_results(change=lambda records: records.iloc[:0])
    failed = page_results(change=lambda records: records.assign(status="failed", reason="no memory"))
    for i, results in enumerate((page_results(), empty, failed)):
        tab = open_page(write_page(results, tmp_path / f"{i}.html"))
        tab.run("document.querySelector('section:last-of-type').scrollIntoView()")
        tab.settle()
        assert tab.complaints() == []
        assert tab.run("document.querySelectorAll('.tile img').length") == 0


# The verdict and the table


def test_verdict_shows_one_metric(tab: Any) -> None:
    tables = "[...document.querySelectorAll('.verdict')]"
    seen = f"{tables}.filter((one) => one.offsetHeight > 0).map((one) => one.dataset.metric)"
    assert tab.run(seen) == ["psnr"]
    change(tab, "verdict-metric", "ssim")
    assert tab.run(seen) == ["ssim"]


def test_sorting_by_mouse_and_keyboard(tab: Any) -> None:
    state = "document.querySelector('#rows th[data-key=psnr]').ariaSort"
    assert tab.run(state) == "none"
    tab.click("#rows th[data-key=psnr] button")
    assert tab.run(state) == "ascending"
    scores = column(tab, "psnr")
    assert scores[-3:] == ["∞", "∞", "n/a"]  # what was not measured stands last, however it is sorted
    assert [value(one) for one in scores[:-1]] == sorted(value(one) for one in scores[:-1])
    tab.run("document.querySelector('#rows th[data-key=psnr] button').focus()")
    tab.press("Enter")
    assert tab.run(state) == "descending"
    down = column(tab, "psnr")
    assert down[:2] == ["∞", "∞"]
    assert down[-1] == "n/a"
    assert sorted(down) == sorted(scores)
    tab.run("document.querySelector('#rows th[data-key=attack] button').focus()")
    tab.press(" ")
    assert column(tab, "attack") == sorted(column(tab, "attack"))
    assert tab.run("document.querySelectorAll('#rows th[aria-sort]:not([aria-sort=none])').length") == 1


def test_filters(tab: Any) -> None:
    everything = len(column(tab, "case"))
    assert everything == 3 * 5 + 1
    change(tab, "t-case", "1")
    assert set(column(tab, "case")) == {"DeiT-S"}
    change(tab, "t-attack", "april")
    assert column(tab, "attack") == ["april"]
    change(tab, "t-case", "")
    assert len(column(tab, "case")) == 3
    change(tab, "t-setting", "c")
    assert column(tab, "case") == ["DeiT-S+MJP"]
    change(tab, "t-setting", "")
    change(tab, "t-attack", "")
    change(tab, "t-geometry", "oracle")
    assert set(column(tab, "attack")) == {"april", "patch-gradient", "worst case"}
    change(tab, "t-geometry", "in_place")
    tab.run("document.getElementById('t-text').focus()")
    tab.write("VIT control")
    assert column(tab, "attack") == ["control:mean", "control:shuffled"]
    tab.write(" nonsense")
    assert tab.run("document.getElementById('t-status').textContent") == "no row fits"
    change(tab, "t-text", "")
    assert len(column(tab, "case")) == everything


def test_rows_of_images_come_in_pages(tab: Any) -> None:
    change(tab, "t-level", "images")
    status = "document.getElementById('t-status').textContent"
    assert tab.run(status) == "1 to 100 of 210 rows"
    tab.click("#t-next")
    tab.click("#t-next")
    assert tab.run(status) == "201 to 210 of 210 rows"
    assert tab.run("document.getElementById('t-next').disabled")
    change(tab, "t-text", "image-007 patch")
    assert tab.run(status) == "1 to 3 of 3 rows"
    assert set(column(tab, "image")) == {"image-007.png"}
    tab.click("#rows tbody button.link")
    assert tab.run("document.getElementById('v-name').textContent") == "image-007.png"
    assert tab.run("document.activeElement.id") == "v-cut"
    change(tab, "t-text", "")
    change(tab, "t-level", "means")


# The images


def test_slider_by_mouse_and_keyboard(tab: Any) -> None:
    cut = "Number(document.getElementById('v-cut').value)"
    tab.drag("#v-cut", 0.5, 0.8)
    assert tab.run(cut) == pytest.approx(80, abs=1)
    tab.drag("#v-cut", 0.8, 0.2)
    assert tab.run(cut) == pytest.approx(20, abs=1)
    tab.run("document.getElementById('v-cut').focus()")
    before = tab.run(cut)
    tab.press("ArrowRight", "ArrowRight")
    assert tab.run(cut) == before + 2
    tab.press("Home")
    assert tab.run(cut) == 0
    tab.press("End", "ArrowLeft")
    assert tab.run(cut) == 99
    assert tab.run("document.getElementById('v-cut').ariaValueText") == "99 % private image"


def test_slider_uncovers_the_private_image(tab: Any) -> None:
    """Left of the divider is the private image, which is smooth, right of it the reconstruction, which is noisy."""
    change(tab, "i-case", "2")
    change(tab, "i-attack", "april")
    tab.run("document.querySelector('.compare').scrollIntoView({ block: 'center' })")
    change(tab, "v-cut", "50")
    box = tab.run(
        "(({ left, top, width }) => [left, top, width])(document.querySelector('.compare').getBoundingClientRect())"
    )
    left, top, side = map(round, box)
    with Image.open(io.BytesIO(tab.screenshot())) as seen:
        pixels = np.asarray(seen.convert("L"), dtype=float)[top + 20 : top + side // 3, left + 4 : left + side - 4]
    steps = np.abs(np.diff(pixels, axis=0)).mean(axis=0)
    half = len(steps) // 2
    assert steps[: half - 10].mean() < 2
    assert steps[half + 10 :].mean() > 5


def test_gallery_by_keyboard(tab: Any) -> None:
    change(tab, "i-case", "0")
    change(tab, "i-attack", "worst case")
    name = "document.getElementById('v-name').textContent"
    names = tab.run("[...document.querySelectorAll('.tile .name')].map((one) => one.textContent)")
    assert sorted(names) == [f"image-{i:03d}.png" for i in range(14)]
    assert names[0] == "image-000.png"  # exact: the leakiest
    assert tab.run("document.querySelectorAll('.tile[tabindex=\"0\"]').length") == 1
    tab.click(".tile")
    assert tab.run(name) == names[0]
    tab.press("ArrowRight")
    assert tab.run(name) == names[1]
    tab.press("ArrowDown", "ArrowUp", "End")
    assert tab.run(name) == names[-1]
    assert tab.run("document.activeElement.querySelector('.name').textContent") == names[-1]
    tab.press("Home")
    assert tab.run(name) == names[0]
    assert tab.run("document.querySelectorAll('.tile[aria-selected=true]').length") == 1


def test_gallery_is_ordered_by_the_score(tab: Any) -> None:
    change(tab, "i-case", "1")
    change(tab, "i-attack", "april")
    scores = "[...document.querySelectorAll('.tile .score b')].map((one) => one.textContent)"
    leaky = [value(one) for one in tab.run(scores)]
    assert leaky == sorted(leaky, reverse=True)
    change(tab, "i-order", "safe")
    assert [value(one) for one in tab.run(scores)] == leaky[::-1]
    change(tab, "i-metric", "mse")  # where a lower value leaks
    safe = [value(one) for one in tab.run(scores)]
    assert safe == sorted(safe, reverse=True)
    change(tab, "i-metric", "psnr")
    change(tab, "i-order", "leaky")
    change(tab, "i-text", "004")
    assert tab.run("document.getElementById('i-status').textContent") == "1 of 14 images"
    change(tab, "i-text", "")


@pytest.mark.slow
def test_tiles_are_filled_when_they_come_into_sight(page_results: Maker, open_page: Open, tmp_path: Path) -> None:
    tab = open_page(write_page(page_results(120, side=24), tmp_path / "page.html"))
    tab.run("document.getElementById('gallery').scrollIntoView()")
    tab.settle()
    filled = tab.run("document.querySelectorAll('.tile:has(img)').length")
    assert 0 < filled < 60
    tab.run("document.getElementById('gallery').scrollTop = 1e6")
    tab.settle()
    tab.settle()
    assert tab.run("document.querySelector('.tile:last-child img').naturalWidth") == 24
    assert tab.run("document.querySelectorAll('.tile:has(img)').length") < 120
    assert tab.run(
        "document.querySelector('.compare').classList.contains('pixels')"
    )  # small pixels are not smoothed away


# The distribution, and what is copied


def test_distribution(tab: Any) -> None:
    tab.run("document.getElementById('distribution').scrollIntoView()")
    tab.settle()
    tab.settle()
    lines = "document.querySelectorAll('#d-plot g:has(title)').length"
    assert tab.run(lines) == 3 * 5
    dots = "[...document.querySelectorAll('#d-plot .dots')].map((one) => one.getAttribute('d').split('M').length - 1)"
    assert tab.run(dots) == [14] * 15
    assert (
        tab.run("[...document.querySelectorAll('#d-plot text')].filter((one) => one.textContent === '×1').length") == 2
    )
    places = tab.run("[...document.querySelectorAll('#d-plot .box')].map((one) => one.getAttribute('d'))")
    assert not any(word in place for place in places for word in ("NaN", "Infinity", "undefined"))
    change(tab, "d-metric", "lpips_alex")
    assert tab.run(lines) == 0
    assert (
        tab.run("[...document.querySelectorAll('#d-plot text')].filter((one) => one.textContent === 'n/a').length")
        == 15
    )
    change(tab, "d-metric", "mse")
    change(tab, "d-case", "2")
    assert tab.run(lines) == 5


@pytest.mark.parametrize("allowed", [True, False])
def test_command_can_be_copied(tab: Any, allowed: bool) -> None:
    """Where the clipboard is not to be had, the command is selected."""
    kept = "(text) => { window.kept = text; }" if allowed else "() => Promise.reject(new Error('not allowed'))"
    tab.run(f"Object.defineProperty(navigator, 'clipboard', {{ configurable: true, value: {{ writeText: {kept} }} }})")
    tab.click("#copy")
    assert tab.run("document.getElementById('copied').textContent").startswith("copied" if allowed else "selected")
    assert tab.run("window.kept" if allowed else "getSelection().toString()") == COMMAND


def test_nothing_was_complained_of(tab: Any, file: Path) -> None:
    """After all that was clicked above."""
    assert tab.complaints() == []
    assert tab.requests() == [file.as_uri()]


@pytest.mark.slow
def test_without_a_private_image_the_page_shows_reconstructions_alone(page_results: Maker, open_page: Open) -> None:
    results = page_results(2, side=64, change=lambda records: records.assign(psnr=np.nan, mse=np.nan, ssim=np.nan))
    for file in (results.path / "pictures").rglob("*-private.png"):
        file.unlink()
    results = replace(results, facts={**results.facts, "unscored": "No private image is known."})
    tab = open_page(write_page(results, results.path / "page.html"))
    tab.run("document.getElementById('images').scrollIntoView()")
    tab.settle()
    texts = "[...document.querySelectorAll('{}')].map((one) => one.textContent)"
    assert tab.run(texts.format("#i-attack option")) == ["april", "patch-gradient", "what the client fed"]
    assert tab.run(texts.format(".tile .pair span:first-child")) == ["not known"] * 2
    assert tab.run("document.querySelectorAll('.tile .pair span:last-child img').length") == 2
    assert tab.run(texts.format("#v-note")) == ["No private image is known."]
    assert tab.run("[...document.querySelectorAll('#compare > *')].filter((one) => one.checkVisibility()).length") == 2
    assert tab.run("getComputedStyle(document.getElementById('compare')).getPropertyValue('--cut')") == "0%"

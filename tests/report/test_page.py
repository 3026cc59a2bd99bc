"""The page as a file: what it says, that nothing in it asks a network, and that no name of anything can act in it."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from privlab.base import PrivlabError
from privlab.grids import Layout
from privlab.report.page import pictures as page_pictures
from privlab.report.page import write_page
from privlab.report.tables import CaseFacts, Results

Maker = Callable[..., Results]
HOSTILE = (
    "<script>alert(1)</script>.png",
    "</script><img src=x onerror=alert(2)>.png",
    "\"'><svg onload=alert(3)>{{ 7 * 7 }}&amp;.png",
    "https://example.org/a b\u2028\u202e.png",
)
VOID = {"meta", "link", "img", "input", "br", "path", "circle"}


class _Read(HTMLParser):
    """The elements of a page, the text in sight, and its scripts; a tag that is never closed is refused."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append((self.elements[-1][1], data))
        elif self.open[-1:] == ["style"]:
            self.styles.append(data)
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    @property
    def data(self) -> dict[str, Any]:
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("id") == "data")

    @property
    def albums(self) -> dict[int, dict[str, Any]]:
        return {
            int(name.removeprefix("album-")): json.loads(text)
            for attributes, text in self.scripts
            if (name := attributes.get("id") or "").startswith("album-")
        }


@pytest.fixture
def page(tmp_path: Path) -> Callable[[Results], _Read]:
    def write(results: Results) -> _Read:
        return _Read(write_page(results, tmp_path / "page.html").read_text("utf-8"))

    return write


# What it is made of


def test_structure(page: Callable[[Results], _Read], page_results: Maker) -> None:
    read = page(page_results(side=32))
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    sections = [attributes["id"] for tag, attributes in read.elements if tag == "section"]
    assert sections == ["verdict", "table", "images", "distribution", "specification", "reproduce"]
    wanted = ("aria-labelledby", "aria-describedby")
    named = [value for _, attributes in read.elements for key, value in attributes.items() if key in wanted]
    links = [(attributes.get("href") or "")[1:] for tag, attributes in read.elements if tag == "a"]
    assert set(named) | set(links) <= set(ids)
    assert ("html", {"lang": "en"}) in read.elements
    assert [tag for tag, _ in read.elements].count("h1") == 1


def test_nothing_is_asked_of_a_network(page: Callable[[Results], _Read], page_results: Maker) -> None:
    read = page(page_results(side=32))
    addresses = [
        value or ""
        for _, attributes in read.elements
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "action", "poster", "data", "xlink:href", "style", "background")
    ]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    code = [text for attributes, text in read.scripts if attributes.get("type") != "application/json"]
    assert len(code) == 1
    for text in (*code, *read.styles):
        assert not re.search(
            r"https?:|//\w|\burl\(|@import|fetch\(|XMLHttp|WebSocket|EventSource|import\(|sendBeacon", text
        )
    policy = next(a["content"] for tag, a in read.elements if tag == "meta" and "Content-Security-Policy" in a.values())
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    for text in (*code, *read.styles):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


@pytest.mark.slow
def test_same_results_give_the_same_page(page_results: Maker, tmp_path: Path) -> None:
    results = page_results(side=32)
    pages = [write_page(results, tmp_path / name).read_bytes() for name in ("a.html", "b.html")]
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_hostile_names_are_only_text(page: Callable[[Results], _Read], page_results: Maker) -> None:
    plain, evil = page(page_results(4, side=32)), HOSTILE[1]
    case = CaseFacts(evil, evil, {"gamma": evil}, {"psnr": 19.0}, {evil: evil})
    results = page_results(
        4,
        side=32,
        names=HOSTILE,
        change=lambda records: records.assign(victim=evil, weights=evil, external=evil),
        **{"title": evil, "source": evil, "cases": (case,) * 3, "conditions": {evil: evil}},
        facts={"warnings": [evil], "command": evil, "versions": {evil: evil}, "status": evil},
    )
    read = page(results)
    assert tuple(name for name, _ in read.data["images"]) == HOSTILE
    tags = {tag for tag, _ in read.elements}
    assert tags == {tag for tag, _ in plain.elements}
    assert not [key for _, attributes in read.elements for key in attributes if key.startswith("on")]
    for tag in ("img", "script"):
        assert [name for name, _ in read.elements].count(tag) == [name for name, _ in plain.elements].count(tag) > 0
    assert evil in read.text


# What it says


def test_verdict(page: Callable[[Results], _Read], page_results: Maker) -> None:
    text = page(page_results()).text
    assert (
        "By PSNR, the worst case leaks more than the paper's attack, april, on 3 of 3 cases, beyond the intervals"
        in text
    )
    assert "1 of 3 cases is no better than an image that no attack made" in text
    beaten = r"april 8\.\d\d dB, patch-gradient 7\.\d\d dB do not beat control:mean 1\d\.\d\d dB"
    assert re.search(rf"No better than a control DeiT-S\+MJP: {beaten} Random weights deit_s \(every case\)", text)
    assert "Other conditions than the paper's weights: paper: trained / here: random" in text
    assert "Refused pe-assignment on DeiT-S+MJP: it needs released features" in text
    assert "Warnings of the run weights are random" in text
    assert "privlab table mjp_table5 --out runs/t5" in text
    assert "19.27" in text


def test_only_the_papers_attack(page: Callable[[Results], _Read], page_results: Maker) -> None:
    text = page(page_results(change=lambda records: records[records.attack != "patch-gradient"])).text
    assert "By PSNR, no attack leaks more than the paper's own, april." in text


@pytest.mark.slow
def test_infinite_and_unmeasured_scores(page: Callable[[Results], _Read], page_results: Maker) -> None:
    read = page(page_results())
    exact = next(s for s in read.data["sets"] if (s["case"], s["attack"]) == (0, "patch-gradient"))
    assert exact["values"]["psnr"][0] == "Infinity"
    assert exact["means"]["psnr"][0] == "Infinity"
    assert exact["means"]["lpips_alex"] == [None, None, None]
    assert exact["values"]["lpips_alex"] == [None] * 6
    verdicts = read.text.split("LPIPS alex ↓:")[1].split("published")[0]
    assert "n/a" in verdicts
    assert not re.search(r"\b0\.0+\b", verdicts)
    assert "∞" in read.text.split("PSNR ↑:")[1].split("SSIM ↑:")[0]
    assert not re.search(r"\b(nan|NaN|inf|None)\b", read.text)


def test_scores_are_averaged_over_draws_and_the_worst_is_not(
    page: Callable[[Results], _Read], page_results: Maker
) -> None:
    def twice(records: pd.DataFrame) -> pd.DataFrame:
        one = records.loc[(records.case == 0) & (records.image == "image-001.png")]
        return pd.concat([one.assign(psnr=10.0), one.assign(psnr=16.0, draw=1)], ignore_index=True)

    found = page(page_results(change=twice)).data["sets"]
    sets = {s["attack"]: s for s in found if (s["case"], s["geometry"]) == (0, "in_place")}
    assert sets["april"]["values"]["psnr"] == [13.0]
    assert sets["april"]["means"]["psnr"] == [13.0, None, None]
    assert sets["worst case"]["values"]["psnr"] == [16.0]
    assert sets["worst case"]["by"]["psnr"] == ["april"]


@pytest.mark.slow
def test_other_geometries_stand_in_the_table_alone(page: Callable[[Results], _Read], page_results: Maker) -> None:
    sets = page(page_results()).data["sets"]
    assert {s["geometry"] for s in sets if s["kind"] == "control"} == {"in_place"}
    assert {s["attack"] for s in sets if s["geometry"] == "oracle"} == {"worst case", "april", "patch-gradient"}
    turned = page(page_results(layout=Layout(("psnr",), geometry="oracle"))).data
    assert turned["geometry"] == turned["sets"][0]["geometry"] == "oracle"


@pytest.mark.slow
def test_failed_images_are_counted_and_named(page: Callable[[Results], _Read], page_results: Maker) -> None:
    def fail(records: pd.DataFrame) -> pd.DataFrame:
        wrong = (records.case == 1) & (records.image == "image-002.png")
        records.loc[wrong, ["status", "reason", "image_sha256"]] = ["failed", "truncated file", None]
        records.loc[wrong, ["psnr", "mse", "ssim"]] = np.nan
        return records

    read = page(page_results(change=fail))
    assert "Failed DeiT-S: 1 image, truncated file" in read.text
    april = next(s for s in read.data["sets"] if (s["case"], s["attack"], s["geometry"]) == (1, "april", "in_place"))
    assert april["n"] == 5
    assert [reason for _, reason in april["failed"]] == ["truncated file"]
    assert read.data["images"][april["failed"][0][0]] == ["image-002.png", ""]


def test_failed_records_alone(page: Callable[[Results], _Read], page_results: Maker) -> None:
    def fail(records: pd.DataFrame) -> pd.DataFrame:
        return records.assign(status="failed", reason="no memory", psnr=np.nan, mse=np.nan, ssim=np.nan)

    read = page(page_results(change=fail))
    assert "Nothing has been scored yet" in read.text
    assert "Failed ViT-S: 6 images, no memory" in read.text
    assert all(s["n"] == 0 for s in read.data["sets"])


def test_external_results_are_marked(page: Callable[[Results], _Read], page_results: Maker) -> None:
    def measured_elsewhere(records: pd.DataFrame) -> pd.DataFrame:
        records.loc[records.attack == "patch-gradient", "external"] = "Doe et al. 2024"
        return records

    read = page(page_results(change=measured_elsewhere))
    assert "external: Doe et al. 2024" in read.text
    assert "Measured elsewhere ViT-S, patch-gradient: Doe et al. 2024" in read.text
    assert {s["external"] for s in read.data["sets"] if s["attack"] == "patch-gradient"} == {"Doe et al. 2024"}


def test_figures_of_no_image_mark_no_worst_case(page: Callable[[Results], _Read], page_results: Maker) -> None:
    def told_without_images(records: pd.DataFrame) -> pd.DataFrame:
        theirs = records[records.attack == "patch-gradient"].iloc[:1]
        theirs = theirs.assign(attack="theirs", external="Doe et al. 2024", image=None, image_sha256=None)
        return pd.concat([records, theirs], ignore_index=True)

    read = page(page_results(change=told_without_images))
    assert "with external: " not in read.text
    assert {s["external"] for s in read.data["sets"] if s["kind"] == "worst"} == {None}
    assert {s["external"] for s in read.data["sets"] if s["attack"] == "theirs"} == {"Doe et al. 2024"}


def test_empty_records(page: Callable[[Results], _Read], page_results: Maker) -> None:
    read = page(page_results(change=lambda records: records.iloc[:0]))
    assert "Nothing has been scored yet: no attack on any case has left a number." in read.text
    assert "0 records" in read.text
    assert read.scripts == []


def test_results_without_a_flag(page: Callable[[Results], _Read], page_results: Maker) -> None:
    facts = {"command": ["privlab", "table", "a b.toml"]}
    given = page_results(20, change=lambda r: r[r.case == 0].assign(weights="given"), facts=facts, conditions={})
    results = replace(given, cases=given.cases[:1])
    read = page(results)
    assert "No red flag" in read.text
    assert "on the only case, beyond the intervals." in read.text
    assert "privlab table 'a b.toml'" in read.text


@pytest.mark.slow
def test_cases_of_one_label_go_by_their_group(page: Callable[[Results], _Read], page_results: Maker) -> None:
    cases = (
        CaseFacts("DeiT-S", "a"),
        CaseFacts("DeiT-S", "b", {"gamma": 0.27}, refused={"x": "no"}),
        CaseFacts("ViT-S"),
    )
    read = page(page_results(cases=cases))
    assert [case["name"] for case in read.data["cases"]] == ["DeiT-S, a", "DeiT-S, b", "ViT-S"]
    assert "x on DeiT-S, b: no" in read.text
    assert "DeiT-S, b gamma 0.27" in read.text


@pytest.mark.slow
def test_facts_without_a_command(page: Callable[[Results], _Read], page_results: Maker) -> None:
    read = page(page_results(facts={"image_lists": {"x": [f"{i:064x}" for i in range(1000)]}}))
    assert "run.json holds no command." in read.text
    assert "… 980 more" in read.text


def test_layout_without_a_papers_attack(page: Callable[[Results], _Read], page_results: Maker) -> None:
    read = page(page_results(layout=Layout(("ssim", "mse", "correct"))))
    assert "paper's attack, None" not in read.text
    assert read.data["lead"] == "ssim"
    assert [metric["leaks"] for metric in read.data["metrics"]] == [1, -1, 0]


# The pictures


def test_small_pictures_are_held_as_they_are(page: Callable[[Results], _Read], page_results: Maker) -> None:
    results = page_results(2, side=32)
    read = page(results)
    assert "2 of 2 images are shown in full size." in read.text
    album = read.albums[1]
    place = results.picture(2, results.records.image_sha256.unique()[1], "april")
    assert place is not None
    held = album["small"][album["of"]["2/april"]]
    assert held == "data:image/png;base64," + base64.b64encode(place.file.read_bytes()).decode()
    assert album["of"]["0/private"] == album["of"]["1/private"]  # equal pictures are held once
    assert set(album["full"]) == {""}


@pytest.mark.slow
def test_large_pictures_have_thumbnails(page: Callable[[Results], _Read], page_results: Maker) -> None:
    for album in page(page_results(2, side=160)).albums.values():
        for small, full in zip(album["small"], album["full"], strict=True):
            assert small.startswith("data:image/jpeg;base64,")
            assert len(small) < len(full)


@pytest.mark.slow
def test_budgets_are_kept_and_spent_on_the_extremes_first(
    page: Callable[[Results], _Read], page_results: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = page_results(30, side=120)
    results = replace(results, cases=results.cases[:1], records=results.records[results.records.case == 0])
    everything = page(results).albums
    cost = {i: sum(map(len, album["full"])) for i, album in everything.items()}
    monkeypatch.setattr(page_pictures, "FULL_BUDGET", sum(sorted(cost.values())[-9:]))
    monkeypatch.setattr(
        page_pictures, "SMALL_BUDGET", sum(len(s) for a in everything.values() for s in a["small"]) // 2
    )
    read = page(results)
    whole = {i for i, album in read.albums.items() if None not in album["full"]}
    assert sum(cost[i] for i in whole) <= page_pictures.FULL_BUDGET
    psnr = results.records[(results.records.attack == "april") & (results.records.geometry == "in_place")].psnr
    extremes = psnr.reset_index(drop=True).sort_values().index[[0, 15, -1]]
    assert set(extremes) <= whole
    alone = [album for album in read.albums.values() if set(album["of"]) == {"0/private"}]
    assert len(read.albums) == 30
    assert len(alone) > 5
    thumbnails = sum(len(s) for a in read.albums.values() if len(a["of"]) > 1 for s in a["small"])
    assert thumbnails <= page_pictures.SMALL_BUDGET
    assert (
        f"{len(whole)} of 30 images are shown in full size, {30 - len(whole) - len(alone)} as thumbnails, "
        f"{len(alone)} without their reconstructions." in read.text
    )


@pytest.mark.slow
def test_missing_and_torn_pictures(page: Callable[[Results], _Read], page_results: Maker) -> None:
    assert "No images were kept in this directory." in page(page_results()).text
    results = page_results(3, side=32)
    places = [results.picture(0, results.records.image_sha256.unique()[i], "april") for i in range(3)]
    for place, content in zip(places, (b"", b"\x89PNG\r\n\x1a\n torn", None), strict=True):
        assert place is not None
        place.file.write_bytes(content or place.file.read_bytes()[:-40])
    read = page(results)
    assert "3 files could not be read as images." in read.text
    assert all("0/april" not in album["of"] and "0/private" in album["of"] for album in read.albums.values())


# Where it cannot be written


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "file/page.html"])
def test_place_that_cannot_be_written(page_results: Maker, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PrivlabError, match="written"):
        write_page(page_results(), tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_text_that_is_no_unicode(page: Callable[[Results], _Read], page_results: Maker) -> None:
    assert "\\udc80" in page(page_results(title="a\udc80")).text

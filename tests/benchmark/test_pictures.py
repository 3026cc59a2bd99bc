"""The pictures of an entry are of the attack, draw and geometry that its score counts, or the page says that not."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from privlab.benchmark import entries
from privlab.benchmark.form import Judged
from privlab.benchmark.measure import Measurement
from privlab.benchmark.page import best_rows, fragment, pictures, pictures_of
from privlab.benchmark.results import Result, defense_entries
from privlab.benchmark.rule import standings
from privlab.benchmark.tracks import photographs
from privlab.evaluation import Case
from privlab.grids import specify
from privlab.report.tables import load_results
from privlab.runs import execute


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), dtype=float) / 255


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of one draw of a shuffle of two photographs."""
    out = tmp_path_factory.mktemp("run") / "one"
    spec = specify(
        model=("cifar_vit",),
        setting=("c",),
        attack=("patch-gradient",),
        metrics=("psnr",),
        limit=2,
        defense="jigsaw",
        draw=3,
    )
    execute(spec, out=out)
    return out


def test_the_picture_is_what_is_scored(run: Path) -> None:
    """The score of each picture, computed from its own pixels, is that of the row with its draw and geometry."""
    records = load_results(run).records.assign(case="one step")
    images = records.image_sha256.unique()
    for geometry in ("in_place", "reassembled"):
        rows = records.loc[(records.geometry == geometry) & (records.attack == "patch-gradient")]
        shown = {"median": images[0], "worst_image": images[1], "leakiest": "one step", "images": 2, "verdict": ""}
        judged = Judged(known_by=[], worst={}, by={}, why="", flags=[], **shown)
        found = pictures(defense_entries("gradients", ["jigsaw"])[0], judged, rows, lambda row: run)
        assert {each["image"] for each in found.values()} == {*images}
        for each in found.values():
            assert (each["geometry"], each["draw"]) == (geometry, 3)
            error = np.square(pixels(each["private"]) - pixels(each["made"])).mean()
            score = rows.psnr[rows.image_sha256 == each["image"]].item()
            assert error**0.5 == pytest.approx(10 ** (-score / 20), abs=0.003)  # eight bits
            assert float(each["score"]) == pytest.approx(score, abs=0.01)


def test_the_run_of_a_picture_is_that_of_its_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []
    monkeypatch.setattr(Measurement, "_run", lambda own, case, spec, *given: asked.append(spec))
    row = {
        "case": "one step",
        "setting": "c",
        "attack": "mjp-full",
        "draw": 7,
        "image_sha256": next(iter(photographs("bundled"))),
    }
    Measurement(defense_entries("gradients", ["jigsaw"])[0], out=tmp_path).run_with_pictures(row)
    assert [(spec.draw, spec.draws, spec.words.attacks) for spec in asked] == [(7, 1, ("mjp-full",))]


def of_stem(*stems: str) -> list[Result]:
    return [each for each in entries() if each.path.stem in stems]


@pytest.fixture(scope="module")
def blur() -> list[Result]:
    return of_stem("features-blur", "features-deconvolution")


def changed(result: Result, **pictures: Any) -> Result:
    return Result({**result.data, "pictures": pictures}, result.path)


def uri(name: str) -> str:
    return f"data:image/png;base64,{name}"


@pytest.mark.slow
def test_the_page_says_that_a_picture_is_not_of_the_attack_behind_the_score(blur: list[Result]) -> None:
    said = blur[0].data["judged"]
    old = {
        what: {"private": uri("P"), "made": uri("M"), "attack": "least-squares", "score": score}
        | {"image": said[name], "geometry": "in_place"}
        for what, name, score in (("median", "median", "17.87"), ("worst", "worst_image", "25.05"))
    }
    (row,) = standings([changed(blur[0], **old), changed(blur[1])])
    assert (row.judged["median"] != said["median"], row.judged["worst_image"]) == (True, said["worst_image"])
    assert [(each["own"], each["shown"], each["by"]) for each in pictures_of(row)] == [
        (False, False, ["deconvolution"]),
        (True, False, ["deconvolution"]),
    ]
    page, text = fragment([row]), "36.41 dB, comes from deconvolution, of which no picture is kept"
    assert f"worst photograph: picture by least-squares, 25.05 dB; the worst case, {text}" in page
    assert "no picture is kept of the median photograph; this was the median one before other attacks" in page


@pytest.mark.slow
def test_the_picture_of_an_attack_that_entered_is_shown(blur: list[Result]) -> None:
    """It is of the photograph that is the median one now, and of the attack that reaches its score."""
    (plain,) = standings(blur)
    assert plain.result is not None
    image = plain.judged["median"]
    rows = blur[1].rows.query("entry == 'blur'")
    best = best_rows(rows, blur[0].card.of, plain.judged["leakiest"], image).iloc[0]
    theirs = {"private": uri("P"), "made": uri("D"), "attack": "deconvolution", "image": image, "geometry": "in_place"}
    given = [blur[0], changed(blur[1], blur={"median": theirs | {"score": f"{best.psnr:.2f}"}})]
    (row,) = standings(given)
    (median,) = [each for each in pictures_of(row) if each["what"] == "median"]
    assert (median["made"], median["own"], median["shown"]) == (uri("D"), True, True)
    assert f"median photograph: deconvolution, {best.psnr:.2f} dB" in fragment([row])


def test_a_picture_of_another_draw_is_not_that_of_the_score() -> None:
    (result,) = of_stem("gradients-weak-noise")
    said = result.data["judged"]
    best = best_rows(result.rows, result.card.of, said["leakiest"], said["worst_image"]).iloc[0]
    own = {"private": uri("P"), "made": uri("M"), "attack": best.attack, "score": f"{best.psnr - 0.5:.2f}"}
    own |= {"image": said["worst_image"], "geometry": best.geometry}
    (row,) = standings([changed(result, worst=own)])
    assert "comes from it in another draw or case, of which no picture is kept" in fragment([row])

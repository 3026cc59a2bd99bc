"""The pictures of `privlab attack`: cut out of its strips, they are in the page what they are in the strip."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torchvision.utils import save_image

from privlab import attack
from privlab.grids import Figure
from privlab.images import read_image, to_png
from privlab.report.figures.draw import draw
from privlab.report.page import write_page
from privlab.report.tables import Results, load_results
from privlab.stores import Place, places_of, pngs, sheet_png, strip_png
from privlab.victims import victim

ATTACKS = ("april", "patch-gradient")
VICTIM: Mapping[str, Any] = {"weights": "random", "img_size": 64}

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three smooth pictures of 64 pixels."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(3):
        coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of `privlab attack` in two settings, on a tiny victim."""
    path = tmp_path_factory.mktemp("run") / "run"
    attack("vit_ti_mjp", photos, settings="a,c", attacks=ATTACKS, metrics="mse,psnr", out=path, **VICTIM)
    return path


def pixels(place: Place | None) -> np.ndarray:
    assert place is not None
    with Image.open(io.BytesIO(pngs([place])[0])) as picture:
        return np.asarray(picture)


def albums(results: Results, out: Path) -> tuple[str, Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the page of results, its data, and its albums by the name of the image."""
    html = write_page(results, out / "page.html").read_text("utf-8")
    scripts = dict(re.findall(r'<script type="application/json" id="([^"]*)">(.*?)</script>', html, re.DOTALL))
    data = json.loads(scripts.pop("data"))
    held = {data["images"][int(key.removeprefix("album-"))][0]: json.loads(text) for key, text in scripts.items()}
    return html, data, held


# Out of one strip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.integers(0, 2),
)
def test_panels_are_cut_out_as_they_were_drawn(
    tmp_path_factory: pytest.TempPathFactory, columns: Sequence[int], size: tuple[int, int], lines: int
) -> None:
    """Whatever the rows and columns, and whether pictures are smaller or larger than a panel."""
    draws = torch.Generator().manual_seed(sum(size))
    rows = tuple(
        tuple((f"{r}-{c}", torch.rand(3, *size, generator=draws), "\n".join(["a line"] * lines)) for c in range(count))
        for r, count in enumerate(columns)
    )
    path = tmp_path_factory.mktemp("strip") / "strip.png"
    path.write_bytes(strip_png(rows, "sha"))
    found = places_of(path)
    wanted = {(name, "sha"): to_png(image) for row in rows for name, image, _ in row}
    assert dict(zip(found, pngs([*found.values()]), strict=True)) == wanted
    with Image.open(path) as strip:
        for place in found.values():
            shown = np.asarray(strip.crop(place.box))
            assert (shown == pixels(place).repeat(place.scale, 0).repeat(place.scale, 1)).all()


@pytest.mark.parametrize("count", [1, 2, 8, 9, 17])
def test_a_contact_sheet_is_as_torchvision_saves_it_and_is_cut_up_again(tmp_path: Path, count: int) -> None:
    images = torch.rand(count, 3, 5, 7, generator=torch.Generator().manual_seed(count))
    (tmp_path / "sheet.png").write_bytes(sheet_png(images, [f"sha-{i}" for i in range(count)], "cell"))
    save_image(images, tmp_path / "plain.png", nrow=8, padding=4, pad_value=1.0)
    with Image.open(tmp_path / "sheet.png") as sheet, Image.open(tmp_path / "plain.png") as plain:
        assert np.array_equal(np.asarray(sheet), np.asarray(plain))
    found = places_of(tmp_path / "sheet.png")
    assert list(found) == [("cell", f"sha-{i}") for i in range(count)]
    for place, image in zip(found.values(), images, strict=True):
        assert np.array_equal(pixels(place), (image * 255).round().byte().permute(1, 2, 0).numpy())


def told(path: Path, text: str) -> None:
    info = PngInfo()
    info.add_text("privlab strip", text)
    Image.new("RGB", (20, 10)).save(path, pnginfo=info)


def one_panel(box: str, scale: str = "1") -> str:
    return f'{{"image": "s", "scale": {scale}, "panels": {{"p": {box}}}}}'


OUTSIDE = ("[0, 0, 21, 10]", "[0, 0, 20, 11]", "[-1, 0, 9, 9]", "[5, 0, 5, 9]", "[0, 0, 1e999, 1]")
NO_BOX = ("7", "{}", "[0, 0, 1]", '["a", 0, 1, 1]')
NO_SCALE = ("0", "-1", "3", "Infinity", "NaN", "null", '"x"')


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "null", "[" * 100_000, '{"image": "s", "scale": 1, "panels": []}'),
        *(one_panel(box) for box in (*OUTSIDE, *NO_BOX)),
        *(one_panel("[0, 0, 10, 10]", scale) for scale in NO_SCALE),
    ],
)
def test_a_foreign_text_names_no_panel(tmp_path: Path, text: str) -> None:
    told(tmp_path / "strip.png", text)
    assert places_of(tmp_path / "strip.png") == {}


def test_long_names_stay_under_their_image() -> None:
    said = "orthogonal-matching (reassembled) (stock block)"
    row = [(name, torch.zeros(3, 8, 8), said) for name in "ab"]
    with Image.open(io.BytesIO(strip_png([row], "0"))) as strip:
        drawn = np.asarray(strip)
    assert (drawn[:, 232:240] == 255).all()  # the gap between both
    assert (drawn[:, -8:] == 255).all()


def test_a_file_that_is_no_strip_names_no_panel(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "plain.png")
    told(tmp_path / "whole.png", one_panel("[0, 0, 9, 9]"))
    assert list(places_of(tmp_path / "whole.png")) == [("p", "s")]
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "head.png").write_bytes((tmp_path / "whole.png").read_bytes()[:40])
    Image.new("RGB", (20, 10)).save(tmp_path / "other.jpg")
    (tmp_path / "folder.png").mkdir()
    for name in ("plain.png", "empty.png", "head.png", "other.jpg", "folder.png", "missing.png"):
        assert places_of(tmp_path / name) == {}, name


# Out of a run


@pytest.mark.slow
def test_the_page_holds_what_was_attacked(run: Path, photos: Path, tmp_path: Path) -> None:
    """The private panel is the photograph, and each reconstruction has the error that its record states."""
    results, cut = load_results(run), victim("vit_ti_mjp", **VICTIM).preprocessing
    rows = results.records.query("geometry == 'in_place' and attack in @ATTACKS")
    assert len(rows) == 2 * 2 * 3
    for row in rows.to_dict("records"):
        case, sha = row["case"], row["image_sha256"]
        private, fed, reconstruction = (
            pixels(results.picture(case, sha, what)) for what in ("private", "fed", row["attack"])
        )
        assert (photo := read_image(photos / row["image"]).pixels) is not None
        assert (private == (255 * cut(photo)).round().byte().permute(1, 2, 0).numpy()).all()
        assert (fed == private).all() == (row["setting"] == "a")
        error, rounding = np.square(private / 255 - reconstruction / 255).mean(), 2 / 510  # both have 8 bits
        assert error == pytest.approx(row["mse"], abs=2 * row["mse"] ** 0.5 * rounding + rounding**2)
    html, data, held = albums(results, tmp_path)
    assert "3 of 3 images are shown in full size." in html
    assert data["fed"]
    assert data["kept"] == "strips"
    for image, sha in rows[["image", "image_sha256"]].drop_duplicates().itertuples(index=False):
        album = held[image]
        assert set(album["of"]) == {f"{case}/{what}" for case in (0, 1) for what in ("private", "fed", *ATTACKS)}
        for key, at in album["of"].items():
            case, what = key.split("/")
            png = base64.b64decode(album["small"][at].removeprefix("data:image/png;base64,"))
            with Image.open(io.BytesIO(png)) as shown:
                assert (np.asarray(shown) == pixels(results.picture(int(case), sha, what))).all()


def test_the_page_opens_on_the_defended_case_and_hides_folders(run: Path, tmp_path: Path) -> None:
    html = write_page(load_results(run), tmp_path / "page.html").read_text("utf-8")
    assert 'data-opens="1"' in html  # setting c
    assert re.search(r"Can someone rebuild the private images\? [^<]*setting c", html)
    assert html.index("Can someone") < html.index("the private image<") < html.index("case-verdicts")
    assert str(run.parent) not in html
    assert run.name in html


def test_a_contact_sheet_shows_strips(run: Path) -> None:
    results = load_results(run)
    drawn = draw(results, Figure("sheet", "sheet", "psnr")).axes[0].get_images()
    assert len(drawn) == 2 * 3 * 4
    sha = results.records.image_sha256.iloc[0]
    private = pixels(results.picture(0, sha, "private"))
    assert any(np.array_equal(np.asarray(one.get_array()), private) for one in drawn)


def test_a_strip_is_decoded_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, opened = load_results(run), []
    files = {place.file for place in results._strips.values()}
    plain = Image.open
    monkeypatch.setattr(Image, "open", lambda file, **options: opened.append(file) or plain(file, **options))
    albums(results, tmp_path)
    assert len([file for file in opened if hasattr(file, "fileno") and hasattr(file, "name")]) == len(files)


@pytest.mark.slow
def test_torn_and_foreign_strips_are_no_failure(run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run, tmp_path / "run"))
    results, (first, second, third) = load_results(run), sorted((run / "strips").iterdir())
    first.write_bytes(first.read_bytes()[:-2000])  # its text is whole
    with Image.open(second) as strip:
        strip.save(second)  # as an earlier version wrote it, without a text
    told(run / "strips" / "foreign.png", one_panel("[0, 0, 9, 9]"))
    html, _, held = albums(results, tmp_path)
    assert "1 of 3 images are shown in full size, 2 have no image. 1 files could not be read as images." in html
    assert {image: len(album["of"]) for image, album in held.items()} == {"0.png": 0, "2.png": 8}
    first.unlink()
    third.unlink()
    html, _, held = albums(load_results(run), tmp_path)
    assert "No images were kept in this directory." in html
    assert held == {}


# In a browser


@pytest.mark.slow
def test_slider(
    run: Path, open_page: Callable[..., Any], keep_screenshot: Callable[[str, bytes], None], tmp_path: Path
) -> None:
    """Left of the divider is the private image, right of it what april made of it, pixel for pixel."""
    results = load_results(run)
    tab = open_page(page := write_page(results, tmp_path / "page.html"))
    tab.run(
        "for (const [id, value] of [['i-case', '1'], ['i-attack', 'april']]) {"
        "const one = document.getElementById(id); one.value = value; one.dispatchEvent(new Event('input')); }"
    )
    tab.run("document.querySelector('.compare').scrollIntoView({ block: 'center' })")
    tab.settle()
    name = tab.run("document.getElementById('v-name').textContent")
    sha = results.records.set_index("image").image_sha256[name].iloc[0]
    pair = [pixels(results.picture(1, sha, what)).astype(float) for what in ("private", "april")]
    assert tab.run("document.querySelector('.compare img.left').naturalWidth") == 64
    for share, found in ((0.9, pair[0]), (0.1, pair[1])):
        tab.drag("#v-cut", 0.5, share)
        left, top, side = tab.run(
            "(({ left, top, width }) => [left, top, width])(document.querySelector('.compare').getBoundingClientRect())"
        )
        png = tab.screenshot()
        with Image.open(io.BytesIO(png)) as seen:
            at = [round((i + 0.5) * side / 64) for i in range(64)]
            shown = np.asarray(seen.convert("RGB"), dtype=float)[round(top) :, round(left) :][np.ix_(at, at)]
        middle = np.s_[8:48, 16:48]  # beside the divider's ends and above the names
        assert np.abs(shown - found)[middle].max() <= 2
    keep_screenshot("page-attack-images", png)
    assert tab.complaints() == []
    assert tab.requests() == [page.as_uri()]

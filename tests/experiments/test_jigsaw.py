"""The jigsaw study: exact answers on smooth images, missing pieces, what is refused, and the same draws twice."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.experiments.studies.jigsaw import (
    JigsawStudy,
    Shuffled,
    score,
    shuffle,
    solve,
    study,
    to_rows,
)
from privlab.experiments.studies.jigsaw_protocols import PROTOCOLS, Protocol, protocol
from privlab.experiments.studies.jigsaw_published import PUBLISHED


def plan(**options: Any) -> JigsawStudy:
    return JigsawStudy(**({"images": "samples", "protocols": ("3x3@24",), "solvers": ("border", "odds")} | options))


def bowl(side: int) -> Tensor:
    """Return a smooth image whose borders have one continuation each: x² + y² and other polynomials."""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0.1, 1, side), indexing="ij")
    return torch.stack([x.square() + 0.3 * y, y.square() + 0.2 * x, (x * y + x) / 1.5]) / 2


def pieces_of(cut: Protocol) -> Tensor:
    return cut.cut(bowl(cut.side)[None])[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three smooth images."""
    for i in range(3):
        pixels = (255 * bowl(48).roll(i, 0)).byte().permute(1, 2, 0).numpy()
        (tmp_path / "smooth").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "smooth" / f"{i}.png")
    return tmp_path / "smooth"


def test_published_protocols_have_their_pieces_where_the_papers_have_them() -> None:
    """JPwLEG-3: 7 + 96 + 24, 24 + 96 + 24 and 24 + 96 + 7 pixels; JPwLEG-5: 3 + 96 + 6, …; crops of 64 from 85."""
    for name, starts in {
        "jpwleg-3": (7, 151, 295),
        "jpwleg-5": (3, 111, 219, 327, 435),
        "3x3-gap21": (10, 95, 180),
        "3x3": (0, 96, 192),
    }.items():
        cut = PROTOCOLS[name]
        rows = torch.arange(cut.side, dtype=torch.float32).expand(1, 1, cut.side, cut.side)
        found = cut.cut(rows)[0, : cut.grid, 0, 0, 0]
        assert found.tolist() == list(starts)
        assert cut.cut(rows).shape == (1, cut.slots, 1, cut.piece, cut.piece)


def test_a_protocol_of_ones_own_is_centred_crops() -> None:
    assert protocol("4x4@64-6") == Protocol("4x4@64-6", 64, 4, 10, 6)
    assert protocol("2x2@32") == Protocol("2x2@32", 32, 2, 16, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3x3@100", "multiple of the pieces a side. Found 3x3@100"),
        ("3x4@24", "Found 3x4@24"),
        ("0x0@24", "Found 0x0@24"),
        ("3x3@24-5", "side of a piece of 3x3@24-5 must be 4 pixels or more. Found 3"),
        ("3x3@24-8", "Found 0"),
        ("1x1@24", "two or more. Found 1"),
        ("three", "Unknown protocol 'three'"),
    ],
)
def test_a_protocol_that_cannot_be_cut_is_refused(text: str, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        protocol(text)


def test_pieces_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PrivlabError, match=r"at most 20\. Found 26"):
        Protocol("own", 20, 3, 8, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": (8,)}, "Two or more pieces of 9 must be left to place in 3x3@24. Found 8 missing and 0 known."),
        ({"missing": (10,)}, "Found 10 missing"),
        ({"missing": (-1,)}, "Found -1 missing"),
        ({"missing": (4,), "known": 4}, "Found 4 missing and 4 known"),
        ({"known": -1}, "Found -1"),
        ({"noise": -0.1}, "Found -0.1"),
        ({"noise": math.nan}, "Found nan"),
        ({"solvers": ("bordr",)}, "Unknown solver 'bordr'"),
        ({"solvers": ("odds+slots",)}, "learns from public photographs"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        plan(**options)


@pytest.mark.parametrize("name", ["border", "odds"])
@pytest.mark.parametrize("text", ["3x3@48", "3x3@48-4", "4x4@64"])
def test_a_smooth_image_is_solved_exactly(name: str, text: str) -> None:
    cut = protocol(text)
    pieces = pieces_of(cut)
    for seed in range(4):
        given = shuffle(plan(seed=seed), pieces, 0, "ab", text)
        order = solve(name, given.pieces, given.present, given.known)
        found = score(pieces, given, order, cut.grid)
        assert found == {"placed": 1.0, "neighbours": 1.0, "solved": True, "error": 0.0}


def test_missing_pieces_leave_their_slots_empty() -> None:
    """The centre's place is shown by its neighbours, and the slot of each missing piece is given a blank."""
    pieces, cut = pieces_of(protocol("3x3@48")), protocol("3x3@48")
    for seed in range(6):
        given = shuffle(plan(seed=seed), pieces, 1, "ab", cut.name)
        order = solve("odds", given.pieces, given.present, given.known)
        empty = ~given.present[order]
        assert int(empty.sum()) == 1
        assert (given.pieces[order][empty] == 0).all()
        held = given.sent[order]
        assert score(pieces, given, order, 3)["placed"] == (held == torch.arange(9))[~empty].sum() / 8
        inside = int(given.sent[~given.present]) == 4
        assert not inside or score(pieces, given, order, 3)["solved"]


def test_a_canvas_holds_each_piece_once_and_the_number_that_was_asked_for() -> None:
    pieces = torch.arange(1.0, 17).view(16, 1, 1, 1).expand(16, 3, 4, 4) / 16
    given = shuffle(plan(known=3), pieces, 5, "ab", "x")
    assert given.sent.sort().values.tolist() == list(range(16))
    assert (int(given.present.sum()), int(given.known.sum())) == (11, 3)
    assert (given.sent == torch.arange(16))[given.known].all()
    assert given.present[given.known].all()
    assert_close(given.pieces[given.present], pieces[given.sent][given.present])
    assert (given.pieces[~given.present] == 0).all()


def test_draws_are_keyed_by_image_protocol_and_seed() -> None:
    pieces = torch.rand(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    noisy = plan(noise=0.1)

    def drawn(seed: int = 0, image: str = "ab", name: str = "x") -> Shuffled:
        return shuffle(plan(noise=0.1, seed=seed), pieces, 2, image, name)

    first = shuffle(noisy, pieces, 2, "ab", "x")
    for again in (drawn(),):
        for field in fields(Shuffled):
            assert torch.equal(getattr(first, field.name), getattr(again, field.name))
    for other in (drawn(seed=1), drawn(image="cd"), drawn(name="y")):
        assert not torch.equal(first.sent, other.sent)


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    pieces = torch.full((9, 3, 16, 16), 0.5)
    given = shuffle(plan(noise=0.1), pieces, 0, "ab", "x")
    assert float((given.pieces - 0.5).std()) == pytest.approx(0.1, rel=0.05)


def test_scores_of_arrangements_by_hand() -> None:
    """2 × 2, piece 3 missing; the row of 0 and 1 put below: no slot is right, one pair of two is."""
    pieces = torch.tensor([0.0, 0.2, 0.4, 0.9]).view(4, 1, 1, 1).expand(4, 1, 4, 4)
    sent, present = torch.tensor([3, 1, 0, 2]), torch.tensor([False, True, True, True])
    given = Shuffled(torch.where(present.view(4, 1, 1, 1), pieces[sent], 0), present, torch.zeros(4).bool(), sent)
    right = score(pieces, given, torch.tensor([2, 1, 3, 0]), 2)
    assert right == {"placed": 1.0, "neighbours": 1.0, "solved": True, "error": 0.0}
    moved = score(pieces, given, torch.tensor([3, 0, 2, 1]), 2)  # slots hold 2, empty, 0, 1
    assert (moved["placed"], moved["neighbours"], moved["solved"]) == (0.0, 0.5, False)
    assert moved["error"] == pytest.approx((0.4**2 + 0.3**2 + 0.4**2) / 3)
    known = Shuffled(given.pieces, present, torch.tensor([False, True, False, False]), sent)
    assert score(pieces, known, torch.tensor([3, 1, 2, 0]), 2)["placed"] == 0


@pytest.mark.slow
def test_a_study_writes_what_it_measured_and_again_the_same(folder: Path, tmp_path: Path) -> None:
    asked = plan(images=str(folder), protocols=("3x3@48", "2x2@48-4"), missing=(0, 1), known=1)
    said: list[str] = []
    facts = study(asked, tmp_path / "one", say=said.append)
    again = study(asked, tmp_path / "two", say=said.append)
    assert not said
    records = pd.read_parquet(tmp_path / "one" / "jigsaw.parquet")
    assert len(records) == 3 * 2 * 2 * 2
    other = pd.read_parquet(tmp_path / "two" / "jigsaw.parquet")
    pd.testing.assert_frame_equal(records.drop(columns="seconds"), other.drop(columns="seconds"))
    whole = [cell for cell in facts["cells"] if not cell["missing"]]
    assert [cell["placed"] for cell in whole] == [1.0] * 4
    assert [cell["psnr"] for cell in whole] == [None] * 4
    assert facts["images"] == again["images"] == 3
    shown = to_rows(facts)
    assert shown[0]["placed %"] == "100.0 [100.0, 100.0]"
    assert shown[0]["PSNR of the mean error"] == "exact"


def test_public_photographs_are_not_the_private_ones(folder: Path, tmp_path: Path) -> None:
    asked = plan(images=str(folder), solvers=("odds+slots",), protocols=("3x3@48",), public=str(folder))
    with pytest.raises(PrivlabError, match="public"):
        study(asked, tmp_path)
    Image.fromarray(np.full((48, 48, 3), 99, np.uint8)).save(folder / "9.png")
    one = plan(images=str(folder), limit=3, solvers=("odds+slots",), protocols=("3x3@48",), public=str(folder))
    assert study(one, tmp_path)["images"] == 3


def test_images_that_cannot_be_read_are_said_and_none_is_an_error(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.png").write_bytes(b"no image")
    said: list[str] = []
    assert study(plan(images=str(folder), protocols=("3x3@48",)), tmp_path, say=said.append)["images"] == 3
    assert len(said) == 1
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no image")
    with pytest.raises(PrivlabError, match="can be read"):
        study(plan(images=str(tmp_path / "bad")), tmp_path, say=said.append)


def test_published_figures_stand_beside_their_protocol_alone(folder: Path, tmp_path: Path) -> None:
    """Chance of nine is 11 %: a protocol's name, the pieces missing and those known must be theirs."""
    row = next(row for row in PUBLISHED if row.method == "JPDVT" and row.protocol == "3x3-gap21")
    asked = plan(images=str(folder), limit=1, protocols=("3x3-gap21",), solvers=("odds",))
    facts = study(asked, tmp_path)
    assert [found["placed"] for found in facts["published"]] == [92.2, row.placed]
    assert to_rows(facts)[-1]["solver"] == "JPDVT, theirs"
    assert to_rows(facts)[-1]["solved %"] == "68.7"
    none = study(plan(images=str(folder), limit=1, protocols=("3x3-gap21",), solvers=("odds",), known=1), tmp_path)
    assert none["published"] == []
    for each in PUBLISHED:
        assert each.protocol in PROTOCOLS
        assert 0 < each.placed <= 100
        assert each.missing + each.known <= PROTOCOLS[each.protocol].slots - 2

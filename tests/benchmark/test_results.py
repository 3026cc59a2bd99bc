"""Result files: what was written is what is read, and what was edited is seen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from privlab.base import PrivlabError
from privlab.benchmark import write_site
from privlab.benchmark.cards import file_name, parse_card
from privlab.benchmark.results import FORMAT, PACKAGE, from_rows, read_result, to_rows, write_result
from privlab.benchmark.tracks import track

RECORDS = pd.DataFrame(
    {
        "attack": ["april", "april", "control:mean"],
        "psnr": [12.34567, np.inf, np.nan],
        "exact": [np.inf] * 3,
        "draw": [0, 1, 0],
        "reason": [None, "nothing", None],
        "release": ["gradients"] * 3,
    }
)


def contents(**more: Any) -> dict[str, Any]:
    own = track("gradients")
    return {
        "format": FORMAT,
        "track": {"name": own.name, "version": own.version, "sha256": own.sha256},
        "created": 0,
        "card": "",
        "plugin": None,
        "versions": {},
        "photographs": ["bundled"],
        "admission": [],
        "judged": {},
        "rows": to_rows(RECORDS),
    } | more


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return an ed25519 key in PEM."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path / "key.pem"
    path.write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(*form))
    return path


def test_rows_come_back_with_three_decimals() -> None:
    found = from_rows(json.loads(json.dumps(to_rows(RECORDS), allow_nan=False)))
    assert found.psnr.tolist()[:2] == [12.346, np.inf]
    assert found.exact.tolist() == [np.inf] * 3
    assert found.psnr.isna().tolist() == [False, False, True]
    assert found.reason.tolist() == [None, "nothing", None]
    assert found.attack.tolist() == RECORDS.attack.tolist()
    assert found.draw.tolist() == [0, 1, 0]
    assert set(found.release) == {"gradients"}


def test_rows_of_other_lengths_are_refused() -> None:
    given = to_rows(RECORDS)
    given["columns"]["psnr"]["each"].pop()
    with pytest.raises(PrivlabError, match=r"2.*3.*values"):
        from_rows(given)


@pytest.mark.parametrize(
    ("column", "value"), [("psnr", "nan"), ("patches_read", "nan"), ("case", 1.0), ("attack", 1.0)]
)
def test_a_column_with_values_of_another_type_is_refused(column: str, value: str | float) -> None:
    given = to_rows(RECORDS)
    given["columns"][column] = {"all": value}
    with pytest.raises(PrivlabError, match=f"{column}.*another type"):
        from_rows(given)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = write_result(contents(), tmp_path / "r.json")
    assert read_result(tmp_path / "r.json").data == written.data
    assert written.signer is None


def test_a_key_says_who_signed(tmp_path: Path, key: Path) -> None:
    written = write_result(contents(), tmp_path / "r.json", key)
    assert read_result(tmp_path / "r.json").signer == written.signer
    assert len(bytes.fromhex(written.signer or "")) == 32


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["rows"]["columns"]["psnr"]["each"].__setitem__(0, 9.0), "was edited after it was written"),
        (lambda d: d.pop("judged"), "judged"),
        (lambda d: d["track"].update(version="privlab/2"), "of 'privlab/2'. This package reads format 1"),
        (lambda d: d.update(format=2), "has format 2"),
        (lambda d: d["signature"].update(sha256="0"), "was edited"),
    ],
)
def test_an_edited_file_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    write_result(contents(), tmp_path / "r.json")
    edit(tmp_path / "r.json", change)
    with pytest.raises(PrivlabError, match=said):
        read_result(tmp_path / "r.json")


def test_a_file_that_was_edited_and_hashed_anew_keeps_no_signature(tmp_path: Path, key: Path) -> None:
    signed = write_result(contents(), tmp_path / "r.json", key).data["signature"]
    write_result(contents(created=1), tmp_path / "r.json")
    edit(tmp_path / "r.json", lambda d: d["signature"].update({k: v for k, v in signed.items() if k != "sha256"}))
    with pytest.raises(PrivlabError, match="signature"):
        read_result(tmp_path / "r.json")


def test_a_result_of_another_track_is_refused(tmp_path: Path) -> None:
    own = track("gradients")
    other = {"name": own.name, "version": own.version, "sha256": "0" * 64}
    write_result(contents(track=other), tmp_path / "r.json")
    with pytest.raises(PrivlabError, match="'gradients'"):
        read_result(tmp_path / "r.json")


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(PrivlabError, match="Cannot read the key"):
        write_result(contents(), tmp_path / "r.json", tmp_path / "key.pem")


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(PrivlabError, match="is no JSON"):
        read_result(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"count": 10**12, "columns": {"case": {"all": "x"}}}, "count"),
        ({"count": 2**16 + 1, "columns": {"case": {"all": "x"}}}, "count"),
        ({"count": -1, "columns": {}}, "count"),
        ({"count": 1.0, "columns": {}}, "count"),
        ({"count": 1, "columns": []}, "columns"),
        ({"count": 1, "columns": {"case": {"of": ["x"], "codes": [-1]}}}, "codes"),
        ({"count": 1, "columns": {"case": {"of": ["x"], "codes": [1]}}}, "column 'case'"),
        ({"count": 1, "columns": {"psnr": {"each": [{}]}}}, "each"),
        ({"count": 1, "columns": {"psnr": {"all": [[0]]}}}, "all"),
        ({"count": 1, "columns": {str(i): {"all": 0} for i in range(200)}}, "columns"),
    ],
)
def test_rows_of_another_form_are_refused_before_they_are_made(tmp_path: Path, rows: Any, said: str) -> None:
    write_result(contents(rows=rows), tmp_path / "r.json")
    with pytest.raises(PrivlabError, match=said):
        read_result(tmp_path / "r.json")


@pytest.mark.parametrize("field", ["track", "card", "plugin", "photographs", "admission", "judged", "rows"])
def test_a_field_of_another_type_is_refused(tmp_path: Path, field: str) -> None:
    write_result(contents(**{field: 3}), tmp_path / "r.json")
    with pytest.raises(PrivlabError, match=field):
        read_result(tmp_path / "r.json")


@pytest.mark.parametrize("name", ["/../../../victim/package", "..", "", "A", "a/b", "-a", "a" * 65, "a.b", "a\n"])
def test_a_name_that_is_more_than_a_name_reaches_no_path(name: str) -> None:
    with pytest.raises(PrivlabError, match="name"):
        file_name(name)
    text = (PACKAGE / "cards/gradients-sign.toml").read_text("utf-8")
    with pytest.raises(PrivlabError, match="name"):
        parse_card(text.replace('name = "gradient-sign"', f"name = {json.dumps(name)}"), tmp := Path("card.toml"))
    assert not tmp.exists()


def test_the_page_loads_nothing_and_shows_pictures_as_data_alone(tmp_path: Path) -> None:
    source = PACKAGE / "results/gradients-sign.json"
    data = json.loads(source.read_text("utf-8"))
    data["pictures"]["median"]["made"] = "https://example.org/x.png"
    write_result(data, tmp_path / "gradients-sign.json")
    page = write_site([read_result(tmp_path / "gradients-sign.json")], tmp_path / "site")[0].read_text()
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in page
    assert "form-action 'none'" in page
    assert "example.org" not in page
    assert "data:image/png;base64," in page

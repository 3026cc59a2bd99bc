"""The format of key files: known answers, modes, and everything that is refused."""

import hashlib
import json
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from privlab.base import PrivlabError
from privlab.keys import ModelKey, ModelShape, canonical, key_id, load_key, new_key, save_key, to_bytes, write_new
from privlab.keys import key_file as keyfile

SHAPE = ModelShape(width=4, depth=1, heads=2, head_dim=2, hidden=3)
KEY = ModelKey(
    residual=torch.tensor([2, 0, 3, 1]),
    heads=torch.tensor([[1, 0]]),
    qk=torch.tensor([[[0, 1], [1, 0]]]),
    value=torch.tensor([[[1, 0], [0, 1]]]),
    hidden=torch.tensor([[2, 0, 1]]),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a key file."""
    save_key(KEY, SHAPE, path := tmp_path / "a.key")
    return path


def test_canonical_bytes_are_as_documented() -> None:
    """A known answer, written out by hand."""
    shape = '{"depth":1,"family":"vit","glu":false,"head_dim":2,"heads":2,"hidden":3,"qk_norm":false,"width":4}'
    numbers = {
        "heads:1x2": [1, 0],
        "hidden:1x3": [2, 0, 1],
        "qk:1x2x2": [0, 1, 1, 0],
        "residual:4": [2, 0, 3, 1],
        "value:1x2x2": [1, 0, 0, 1],
    }
    orders = b"".join(
        f"{name}\n".encode() + b"".join(n.to_bytes(4, "little") for n in values) for name, values in numbers.items()
    )
    assert canonical(KEY, SHAPE) == f"privlab-key/1\n{shape}\nfull\n".encode() + orders
    assert key_id(KEY, SHAPE) == hashlib.sha256(f"privlab-key-id/1\n{shape}\n".encode() + orders).hexdigest()


def test_known_answers_are_frozen(path: Path) -> None:
    """Files of version 1 stay what they are: a change here needs privlab-key/2."""
    hashes = [hashlib.sha256(data).hexdigest() for data in (canonical(KEY, SHAPE), path.read_bytes())]
    assert hashes == [
        "fb0f7722432c7220abbe308c5c2cb75a614ca369f0cac583c6ac8cc6bd964511",
        "97a1b8abb4af1602ec25b76f97f4576d60eb30529add526cf7dbd2afe54682c3",
    ]
    assert key_id(KEY, SHAPE) == "db2397616c057f6e4a2169a3e0bdcad941f526788390fe61fe94dc820c892297"


def test_any_safetensors_reader_reads_it(path: Path) -> None:
    tensors = load_file(path)
    assert {name: order.tolist() for name, order in tensors.items()} == {
        name: order.tolist() for name, order in KEY.orders().items()
    }
    assert {order.dtype for order in tensors.values()} == {torch.int32}


@pytest.mark.parametrize("space", ["full", "paper", "residual"])
def test_what_is_written_is_read(tmp_path: Path, space: str) -> None:
    key = new_key(SHAPE, space)
    save_key(key, SHAPE, tmp_path / "a")
    found = load_key(tmp_path / "a")
    assert found.shape == SHAPE
    assert found.key.space == space
    assert all(torch.equal(order, key.orders()[name]) for name, order in found.key.orders().items())
    assert found.key_id == key_id(key, SHAPE)


def test_the_same_key_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    save_key(KEY, SHAPE, tmp_path / "b.key")
    assert (tmp_path / "b.key").read_bytes() == path.read_bytes()


def test_metadata_are_sorted_and_tensors_unharmed() -> None:
    tensors = {"b": torch.arange(3), "a": torch.eye(2).T, "half": torch.zeros(3).bfloat16()}
    data = to_bytes(tensors, {"z": "1", "a": "2", "k": "ü"})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert next(iter(header)) == "__metadata__"
    assert list(header["__metadata__"].items()) == [("a", "2"), ("k", "ü"), ("z", "1")]
    assert all(torch.equal(found, tensors[name]) for name, found in load(data).items())


def test_keys_with_different_orders_have_different_ids() -> None:
    ids = {key_id(KEY, SHAPE)}
    for name, order in KEY.orders().items():
        ids.add(key_id(ModelKey(**(KEY.orders() | {name: order.flip(-1)})), SHAPE))
    assert len(ids) == 6


# ---- modes and writing


def test_a_key_file_is_its_owners_alone(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_key_that_others_may_touch_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(PrivlabError, match=rf"Others may read the key file .* \(mode {mode:03o}\): run chmod 600"):
        load_key(path)
    path.chmod(0o400)
    assert load_key(path).shape == SHAPE


def test_an_earlier_key_stays_unless_told_otherwise(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(PrivlabError, match="--overwrite"):
        save_key(new_key(SHAPE), SHAPE, path)
    assert path.read_bytes() == before
    path.chmod(0o644)
    save_key(new_key(SHAPE), SHAPE, path, overwrite=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() != before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_link_is_not_followed(tmp_path: Path, path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrivlabError, match="exists already"):
        save_key(KEY, SHAPE, tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    save_key(KEY, SHAPE, tmp_path / "folder" / "a.key")
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    with pytest.raises(PrivlabError, match=r"a\.key' cannot be written"):
        save_key(KEY, SHAPE, tmp_path / "folder" / "a.key" / "b.key")
    for overwrite, message in ((False, "exists already"), (True, "cannot be written")):
        with pytest.raises(PrivlabError, match=message):
            save_key(KEY, SHAPE, tmp_path / "folder", overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PrivlabError, match="No space"):
        write_new(tmp_path / "a", b"x")
    assert list(tmp_path.iterdir()) == []


# ---- what is refused


def rewrite(path: Path, **changes: object) -> None:
    """Write the key again, with other metadata (None: without) and the tensors in `tensors`."""
    data = path.read_bytes()
    tensors = load(data) | changes.pop("tensors", {})
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"] | changes
    write_new(path, to_bytes(tensors, {k: v for k, v in metadata.items() if v}), private=True, overwrite=True)


def refused(path: Path) -> str:
    with pytest.raises(PrivlabError) as caught:
        load_key(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.key").endswith("none.key'. `privlab keys new` makes one.")


def test_a_folder_is_no_key(tmp_path: Path) -> None:
    assert "it is a folder" in refused(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\0" * 64, b"\xff" * 64, b'{"a": 1}', to_bytes({"a": torch.eye(2)}, {})]
)
def test_foreign_files_are_no_keys(tmp_path: Path, content: bytes) -> None:
    write_new(tmp_path / "a", content, private=True)
    assert "is not a key file of privlab, or its header is damaged" in refused(tmp_path / "a")


def test_a_newer_format_is_named(path: Path) -> None:
    rewrite(path, format="privlab-key/2")
    assert "has the format privlab-key/2; this privlab reads privlab-key/1. Use a newer privlab." in refused(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checksum": "0" * 64}, "its checksum is wrong"),
        ({"checksum": None}, "no 'checksum'"),
        ({"fingerprint": "0" * 64}, "its fingerprint is another shape's"),
        ({"space": "paper"}, "its checksum is wrong"),
        ({"space": "other"}, "unknown space 'other'"),
        ({"shape": "{}"}, "its shape has not the fields width, depth"),
        ({"shape": "[]"}, ""),
        ({"shape": "[" * 100_000}, ""),
        ({"shape": SHAPE.text.replace("4", '"4"')}, "its shape has not the fields"),
        ({"shape": SHAPE.text.replace(":4", ":5")}, r"order 'residual' has shape (4,), not (5,)"),
        ({"tensors": {"residual": torch.tensor([2, 0, 3, 1])}}, "expected int32 tensors"),
        ({"tensors": {"more": torch.tensor([1], dtype=torch.int32)}}, "expected int32 tensors"),
        ({"tensors": {"residual": torch.tensor([0, 1, 2, 3], dtype=torch.int32)}}, "its checksum is wrong"),
    ],
)
def test_corrupted_keys_are_refused(path: Path, change: dict[str, object], reason: str) -> None:
    rewrite(path, **change)
    message = refused(path)
    assert "is corrupted or truncated" in message
    assert reason in message


@pytest.mark.parametrize("wrong", [[0, 0, 1, 2], [0, 1, 2, 4], [-1, 0, 1, 2]])
def test_no_permutation_is_refused_even_with_a_right_checksum(
    path: Path, wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ModelKey(**(KEY.orders() | {"residual": torch.tensor(wrong)}))
    save_key(key, SHAPE, path, overwrite=True)
    assert "order 'residual' is not a permutation" in refused(path)


def test_every_truncation_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        write_new(path, data[:size], private=True, overwrite=True)
        assert "not a key file" in (message := refused(path)) or "corrupted or truncated" in message


@pytest.mark.slow
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=200)
def test_every_changed_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, place: float, flip: int) -> None:
    """Only white space that pads the header may change: it says nothing."""
    path = tmp_path_factory.mktemp("key") / "a.key"
    save_key(KEY, SHAPE, path)
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    padding = header - len(bytes(data[:header]).rstrip(b" "))
    at = int(place * len(data))
    data[at] ^= flip
    write_new(path, bytes(data), private=True, overwrite=True)
    if not header - padding <= at < header:
        assert refused(path)


def test_a_file_too_large_for_a_key_is_not_read_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyfile, "_MOST_BYTES", 200)
    assert refused(path)

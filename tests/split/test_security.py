"""Tokens in files, and addresses that stay on this machine."""

import stat
from pathlib import Path

import pytest

from privlab.base import PrivlabError
from privlab.split.protocol.security import is_loopback, make_token, read_token, split_address


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    first = make_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert make_token(path) == read_token(path) == first
    assert make_token(tmp_path / "other") != first
    assert len(first) == 43  # 256 bits in base 64


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o666, 0o601])
def test_a_token_that_others_may_touch_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_token(path)
    path.chmod(mode)
    for take in (make_token, read_token):
        with pytest.raises(PrivlabError, match=rf"must have mode 0600. Found 0{mode:o}: chmod 600 it"):
            take(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "x" * 20 + " " + "x" * 20, "x" * 40 + "\n" + "y" * 40])
def test_a_file_that_holds_no_token_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(PrivlabError, match=r"32.*characters"):
        read_token(path)


def test_a_token_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"'.*none'.*`privlab.*serve`"):
        read_token(tmp_path / "none")
    with pytest.raises(PrivlabError, match="it is a folder"):
        read_token(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    with pytest.raises(PrivlabError, match="cannot be read"):
        read_token(tmp_path / "binary")
    with pytest.raises(PrivlabError, match="cannot be written"):
        make_token(tmp_path / "binary" / "folder" / "token")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "255.255.255.255"])
def test_everything_else_is_not(host: str) -> None:
    assert not is_loopback(host)


def test_a_host_that_is_not_known_is_told() -> None:
    with pytest.raises(PrivlabError, match=r"'\.\.'.*known"):
        is_loopback("..")


def test_addresses_are_host_and_port() -> None:
    assert split_address("localhost:5") == ("localhost", 5)
    assert split_address("[::1]:50551") == ("::1", 50551)


@pytest.mark.parametrize("address", ["", ":", "here", "here:", ":5", "here:x", "here:0", "here:65536", "here:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(PrivlabError, match=f"--server must be HOST:PORT. Found '{address}'"):
        split_address(address)

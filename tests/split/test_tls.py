"""TLS: who is believed, who is turned away, and what both sides say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.split.client.client import Lost, Rebuffed
from privlab.split.protocol.security import ClientTls, ServerTls

pytest.importorskip("trustme", reason="needs trustme to make certificates")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make authorities with certificates: a good one, one that has expired, a stranger, and one for another host."""
    from privlab.split.protocol.security import make_certificates

    folder = tmp_path_factory.mktemp("certificates")
    for name, hosts, days in (
        ("good", ["localhost", "127.0.0.1"], 1.0),
        ("old", ["localhost", "127.0.0.1"], -1.0),
        ("stranger", ["localhost", "127.0.0.1"], 1.0),
        ("elsewhere", ["example.org"], 1.0),
    ):
        make_certificates(folder / name, hosts, days)
    return folder


@pytest.fixture
def ours(certificates: Path) -> Callable[..., ServerTls]:
    """Return a maker of a server's side."""
    return lambda name="good", client_ca=None: ServerTls(
        certificates / name / "server.pem", certificates / name / "server.key", client_ca
    )


@pytest.fixture
def theirs(certificates: Path) -> Callable[..., ClientTls]:
    """Return a maker of a client's side: whom it trusts, and as whom it comes."""

    def make(trusts: str = "good", comes_as: str | None = None) -> ClientTls:
        own = (
            (None, None)
            if comes_as is None
            else (certificates / comes_as / f"client.{kind}" for kind in ("pem", "key"))
        )
        return ClientTls(certificates / trusts / "ca.pem", *own)

    return make


@pytest.mark.parametrize("mutual", [False, True])
def test_training_over_tls_is_training(
    mutual: bool,
    ours: Any,
    theirs: Any,
    certificates: Path,
    server: Any,
    client: Any,
    tiny: Any,
    alone: Any,
    tmp_path: Path,
) -> None:
    learner = tiny.learner("row-permutation+column-permutation", dtype="float64")
    tls = ours(client_ca=certificates / "good" / "ca.pem" if mutual else None)
    (tmp_path / "client").mkdir()
    with server(tls=tls) as (running, _):
        far = client(running, tls=theirs(comes_as="good" if mutual else None))
        tiny.Trainer(learner, far, tmp_path / "client").train(tiny.batches(), tiny.STEPS)
    assert_close(learner.losses.tolist(), alone(learner.contract, tiny.STEPS), rtol=0, atol=1e-9)


def test_tls_does_not_replace_the_token(ours: Any, theirs: Any, server: Any, client: Any, tiny: Any) -> None:
    with (
        server(tls=ours()) as (running, events),
        pytest.raises(PrivlabError, match="Wrong token"),
        client(running, tls=theirs(), token="x" * 40).session(tiny.contract()),
    ):
        pass
    assert events == [{"event": "refused", "reason": "wrong token"}]


REFUSED = {
    "expired": ({"name": "old"}, {"trusts": "old"}, r"not accepted by --tls-ca: certificate has expired\.$"),
    "unknown authority": ({}, {"trusts": "stranger"}, "not accepted by --tls-ca: unable to get local issuer"),
    "another host": (
        {"name": "elsewhere"},
        {"trusts": "elsewhere"},
        "is for another host: use a name of it in --server",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_client_refuses_a_server_that_it_cannot_trust(
    case: str, ours: Any, theirs: Any, server: Any, client: Any, tiny: Any
) -> None:
    its, my, says = REFUSED[case]
    with (
        server(tls=ours(**its)) as (running, events),
        pytest.raises(PrivlabError, match=says) as refused,
        client(running, tls=theirs(**my)).session(tiny.contract()),
    ):
        pass
    assert not isinstance(refused.value, Lost)  # nothing that trying again would mend
    assert events == []


@pytest.mark.parametrize("comes_as", [None, "stranger", "old"])
def test_a_server_refuses_a_client_without_a_good_certificate(
    comes_as: str | None, ours: Any, theirs: Any, certificates: Path, server: Any, client: Any, tiny: Any
) -> None:
    tls = ours(client_ca=certificates / "good" / "ca.pem")
    with server(tls=tls) as (running, events):
        with (
            pytest.raises(Rebuffed, match="certificate"),
            client(running, tls=theirs(comes_as=comes_as)).session(tiny.contract()),
        ):
            pass
        with client(running, tls=theirs(comes_as="good")).session(tiny.contract()) as good:
            assert good.step == 0
    assert [event["event"] for event in events] == ["opened", "closed"]


def test_plain_text_to_a_tls_port_is_told(
    ours: Any, theirs: Any, server: Any, client: Any, tiny: Any, tmp_path: Path
) -> None:
    with server(tls=ours()) as (running, _):
        with pytest.raises(Rebuffed, match=r"does it want TLS \(--tls-ca\)"), client(running).session(tiny.contract()):
            pass
        trainer = tiny.Trainer(tiny.learner(), client(running, retry_for=30.0), tmp_path)
        with pytest.raises(Rebuffed):  # at once: it would not get better
            trainer.train(tiny.batches(), 1)
        with client(running, tls=theirs()).session(tiny.contract()) as good:
            assert good.step == 0


def test_tls_to_a_plain_port_is_told(theirs: Any, server: Any, client: Any, tiny: Any) -> None:
    with server() as (running, _):
        with (
            pytest.raises(PrivlabError, match=r"TLS.*--tls-ca"),
            client(running, tls=theirs()).session(tiny.contract()),
        ):
            pass
        with client(running).session(tiny.contract()) as good:
            assert good.step == 0


def test_all_addresses_may_be_listened_on_with_tls(ours: Any, theirs: Any, server: Any, tiny: Any) -> None:
    with server(tls=ours(), host="0.0.0.0") as (running, _):
        far = tiny.Client(f"localhost:{running.port}", tiny.TOKEN, theirs())
        with far.session(tiny.contract()) as good:
            assert good.step == 0


FILES = {
    "no file": (
        lambda f: ServerTls(f / "none", f / "good/server.key"),
        "Cannot read the TLS file '.*none': No such",
    ),
    "no pair": (lambda f: ServerTls(f / "good/server.pem", f / "old/server.key"), "are not a certificate with its key"),
    "no PEM": (lambda f: ServerTls(f / "good/server.key", f / "good/server.key"), "are not a certificate with its key"),
    "no authority": (
        lambda f: ServerTls(f / "good/server.pem", f / "good/server.key", f / "good/client.key"),
        "holds no certificate in PEM",
    ),
    "trusts no certificate": (lambda f: ClientTls(f / "good/server.key"), "holds no certificate in PEM"),
    "no key": (lambda f: ClientTls(f / "good/ca.pem", f / "good/client.pem"), "give both --tls-cert and --tls-key"),
    "another key": (
        lambda f: ClientTls(f / "good/ca.pem", f / "good/client.pem", f / "old/client.key"),
        "are not a certificate with its key",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_certificates_are_refused(case: str, certificates: Path) -> None:
    make, says = FILES[case]
    with pytest.raises(PrivlabError, match=says):
        make(certificates).credentials()


def test_an_encrypted_key_is_refused_without_asking(certificates: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key((certificates / "good" / "server.key").read_bytes(), None)
    locked = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    (tmp_path / "server.key").write_bytes(locked)
    with pytest.raises(PrivlabError, match="the key is encrypted"):
        ServerTls(certificates / "good" / "server.pem", tmp_path / "server.key").credentials()


def test_keys_are_private_and_nothing_is_written_over(certificates: Path) -> None:
    from privlab.split.protocol.security import make_certificates

    modes = {path.name: path.stat().st_mode & 0o777 for path in (certificates / "good").iterdir()}
    public = {"ca.pem": 0o644, "server.pem": 0o644, "client.pem": 0o644}
    assert modes == public | {"server.key": 0o600, "client.key": 0o600}
    with pytest.raises(PrivlabError, match=r"ca\.pem.*new folder"):
        make_certificates(certificates / "good", ["localhost"], 1.0)

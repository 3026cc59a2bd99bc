"""`privlab split` as its users type it: a server in a process of its own, clients, and everything that can go wrong."""

import functools
import json
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from privlab.release import read_recording

pytestmark = pytest.mark.slow

MODEL = ("--model", "vit_ti", "--weights", "random", "--img-size", "32")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a folder of its own, with settings of its own, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli(cli: Callable[..., Any]) -> Callable[..., Any]:
    """Run `privlab split` as its entry point does."""
    return functools.partial(cli, "split")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Write six images in each of two class folders: noise, on dark and on bright ground."""
    rng = np.random.default_rng(0)
    for label, ground in (("dark", 0), ("light", 180)):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for i in range(6):
            pixels = ground + rng.integers(0, 60, (40, 36, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "pictures" / label / f"{i}.png")
    return tmp_path / "pictures"


def serving(spawn: Any, folder: Path, *options: object) -> tuple[Any, str]:
    """Start `privlab split serve` in a process of its own, and return the process and its address."""
    arguments = ["split", "serve", *MODEL, "--port", "0", "--json", *options]
    child = spawn("main", arguments=arguments, settings=str(folder / "settings"), folder=str(folder))
    return child, json.loads(child.line("listening"))["address"]


@pytest.fixture
def served(spawn: Any, tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    """Return a starter of servers: options ↦ the process and its address."""
    return lambda *options: serving(spawn, tmp_path, *options)


@pytest.fixture(scope="module")
def everyday(spawning: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yield the address of a server for many tests, and its token file."""
    folder = tmp_path_factory.mktemp("everyday")
    with spawning(folder) as spawn:
        yield serving(spawn, folder)[1], folder / "settings" / "privlab" / "split-token"


@pytest.fixture
def there(everyday: tuple[str, Path]) -> tuple[object, ...]:
    """Return the options that lead to that server."""
    return ("--server", everyday[0], "--token-file", everyday[1])


def events(child: Any) -> list[dict[str, Any]]:
    """Return the events that a server printed."""
    return [json.loads(line) for line in child.out.splitlines()]


def test_two_terminals(served: Any, cli: Any, pictures: Path, tmp_path: Path) -> None:
    """Serve, train, go on, ask; the token file is made by the server, and found by the client."""
    server, address = served("--record", tmp_path / "rec", "--state", tmp_path / "state")
    token = tmp_path / "settings" / "privlab" / "split-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    train = ("train", *MODEL, "--images", pictures, "--server", address, "--batch-size", 5, "--lr", 1e-3)
    first = cli(*train, "--defense", "row-permutation", "--epochs", 2, "--out", "mine", "--json").json
    assert (first["run"], first["steps"], len(first["epochs"])) == ("mine", 6, 2)
    assert first["epochs"][1]["loss"] < first["epochs"][0]["loss"]
    assert first["bytes_sent"] > 2 * 24 * 5 * 192 * 4
    assert first["latency_ms_median"] <= first["latency_ms_worst"]
    assert first["key_bits"] == pytest.approx(np.log2(120))  # 5 tokens
    assert [path.name for path in Path("mine").iterdir()] == ["client.safetensors"]
    assert stat.S_IMODE(Path("mine/client.safetensors").stat().st_mode) == 0o600

    again = cli("train", "--resume", "mine", "--epochs", 4, "--server", address, "--json").json
    assert (again["steps"], again["epochs"][:2]) == (12, first["epochs"])
    ask = ("infer", "--run", "mine", "--images", pictures, "--server", address)
    answers = cli(*ask, "--json").json
    assert answers["accuracy"] == 1
    assert [row["class"] for row in answers["predictions"]] == ["dark"] * 6 + ["light"] * 6
    table = cli(*ask, "--limit", 2).out
    assert "dark/0.png" in table
    assert "accuracy 100.00%" in table
    assert cli("infer", *MODEL, "--images", pictures, "--server", address, "--json").json["accuracy"] is not None

    assert server.kill(signal.SIGTERM) == 0
    names = [event["event"] for event in events(server)]
    assert names[0] == "listening"
    assert names[-1] == "stopped"
    assert [name for name in names if name in ("opened", "resumed")] == ["opened", *["resumed"] * 3, "opened"]
    trained, asked = (list(read_recording(tmp_path / "rec", kind)) for kind in ("step", "infer"))
    assert [b.number for b in trained] == list(range(1, 13))
    assert {b.features.shape[1:] for b in trained + asked} == {(5, 192)}


def test_columns_are_permuted_with_weights_that_the_client_brings(there: Any, cli: Any, pictures: Path) -> None:
    train = ("train", *MODEL, "--images", pictures, *there, "--batch-size", 6, "--optimizer", "sgd")
    plain = cli(*train, "--out", "plain", "--json").json
    keyed = cli(*train, "--defense", "row-permutation+column-permutation", "--out", "keyed", "--json").json
    assert keyed["epochs"][0]["loss"] == pytest.approx(plain["epochs"][0]["loss"], abs=1e-4)
    assert keyed["key_bits"] > 1000
    answers = [
        cli("infer", "--run", run, "--images", pictures, *there, "--json").json["predictions"]
        for run in ("plain", "keyed")
    ]
    for one, other in zip(*answers, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)


def test_weights_that_differ_are_refused_or_brought(there: Any, cli: Any, pictures: Path) -> None:
    train = ("train", *MODEL, "--seed", 1, "--images", pictures, *there, "--batch-size", 6)
    assert "backbone has other weights than this client's model" in cli(*train, "--out", "a").error
    assert cli(*train, "--upload", "--out", "b", "--json").json["steps"] == 2


def test_a_fresh_head_has_as_many_classes_as_asked(there: Any, cli: Any, pictures: Path) -> None:
    train = ("train", *MODEL, "--images", pictures, *there, "--batch-size", 6, "--classes", 2)
    printed = cli(*train, "--out", "mine", "--set", "gaussian-noise.std=0.1", "--defense", "gaussian-noise").out
    assert "2 steps, session " in printed
    assert "run: mine" in printed
    answers = cli("infer", "--run", "mine", "--images", pictures, *there, "--json").json
    assert {row["predicted"] for row in answers["predictions"]} <= {0, 1}
    assert all(row["probability"] >= 0.5 for row in answers["predictions"])


def test_a_client_that_is_killed_is_resumed(served: Any, spawn: Any, cli: Any, pictures: Path, tmp_path: Path) -> None:
    server, address = served("--checkpoint-every", 2)
    train = ["train", *MODEL, "--images", pictures, "--server", address, "--batch-size", 12, "--optimizer", "sgd"]
    whole = cli(*train, "--epochs", 6, "--out", "whole", "--json").json
    arguments = ["split", *train, "--epochs", 400, "--out", tmp_path / "mine"]
    doomed = spawn("main", arguments=arguments, settings=str(tmp_path / "settings"), folder=str(tmp_path))
    until = time.monotonic() + 60
    while sum(event["event"] == "saved" for event in events(server)) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    doomed.kill()
    resumed = cli("train", "--resume", "mine", "--epochs", 10, "--server", address, "--json").json
    assert len(resumed["epochs"]) == resumed["steps"] >= 10
    assert resumed["epochs"][:6] == whole["epochs"]
    assert sum(event["event"] == "resumed" for event in events(server)) == 1


def test_tls_and_certificates(served: Any, cli: Any, pictures: Path) -> None:
    made = cli("certificate", "certs", "--json").json
    assert sorted(made) == ["ca.pem", "client.key", "client.pem", "server.key", "server.pem"]
    printed = cli("certificate", "others", "--host", "localhost", "--days", 2).out
    assert "server: --tls-cert others/server.pem --tls-key others/server.key --tls-client-ca others/ca.pem" in printed
    assert "already holds ca.pem" in cli("certificate", "certs").error
    _, address = served(
        "--tls-cert", made["server.pem"], "--tls-key", made["server.key"], "--tls-client-ca", made["ca.pem"]
    )  # fmt: skip
    ask = ("infer", *MODEL, "--images", pictures, "--limit", 1, "--server", address)
    mine = ("--tls-ca", made["ca.pem"], "--tls-cert", made["client.pem"], "--tls-key", made["client.key"])
    assert len(cli(*ask, *mine, "--json").json["predictions"]) == 1
    assert "does it want TLS (--tls-ca)" in cli(*ask).error
    assert "a client's certificate" in cli(*ask, *mine[:2]).error
    assert "not accepted by --tls-ca" in cli(*ask, "--tls-ca", "others/ca.pem", *mine[2:]).error
    assert "not accepted" in cli(*ask, "--tls", *mine[2:]).error


def test_labels_may_be_what_the_model_itself_says(there: Any, cli: Any) -> None:
    """On the photographs that come along, which have no labels, as the README has it."""
    train = ("train", *MODEL, *there, "--limit", 3, "--labels", "predicted", "--out", "mine", "--lr", 1e-3)
    trained = cli(*train, "--defense", "row-permutation", "--epochs", 2, "--json").json
    assert trained["epochs"][0]["accuracy"] == 1
    assert trained["epochs"][1]["loss"] < trained["epochs"][0]["loss"]
    answers = cli("infer", "--run", "mine", "--limit", 3, *there, "--json").json
    assert answers["accuracy"] is None
    again = cli("infer", *MODEL, "--limit", 3, "--labels", "predicted", *there, "--json").json
    assert again["accuracy"] == 1


def test_an_image_that_cannot_be_read_fails_alone(there: Any, cli: Any, pictures: Path) -> None:
    (pictures / "dark" / "9.png").write_bytes(b"no image")
    result = cli("infer", *MODEL, "--images", pictures, *there, "--json")
    assert result.status == 2
    assert list(json.loads(result.out)["failed"]) == ["dark/9.png"]
    assert "Failed: dark/9.png" in result.err
    trained = cli("train", *MODEL, "--images", pictures, *there, "--out", "mine")
    assert trained.status == 0
    assert "Failed: dark/9.png" in trained.err


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """Write a token, for what goes wrong before any server is asked."""
    path = tmp_path / "token"
    path.write_text("t" * 40)
    path.chmod(0o600)
    return path


NOWHERE = ("--server", "127.0.0.1:1", "--retry-for", "0")

BAD_SERVE = [
    (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to other machines, which needs TLS"),
    (["--host", "no.such.host.invalid"], "The host 'no.such.host.invalid' is not known here"),
    (["--tls-cert", "x"], "TLS needs both --tls-cert and --tls-key"),
    (["--tls-client-ca", "x"], "TLS needs both --tls-cert and --tls-key"),
    (["--tls-cert", "x", "--tls-key", "y"], "TLS file 'x'"),
    (["--model", "vit_tu"], "Unknown model 'vit_tu'. Did you mean vit_ti"),
    (["--weights", "none.safetensors"], "none.safetensors"),
    (["--img-size", "33"], "33"),
    (["--device", "tpu"], "Unknown device 'tpu'"),
    (["--port", "70000"], "70000 is not in the range"),
    (["--idle", "0"], "0.0 is not in the range"),
    (["--checkpoint-every", "0"], "0 is not in the range"),
    (["--max-sessions", "0"], "0 is not in the range"),
    (["--max-message", "4000"], "4000 is not in the range"),
    (["--state", "token/x"], "The folder 'token/x' cannot be made"),
    (["--record", "token/x"], "--record 'token/x' cannot be made"),
    (["--nonsense"], "No such option"),
]


@pytest.mark.parametrize(("options", "says"), BAD_SERVE)
def test_a_server_is_not_started_on_bad_options(options: list[str], says: str, cli: Any, token: Path) -> None:
    assert says in cli("serve", *MODEL, "--port", 0, "--token-file", token, *options).error


def test_a_token_file_that_others_can_read_is_refused(cli: Any, token: Path, pictures: Path) -> None:
    token.chmod(0o644)
    says = "must have mode 0600. Found 0644: chmod 600 it"
    assert says in cli("serve", *MODEL, "--port", 0, "--token-file", token).error
    for command in ("train", "infer"):
        assert says in cli(command, *MODEL, "--images", pictures, *NOWHERE, "--token-file", token).error


BAD_BOTH = [
    ([], "The server cannot be reached"),
    (["--server", "here"], "--server must be HOST:PORT. Found 'here'"),
    (["--server", "192.0.2.1:5"], "--server 192.0.2.1:5 is another machine, which needs TLS"),
    (["--tls-cert", "x"], "--tls-cert and --tls-key are for TLS"),
    (["--tls-ca", "x"], "TLS file 'x'"),
    (["--token-file", "none"], "There is no token file 'none'"),
    (["--retry-for", "-1"], "-1.0 is not in the range"),
    (["--timeout", "0"], "0.0 is not in the range"),
    (["--defense", "row-permutatio"], "Unknown defense 'row-permutatio'. Did you mean row-permutation"),
    (["--defense", "row-permutation", "--set", "std=1"], "Unknown option 'std'"),
    (["--defense", "gaussian-noise", "--set", "std=x"], "the value must be of type float"),
    (["--defense", "mjp"], "E_unk"),
    (["--dtype", "float16"], "Unknown dtype 'float16'"),
    (["--batch-size", "0"], "0 is not in the range"),
    (["--batch-size", "70000"], "max_batch must be in [1, 65536]. Found 70000"),
    (["--model", "vit_tu"], "Unknown model 'vit_tu'"),
    (["--images", "nowhere"], "No file or folder 'nowhere'"),
    (["--limit", "0"], "0 is not in the range"),
]


@pytest.mark.parametrize("command", ["train", "infer"])
@pytest.mark.parametrize(("options", "says"), BAD_BOTH)
def test_a_client_is_not_started_on_bad_options(
    options: list[str], says: str, command: str, cli: Any, token: Path, pictures: Path
) -> None:
    given = () if "--images" in options else ("--images", pictures)
    assert says in cli(command, *MODEL, *NOWHERE, "--token-file", token, *given, *options).error


BAD_TRAIN = [
    (["--optimizer", "lbfgs"], "Unknown optimizer 'lbfgs'"),
    (["--lr", "0"], "lr must be above 0 and finite. Found 0.0"),
    (["--lr", "nan"], "lr must be above 0 and finite. Found nan"),
    (["--momentum", "1"], "momentum must be in [0, 1). Found 1.0"),
    (["--weight-decay", "-1"], "weight_decay must be at least 0 and finite. Found -1.0"),
    (["--epochs", "0"], "0 is not in the range"),
    (["--classes", "1"], "1 is not in the range"),
    (["--images", "samples"], "Training needs labels. 'samples/astronaut-0' has none"),
    (["--out", "token/x"], "The folder 'token/x' cannot be made"),
    (["--resume", "nowhere"], "The run in 'nowhere' keeps its options. Found --model: leave it out"),
]


@pytest.mark.parametrize(("options", "says"), BAD_TRAIN)
def test_training_is_not_begun_on_bad_options(
    options: list[str], says: str, cli: Any, token: Path, pictures: Path
) -> None:
    given = () if "--images" in options else ("--images", pictures)
    assert says in cli("train", *MODEL, *NOWHERE, "--token-file", token, *given, *options).error


def test_labels_must_fit_the_head(cli: Any, token: Path, pictures: Path) -> None:
    (pictures / "others").mkdir()
    (pictures / "dark" / "0.png").rename(pictures / "others" / "0.png")
    train = ("train", *MODEL, *NOWHERE, "--token-file", token, "--images", pictures, "--classes", 2)
    assert "The model has 2 classes. Found label 2 of 'others/0.png': use --classes" in cli(*train).error


def test_a_run_keeps_its_options_and_its_images(there: Any, cli: Any, pictures: Path, tmp_path: Path) -> None:
    cli("train", *MODEL, "--images", pictures, *there, "--out", "mine")
    assert "'mine' holds another run: --resume it" in cli(
        "train", *MODEL, "--images", pictures, *there, "--out", "mine"
    ).error  # fmt: skip
    for option in (["--lr", 1], ["--images", pictures], ["--defense", "none"], ["--seed", 0], ["--out", "x"]):
        says = f"The run in 'mine' keeps its options. Found {option[0]}: leave it out"
        assert says in cli("train", "--resume", "mine", *there, *option).error
    for option in (["--defense", "none"], ["--batch-size", 2], ["--model", "vit_ti"]):
        assert f"Found {option[0]}: leave it out" in cli("infer", "--run", "mine", *there, *option).error
    assert "holds no client.safetensors" in cli("infer", "--run", "nowhere", *there).error
    (pictures / "dark" / "0.png").unlink()
    assert "The images are not those that the run in 'mine' was begun with" in cli(
        "train", "--resume", "mine", *there
    ).error  # fmt: skip
    (tmp_path / "mine" / "client.safetensors").write_bytes(b"torn")
    assert "The checkpoint 'mine/client.safetensors' cannot be read" in cli("train", "--resume", "mine", *there).error


def test_the_extra_is_named_where_it_is_missing(cli: Any, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.util import find_spec

    missing = {"grpc"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find_spec(name))
    assert "needs the extra: pip install 'privlab[split]'" in cli("serve", "--token-file", token).error
    missing = {"trustme"}
    assert "Making certificates needs trustme" in cli("certificate", "certs").error


@pytest.mark.parametrize("command", ["serve", "train", "infer", "certificate"])
def test_every_command_has_help(command: str, cli: Any) -> None:
    result = cli(command, "--help")
    assert result.status == 0
    assert "--json" in result.out


def test_a_server_says_its_events_as_text_too(spawn: Any, cli: Any, pictures: Path, tmp_path: Path) -> None:
    arguments = ["split", "serve", *MODEL, "--port", "0"]
    server = spawn("main", arguments=arguments, settings=str(tmp_path / "settings"), folder=str(tmp_path))
    until = time.monotonic() + 60
    while "listening" not in server.err and time.monotonic() < until:
        time.sleep(0.01)
    address = server.err.partition("address=")[2].split()[0]
    cli("infer", *MODEL, "--images", pictures, "--server", address)
    assert server.kill(signal.SIGINT) == 0
    assert server.out == ""
    words = [line.split()[1] for line in server.err.splitlines() if line[:2] == "20"]
    assert words == ["listening", "opened", "closed", "stopped"]
    assert [path.name for path in Path("runs/split-server").iterdir()] == ["lock"]

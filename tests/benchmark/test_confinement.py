"""A plug-in that reaches for the network, files or processes while it runs is refused in one line."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError, read_text
from privlab.benchmark.cards import instances, read_card, write_template
from privlab.benchmark.plugins import installed, source_of_plugin
from privlab.benchmark.submit import checks_of
from privlab.testing.confinement import confined

RELEASE = "        steps = {name"
MORE = "        {line}\n        steps = {name"


@pytest.fixture
def port() -> Iterator[int]:
    """Return the port of a server that listens in a thread of this process, and answers a number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def answer() -> None:
            try:
                while True:
                    with server.accept()[0] as one:
                        one.recv(1000)
                        one.sendall(b"HTTP/1.0 200 OK\r\n\r\n0.5\n")
            except OSError:
                return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str, str], Path]:
    """Return the card of the template of a defense, with a line at its beginning and one in its release."""

    def write(first: str, line: str) -> Path:
        path, source = write_template("defense", tmp_path)
        text = source.read_text()
        assert RELEASE in text
        source.write_text(f"{first}\n{text.replace(RELEASE, MORE.replace('{line}', line))}")
        return path

    return write


def refused(path: Path) -> str:
    """Return the one line by which a card's entry is refused, at the latest in admission."""
    card = read_card(path)
    with pytest.raises(PrivlabError) as error, installed(card, source_of_plugin(card)):
        checks_of(card, "auto")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_network_through_an_allowed_package_is_refused(mine: Callable[[str, str], Path], port: int) -> None:
    path = mine("import numpy as np", f'np.genfromtxt("http://127.0.0.1:{port}/x")')
    assert f"reads the network: urllib.Request to http://127.0.0.1:{port}/x in release; an entry may not" in refused(
        path
    )


def test_the_network_is_refused_whatever_the_plugin_makes_of_the_error(
    mine: Callable[[str, str], Path], port: int
) -> None:
    line = f'try:\n            np.genfromtxt("http://127.0.0.1:{port}/x")\n        except Exception:\n            pass'
    assert "reads the network" in refused(mine("import numpy as np", line))


def test_a_socket_is_refused(mine: Callable[[str, str], Path], port: int) -> None:
    line = f"d.os.sys.modules['socket'].create_connection(('127.0.0.1', {port}))"
    path = mine("import numpy.lib._datasource as d", line)
    assert f"reads the network: socket.getaddrinfo to 127.0.0.1:{port} in release" in refused(path)
    said = rf"socket\.connect to 127\.0\.0\.1:{port} in it"
    with socket.socket() as made, pytest.raises(PrivlabError, match=said), confined("nobody", "it"):
        made.connect(("127.0.0.1", port))


def test_a_subprocess_is_refused(mine: Callable[[str, str], Path]) -> None:
    path = mine("import numpy.lib._datasource as d", "d.os.system('true')")
    assert "starts a process: os.system in release; an entry may not" in refused(path)
    with pytest.raises(PrivlabError, match=r"subprocess\.Popen"), confined("nobody", "it"):
        subprocess.run([sys.executable, "-c", ""], check=True)


def test_files_are_refused(mine: Callable[[str, str], Path], tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1\n")
    path = mine("import numpy as np", f'np.genfromtxt("{tmp_path / "x.csv"}")')
    assert f"reads the file {tmp_path / 'x.csv'} in release" in refused(path)
    with pytest.raises(PrivlabError, match=r"y\.csv"), confined("nobody", "it"):
        (tmp_path / "y.csv").write_text("2")
    assert not (tmp_path / "y.csv").exists()
    with pytest.raises(PrivlabError, match=r"os\.remove.*x\.csv"), confined("nobody", "it"):
        (tmp_path / "x.csv").unlink()
    assert (tmp_path / "x.csv").exists()


def test_what_an_import_and_privlab_read_is_let_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harmless.py").write_text("with open(__file__.replace('.py', '.txt')) as file:\n    X = file.read()\n")
    (tmp_path / "harmless.txt").write_text("4")
    finder = FileFinder(str(tmp_path), (SourceFileLoader, [".py"]))
    spec = finder.find_spec("harmless")
    assert spec is not None
    assert spec.loader is not None
    with confined("nobody", "it"):
        made = module_from_spec(spec)
        spec.loader.exec_module(made)
        assert read_text(tmp_path / "harmless.txt", "text") == "4"
    assert made.X == "4"


def test_an_import_that_reads_the_network_is_refused(mine: Callable[[str, str], Path], port: int) -> None:
    path = mine(f'import numpy as np\n\nX = np.genfromtxt("http://127.0.0.1:{port}/x")', "pass")
    assert "reads the network: urllib.Request" in (said := refused(path))
    assert said.endswith("in its import; an entry may not.")


def test_pretrained_weights_are_refused_at_once(mine: Callable[[str, str], Path]) -> None:
    path = mine("import timm", 'timm.create_model("vit_tiny_patch16_224", pretrained=True)')
    begun = time.monotonic()
    assert "; an entry may not" in refused(path)
    assert time.monotonic() - begun < 20


def test_what_is_confined_is_the_plugin_alone(mine: Callable[[str, str], Path], tmp_path: Path, port: int) -> None:
    card = read_card(mine("", "pass"))
    with installed(card, source_of_plugin(card)):
        (part,) = instances(card)
        assert type(part).release.__name__ == "release"
        (tmp_path / "z.txt").write_text("3")
        socket.create_connection(("127.0.0.1", port)).close()


def test_an_error_of_the_plugin_stays_its_own() -> None:
    with pytest.raises(ZeroDivisionError), confined("nobody", "it"):
        _: Any = 1 / 0

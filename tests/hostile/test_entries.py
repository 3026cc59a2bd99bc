"""Tricks of an entry do not raise its score: truth, metrics and other calls are out of its reach."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from privlab.base import PrivlabError
from privlab.benchmark import read_card
from privlab.benchmark.cards import write_template
from privlab.benchmark.measure import Measurement, Photographs
from privlab.benchmark.plugins import check_source, installed, source_of_plugin
from privlab.benchmark.submit import checks_of, worth_of
from privlab.evaluation import attack_batch
from privlab.metrics import psnr
from privlab.testing import plugin_process
from privlab.testing.confined import has_seccomp, landlock_version
from privlab.testing.defenses import small_victim
from privlab.testing.plugin_child import Seeds
from privlab.testing.plugin_process import Limits, Plugin
from privlab.threat import Observation

SECRET = 0.8125
LIMITS = Limits(seconds=20.0, memory=2**30, answer=2**26)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["bubblewrap", "kernel"])
def plugin(request: pytest.FixtureRequest) -> Iterator[Plugin]:
    """Return the process of all tricks, in each way in which this system confines it."""
    if request.param == "bubblewrap" and plugin_process._bubblewrap() is None:
        pytest.skip("bubblewrap does not work here")
    if request.param == "kernel" and not (landlock_version() and has_seccomp()):
        pytest.skip("the kernel offers no Landlock or no seccomp")
    made = Plugin((Path(__file__).parent / "cheats.py.txt").read_text(), LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "kernel":
            patch.setattr(plugin_process, "_bubblewrap", lambda: None)
        yield made
        made.close()


@pytest.fixture(scope="module")
def kinds(plugin: Plugin) -> dict[str, Any]:
    """Return the classes by which the tricks are called."""
    return plugin.stand_ins()


@pytest.fixture(scope="module")
def seen() -> Observation:
    """Return an observation; its gradient is a view of what has the private image."""
    private = torch.full((2, 3, 64, 64), SECRET)
    whole = torch.cat([torch.zeros(1, 3 * 64 * 64), private.flatten(1)])
    return Observation(small_victim(), {"w": whole[:1]}, frozenset())


TRICKS = (
    *("Attack", "Frames", "Objects", "Views", "Patches", "Remembers", "Subclasses", "Starts", "Flags", "Kernel"),
    *("Numbers", "Memories", "Pipes", "Surroundings", "Others"),
)


@pytest.mark.parametrize("name", TRICKS)
def test_an_attack_finds_nothing_beyond_its_observation(kinds: dict[str, Any], seen: Observation, name: str) -> None:
    private = torch.full((1, 3, 64, 64), SECRET)
    square, before = torch.Tensor.square, psnr(private, private * 0.5)
    for _ in range(2):
        images = attack_batch(kinds[name](), seen).images
        assert (images == 0.25).all()
        assert type(images) is torch.Tensor
    assert torch.Tensor.square is square
    assert torch.equal(psnr(private, private * 0.5), before)


@pytest.mark.parametrize("name", ["Prints", "Forks"])
def test_what_a_plugin_writes_elsewhere_spoils_its_own_answer_at_most(
    kinds: dict[str, Any], seen: Observation, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    with suppress(PrivlabError):
        assert (kinds[name]()(seen).images == 0.25).all()
    assert (kinds["Attack"]()(seen).images == 0.25).all()
    assert "xxx" not in "".join(capfd.readouterr())


def test_files_and_the_network_are_out_of_reach(kinds: dict[str, Any], seen: Observation, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(PrivlabError, match=r"FileNotFoundError|PermissionError"):
        kinds["Files"](path=str(tmp_path / "secret"))(seen)
    for path in (tmp_path / "written", Path("/tmp/written"), Path("/dev/shm/written"), Path("written")):
        with pytest.raises(PrivlabError, match="Error"):
            kinds["Writes"](path=str(path))(seen)
        assert not path.exists()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def answer() -> None:
            try:
                server.accept()[0].sendall(b"x")
            except OSError:
                return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(PrivlabError, match="Error"):
            kinds["Network"](port=server.getsockname()[1])(seen)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_a_plugin_reads_no_folder_in_which_python_was_started(
    kinds: dict[str, Any], seen: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("secret")
    monkeypatch.syspath_prepend(str(tmp_path))
    again = Plugin(kinds["Files"].plugin.source, LIMITS)
    with pytest.raises(PrivlabError, match=r"FileNotFoundError|PermissionError"):
        again.stand_ins()["Files"](path=str(tmp_path / "secret"))(seen)
    again.close()


def test_a_defense_cannot_be_honest_in_the_first_calls_alone(kinds: dict[str, Any]) -> None:
    turning = kinds["Turns"]()
    draws = [torch.Generator().manual_seed(i) for i in range(3)]
    for _ in range(3):
        released = turning.release({"w": torch.ones(3, 8)}, draws)
        assert (released["w"] == 1).all()


def test_an_answer_is_in_no_memory_of_a_later_call(kinds: dict[str, Any]) -> None:
    for _ in range(3):
        released = kinds["Leftovers"]().release({"w": torch.ones(1, 64)}, [torch.Generator()])
        assert (released["w"] == 0.37109375).all()


def test_limits_end_a_call(kinds: dict[str, Any], plugin: Plugin, seen: Observation) -> None:
    with pytest.raises(PrivlabError, match=r"memory|Memory"):
        kinds["Memory"]()(seen)
    quick = Plugin(plugin.source, Limits(seconds=2.0, memory=2**30, answer=2**26))
    with pytest.raises(PrivlabError, match=r"longer than 2 seconds|signal"):
        quick.stand_ins()["Endless"]()(seen)
    quick.close()


def test_a_call_ends_with_the_process_that_asked_for_it(plugin: Plugin) -> None:
    again = Plugin(plugin.source, LIMITS)
    again.ask("describe")
    assert again._process is not None

    def ask() -> None:
        with suppress(PrivlabError, ValueError):  # its pipe is closed
            again.ask("__call__", "Sleeps", {}, None)

    threading.Thread(target=ask, daemon=True).start()
    until, processes = time.monotonic() + 20, list[psutil.Process]()
    while len(processes) < 2 and time.monotonic() < until:
        processes = psutil.Process(again._process.pid).children(recursive=True)
    again.close()
    assert processes
    assert not psutil.wait_procs(processes, 10)[1]


def test_who_ends_the_process_is_refused_and_the_next_call_works(kinds: dict[str, Any], seen: Observation) -> None:
    with pytest.raises(PrivlabError, match=r"ended|failed"):
        kinds["Kills"]()(seen)
    assert (kinds["Attack"]()(seen).images == 0.25).all()


@pytest.mark.parametrize("what", ["nan", "large", "shape", "huge", "object", "text", "nested", "none"])
def test_what_an_attack_may_not_return_is_refused(kinds: dict[str, Any], seen: Observation, what: str) -> None:
    with pytest.raises(PrivlabError):
        attack_batch(kinds["Returns"](what=what), seen)


def test_a_subclass_of_tensors_comes_as_a_plain_tensor(kinds: dict[str, Any], seen: Observation) -> None:
    try:
        images = attack_batch(kinds["Returns"](what="subclass"), seen).images
    except PrivlabError:
        return
    assert type(images) is torch.Tensor
    assert not (images == SECRET).all()


@pytest.mark.parametrize(
    "described",
    [
        {"A": {"parameters": {"class": 1}, "values": {}, "depending": [], "methods": []}},
        {"A": {"parameters": {"x": [1]}, "values": {}, "depending": [], "methods": []}},
        {"A": {"parameters": {}, "values": {}, "depending": [], "methods": []}, "B": 1},
        ["A"],
        None,
    ],
)
def test_classes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, described: Any) -> None:
    monkeypatch.setattr(Plugin, "ask", lambda self, what: described)
    with pytest.raises(PrivlabError, match=r"The plug-in returned .*cannot be"):
        Plugin("").stand_ins()


@pytest.mark.parametrize("order", [None, "x"])
def test_what_a_defense_may_not_feed_is_refused(monkeypatch: pytest.MonkeyPatch, order: Any) -> None:
    images = torch.rand(2, 3, 8, 8)
    feed = SimpleNamespace(images=images[:1].double(), order=order, moved=order, masked_pe=None, replacement=None)
    described = {"A": {"parameters": {}, "values": {"name": "a"}, "depending": [], "methods": ["__call__"]}}
    answers = {"describe": described, "make": {}}
    monkeypatch.setattr(Plugin, "ask", lambda self, what, *given: answers.get(what, feed))
    monkeypatch.setattr(plugin_process, "Feed", SimpleNamespace)
    with pytest.raises(PrivlabError, match="The plug-in returned"):
        Plugin("").stand_ins()["A"]()(images, 4, [torch.Generator(), torch.Generator()])


SOURCES = ("-" * 10**4 + "1", "a" + ".b" * 10**4, "(" * 10**4, "a = 1\x00", "a = '\ud800'", "a;" * 2**19)


@pytest.mark.parametrize("text", SOURCES, ids=range(len(SOURCES)))
def test_source_that_is_too_deep_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(PrivlabError, match=r"cannot be read as Python|not valid Python|At most"):
        check_source(text, "plug-in.py")


def test_name_of_a_plugin_installs_nothing_else(tmp_path: Path) -> None:
    """With a line break in it, the metadata of the plug-in would name other code as well."""
    write_template("defense", tmp_path)
    card = replace(read_card(tmp_path / "my_defense.toml"), uses="x = os:abort\nmine")
    with pytest.raises(PrivlabError, match="A name must have"), installed(card, "a = 1"):
        pass


@pytest.mark.parametrize("what", ["nan", "infinite", "shape", "name", "bool", "list", "none"])
def test_what_a_defense_may_not_release_is_refused(kinds: dict[str, Any], what: str) -> None:
    with pytest.raises(PrivlabError, match="plug-in"):
        kinds["Sends"](what=what).release({"w": torch.ones(2, 8)}, [torch.Generator(), torch.Generator()])


def test_a_process_ends_where_another_one_holds_its_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bubblewrap's own child does so where it is killed before it could ask to die with its parent."""
    os.mkfifo(tmp_path / "gate")
    script = f"PATH={os.environ['PATH']}; setsid cat {tmp_path / 'gate'} & cat"
    monkeypatch.setattr(plugin_process, "_command", lambda: ["/bin/sh", "-c", script])
    made = Plugin("")
    made._started()
    with (tmp_path / "gate").open("w"):  # it waits until the other process reads, and lets that end
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def test_admission_and_a_measured_run_look_the_same_to_a_defense(kinds: dict[str, Any]) -> None:
    watching = kinds["Watches"]()
    draws = [torch.Generator().manual_seed(i) for i in range(5)]
    admitted = watching.release({"w": torch.rand(2, 8, dtype=torch.float64)}, draws[:2])["w"]
    measured = watching.release({"w": torch.rand(5, 8)}, draws)["w"]
    assert torch.equal(admitted.unique(dim=0), measured.double().unique(dim=0))
    _, size, exact, images, generators, calls, *_ = admitted[0].tolist()
    assert (size, exact, images, generators, calls) == (8, 1, 1, 1, 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 8,
        plugin_process.LENGTH.pack(2) + b"{}",
        plugin_process.LENGTH.pack(4) + b"null",
        plugin_process.LENGTH.pack(30) + b'{"done": {"object": "Popen"}}  ',
        plugin_process.LENGTH.pack(27) + b'{"done": {"tensor": "none"}' + b"\x80\x04cos\nsystem\n",
    ],
)
def test_an_answer_in_another_form_is_refused(plugin: Plugin, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(Plugin, "_read", lambda *given: answer)
    with pytest.raises(PrivlabError):
        plugin.ask("describe")
    plugin.close()


def test_every_call_of_a_measured_run_is_one_that_admission_makes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_template("defense", tmp_path)
    card = read_card(tmp_path / "my_defense.toml")
    ask, calls = Plugin.ask, list[tuple[Any, ...]]()

    def recorded(self: Plugin, *call: Any) -> Any:
        what, *given = call
        calls.append((what, *map(_form, given[2:])))
        return ask(self, *call)

    monkeypatch.setattr(Plugin, "ask", recorded)
    with installed(card, source_of_plugin(card)):
        checks_of(card, "auto")
        admitted, measuring = {*calls}, len(calls)
        own = Measurement(card, Photographs())
        for case, setting in own.cases():
            own.records_of(case, setting)
        worth_of(card, Photographs())
    measured = {*calls[measuring:]}
    assert {what for what, *_ in measured} == {"make", "release", "variance"}
    assert measured <= admitted


def _form(value: Any) -> Any:
    """Return all of an argument but the values of its tensors and its seeds."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape  # the pipe makes it contiguous
    if isinstance(value, Seeds):
        return len(value.images), value.shared is None
    if isinstance(value, dict):
        return tuple((name, _form(each)) for name, each in value.items())
    return value


def test_the_number_of_a_call_and_what_is_around_it_are_always_the_same(kinds: dict[str, Any]) -> None:
    seen = [kinds["Watches"]().remark() for _ in range(3)]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["numbers"] == (0, 0)


@pytest.mark.parametrize("offered", ["Landlock", "seccomp"])
def test_either_alone_takes_what_it_can(offered: str, tmp_path: Path) -> None:
    if not (landlock_version() and has_seccomp()):
        pytest.skip("the kernel offers only one of them")
    (tmp_path / "secret").write_text("secret")
    code = f"""
import os, socket, sys
from privlab.testing import confined
confined.landlock_version = lambda: {landlock_version() if offered == "Landlock" else 0}
confined.has_seccomp = lambda: {offered == "seccomp"}
confined.confine(())
def does(action):
    try:
        action()
        return "1"
    except OSError:
        return "0"
def fork():
    if os.fork() == 0:
        os._exit(0)
folder = {str(tmp_path)!r}
print(does(lambda: open(folder + "/secret").close()), does(lambda: open(folder + "/new", "w").close()),
    does(lambda: os.kill(os.getppid(), 0)), does(lambda: socket.create_connection(("127.0.0.1", 9), 1)), does(fork))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    reads, writes, reaches, connects, forks = ran.stdout.split()
    assert (writes, connects) == ("0", "0")
    assert (reads, forks) == (("0", "1") if offered == "Landlock" else ("1", "0"))
    assert reaches == ("0" if offered == "seccomp" or landlock_version() >= 6 else "1")
    assert not (tmp_path / "new").exists()

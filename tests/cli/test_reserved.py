"""An audit has its run directory before its work begins, so that no other process and no earlier run can cost it."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from privlab.base import PrivlabError
from privlab.cli.common import reserved

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, where the clock stands still."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr("privlab.cli.common.datetime", Clock)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def files(tmp_path: Path, step: Callable[..., Path], recording: Path, state: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return the options of each audit, and its files."""
    for name, factor in (("before", 1.0), ("after", 1.01)):
        save_file({key: factor * value for key, value in state.items()}, tmp_path / f"{name}.safetensors")
    update = ["update", "before.safetensors", "after.safetensors", "--client", "sgd"]
    return {"gradients": ["gradients", step()], "update": update, "features": ["features", recording]}


def names() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def test_runs_that_start_in_one_second_have_directories_of_their_own() -> None:
    what = ["timm:a/b", "update"]
    with reserved(None, what) as one, reserved(None, what) as two, reserved(None, what):
        (one / "run.json").write_text("{}")
        assert names() == [f"20260102-030405-timm_a_b-update{more}" for more in ("", "-2", "-3")]
        assert two == one.with_name(f"{one.name}-2")
    assert names() == [one.name]  # those in which nothing was written are gone
    with reserved(Path("other"), what) as named:
        assert named == Path("other")
    assert not named.exists()
    with reserved(None, ["/home/me/checkpoint-5", "update"]) as folder:
        assert folder.name == "20260102-030405-checkpoint-5-update"


def test_a_place_where_no_directory_can_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(PrivlabError, match=r"^'runs.*--out"), reserved(None, []):
        pass


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("gradients", "privlab.runs.audit_gradients"),
        ("update", "privlab.runs.audit_gradients"),
        ("features", "privlab.runs.audit_features"),
    ],
)
def test_the_default_directory_of_an_audit_is_there_before_its_work(
    cli: Cli, files: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, kind: str, work: str
) -> None:
    found: list[Path] = []

    def audits(*_: object, out: Path, **__: object) -> None:
        found.append(out)
        with reserved(None, ["vit_ti", kind]) as other:
            assert out.is_dir()
            assert other.name == f"{out.name}-2"
        raise PrivlabError("stopped here")

    monkeypatch.setattr(work, audits)
    done = cli("audit", *files[kind], "--model", "vit_ti", "--img-size", 32)
    assert done.error == "stopped here"
    assert found == [Path("runs", f"20260102-030405-vit_ti-{kind}")]
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", ["gradients", "update", "features"])
@pytest.mark.parametrize(
    ("name", "said"), [("run.json", "holds another run"), ("mine.txt", "holds files of something")]
)
def test_a_directory_of_something_else_is_refused_before_the_work(
    cli: Cli, files: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, kind: str, name: str, said: str
) -> None:
    for work in ("audit_release.read_audited", "audit_recording.audited_victim"):
        monkeypatch.setattr(f"privlab.runs.{work}", lambda *_, **__: pytest.fail("the work began"))
    Path("there").mkdir()
    Path("there", name).write_text(json.dumps({"specification": {}, "status": "finished"}))
    done = cli("audit", *files[kind], "--model", "vit_ti", "--img-size", 64, "--out", "there")
    assert done.status == 2
    assert said in done.error
    assert [path.name for path in Path("there").iterdir()] == [name]

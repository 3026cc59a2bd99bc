"""The generated code is what split.proto says."""

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from privlab.split.protocol import split_pb2

FOLDER = Path(split_pb2.__file__).resolve().parent
NAME = "privlab/split/protocol/split.proto"


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """Run the documented command, with the output somewhere else."""
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    source = tmp_path / NAME
    source.parent.mkdir(parents=True)
    source.write_text((FOLDER / "split.proto").read_text())
    command = re.search(r"python (-m grpc_tools.+)", (FOLDER / "__init__.py").read_text())
    assert command is not None
    subprocess.run([sys.executable, *command[1].split()], cwd=tmp_path, check=True, timeout=60)
    return source.parent


def described(code: Path) -> bytes:
    """Return the serialised description of all messages that stands in generated code."""
    calls = (node for node in ast.walk(ast.parse(code.read_text())) if isinstance(node, ast.Call))
    (text,) = (c.args[0] for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "AddSerializedFile")
    assert isinstance(text, ast.Constant)
    assert isinstance(text.value, bytes)
    return text.value


def test_the_checked_in_code_describes_the_same_messages(generated: Path) -> None:
    assert described(FOLDER / "split_pb2.py") == described(generated / "split_pb2.py")


def test_the_checked_in_code_is_what_the_documented_version_generates(generated: Path) -> None:
    documented = re.search(r"grpcio-tools ([\d.]+)", (FOLDER / "__init__.py").read_text())
    assert documented is not None
    if version("grpcio-tools") != documented[1]:
        pytest.skip(f"needs grpcio-tools {documented[1]}")
    for name in ("split_pb2.py", "split_pb2.pyi"):
        assert (generated / name).read_text() == (FOLDER / name).read_text()

"""All files go through one reader: what opens or parses one elsewhere is named here, with the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import privlab

PACKAGE = Path(privlab.__file__).parent
FOLDERS = (PACKAGE, PACKAGE / "attacks", PACKAGE / "defenses")  # the last two are links, which rglob leaves out

READS = {
    *("open", "read_bytes", "read_text", "load_file", "safe_open", "fromfile", "memmap", "loadtxt", "genfromtxt"),
    *("os.open", "json.load", "json.loads", "tomllib.load", "tomllib.loads", "pickle.load", "pickle.loads", "np.load"),
    *("torch.load", "Image.open", "tarfile.open", "zipfile.ZipFile", "nibabel.load", "pydicom.dcmread", "pd.read_csv"),
    *("pq.read_table", "pq.ParquetFile", "ParquetFile"),
}
"""What opens or parses a file. `open` and `read_*` count as methods too."""

SHIPPED = "a file of the package"
CHECKED = "after check_file or open_file; the library must have the path"
OPENED = "what the reader has opened or returned"
MADE = "what this process has made"
FOLDER = "a file of a run directory, in which refuse_links has found regular files alone"
PLACE = "stores/strips.py opens it"

ALLOWED: dict[str, dict[str, str]] = {
    "attacks/solvers/denoiser.py": {"load_file": SHIPPED},
    "base/files.py": {"os.open": "creates the file that is written"},
    "base/sources.py": {"read_text": SHIPPED},
    "base/streams.py": {"open": "standard output", "os.open": "the null device"},
    "benchmark/page.py": {"json.loads": MADE},
    "benchmark/standing.py": dict.fromkeys(("json.loads", "read_bytes", "read_text", "tarfile.open"), SHIPPED),
    "cli/common.py": {"tomllib.loads": SHIPPED},
    "grids/external.py": {"json.loads": MADE},
    "grids/fill.py": {"json.loads": MADE},
    "grids/plan.py": {"safe_open": FOLDER},
    "grids/tasks.py": {"load_file": FOLDER},
    "images/archives.py": dict.fromkeys(("np.load", "tarfile.open", "zipfile.ZipFile"), OPENED),
    "images/data.py": {"pickle.load": MADE},
    "images/datasets.py": {"pq.ParquetFile": CHECKED},
    "images/decode.py": {"Image.open": OPENED},
    "images/medical.py": {"nibabel.load": CHECKED, "np.load": CHECKED, "pydicom.dcmread": OPENED},
    "inventory/doctor.py": {"tomllib.loads": SHIPPED},
    "inventory/texts.py": {"json.loads": SHIPPED},
    "keys/encryption.py": {"safe_open": CHECKED},
    "keys/key_file.py": {"json.loads": MADE},
    "reassembly/predictors.py": {"safe_open": CHECKED},
    "release/gradient_file.py": {"safe_open": CHECKED},
    "report/figures/sheet.py": {"open": PLACE},
    "report/flag_meanings.py": {"tomllib.loads": SHIPPED},
    "report/identity.py": {"open": PLACE},
    "report/page/pictures.py": {"Image.open": OPENED},
    "report/run.py": {"open": PLACE, "Image.open": FOLDER},
    "runs/attack.py": {"json.loads": MADE},
    "runs/own_update.py": {"open": "appends to a log"},
    "split/client/client.py": {"open": "opens a session"},
    "split/protocol/checkpoint.py": {"safe_open": CHECKED},
    "split/protocol/security.py": {"os.open": "creates the token file"},
    "stores/strips.py": {"Image.open": OPENED},
    "testing/confined.py": {"os.open": "names a path in a rule of Landlock"},
    "testing/plugin_child.py": {
        "os.open": "the null device",
        "pickle.loads": "what privlab's own process sends",
    },
    "testing/plugin_process.py": {"json.loads": "the answer of a plug-in, of a bounded size"},
    "training/kept.py": {"safe_open": "the user's own cache"},
    "victims/weights.py": dict.fromkeys(("load_file", "np.load", "torch.load"), CHECKED),
}
"""By module and name of the call, why it is no reader outside `base/reading.py`."""


def name_of(call: ast.Call) -> str:
    """Return the name of what is called, as READS has it, or an empty text."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    if isinstance(function.value, ast.Name) and (named := f"{function.value.id}.{function.attr}") in READS:
        return named
    return function.attr


def is_resource(call: ast.Call) -> bool:
    """Return whether a call reads a file of the package by importlib.resources: files(…) is in what it is called on."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) else call
    return any(isinstance(part, ast.Call) and name_of(part) == "files" for part in ast.walk(inner))


def readers() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each call that opens or parses a file outside the reader."""
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module == "base/reading.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and name_of(node) in READS and not is_resource(node):
                base = isinstance(node.func, ast.Name) and node.func.id in ("read_bytes", "read_text")
                if not base:
                    yield module, name_of(node)


def test_no_file_is_read_past_the_reader() -> None:
    found = {*readers()}
    allowed = {(module, name) for module, names in ALLOWED.items() for name in names}
    assert found - allowed == set()
    assert allowed - found == set()

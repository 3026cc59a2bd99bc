"""The experiments that come with privlab, by name."""

from pathlib import Path

from privlab.base import unknown_name

_HERE = Path(__file__).parent


def experiment_names() -> list[str]:
    """Return the names of the TOML files beside this one."""
    return sorted(path.stem for path in _HERE.glob("*.toml"))


def find_experiment(name: str) -> Path:
    """Return the file of an experiment: a path, or a name of ours.

    Raises:
        PrivlabError: if there is neither.
    """
    if name in experiment_names() and not Path(name).is_file():
        return _HERE / f"{name}.toml"
    if Path(name).suffix == ".toml" or Path(name).is_file():
        return Path(name)
    raise unknown_name("experiment", name, [*experiment_names(), "FILE.toml"])

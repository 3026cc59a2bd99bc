"""Which engine runs the tasks of a grid, and with how many workers. Importing this costs no import of torch."""

from dataclasses import dataclass

from privlab.base import PrivlabError, unknown_name

ENGINES: dict[str, str] = {
    "local": "this process, or --workers processes of this machine, each with one GPU where there are several",
    "ray": "a Ray cluster (privlab[ray]): --ray-address, or one started here with --workers processes",
}
"""Where the tasks of a grid may run."""


@dataclass(frozen=True)
class Engine:
    """Where tasks run; nothing here changes a result.

    `cpus` and `gpus` are what a task reserves on a Ray cluster.

    Raises:
        PrivlabError: for an unknown engine, or a number out of range.
    """

    name: str = "local"
    workers: int = 1
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        """Check name and numbers."""
        if self.name not in ENGINES:
            raise unknown_name("engine", self.name, ENGINES)
        if self.workers < 1:
            raise PrivlabError(f"--workers must be a positive number. Found {self.workers}.")
        if not (self.cpus > 0 and self.gpus >= 0):
            raise PrivlabError(
                f"--task-cpus must be positive, --task-gpus not negative. Found {self.cpus:g} and {self.gpus:g}."
            )
        if self.address is not None and self.name != "ray":
            raise PrivlabError(f"--ray-address is for --engine ray. Found --engine {self.name}.")


IN_PROCESS = Engine()
"""Runs tasks one after the other, in this process."""

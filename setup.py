"""Pack the results of the benchmark's entries in the wheel; everything else of the build is in pyproject.toml."""

import shutil
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


def pack(results: Path) -> None:
    """Replace a folder of result files by an archive beside it, which is a tenth as large."""
    with tarfile.open(results.with_suffix(".tar.xz"), "w:xz", preset=9) as archive:
        for path in sorted(results.glob("*.json")):
            archive.add(path, path.name)
    shutil.rmtree(results)


class BuildPacked(build_py):
    """A build whose result files, 12 MB of JSON, are one archive, which `privlab.benchmark.standing` reads."""

    def run(self) -> None:
        """Build the package and pack the result files."""
        super().run()
        results = Path(self.build_lib, "privlab/experiments/benchmark/results")
        if not self.editable_mode and results.is_dir():
            pack(results)


setup(cmdclass={"build_py": BuildPacked})

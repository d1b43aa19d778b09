"""Environments with the wheel and some of its extras, made offline of the packages installed here."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from shutil import rmtree
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from tests.packaging.conftest import TIMEOUT_SECONDS, run


class Environment:
    """A virtual environment with the wheel and the extras named.

    Arguments:
        base: an environment with the same wheel, whose files and bytecode of it are used, too.
    """

    def __init__(
        self, folder: Path, wheel: Path, extras: set[str], base: "Environment | None" = None
    ) -> None:
        self.folder = folder
        run(find_uv_bin(), "venv", "--quiet", "--python", sys.executable, folder)
        run(
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--offline",
            "--no-deps",
            "--python",
            self.python,
            wheel,
        )
        (site,) = folder.glob("lib/python*/site-packages")
        self.code = site / "postroom"
        if base is not None:
            rmtree(self.code)
            self.code.symlink_to(base.code)
        for package in self._packages(wheel, extras):
            for file in package.files or []:
                source = Path(str(package.locate_file(file)))
                if {"..", "__pycache__"}.isdisjoint(file.parts) and source.is_file():
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    (site / file).symlink_to(source)
                    _share_bytecode(source.parent, (site / file).parent)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment in its folder, with no variable but the PATH."""
        return subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.folder,
            env={"PATH": os.defpath, "HOME": str(self.folder), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )

    def output(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @staticmethod
    def _packages(wheel: Path, extras: set[str]) -> list[Distribution]:
        """Return the installed packages that the wheel requires with its extras, directly or not."""
        packages: dict[tuple[str, frozenset[str]], Distribution] = {}

        def collect(requirements: list[str], extras: set[str]) -> None:
            for requirement in _required(requirements, extras):
                name = canonicalize_name(requirement.name)
                key = (name, frozenset(requirement.extras))
                if name == "postroom":
                    collect(own, requirement.extras)
                elif key not in packages:
                    packages[key] = distribution(name)
                    collect(packages[key].requires or [], requirement.extras)

        own = requirements_of(wheel)
        collect(own, extras)
        return list({name: package for (name, _), package in packages.items()}.values())


def _share_bytecode(of: Path, folder: Path) -> None:
    """Have a folder use the bytecode of another: else each environment would compile its packages anew."""
    cached, own = of / "__pycache__", folder / "__pycache__"
    if cached.is_dir() and not own.is_symlink():
        own.symlink_to(cached)


def requirements_of(wheel: Path) -> list[str]:
    """Return what a wheel requires, its extras included."""
    (info,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    return PathDistribution(info).requires or []


def _required(requirements: list[str], extras: set[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
        # chdb requires pandas, which is left out: see [tool.uv] in pyproject.toml.
        if applies and canonicalize_name(requirement.name) != "pandas":
            yield requirement

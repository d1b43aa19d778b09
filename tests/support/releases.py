"""Released versions of Postroom, each in an environment of its own that is built from the history."""

import fcntl
import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv" / "releases"
RELEASES = {"0.1.0": "aab8b3a1061ad77a33030f6494a33255579e15d3"}
"""Commits of the releases, oldest first; a release is added when it was cut (ADR 0150)."""
LAST = next(reversed(RELEASES))
SECONDS = 300


def install_release(version: str) -> Path:
    """Return the interpreter of an environment with the wheel of a release, which is built once.

    The environment borrows the packages of this one: a path in a .pth file adds those, but not this
    environment's own Postroom, which is itself a .pth file.
    """
    folder = ENVIRONMENTS / f"{version}-{RELEASES[version][:12]}"
    python = folder / "bin" / "python"
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of the suite build it, too
        if not (folder / "ready").exists():
            files = read_files(version)
            shutil.rmtree(folder, ignore_errors=True)
            source, uv = folder / "source", find_uv_bin()
            files.extractall(source, filter="data")
            _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
            (wheel,) = folder.glob("*.whl")
            _run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
            options = ("--quiet", "--offline", "--no-deps", "--compile-bytecode")
            _run(uv, "pip", "install", *options, "--python", python, wheel)
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
            shutil.rmtree(source)
            (folder / "ready").touch()
    return python


def read_files(version: str) -> tarfile.TarFile:
    """Return the files of a release; skip the test where its commit is missing, as in a shallow clone."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", RELEASES[version]], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"The commit {RELEASES[version][:12]} of {version} is not in the history of this clone.")
    return tarfile.open(fileobj=io.BytesIO(archive.stdout))


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

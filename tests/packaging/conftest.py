import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 900
"""A command that hangs fails, also on a machine that is sixteen times as slow."""


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return what it printed; its errors appear in the failure."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.fixture(scope="session")
def consumer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel, and a service of someone else's that has a package called `domain`.

    Third-party dependencies are borrowed from this environment: a path in a .pth file adds those, but not
    this environment's own editable postroom, which is itself a .pth file.
    """
    home = tmp_path_factory.mktemp("consumer")
    run(find_uv_bin(), "venv", "--quiet", "--python", sys.executable, home / ".venv")
    python = home / ".venv/bin/python"
    run(find_uv_bin(), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (home / "domain").mkdir()
    (home / "domain/__init__.py").write_text("OWNER = 'consumer'\n")
    return home

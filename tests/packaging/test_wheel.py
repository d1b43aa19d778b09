"""The built wheel holds every layer and lives beside a consumer that has a `domain` package of its own."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
LAYERS = ("domain", "application", "adapters", "projections")

IMPORT_EVERYTHING = """
import importlib, json, pathlib
import domain
import postroom

names = [
    ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for root in [pathlib.Path(postroom.__path__[0]).parent]
    for file in sorted(root.glob("postroom/**/*.py"))
]
modules = [importlib.import_module(name) for name in names]
files = [module.__file__ for module in modules]
print(json.dumps({"domain": domain.__file__, "owner": domain.OWNER, "postroom": files}))
"""


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return what it printed; its errors appear in the failure."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources() -> set[str]:
    """Return every file of the layers, but for caches, as paths below the root."""
    return {
        str(file.relative_to(ROOT))
        for layer in LAYERS
        for file in (ROOT / layer).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
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


def test_the_wheel_holds_every_file_of_every_layer_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"postroom/{source}" for source in sources()}


def test_the_wheel_is_typed_in_every_layer_and_leaves_the_namespace_open(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"postroom/{layer}/py.typed" for layer in LAYERS} <= names
    assert "postroom/__init__.py" not in names


def test_the_wheel_carries_its_licence_and_its_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "postroom = postroom.adapters.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_every_module_imports_from_the_wheel_beside_a_package_called_domain(consumer: Path) -> None:
    python = consumer / ".venv/bin/python"
    found = json.loads(run(python, "-W", "error", "-c", IMPORT_EVERYTHING, cwd=consumer))
    assert found["owner"] == "consumer"
    assert Path(found["domain"]).is_relative_to(consumer / "domain")
    assert len(found["postroom"]) == sum(source.endswith(".py") for source in sources())
    assert all(Path(file).is_relative_to(consumer / ".venv") for file in found["postroom"])

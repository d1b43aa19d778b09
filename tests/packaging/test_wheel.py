"""The built wheel holds every layer and lives beside a consumer that has a `domain` package of its own."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, TIMEOUT_SECONDS, run

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


def packaged() -> set[str]:
    """Return every file of the layers and of the package, but for caches, as paths in the package."""
    own = [*(ROOT / "postroom").glob("*.*"), *(ROOT / "postroom" / "django").rglob("*")]
    top = [each for each in own if each.is_file() and "__pycache__" not in each.parts]
    top += ROOT.glob("pyspark_*.py")
    layers = (ROOT / layer for layer in ("domain", "application", "adapters", "projections"))
    return {str(file.relative_to(ROOT)) for file in top} | {
        f"postroom/{file.relative_to(ROOT)}"
        for layer in layers
        for file in layer.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_every_file_of_every_layer_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == packaged()
    assert {"postroom/testing.py", "postroom/adapters/cli/main.py", "pyspark_postroom_events.py"} < names


def test_the_wheel_holds_no_tests_benchmarks_or_test_servers(wheel: Path) -> None:
    parts = {part for name in zipfile.ZipFile(wheel).namelist() for part in Path(name).parts}
    assert parts.isdisjoint({"tests", "bench", "benchmarks", "embedded", "support"})


def test_the_wheel_is_one_typed_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith("py.typed")] == ["postroom/py.typed"]
    assert "postroom/__init__.py" in names


@pytest.mark.extended
def test_a_wheel_built_from_the_source_distribution_holds_the_same(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(rebuilt).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_carries_its_licence_and_its_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "postroom = postroom.adapters.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()


@pytest.mark.parametrize(
    ("site", "repository", "links", "urls"),
    [
        ("", "", {"docs/workers.md", "docs/images/console/overview-1280-light.webp", "CONTRIBUTING.md"}, []),
        (
            "https://docs.example/",
            "https://code.example/postroom",
            {
                "https://docs.example/{}/workers/",
                "https://docs.example/{}/images/console/overview-1280-light.webp",
                "https://docs.example/{}/",
                "https://docs.example/{}/adr/",
                "https://docs.example/{}/operations/#anchors",
                "https://docs.example/{}/changelog/",
                "https://code.example/postroom/blob/v{}/CONTRIBUTING.md",
            },
            ["Documentation", "Changelog", "Source", "Issues"],
        ),
        (
            "",
            "https://code.example/postroom",
            {
                "https://code.example/postroom/blob/v{}/docs/workers.md",
                "https://code.example/postroom/raw/v{}/docs/images/console/overview-1280-light.webp",
            },
            ["Source", "Issues"],
        ),
    ],
)
def test_the_readme_of_the_package_has_absolute_links_where_the_addresses_are_known(
    tmp_path: Path, site: str, repository: str, links: set[str], urls: list[str]
) -> None:
    code = f"from hatchling import build; build.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"POSTROOM_SITE_URL": site, "POSTROOM_REPOSITORY_URL": repository},
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = message_from_string(file.read_text("utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    targets = set(re.findall(r"\]\(([^)]+)\)", text))
    assert {link.format(metadata["Version"]) for link in links} <= targets
    if site or repository:
        assert [target for target in targets if "://" not in target] == []
    else:
        assert text == (ROOT / "README.md").read_text("utf-8")
    assert [url.partition(",")[0] for url in metadata.get_all("Project-URL", [])] == urls


@pytest.mark.extended
def test_every_module_imports_from_the_wheel_beside_a_package_called_domain(consumer: Path) -> None:
    python = consumer / ".venv/bin/python"
    found = json.loads(run(python, "-W", "error", "-c", IMPORT_EVERYTHING, cwd=consumer))
    assert found["owner"] == "consumer"
    assert Path(found["domain"]).is_relative_to(consumer / "domain")
    assert len(found["postroom"]) == sum(
        name.endswith(".py") for name in packaged() if name.startswith("postroom/")
    )
    assert all(Path(file).is_relative_to(consumer / ".venv") for file in found["postroom"])


def test_the_bench_command_of_an_installed_package_says_where_the_benchmarks_are(consumer: Path) -> None:
    done = subprocess.run(
        [consumer / ".venv/bin/postroom", "bench"],
        cwd=consumer,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode != 0
    assert "clone the source repository and run make bench there" in done.stderr


def test_an_editable_install_is_a_path_to_the_checkout_and_nothing_else(tmp_path: Path) -> None:
    # A file of the package beside it, such as `postroom/__init__.py`, would hide the checkout.
    code = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=ROOT)
    (built,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name]
    assert names == ["_postroom.pth"]

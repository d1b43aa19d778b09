"""Build the release of this commit in dist/VERSION, and check it; nothing is uploaded (ADR 0150).

python -m scripts.release 3.11 3.12              builds, and installs in fresh environments of these Pythons
python -m scripts.release --cut 0.3.0 3.11 3.12  first gives the unreleased changes this version, and commits
python -m scripts.release --tag 3.11 3.12        at the end, tags the commit
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
BRANCH = "main"
UNRELEASED = "Unreleased"
TOOLS = ROOT / ".venv-release" / "bin"
UV = ROOT / ".venv" / "bin" / "uv"
LOCK = ROOT / "requirements" / "lock.txt"
_VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?\n", re.MULTILINE)
_ENTRY = re.compile(r"^- ", re.MULTILINE)
ENVIRONMENTS: tuple[Mapping[str, str], ...] = (
    {"TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"},
    {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "2"},
)
"""Environments of two builds of a commit; their folders, times and file modes differ, too."""
IMPORT_ALL = """
import importlib, pathlib
import django, django.conf, postroom

apps = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")]
django.conf.settings.configure(INSTALLED_APPS=[*apps, "postroom.django"])
django.setup()
package = pathlib.Path(postroom.__file__).parent
for file in sorted(package.rglob("*.py")):
    parts = file.relative_to(package.parent).with_suffix("").parts
    importlib.import_module(".".join(parts).removesuffix(".__init__"))
"""
"""Import every module, those for Django as of a site."""


class Refusal(Exception):
    """A release is refused; the message says why and what to do."""


# -- version and changelog ---


def read_version(root: Path) -> str:
    """Return the version of `pyproject.toml`, the only file that has it."""
    found = _VERSION.search((root / "pyproject.toml").read_text("utf-8"))
    if found is None:
        raise Refusal('pyproject.toml has no line `version = "..."`.')
    return found[1]


def read_section(root: Path, title: str) -> tuple[str | None, str]:
    """Return the date and the text of a section of the changelog; None and empty if it is missing."""
    changelog = (root / "CHANGELOG.md").read_text("utf-8")
    heads = [*_SECTION.finditer(changelog)]
    ends = [*(head.start() for head in heads[1:]), len(changelog)]
    for head, end in zip(heads, ends, strict=True):
        if head[1] == title:
            return head[2], changelog[head.end() : end]
    return None, ""


def cut(root: Path, version: str, date: str) -> None:
    """Give the unreleased changes a version and a date, in `pyproject.toml` and in the changelog.

    Raises: Refusal if there is no change, or the version is not above the present one.
    """
    former = read_version(root)
    try:
        is_canonical = str(Version(version)) == version
    except InvalidVersion:
        is_canonical = False
    if not is_canonical:
        raise Refusal(f"{version} is not a version, such as 0.3.0 or 1.0.0rc1; choose another.")
    if Version(version) <= Version(former):
        raise Refusal(
            f"The version {version} is not above {former}, the one of pyproject.toml; choose another."
        )
    if not _ENTRY.search(read_section(root, UNRELEASED)[1]):
        raise Refusal(
            f"CHANGELOG.md has no entries below [{UNRELEASED}]; list there what users notice, and commit it."
        )
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    project.write_text(_VERSION.sub(f'version = "{version}"', project.read_text("utf-8"), count=1), "utf-8")
    head = f"## [{UNRELEASED}]\n"
    text = changelog.read_text("utf-8").replace(head, f"{head}\n## [{version}] - {date}\n", 1)
    changelog.write_text(text, "utf-8")


# -- the commit ---


def check_tree(root: Path, version: str | None) -> None:
    """Check that all is committed, on the branch of releases or, in a workflow, at the tag of the version.

    Arguments:
        version: of the tag; None accepts the branch alone.

    Raises: Refusal.
    """
    if changed := git(root, "status", "--porcelain"):
        names = ", ".join(line[3:] for line in changed.splitlines()[:3])
        raise Refusal(f"The tree has changes that are not committed ({names}); commit or stash them.")
    branch = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    if branch != BRANCH and not (version and has_tag(root, version)):
        raise Refusal(f"The branch is {branch}, and releases are built on {BRANCH}; switch to {BRANCH}.")


def check_changelog(root: Path, version: str) -> None:
    """Check that this commit is a release by its changelog.

    Raises: Refusal when changes are unreleased, or the version has no dated section, or no entries.
    """
    if _ENTRY.search(read_section(root, UNRELEASED)[1]):
        raise Refusal(
            f"CHANGELOG.md has entries below [{UNRELEASED}] that {version} does not have; run `make release "
            f"CUT=VERSION` with the next version, or check out the commit of {version}."
        )
    date, text = read_section(root, version)
    if date is None or not _ENTRY.search(text):
        raise Refusal(f"CHANGELOG.md has no section `## [{version}] - DATE` with entries; add it.")


def has_tag(root: Path, version: str) -> bool:
    """Return whether the commit has the tag of a version.

    Raises: Refusal when another commit has it.
    """
    tagged = git(root, "tag", "--list", f"v{version}", "--format=%(objectname) %(*objectname)").split()
    if not tagged:
        return False
    if tagged[-1] != git(root, "rev-parse", "HEAD"):
        raise Refusal(
            f"The tag v{version} is of the commit {tagged[-1][:12]}, not of this one; check that out, or run "
            "`make release CUT=VERSION` with the next version."
        )
    return True


def git(root: Path, *arguments: str) -> str:
    """Return what a command of git prints."""
    return run("git", *arguments, cwd=root).rstrip()


# -- building ---


def build(root: Path, folder: Path, environment: Mapping[str, str], umask: int) -> list[Path]:
    """Return the source distribution and the wheel of the commit; the wheel is built from the former.

    Arguments:
        folder: an empty one, for the files of the commit and what is built.
        environment: variables besides those of this process.
        umask: of the files that the build writes.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=root, stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder / "source", filter="data")
    epoch = {"SOURCE_DATE_EPOCH": git(root, "log", "-1", "--format=%ct")}
    built = folder / "dist"
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, folder / "source"),
        env={**os.environ, **environment, **epoch},
        umask=umask,
    )
    return sorted(built.iterdir())


def build_twice(root: Path, folder: Path) -> list[Path]:
    """Return what two builds of the commit have made alike.

    Raises: Refusal when they differ.
    """
    first, second = (
        build(root, folder / str(number), environment, umask)
        for number, (environment, umask) in enumerate(zip(ENVIRONMENTS, (0o022, 0o077), strict=True))
    )
    different = [one.name for one, other in zip(first, second, strict=True) if digest(one) != digest(other)]
    if different:
        raise Refusal(
            f"Two builds of this commit differ in {', '.join(different)}; compare them in {folder}."
        )
    return first


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# -- installing ---


def find_python(version: str) -> Path | None:
    """Return the interpreter of a version of Python that is installed here."""
    found = subprocess.run(
        [ROOT / "scripts/find-python.sh", version], stdout=subprocess.PIPE, text=True, check=False
    )
    return Path(found.stdout.strip()) if found.returncode == 0 else None


def install(python: Path, environment: Path, requirement: str) -> Path:
    """Install a requirement, with the pinned versions of its dependencies, and return the interpreter."""
    overrides = environment.with_suffix(".overrides")
    overrides.write_text('pandas; python_version < "3"\n')  # see [tool.uv] in pyproject.toml
    run(UV, "venv", "--quiet", "--no-project", "--python", python, environment)
    interpreter = environment / "bin" / "python"
    run(
        *(UV, "pip", "install", "--quiet", "--no-config", "--python", interpreter),
        *("--constraint", LOCK, "--build-constraint", LOCK, "--override", overrides, requirement),
    )
    return interpreter


def try_out(python: Path, version: str, folder: Path) -> None:
    """Send, receive and verify by the installed command.

    Raises: Refusal when its version is another one, or a command fails.
    """
    folder.mkdir()
    postroom = python.with_name("postroom")
    printed = run(postroom, "--version", cwd=folder).strip()
    if printed != f"postroom {version}":
        raise Refusal(f"`postroom --version` prints {printed!r}, and the version is {version}.")
    store = ("--store", folder / "orders.db")
    run(postroom, *store, "send", "orders", "{}", cwd=folder)
    received = run(postroom, *store, "recv", "orders", "--ack", "--json", cwd=folder)
    if '"topic": "orders"' not in received and '"topic":"orders"' not in received:
        raise Refusal(f"`postroom recv` prints {received!r} after a send.")
    run(postroom, *store, "verify", cwd=folder)


def write_sbom(python: Path, file: Path) -> int:
    """Write the bill of materials of an environment as CycloneDX, and return the number of components.

    The root is the project, so that neither the environment nor the path of the wheel is in it.
    """
    run(UV, "pip", "uninstall", "--quiet", "--python", python, "postroom")
    run(
        *(
            TOOLS / "cyclonedx-py",
            "environment",
            "--pyproject",
            ROOT / "pyproject.toml",
            "--mc-type",
            "library",
        ),
        *("--output-reproducible", "--spec-version", "1.6", "--output-format", "JSON", "--output-file", file),
        python,
    )
    return len(json.loads(file.read_text("utf-8"))["components"])


# -- all of it ---


def release(root: Path, pythons: Sequence[str]) -> Path:
    """Build and check the release of this commit, and return its folder.

    Raises: Refusal.
    """
    version = read_version(root)
    check_tree(root, version)
    check_changelog(root, version)
    target = root / "dist" / version
    with tempfile.TemporaryDirectory(prefix="postroom-release-") as temporary:
        work = Path(temporary)
        sdist, wheel = sorted(build_twice(root, work / "build"), key=lambda file: file.suffix == ".whl")
        say("build", f"{wheel.name} and {sdist.name}, twice the same")
        run(TOOLS / "twine", "check", "--strict", sdist, wheel)
        say("metadata", "as an index wants it (twine)")
        ready = work / "ready"
        ready.mkdir()
        with_sbom = False
        for number in pythons:
            python = find_python(number)
            if python is None:
                say(f"Python {number}", "not installed, skipped")
                continue
            everything = install(
                python, work / f"{number}-wheel", f"postroom[all,testing] @ {wheel.as_uri()}"
            )
            run(everything, "-W", "error", "-c", IMPORT_ALL, cwd=work)
            try_out(everything, version, work / f"{number}-wheel-run")
            base = install(python, work / f"{number}-sdist", f"postroom @ {sdist.as_uri()}")
            try_out(base, version, work / f"{number}-sdist-run")
            say(f"Python {number}", "wheel with all extras, sdist: installed, send, receive, verify")
            if not with_sbom:
                count = write_sbom(everything, ready / "postroom.cdx.json")
                say("SBOM", f"{count} components of all extras (CycloneDX)")
                with_sbom = True
        if not with_sbom:
            raise Refusal(f"None of Python {', '.join(pythons)} is installed; install one.")
        for file in (sdist, wheel):
            shutil.copy(file, ready)
        files = sorted(ready.iterdir())
        (ready / "SHA256SUMS").write_text("".join(f"{digest(each)}  {each.name}\n" for each in files))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ready, target)
    return target


def commit_cut(root: Path, version: str) -> None:
    """Cut a version, write the contract of the HTTP interface, which names it, and commit.

    Raises: Refusal.
    """
    check_tree(root, None)
    cut(root, version, datetime.now(UTC).date().isoformat())
    run("make", "--silent", "openapi", cwd=root)
    git(root, "commit", "--quiet", "--all", "--message", f"Postroom {version}")
    say("cut", f"{version}, committed as {git(root, 'rev-parse', '--short', 'HEAD')}")


def say(name: str, text: str) -> None:
    """Print a row of what was done."""
    print(f"{name:12} {text}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, umask: int = -1) -> str:
    """Return what a command prints.

    Raises: Refusal with what it printed when it fails.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        umask=umask,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise Refusal(f"`{words}` failed:\n{done.stdout[-4_000:]}{done.stderr[-4_000:]}")
    return done.stdout


def main() -> None:
    """Build and check a release, and end with 1 if it is refused."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="versions to install it with")
    parser.add_argument(
        "--cut", metavar="VERSION", help="give the unreleased changes this version, and commit"
    )
    parser.add_argument("--tag", action="store_true", help="tag the commit when all is checked")
    options = parser.parse_args()
    try:
        if options.cut:
            commit_cut(ROOT, options.cut)
        folder = release(ROOT, options.pythons)
        version = read_version(ROOT)
        if options.tag and not has_tag(ROOT, version):
            git(ROOT, "tag", "--annotate", f"v{version}", "--message", f"Postroom {version}")
            say("tag", f"v{version}, which is not pushed")
    except Refusal as refusal:
        sys.exit(f"postroom: {refusal}")
    say("release", f"{folder.relative_to(ROOT)}; nothing was uploaded")


if __name__ == "__main__":
    main()

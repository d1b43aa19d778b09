#!/bin/sh
# Build the files for a Spark cluster in dist/ or the directory named as argument; docs/spark.md explains their use:
#   postroom-spark.zip       the code, for --py-files
#   postroom-env.tar.gz      the packages it needs, native ones included, for --archives
#   rebuild.py, ...          the entry points: modules of projections/ that can be run
# COMPRESS_LEVEL=0 makes it fast, and the second file large.
# Everything comes from .venv as it is: nothing is fetched, so nodes run what was tested here.
set -eu
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
dist=${1:-dist}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$dist"
"$bin/python" -m build --wheel --no-isolation --outdir "$work" . >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}
# Spark's workers take the packages of a .zip onto their path but ignore a .whl. Python finds no resources of
# namespace packages, such as our .sql files, in a .zip: there they become ordinary packages.
"$bin/python" - "$work"/postroom-*.whl "$work/code" "$dist/postroom-spark" <<'PYTHON'
import compileall
import shutil
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

wheel, code, target = sys.argv[1:]
shutil.unpack_archive(wheel, code, "zip")
for folder in (Path(code) / "postroom", *(Path(code) / "postroom").rglob("*/")):
    (folder / "__init__.py").touch()
unchecked = PycInvalidationMode.UNCHECKED_HASH
compileall.compile_dir(code, quiet=1, legacy=True, stripdir=code, invalidation_mode=unchecked)
shutil.make_archive(target, "zip", code)
PYTHON

"$bin/uv" venv --quiet --no-project --python "$bin/python" "$work/env"
"$bin/python" - "$work"/postroom-*.whl "$work/env" <<'PYTHON'
"""Copy the packages that a wheel's extras `spark` and `postgres` need, except Spark itself, which every node has."""

import shutil
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

wheel, env = sys.argv[1:]
installed = Path(sysconfig.get_path("platlib"))
target = Path(sysconfig.get_path("platlib", vars={"base": env, "platbase": env}))
packages: dict[tuple[str, frozenset[str]], Distribution] = {}


(info,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
own = PathDistribution(info).requires or []


def collect(requirements: Iterable[str], extras: set[str]) -> None:
    """Add to `packages` what is required, and what that requires."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "postroom":  # an extra that includes others
            collect(own, requirement.extras)
            continue
        key = (name, frozenset(requirement.extras))
        if name != "pyspark" and key not in packages:
            packages[key] = distribution(name)
            collect(packages[key].requires or [], requirement.extras)


collect(own, {"spark", "postgres"})
for package in {name: package for (name, _), package in packages.items()}.values():
    for file in package.files or []:
        source = installed / file
        if ".." not in file.parts and source.suffix != ".pyc" and source.is_file():
            copy = target / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
PYTHON
# Else every Python process of every job compiles them anew. What isn't meant to be imported may not compile.
"$work/env/bin/python" -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$work/env/lib" || true
"$bin/venv-pack" --quiet --force --compress-level "${COMPRESS_LEVEL:-1}" --prefix "$work/env" --output "$dist/postroom-env.tar.gz"

grep -l '^if __name__ == "__main__"' projections/*.py | while read -r entry; do cp "$entry" "$dist/"; done
ls -sh "$dist"

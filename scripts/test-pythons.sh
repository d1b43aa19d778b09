#!/bin/sh
# Run unit and conformance tests on every Python named (3.11, 3.12, ...) that is installed here.
# Each has an environment of its own in .venv/pythons, made from the lock; arguments after `--` go to pytest.
set -eu
cd "$(dirname "$0")/.."
uv=$PWD/.venv/bin/uv

versions=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions="$versions $1"
    shift
done
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- tests/unit tests/conformance

failed=
for version in $versions; do
    python=$(scripts/find-python.sh "$version") || {
        echo "Python $version: not installed, skipped"
        continue
    }
    environment=$PWD/.venv/pythons/$version
    echo "Python $version: $python"
    [ -x "$environment/bin/python" ] || "$uv" venv --quiet --no-project --python "$python" "$environment"
    "$uv" pip sync --quiet --python "$environment/bin/python" --require-hashes requirements/lock.txt &&
        "$uv" pip install --quiet --python "$environment/bin/python" --no-deps --no-build-isolation --editable . &&
        "$environment/bin/pytest" -q -n "${WORKERS:-2}" --dist loadfile -p no:cacheprovider "$@" || failed="$failed $version"
done
[ -z "$failed" ] || {
    echo "postroom: the tests failed on Python$failed." >&2
    exit 1
}

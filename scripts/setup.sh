#!/bin/sh
# Make .venv from the hash-pinned lock and install the project into it, editable.
# Needs only Python 3.11 or newer; uv is used where it is installed and fetched by pip where it is not.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "postroom: $*" >&2
    exit 1
}

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# PYTHON, when set, is the user's choice; otherwise the first interpreter on PATH that is recent enough.
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if is_recent "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "Python 3.11 or newer was not found: install it, or name it with 'make PYTHON=/path/to/python3.11'."
}

# `--target` and a private environment are the two ways that work on Pythons managed by the operating system.
fetch_uv() {
    export PIP_ROOT_USER_ACTION=ignore
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --target .uv --require-hashes -r requirements/uv.txt >&2
    elif "$python" -m venv .uv/env >/dev/null 2>&1; then
        .uv/env/bin/python -m pip install --quiet --target .uv --require-hashes -r requirements/uv.txt >&2
    else
        fail "neither uv, pip nor venv was found for $python: install uv or your system's python3-venv package."
    fi
}

find_uv() {
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        command -v uv
        return
    fi
    [ -x .uv/bin/uv ] || fetch_uv
    echo .uv/bin/uv
}

python=$(find_python)
uv=$(find_uv)

is_recent .venv/bin/python || "$uv" venv --quiet --clear --python "$python" .venv
export VIRTUAL_ENV="$PWD/.venv"
# Compiled once here, or by every process that may not write into the environment.
"$uv" pip sync --quiet --compile-bytecode --require-hashes requirements/lock.txt
# hatchling comes from the lock as well: nothing unpinned runs while the project is built.
"$uv" pip install --quiet --no-deps --no-build-isolation --editable .

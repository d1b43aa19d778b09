#!/bin/sh
# Print the interpreter of a version of Python (3.11, 3.12, ...) that is installed; exit with 1 if it is missing.
set -eu
uv=$(dirname "$0")/../.venv/bin/uv

# On the PATH, of pyenv, or of uv; a shim of pyenv's may be on the PATH without its Python.
for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    "$candidate" -c 'import sys; print(sys.executable)' 2>/dev/null && exit
done
"$uv" python find --no-python-downloads --no-project --managed-python "$1" 2>/dev/null

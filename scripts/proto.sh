#!/bin/sh
# Write the Python code of every .proto beside it; with --check, only say whether what is there is up to date.
set -eu
cd "$(dirname "$0")/.."

# Through these links the generated modules get the names they are imported by: postroom.domain..., not domain...
source=tests/typing
out=$source
if [ "${1:-}" = --check ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi

protos=$(cd "$source" && find -L postroom -name '*.proto' | LC_ALL=C sort)
for proto in $protos; do
    .venv/bin/python-grpc-tools-protoc -I "$source" --python_out="$out" --pyi_out="$out" "$source/$proto"
    [ "$out" = "$source" ] && continue
    for generated in "${proto%.proto}_pb2.py" "${proto%.proto}_pb2.pyi"; do
        cmp -s "$out/$generated" "$source/$generated" && continue
        echo "${generated#postroom/} is not what ${proto#postroom/} generates: run 'make proto' and commit the result." >&2
        exit 1
    done
done

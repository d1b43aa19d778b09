#!/bin/sh
# Write the Python code and the descriptors of every .proto beside it; with --check, only check that they are up to date.
# Lints them, and refuses changes that break the clients of the descriptors that are there.
set -eu
cd "$(dirname "$0")/.."

# The links in postroom/ give the generated modules the names they are imported by: postroom.domain..., not domain...
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

fail() {
    echo "$*" >&2
    exit 1
}

protos=$(find -L postroom -name '*.proto' | LC_ALL=C sort)
for proto in $protos; do
    name=${proto%.proto}
    mkdir -p "$out/${name%/*}"
    .venv/bin/python-grpc-tools-protoc -I . --python_out="$out" --pyi_out="$out" \
        --include_imports --descriptor_set_out="$out/$name.binpb" "$proto"
    .venv/bin/buf lint "$out/$name.binpb" --config buf.yaml
    [ ! -e "$name.binpb" ] || .venv/bin/buf breaking "$out/$name.binpb" --against "$name.binpb" \
        --config buf.yaml || fail "${proto#postroom/} breaks its clients; add to it instead of changing it."
    for generated in "${name}_pb2.py" "${name}_pb2.pyi" "$name.binpb"; do
        cmp -s "$out/$generated" "$generated" && continue
        [ "${1:-}" != --check ] ||
            fail "${generated#postroom/} is not what ${proto#postroom/} generates: run 'make proto' and commit the result."
        cp "$out/$generated" "$generated"
    done
done

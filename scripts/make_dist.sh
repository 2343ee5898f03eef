#!/usr/bin/env bash
# The last commit's wheel and sdist, into dist/ or the folder given: the same bytes from the same commit. Each is made twice, from two
# exports, and compared.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
out=$(realpath -m "${1:-dist}")
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() { # FOLDER: from an export of the commit, whose files have its time
    mkdir -p "$work/$1" "$work/out-$1"
    git archive HEAD | tar -x -C "$work/$1"
    "$python" -m build --no-isolation --outdir "$work/out-$1" "$work/$1" >"$work/$1.log" 2>&1 || {
        cat "$work/$1.log" >&2
        exit 1
    }
    # setuptools writes the time into the archive, and who made it.
    local sdist name
    sdist=$(ls "$work/out-$1"/*.tar.gz)
    name=$(basename "$sdist" .tar.gz)
    tar -x -C "$work/out-$1" -f "$sdist"
    tar -c -C "$work/out-$1" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go-w "$name" |
        gzip -9 -n >"$sdist"
    rm -r "${work:?}/out-$1/$name"
}

build one
build two
diff -r "$work/out-one" "$work/out-two" || {
    echo "make_dist: two builds of one commit differ" >&2
    exit 1
}
"$python" -m twine check --strict "$work"/out-one/*
"$python" -m check_wheel_contents "$work"/out-one/*.whl
rm -rf "$out"
mv "$work/out-one" "$out"
(cd "$out" && sha256sum -- *)

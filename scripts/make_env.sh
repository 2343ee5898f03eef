#!/usr/bin/env bash
# Installs SGLang, the tools of requirements.txt and this package into .venv: `make env`.
# Needs Python 3.11, 3.12 or 3.13 (chosen from PATH; PYTHON=... overrides) and about 11 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
needed_kib=$((11 * 1024 * 1024))

say() { printf '\n== %s\n' "$*"; }
fail() { printf '\nmake env: %s\n' "$*" >&2; exit 1; }

# Prints "3.12" for a Python that runs (a version manager's shim may exist and not run), nothing otherwise.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# 3.13 comes last: one dependency has no build for it (see below).
choose_python() {
    local candidate version found=""
    for candidate in ${PYTHON:-python3.12 python3.11 python3.13 python3}; do
        version=$(version_of "$candidate")
        case $version in
            3.11 | 3.12 | 3.13) echo "$candidate"; return ;;
            ?*) found="$found $candidate is Python $version;" ;;
            *) [ -z "${PYTHON:-}" ] || found=" $candidate does not run;" ;;
        esac
    done
    fail "no Python 3.11, 3.12 or 3.13 (SGLang 0.5.23 has no build for another):${found:- none is on PATH;}" \
        "install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv, whichever version your release" \
        "has) or name one with PYTHON=/path/to/python3.12"
}

# Debian and Ubuntu ship Python without its venv module.
ensure_venv_module() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    local package
    package="python$(version_of "$1")-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "$1 lacks the venv module: apt-get install $package"
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y "$package" && return
    fi
    fail "$1 lacks the venv module. Run: sudo apt-get install $package (or python3-venv), then make env again"
}

check_disk() {
    local free_kib
    free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kib" -ge "$needed_kib" ] ||
        fail "SGLang needs about 11 GB of disk, $((free_kib / 1024 / 1024)) GB are free in $PWD: make room, then make env again"
}

# uv does not read pip's settings. Hand over those that say where packages come from, searched as pip would.
hand_over_pip_settings() {
    local indexes
    indexes=$(pip_setting index-url)
    [ -z "$indexes" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$indexes}"
    indexes=$(pip_setting extra-index-url)
    if [ -n "$indexes" ]; then
        export UV_INDEX="${UV_INDEX:-$indexes}" UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
    fi
}

pip_setting() {
    local section
    for section in :env: install global; do
        "$venv/bin/python" -m pip config get "$section.$1" 2>/dev/null | tr '\n' ' ' && return
    done
    true
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # absent, or left half-made
    python=$(choose_python)
    check_disk
    ensure_venv_module "$python"
    say "creating $venv with $("$python" --version) ($(command -v "$python"))"
    "$python" -m venv "$venv"
fi

unset PYTHONDONTWRITEBYTECODE # byte-compiled modules halve a server's start-up
say "installing uv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^uv==' requirements.txt)"

hand_over_pip_settings
# Slow networks and slow machines: longer than uv would wait, and as long as it takes.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" UV_COMPILE_BYTECODE_TIMEOUT=0
export VIRTUAL_ENV="$PWD/$venv"

# On Python 3.13 outlines 0.1.11 would have to be compiled, with Rust. Only --grammar-backend outlines needs it.
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
echo "outlines==0.1.11 ; python_version < '3.13'" >"$overrides"

say "installing requirements.txt (SGLang and torch: 9.6 GB; the first time takes some minutes)"
"$venv/bin/uv" pip install --compile-bytecode --overrides "$overrides" -r requirements.txt
say "installing tetris-sglang (editable)"
"$venv/bin/uv" pip install --quiet --no-deps --no-build-isolation --editable .
say "ready: $("$venv/bin/python" --version), $venv; try: make demo"

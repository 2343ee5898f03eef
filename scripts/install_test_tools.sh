#!/usr/bin/env bash
# Programs that a few tests drive: tmux, Prometheus and Chromium. As root on Debian or Ubuntu they are installed, Prometheus into
# build/test-tools, where it starts no service. Elsewhere those tests say what they lack, and are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=build/test-tools
missing=()
command -v tmux >/dev/null || missing+=(tmux)
command -v chromium >/dev/null || missing+=(chromium)
has_prometheus=no
if command -v prometheus >/dev/null || [ -x "$tools/usr/bin/prometheus" ]; then has_prometheus=yes; fi
if [ ${#missing[@]} = 0 ] && [ $has_prometheus = yes ]; then exit; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install_test_tools: not root on Debian: tests that need ${missing[*]:-} prometheus are skipped where they are missing"
    exit
fi
apt-get update -q
if [ ${#missing[@]} != 0 ]; then
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
fi
if [ $has_prometheus = no ]; then
    mkdir -p "$tools"
    (cd "$tools" && apt-get download -q prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
fi

#!/usr/bin/env bash
# The documentation as a site in build/site: every page of the repository and what pages link to, laid out as here, so that
# one link holds on the site and in a checkout. A link that leads nowhere stops it.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf build/docs
mkdir -p build/docs
git ls-files -z --cached --others --exclude-standard -- '*.md' '*.svg' '*.png' 'benchmarks/results/*.json' LICENSE NOTICE CITATION.cff \
    | xargs -0 cp --parents -t build/docs
.venv/bin/mkdocs build --strict --quiet
echo "build/site/README.html"

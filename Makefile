# `make` lists the targets. Everything is installed into .venv; models made for the demo and the benchmarks are kept in
# ~/.cache/tetris_sglang (SGLANG_TETRIS_CACHE). As root, a missing python3-venv is installed with apt.
.DEFAULT_GOAL := help
.PHONY: help env demo test test-fast bench check lint docs dist clean gpu-bundle gpu-dry-run gpu-check

VENV := .venv
STAMP := $(VENV)/.installed

# Byte-compiled modules halve a server's start-up.
unexport PYTHONDONTWRITEBYTECODE
# PYTHON=python3.12 chooses the Python that .venv is made of.
export PYTHON

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## install SGLang, this package and its tools into .venv; does nothing when up to date

$(STAMP): requirements.txt pyproject.toml scripts/make_env.sh
	./scripts/make_env.sh
	@touch $@

demo: env ## a real model served with TETRIS, with SGLang's own speculation and with none
	$(VENV)/bin/tetris-sglang demo

test: env ## the whole test suite
	./scripts/install_test_tools.sh
	$(VENV)/bin/python -m pytest -n 3 --durations 40

test-fast: env ## what needs no server, no kernel, no tool and no million samples
	$(VENV)/bin/python -m pytest -n 2 -m "not e2e and not kernels and not tools and not statistics"

# ARGS="--full --resume" compares everything, for hours.
bench: env ## the same three compared on real prompts, side by side
	$(VENV)/bin/tetris-sglang bench --out build/bench.json $(ARGS)

check: env ## what is installed, and what would stop TETRIS from starting
	$(VENV)/bin/tetris-sglang check

lint: env ## ruff, its format, types of the pure packages, and the Dockerfiles
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint docker/Dockerfile docker/cpu.Dockerfile

docs: env ## the documentation as a site in build/site; a broken link stops it
	./scripts/make_docs.sh

dist: env ## the last commit's wheel and sdist in dist/, reproducible and checked
	./scripts/make_dist.sh

gpu-bundle: env ## what an offline GPU host lacks, in build/gpu-bundle (docs/gpu.md)
	./scripts/gpu/make_bundle.sh

gpu-dry-run: env ## the CUDA path of real servers, without a GPU
	$(VENV)/bin/python scripts/gpu/dry_run.py $(ARGS)

# ARGS="--stages c,d --resume" chooses. With a bundle the host's own python3 runs, without one .venv.
gpu-check: ## every check that needs a GPU, on a GPU host
	@set -e; python=$(VENV)/bin/python; \
	if [ -d build/gpu-bundle ]; then \
		environment=$$(bash scripts/gpu/install_bundle.sh); eval "$$environment"; python=$${PYTHON:-python3}; \
	fi; \
	$$python scripts/gpu/check.py $(ARGS)

clean: ## remove caches and logs; .venv stays (rm -rf .venv frees its 10 GB)
	find . -name .git -prune -o -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
	rm -rf .pytest_cache .hypothesis .ruff_cache .mypy_cache .cache build dist
	find . -maxdepth 1 -name '*.log' -delete

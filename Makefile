# Every target sets .venv up first; that is quick when nothing has changed.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench-cpu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

setup: ## make .venv: vLLM for CPU, this package and the development tools
	@scripts/setup.sh

demo: setup ## serve a small model on two expert-parallel CPU ranks and compare with stock vLLM
	.venv/bin/vllm-moe-ep demo --cache-dir .cache

test: setup ## the whole test suite, real servers included (about 15 minutes on 2 cores); ARGS=... adds pytest options
	.venv/bin/python -m pytest $(ARGS)

lint: setup ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/mypy

bench-cpu: setup ## decode speed and time to first token against stock vLLM on CPU; ARGS=... adds options
	.venv/bin/python benchmarks/serve_cpu.py $(ARGS)

clean: ## remove .venv, the cached model, logs and build output
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

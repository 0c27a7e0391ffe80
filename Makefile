# Everything that a person or a machine does with this repository. `make` alone lists it.

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-rdma soak lint format types unit bench docs clean

VENV ?= .venv
BIN := $(VENV)/bin
export VENV

help:  ## list these targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything that demo and test need (a second run takes well under a second)
	@scripts/setup

demo: setup  ## the whole thing on this machine: real vLLM, a store, a restart, a damaged value (minutes, no GPU)
	@$(BIN)/python -m memkv_vllm.demo

test: setup  ## linters, types and every test, the ones with the real vLLM last
	@scripts/test

test-rdma: setup  ## the tests that need RDMA, in a VM with RDMA in software (root; builds its kernel once, 3-6 minutes)
	@scripts/test-rdma

soak: setup  ## half an hour of kills, freezes and disk damage under load, then kill -9 and fuzzing at length
	@scripts/soak

lint: setup  ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## ruff, changing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy --strict
	$(BIN)/mypy

unit: setup  ## the tests that need neither vLLM nor RDMA (under a minute or two)
	$(BIN)/python -m pytest -m "not vllm and not rdma"

bench: setup  ## the loopback transport beside memcpy, in the same run (some minutes; an idle machine, please)
	@mkdir -p build
	@$(BIN)/python -m benchmarks.bench_loopback --out build/bench-loopback.jsonl

docs: setup  ## write the generated pages anew
	$(BIN)/python scripts/gen_settings_docs.py
	$(BIN)/python scripts/gen_metrics_docs.py

clean:  ## remove caches and what the demo leaves; .venv stays
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo build dist
	find memkv_vllm tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

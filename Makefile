# The one list of commands. Each makes what it needs; the first run downloads packages, later ones take seconds to start.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
ENVS := $(PYTHON) -m tools.envs

.PHONY: help setup envs env-vllm env-sglang env-megatron demo demo-quick demo-megatron demo-megatron-quick demo-sglang demo-sglang-quick test test-core test-vllm test-sglang test-megatron nightly-sim nightly-property nightly-sglang lint format bench bench-paper bench-paper-quick docs clean clean-cache

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Make the core environment, .venv
	@$(ENVS) core

env-vllm:  ## Make the vLLM environment, .envs/vllm
	@$(ENVS) vllm

env-sglang:  ## Make the SGLang environment, .envs/sglang
	@$(ENVS) sglang

env-megatron:  ## Make the Megatron environment, .envs/megatron
	@$(ENVS) megatron

envs: env-vllm env-sglang env-megatron  ## Make all engine environments

demo: setup env-vllm  ## The whole idea on a real model: an RL loop and two vLLM engines that follow it (5 minutes)
	@$(PYTHON) -m tools.smollm2
	@.envs/vllm/bin/python demo/run.py

demo-quick: setup env-vllm  ## The same on a tiny model (2 minutes)
	@.envs/vllm/bin/python demo/run.py --quick

demo-megatron: setup env-vllm env-megatron  ## Megatron-Core trains on 2 x 2 ranks, a tensor-parallel vLLM engine follows every step (3 minutes)
	@.envs/vllm/bin/python demo/run.py --megatron

demo-megatron-quick: setup env-vllm env-megatron  ## The same for fewer steps (1 minute)
	@.envs/vllm/bin/python demo/run.py --megatron --quick

demo-sglang: setup env-vllm env-sglang  ## A vLLM and SGLang engines follow one trainer; one is killed, one joins (3 minutes)
	@.envs/vllm/bin/python demo/run.py --sglang

demo-sglang-quick: setup env-vllm env-sglang  ## The same for fewer versions (2 minutes)
	@.envs/vllm/bin/python demo/run.py --sglang --quick

test: setup env-vllm env-sglang env-megatron  ## Run every check that CI runs
	@.venv/bin/python -m tools.check

test-core: setup  ## Run the tests that need no engine
	@.venv/bin/python -m tools.check unit pure processes readme

test-vllm: setup env-vllm  ## Run the tests with a real vLLM
	@.venv/bin/python -m tools.check vllm

test-sglang: setup env-vllm env-sglang  ## Run the tests with a real SGLang
	@.venv/bin/python -m tools.check sglang

test-megatron: setup env-megatron  ## Run the tests with a real Megatron-Core
	@.venv/bin/python -m tools.check megatron

nightly-sim: setup  ## 60,000 simulated worlds, by all cores (hours); CI runs the first 310
	@.venv/bin/python -m tests.sim --seeds 50000 --jobs $$(nproc) --keep-going
	@.venv/bin/python -m tests.sim --agents --seeds 10000 --jobs $$(nproc) --keep-going

nightly-property: setup  ## Properties with other random examples each time; CI draws the same ones
	@.venv/bin/python -m pytest -q -n $$(nproc) --hypothesis-profile=default tests/property tests/unit

nightly-sglang: setup env-sglang  ## Start SGLang as users do, by its command; CI forks its engines, which is faster
	@.envs/sglang/bin/python -m pytest -q tests/engines/sglang/test_command.py

lint: setup  ## ruff, mypy, import-linter
	@.venv/bin/python -m tools.check ruff format mypy imports

format: setup  ## Let ruff rewrite what it can
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

bench: setup  ## Measure, with ratios to raw transports and to peers in the same run (links need root)
	@.venv/bin/python bench/mooncake_env.py
	@.venv/bin/python bench/run.py

bench-paper: setup  ## The paper's workloads: small and real in network namespaces (root), large in the simulator; figures (7 minutes)
	@.venv/bin/python bench/clusters/run.py
	@.venv/bin/python bench/growth.py
	@.venv/bin/python -m bench.sim

bench-paper-quick: setup  ## The same with small fleets (4 minutes); the figures of docs/ stay as they are
	@.venv/bin/python bench/clusters/run.py --quick
	@.venv/bin/python bench/growth.py --quick
	@.venv/bin/python -m bench.sim --quick --figures .work/figures

docs: setup  ## Write docs/protocol.md and the table of settings from the sources
	@.venv/bin/python -m tools.gen_protocol
	@.venv/bin/python -m tools.gen_settings

clean:  ## Remove this clone's environments and build outputs (shared packages stay)
	@$(ENVS) clean
	@rm -rf .work .ruff_cache .mypy_cache .pytest_cache .import_linter_cache dist build

clean-cache:  ## Remove the engine packages that all clones share
	@$(ENVS) clean-cache

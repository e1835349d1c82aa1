# SPDX-License-Identifier: Apache-2.0
# `make lab` does the main job on a simulated host, `make test` passes every test; both install what they need.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := $(CURDIR)/.venv
export PATH := $(VENV)/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export PYTHONDONTWRITEBYTECODE := 1
# Molecule folds what it shows to the width of the terminal; a log has none.
export COLUMNS := 160


.PHONY: help
help: ## What can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: lab
lab: bootstrap $(VENV)/.stamp collections ## Bring the simulated XR7620 up and run site.yml against it
	@tools/timed "lab up" python -m lab up
	@tools/timed "site.yml" ansible-playbook -i inventories/lab site.yml

.PHONY: lab-shell
lab-shell: ## A shell on the simulated host
	@python -m lab shell

.PHONY: lab-down
lab-down: $(VENV)/.stamp ## Remove the lab, its images and its cache
	@python -m lab down

.PHONY: test
test: bootstrap $(VENV)/.stamp collections ## Every test
	@tools/timed "every test" python tools/run_tests.py

.PHONY: test-all
test-all: export VLLM_EDGE_THOROUGH := 1
test-all: test ## Every test and the cases that take longer: further cases on the simulated host, real engines in containers, the judge of the plan, ansible-test sanity, deliberate faults
	@tools/timed "load and floods of the gateway" pytest tests/gateway/test_gateway_load.py tests/gateway/test_gateway_floods.py
	@tools/timed "engines in containers" pytest -m docker tests/unit tests/judge
	@$(MAKE) sanity
	@$(MAKE) faults

.PHONY: faults
faults: bootstrap $(VENV)/.stamp collections ## Try the deliberate faults of tests/tools/faults.yml: a test has to notice each, on a host of its own those of a host
	@tools/timed "faults" python tests/tools/deliberate_faults.py
	@tools/timed "lab images" python -m lab images
	@tools/timed "faults of a host" python tests/tools/deliberate_faults.py --host

# Bytecode of the tests lies in .cache, so that a second run does not compile them again.
.PHONY: check
check: $(VENV)/.stamp collections ## At every save: ruff, mypy, the rule of layers, the fast unit tests; no Docker, root or network
	@tools/timed "ruff" bash -c 'ruff check --quiet . && ruff format --quiet --check .'
	@tools/timed "mypy" mypy
	@tools/timed "layers of imports" env PYTHONPATH=plugins/module_utils lint-imports --no-cache
	@tools/timed "fast unit tests" env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(CURDIR)/.cache/pycache \
		pytest -q -n 2 --durations=10 --durations-min=1 -m "not docker and not slow" tests/unit

.PHONY: lint
lint: bootstrap-python $(VENV)/.stamp collections ## Linters, type checker, shellcheck, scan for secrets
	@tools/timed "ruff" bash -c 'ruff check . && ruff format --check .'
	@tools/timed "mypy" mypy
	@tools/timed "layers of imports" env PYTHONPATH=plugins/module_utils lint-imports --no-cache
	@tools/timed "shellcheck" tools/shell_scripts
	@tools/timed "secrets" tools/secrets
	@tools/timed "yamllint" yamllint --strict .
	@tools/timed "ansible-lint" ansible-lint --offline

.PHONY: audit
audit: bootstrap-python $(VENV)/.stamp ## Known vulnerabilities of the locked Python packages; asks PyPI
	@tools/timed "pip-audit" tools/audit

.PHONY: unit
unit: bootstrap-python $(VENV)/.stamp collections ## Unit tests, and the gateway with a real HAProxy; no Docker Engine needed
	@tools/timed "unit tests" pytest -n 2 -m "not docker" tests/unit tests/gateway

.PHONY: integration
integration: bootstrap $(VENV)/.stamp collections ## The host's program against real containers
	@tools/timed "lab images" python -m lab images
	@tools/timed "integration tests" pytest tests/integration

.PHONY: judged
judged: bootstrap $(VENV)/.stamp collections ## Record what vLLM's model classes say about the published checkpoints of the tests
	@tools/timed "lab images" python -m lab images
	@VLLM_EDGE_RECORD=1 tools/timed "answers of vLLM" pytest tests/judge/test_model_judge.py

.PHONY: molecule
molecule: bootstrap $(VENV)/.stamp collections ## site.yml on a simulated host of its own: converge, idempotence, verify, faults, teardown
	@tools/timed "molecule" molecule test --scenario-name default

.PHONY: airgap
airgap: bootstrap $(VENV)/.stamp collections ## site.yml on a host without a network, from what was staged
	@tools/timed "lab images" python -m lab images
	@tools/timed "air gap" molecule test --scenario-name airgap

.PHONY: switch
switch: bootstrap $(VENV)/.stamp collections ## Switches between profiles, what can go wrong in them, and what happens to those that are cut off
	@tools/timed "lab images" python -m lab images
	@tools/timed "switch" molecule test --scenario-name switch

.PHONY: platforms
platforms: bootstrap $(VENV)/.stamp collections ## The driver on Debian 12, Debian 13 and Ubuntu 24.04: every case, another branch, removal
	@tools/timed "platform images" python -m lab.platforms images
	@tools/timed "platforms" molecule test --scenario-name platforms

.PHONY: box
box: bootstrap $(VENV)/.stamp collections ## The way of docs/install.md for another box: advise, validate, plan and site.yml for one card of 80 GB
	@tools/timed "lab images" python -m lab images
	@tools/timed "another box" molecule test --scenario-name box

.PHONY: fleet
fleet: bootstrap $(VENV)/.stamp collections ## Two hosts as one fleet: a rolling switch under load, and each way to lose a host
	@tools/timed "lab images" python -m lab images
	@tools/timed "fleet" molecule test --scenario-name fleet

.PHONY: setup
setup: $(VENV)/.stamp collections ## What a controller needs: Ansible in .venv, and the collections

.PHONY: bootstrap
bootstrap: ## Install the Debian packages that the lab needs
	@PYTHON=$(PYTHON) tools/bootstrap all

.PHONY: bootstrap-python
bootstrap-python:
	@PYTHON=$(PYTHON) tools/bootstrap python

$(VENV)/.stamp: requirements-dev.txt
	@echo "==> Python environment in .venv"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-dev.txt
	@touch $@

# One line of pip's requirements, with the hash of the wheel.
ANSIBLE_WHEEL := requirements-collections.txt
.PHONY: collections
collections: collections/.stamp ## Collections of requirements.yml, out of the ansible wheel, and a link to this one
	@mkdir -p collections/ansible_collections/edge
	@ln -sfnT ../../.. collections/ansible_collections/edge/vllm_edge
collections/.stamp: requirements.yml $(ANSIBLE_WHEEL) $(VENV)/.stamp
	@echo "==> collections of requirements.yml, out of $(ANSIBLE_WHEEL)"
	@rm -rf collections .cache/ansible
	@mkdir -p collections .cache/ansible
	@python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes --dest .cache/ansible --requirement $(ANSIBLE_WHEEL)
	@python tools/collections_from_wheel.py .cache/ansible/ansible-*.whl requirements.yml collections
	@rm -rf .cache/ansible
	@touch $@

.PHONY: release
release: bootstrap-python $(VENV)/.stamp ## Build the package vllm-edge and the collection edge.vllm_edge in .cache/release; publishes nothing
	@rm -rf .cache/release && mkdir -p .cache
	@tools/release .cache/release

.PHONY: sanity
sanity: release ## ansible-test sanity on the built collection
	@tools/timed "ansible-test sanity" tools/sanity .cache/release/edge-vllm_edge-*.tar.gz

.PHONY: reference
reference: bootstrap-python $(VENV)/.stamp collections ## Write docs/reference anew
	@python -m tools.reference

.PHONY: vllm-release
vllm-release: bootstrap-python $(VENV)/.stamp ## Record a release of vLLM, judge the plan by it, and print what it changes: VERSION=0.33.0
	@python tools/vllm_release.py "$(VERSION)"

.PHONY: judge-releases
judge-releases: bootstrap $(VENV)/.stamp collections ## The judge with the sources of several releases of vLLM: VERSIONS="0.19.0 0.33.0"
	@tools/timed "lab images" python -m lab images
	@python tools/vllm_release.py --only-judge "$(VERSIONS)"

.PHONY: lock
lock: ## Lock the Python packages anew
	@uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_36 --no-annotate --no-header --group dev -o requirements-dev.txt

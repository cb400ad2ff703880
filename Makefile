# h3spool: `make demo` shows it, `make test` checks it. Each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*##/:/' | sort

demo: $(VENV)/ready  ## carry two clips from a sampler spool to MP4s
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo/demo.sh

setup: $(VENV)/ready  ## make the environment, nothing else

test: system $(VENV)/test-ready  ## the default test suite
	$(BIN)/python -m pytest -q --ignore-glob='tests/test_faults_*'
	$(BIN)/python -m pytest -q tests/test_faults_*.py

test-faults: system $(VENV)/test-ready  ## kill, starve and corrupt everything, at length
	H3SPOOL_FAULTS=full $(BIN)/python -m pytest -q -m faults

test-mutations: system $(VENV)/test-ready  ## take each safeguard out; the suite must go red
	$(BIN)/python tests/mutations.py

parity: $(VENV)/test-ready  ## decode the golden latents beside the project
	$(BIN)/python -m pytest -q -m golden

bench: system $(VENV)/test-ready  ## measure speed, as ratios in one run
	$(BIN)/python -m bench

lint: $(VENV)/test-ready  ## ruff and shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck bin/* examples/*/*.sh .ci/run

system:
	@sh bin/need rsync openssh-server

$(VENV)/ready: setup.cfg constraints.txt
	@sh bin/need python3-venv
	@PYTHONWARNINGS=ignore PYTHON="$(PYTHON)" sh bin/make-venv "$(VENV)" .
	@touch $@

$(VENV)/test-ready: $(VENV)/ready
	@PYTHONWARNINGS=ignore $(BIN)/pip install -q -c constraints.txt -e '.[test,dev,comfyui]'
	@touch $@

clean:  ## remove what was set up and made
	rm -rf "$(VENV)" demo-out build *.egg-info

.PHONY: help demo setup test test-faults test-mutations parity bench lint system clean

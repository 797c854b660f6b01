# Everything starts here. `make` alone prints what there is.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCAL  := .calculet
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help up setup engine packages test test-long simulate simulate-night check bench docs clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

up: packages  ## set everything up and serve a real chat on http://127.0.0.1:8080
	@exec $(BIN)/calculet up --config $$(cat $(LOCAL)/fleet)

setup: $(VENV)/.runtime  ## the virtual environment with what Calculet needs at run time

$(VENV)/.runtime: pyproject.toml .ci/setup
	@.ci/setup runtime "$(PYTHON)" "$(VENV)"

$(VENV)/.dev: pyproject.toml .ci/setup $(VENV)/.runtime
	@.ci/setup dev "$(PYTHON)" "$(VENV)"

engine: $(VENV)/.runtime  ## the real engine (llama.cpp), compiled once; without a compiler the simulated board serves
	@.ci/setup engine "$(PYTHON)" "$(VENV)"

packages: engine  ## model packages for the boards, signed with a development key
	@.ci/setup packages "$(PYTHON)" "$(VENV)"

test: $(VENV)/.dev packages  ## everything that CI runs: the two laws, style, types, and all tests but the long searches
	@.ci/setup tools "$(PYTHON)" "$(VENV)"
	@$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -q -m "not long" -n $(JOBS) --dist loadfile

test-long: $(VENV)/.dev packages  ## the long searches
	$(BIN)/python -m pytest -m long

JOBS     ?= 2
SIMULATE := PYTHONPATH=tests $(BIN)/python -m simulation
HOURS    ?= 24
BOARDS   ?= 4
SEED     ?= 7
SEEDS    ?=
EXPLAIN  ?=
REQUESTS ?= 1000000

simulate: $(VENV)/.dev  ## the whole fleet in virtual time: HOURS=24 BOARDS=4 SEED=7, or SEEDS="0 199", or EXPLAIN=17
ifneq ($(EXPLAIN),)
	@$(SIMULATE) explain $(EXPLAIN)
else ifneq ($(SEEDS),)
	@$(SIMULATE) seeds $(SEEDS)
else
	@$(SIMULATE) day --hours $(HOURS) --boards $(BOARDS) --seed $(SEED)
endif

simulate-night: $(VENV)/.dev  ## rough runs with ever new seeds until a million requests were checked
	@$(SIMULATE) seeds $(SEED) $(SEED) --requests $(REQUESTS) --log simulate-night.json

check: $(VENV)/.dev  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.dev packages  ## measure what docs/benchmarks.md claims
	$(BIN)/python tests/bench/run.py

docs: $(VENV)/.dev  ## write the generated reference pages under docs/reference, and check every link of all pages
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/links.py

clean:  ## remove what make made (the compiled engine stays in the cache)
	rm -rf $(VENV) $(LOCAL) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

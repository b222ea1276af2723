# Two commands do everything on a fresh Debian with Python 3.11:
#   make run     trains the Llama stand-in on this machine and explains the result
#   make test    formats, lints, types and tests all that this machine can run
# Beyond these: `make test-all` also proves every parallel layout of the recipes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-all check docs bench clean

run: $(VENV)/engine
	$(BIN)/llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy

# Every worker and every engine that a test starts would otherwise compile the same files again.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: export OMP_NUM_THREADS = 1
# Stealing leaves tests of a file, which share what was computed, together; files that wait for Slurm or for time limits
# go to a worker each, in the order of tests/conftest.py.
test: check $(VENV)/slurm
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not matrix and not gpu and not slurm"
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "(slow or slurm) and not matrix and not gpu"

# The same, and every parallel layout, every row of the recipes and what takes longest.
test-all: test
	$(BIN)/python -m pytest -m "matrix and not gpu"

check: $(VENV)/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/engine
	$(BIN)/python docs/references.py > docs/references.md

bench: $(VENV)/engine
	$(BIN)/python bench/desk.py

$(VENV)/engine: $(VENV)/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[engine]'
	@touch $@

# A torch with CUDA brings its Triton; beside a CPU build this one is for its interpreter, which runs the kernels in tests.
$(VENV)/test: $(VENV)/engine
	$(INSTALL) --editable '.[engine,test]'
	$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) triton==3.6.0
	@touch $@

$(VENV)/python:
	@$(PYTHON) -c "import ensurepip" 2>/dev/null || apt-get install --yes python3-venv
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The daemons that cluster tests start; where they cannot be had, those tests are skipped and say why.
DAEMONS := slurmctld slurmd munged slurmdbd mariadbd
PACKAGES := slurm-wlm slurm-wlm-basic-plugins munge slurmdbd mariadb-server
$(VENV)/slurm: $(VENV)/python
	@which $(DAEMONS) >/dev/null || test "$$(id -u)" != 0 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq --no-install-recommends $(PACKAGES); } >/dev/null || echo "cannot install $(PACKAGES)"
	@! which $(DAEMONS) >/dev/null || touch $@

clean:
	rm -rf $(VENV) build *.egg-info

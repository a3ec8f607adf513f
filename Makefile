# make run    one completion plainly, with n-gram drafts and with a draft model's
# make test   everything that CI runs
# make exact  the full exactness matrices; writes benchmarks/results/exact-cpu.json and
#             served-matrix.json

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := constraints/$(if $(GPU),gpu,cpu).txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c $(CONSTRAINTS)
ENV := OUTRIDER_CHECK=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST := $(BIN)/python -m pytest
SOURCES := $(wildcard cython_ext/*.pyx cython_ext/*.pxd cython_ext/*.h kernels/*.pyx kernels/*.pxd kernels/*.h)
COMPILED := $(basename $(notdir $(wildcard cython_ext/*.pyi)))
COMPILED_KERNELS := $(basename $(notdir $(wildcard kernels/*.pyi)))

.PHONY: run test exact install install-test lint types stubs unit clean

run: install
	$(BIN)/python -m outrider.frontend.demo

test: install-test
	$(MAKE) -j 2 --output-sync=target lint types stubs
	$(MAKE) unit

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint cython_ext kernels

types: install-test
	$(BIN)/mypy

stubs: install-test
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml \
	  $(addprefix outrider.cython_ext.,$(COMPILED)) $(addprefix outrider.kernels.,$(COMPILED_KERNELS))

unit: install-test
	$(ENV) $(PYTEST) -n 2 --dist loadfile -m "not serial and not gpu" --durations=25 \
	  --cov=outrider.engine_core --cov-report=
	$(ENV) $(PYTEST) -m "serial and not gpu" \
	  --cov=outrider.engine_core --cov-append --cov-report=term:skip-covered --cov-fail-under=95

exact: install-test
	$(ENV) $(BIN)/python benchmarks/exactness.py \
	  --json benchmarks/results/exact-cpu.json
	$(ENV) $(BIN)/python benchmarks/served_matrix.py \
	  --json benchmarks/results/served-matrix.json

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Outrider needs Python 3.11 or newer; run make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install -q --upgrade pip

$(VENV)/.installed: pyproject.toml setup.py $(CONSTRAINTS) $(SOURCES) | $(BIN)/python
	$(PIP) "setuptools>=77" "cython>=3.1"
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --group test --group lint
	touch $@

clean:
	rm -rf build dist *.egg-info src/*.egg-info
	find . -name '*.so' -not -path './$(VENV)/*' -delete

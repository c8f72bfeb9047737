# `make demo` and `make test` do everything, from an empty clone.
PYTHON ?= python3
MODEL ?= qwen2.5-coder-0.5b
FUZZ_SECONDS ?= 600
BIN := .venv/bin
RUN := PYTHONWARNINGS=ignore $(BIN)

.PHONY: setup demo test test-full fuzz check docs clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(RUN)/omnidraft demo --target $(MODEL)

test: setup
	sh tests/chromium.sh
	$(BIN)/pytest

test-full: setup
	CMAKE_ARGS=-DLLAVA_BUILD=OFF $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[llamacpp]' bitsandbytes torchao
	sh tests/chromium.sh
	$(BIN)/pytest --full

# Inputs that found something new are kept in .fuzz, and the next run goes on from them.
fuzz: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	mkdir -p .fuzz
	PYTHONPATH=tests $(BIN)/python tests/fuzz_translate.py .fuzz -max_total_time=$(FUZZ_SECONDS) -timeout=10 -len_control=0 -max_len=256

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python docs/api.py

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

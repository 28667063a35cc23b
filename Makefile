# Every target sets up what it needs by itself, in .venv; see scripts/setup and scripts/find-python.
#     make test PYTEST_ARGS='-k lstm'        make demo DEMO_ARGS='--help'        make setup PYTHON=python3.8

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-attention test conformance bench lint format clean distclean

# A Python named on the command line or in the environment reaches scripts/setup.
export PYTHON

bin := .venv/bin
PYTEST_ARGS ?=
# A process for each core, at most four; PYTEST_ARGS='-n 0' runs all in one, as a debugger wants it.
IN_PARALLEL ?= -n auto --maxprocesses 4 --dist worksteal
DEMO_ARGS ?=
CONFORMANCE_ARGS ?=
BENCH_ARGS ?=

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

setup: ## make .venv with everything in it (nothing to do the second time)
	@sh scripts/setup

demo: setup ## train the example of examples/char_lstm.py; its output goes to demo_output/
	$(bin)/python examples/char_lstm.py $(DEMO_ARGS)

demo-attention: setup ## train the one of examples/spelling_to_sound.py; likewise to demo_attention_output/
	$(bin)/python examples/spelling_to_sound.py $(DEMO_ARGS)

test: lint ## lint, check types, run all tests with coverage
	@# Hundreds of processes import it, each of which would compile it anew where Python may write no such files.
	@$(bin)/python -m compileall -q caffe2_recurrent
	$(bin)/python -m pytest $(IN_PARALLEL) --cov --cov-report=term-missing $(PYTEST_ARGS)

conformance: setup ## run Caffe2's own tests with its builder, with ours, and with optimised nets
	$(bin)/python conformance/run.py $(CONFORMANCE_ARGS)

bench: setup ## time all against Caffe2 and PyTorch (an hour); writes benchmarks/RESULTS.md
	$(bin)/python benchmarks/bench.py $(BENCH_ARGS)

lint: setup ## ruff and mypy
	$(bin)/ruff check .
	$(bin)/mypy

format: setup ## let ruff format the code
	$(bin)/ruff format .

clean: ## remove what builds, tests and the demos leave behind
	rm -rf build dist *.egg-info demo_output demo_attention_output htmlcov .coverage .coverage.* \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	rm -rf .venv

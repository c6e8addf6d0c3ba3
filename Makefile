# `make train` and `make test` are all that a fresh machine needs: each sets up $(VENV) first, once.

PYTHON ?= python3
VENV ?= .venv
# Further options of the command: make test ARGS="tests/config -x", make train ARGS="--train-iters 500"
ARGS ?=

BIN := $(VENV)/bin

# One process per core: the threads of the numeric libraries would only compete with each other.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# Threads that wait asleep: on a machine that does something else as well, spinning ones hold each other up.
TRAIN_ENV := OMP_WAIT_POLICY=PASSIVE

# The demonstration: a small GPT on the text of the Python standard library, its whole iteration one graph.
TRAIN_OPTIONS := \
	--num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
	--seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm \
	--position-embedding-type rope --disable-bias-linear \
	--micro-batch-size 4 --global-batch-size 8 --train-iters 200 \
	--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0 \
	--eval-interval 100 --eval-iters 10 --log-interval 20 --seed 1234 \
	--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --compare-with-eager 24

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Create the virtual environment and install everything into it (the other targets do this by themselves).
	@sh scripts/set_up.sh "$(PYTHON)" "$(VENV)"

train: setup ## Train a small GPT with its whole iteration captured, and compare it with eager training.
	$(TRAIN_ENV) $(BIN)/graphstep train $(TRAIN_OPTIONS) $(ARGS)

test: setup ## Run all tests; those that need a GPU are skipped where there is none.
	$(TEST_ENV) $(BIN)/python -m pytest -n auto $(ARGS)

lint: setup ## Check style, format and types.
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

format: setup ## Put the code into its format.
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

clean: ## Remove the virtual environment, caches and build outputs; training runs are kept.
	@if [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '.?*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

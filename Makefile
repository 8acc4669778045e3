# make probe             probe the packaged tiny model with the real vLLM (CPU where there is no NVIDIA GPU)
# make probe MODEL=Qwen/Qwen3-8B TP=1 ARGS="--gpu-memory-utilization 0.9 -- --kv-cache-dtype fp8"
# make test              every check and test, the real engine included
# make coverage          the share of prober/ that the tests run, child processes included
# make test-fast         a few minutes: neither the real engine nor the slow tests

PYTHON ?= python3
ENGINE_PYTHON ?= .venv-engine/bin/python
MODEL ?= prober/models/tiny-llama
TP ?= 1
RESULTS ?= results
ARGS ?=
# 8 MiB of KV cache hold 4,096 tokens of the tiny model; without weights, since it has none. ARGS come on top, and what
# they say of vLLM's flags comes last, so that it wins.
TINY = --load-format dummy --kv-cache-memory-bytes 8388608 --max-num-seqs 16
WITH_TINY = --compile eager $(if $(filter --,$(ARGS)),$(patsubst --,-- $(TINY),$(ARGS)),$(ARGS) -- $(TINY))
WORDS = $(if $(filter prober/models/tiny-llama,$(MODEL)),$(WITH_TINY),$(ARGS))

.PHONY: probe test test-fast coverage check venv engine corpus bench

probe: venv $(if $(filter .venv-engine/bin/python,$(ENGINE_PYTHON)),engine)
	@.venv/bin/prober probe $(MODEL) --tp $(TP) --python $(ENGINE_PYTHON) --results $(RESULTS) $(WORDS)

# The engine's tests come last and alone: two cores are no more than one start needs. What fails is tried once more and
# shown as RERUN: hundreds of these tests start, kill and time processes on a machine that has other work, too.
test: check engine
	@$(PYTHON) scripts/make_env.py engine --version 0.28.0
	.venv/bin/pytest -m "not engine" -n 2 --dist loadgroup --reruns 1
	ENGINE_PYTHON=$(abspath $(ENGINE_PYTHON)) .venv/bin/pytest -m engine --reruns 1

test-fast: check
	.venv/bin/pytest -m "not engine and not slow" -n 2 --dist loadgroup

# The share of prober/ that the tests without the real engine run, its own child processes included; less than 95 % fails.
coverage: venv
	.venv/bin/coverage erase
	.venv/bin/coverage run -m pytest -m "not engine" -n 2 --dist loadgroup --reruns 1
	.venv/bin/coverage combine --quiet
	.venv/bin/coverage report

check: venv
	.venv/bin/ruff check .
	.venv/bin/mypy

venv:
	@$(PYTHON) scripts/make_env.py prober

engine:
	@$(PYTHON) scripts/make_env.py engine

# Five ways to a length, side by side on the real engine (three hours).
bench: venv engine
	@$(PYTHON) scripts/make_env.py engine --version 0.28.0
	.venv/bin/python scripts/side_by_side.py $(ENGINE_PYTHON) .venv-engine-0.28.0/bin/python --output results/bench.csv

# How well the rules read public start-ups.
CORPUS ?= ../shared/corpus
corpus: venv
	.venv/bin/python scripts/corpus.py $(CORPUS)

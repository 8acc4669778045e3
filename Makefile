# make probe             probe the packaged tiny model with the real vLLM (CPU where there is no NVIDIA GPU)
# make probe MODEL=Qwen/Qwen3-8B TP=1 ARGS="--gpu-memory-utilization 0.9 -- --kv-cache-dtype fp8"
# make test              run every check and test, including the real engine
# make coverage          measure the lines of prober/ that the tests run, child processes included
# make test-fast         run the checks and the quick tests, in a few minutes

PYTHON ?= python3
ENGINE_PYTHON ?= .venv-engine/bin/python
MODEL ?= prober/models/tiny-llama
TP ?= 1
RESULTS ?= results
ARGS ?=
# 8 MiB of KV cache hold 4,096 tokens of the tiny model, which has no weights. ARGS are added, and their vLLM flags come
# last, so that they win.
TINY = --load-format dummy --kv-cache-memory-bytes 8388608 --max-num-seqs 16
WITH_TINY = --compile eager $(if $(filter --,$(ARGS)),$(patsubst --,-- $(TINY),$(ARGS)),$(ARGS) -- $(TINY))
WORDS = $(if $(filter prober/models/tiny-llama,$(MODEL)),$(WITH_TINY),$(ARGS))

.PHONY: probe test test-fast coverage check venv engine corpus bench

probe: venv $(if $(filter .venv-engine/bin/python,$(ENGINE_PYTHON)),engine)
	@.venv/bin/prober probe $(MODEL) --tp $(TP) --python $(ENGINE_PYTHON) --results $(RESULTS) $(WORDS)

# The engine's tests run last and one at a time, because one start needs two cores. A failed test is repeated once and
# shown as RERUN: hundreds of tests start, kill and time processes, possibly on a busy machine.
test: check engine
	@$(PYTHON) scripts/make_env.py engine --version 0.28.0
	.venv/bin/pytest -m "not engine" -n 2 --dist loadgroup --reruns 1
	ENGINE_PYTHON=$(abspath $(ENGINE_PYTHON)) .venv/bin/pytest -m engine --reruns 1

test-fast: check
	.venv/bin/pytest -m "not engine and not slow" -n 2 --dist loadgroup

# Line coverage of prober/ without the real engine, child processes included; below 95 % it fails.
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

# Compare five methods of finding a length on the real engine (three hours).
bench: venv engine
	@$(PYTHON) scripts/make_env.py engine --version 0.28.0
	.venv/bin/python scripts/side_by_side.py $(ENGINE_PYTHON) .venv-engine-0.28.0/bin/python --output results/bench.csv

# Score the rules on public startup logs.
CORPUS ?= ../shared/corpus
corpus: venv
	.venv/bin/python scripts/corpus.py $(CORPUS)

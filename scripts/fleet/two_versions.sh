#!/usr/bin/env bash
# Compare two vLLM versions on this machine without a GPU, with one small model.
#   two_versions.sh MODEL_DIRECTORY RESULTS PYTHON PYTHON
# PYTHON: interpreters that have vLLM, as absolute paths. Takes about 15 minutes on two cores.
set -euo pipefail
model=$1 results=$2
plan=$(mktemp --suffix=.toml)
trap 'rm -f "$plan"' EXIT
cat >"$plan" <<TOML
name = "two versions"
deadline_hours = 1
compile = "eager"
[[engine]]
python = "$3"
[[engine]]
python = "$4"
[[model]]
name = "$model"
gpus = "cpu"
flags = "--load-format dummy --kv-cache-memory-bytes 8388608 --max-num-seqs 16"
TOML
prober fleet "$plan" --results "$results" --address local

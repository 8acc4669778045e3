#!/usr/bin/env bash
# One night on this machine alone, without a GPU: one small model on two vLLM versions, side by side in the summary.
#   two_versions.sh MODEL_DIRECTORY RESULTS PYTHON PYTHON
# PYTHON: interpreters that have vLLM, as absolute paths. Takes a quarter of an hour on two cores.
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

#!/usr/bin/env bash
# Check the prober on a machine with an NVIDIA GPU, in less than five minutes, with real NVML and device memory.
#
#   scripts/check_gpu.sh [PYTHON]      PYTHON has torch and nvidia-ml-py (and perhaps vLLM); python3 unless given
#
# The prober runs in .venv if it exists, else in PYTHON, which then also needs click, filelock and psutil.
# Installs nothing and changes no GPU setting. Exit status 0: every check that could run passed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
engine_python=${1:-python3}
prober_python=$engine_python
if [[ -x .venv/bin/python ]] && .venv/bin/python -c 'import pynvml, psutil' 2>/dev/null; then
    prober_python=.venv/bin/python
fi
if ! command -v "$engine_python" >/dev/null; then
    echo "check_gpu: $engine_python not found" >&2
    exit 2
fi
if ! "$engine_python" -c 'import torch' 2>/dev/null; then
    echo "check_gpu: $engine_python has no torch; name an interpreter that has it" >&2
    exit 2
fi
missing=$("$prober_python" - <<'PYTHON'
import importlib.util
print(*(name for name in ("pynvml", "click", "filelock", "psutil") if importlib.util.find_spec(name) is None))
PYTHON
)
if [[ -n $missing ]]; then
    echo "check_gpu: $prober_python lacks: $missing" >&2
    exit 2
fi
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec timeout --signal=TERM --kill-after=20 290 "$prober_python" scripts/check_gpu.py "$(command -v "$engine_python")"

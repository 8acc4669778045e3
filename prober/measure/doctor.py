"""Check whether this machine can measure, and say how to fix what is missing. Changes nothing, prints nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from prober.engine.hub_cache import hf_home, hub_cache
from prober.engine.install import Engine
from prober.host import idle, system
from prober.host.gpu import MIB, Gpu, Inventory
from prober.host.processes import Owner
from prober.records import NotReady

GIB = 1024 * MIB
RESULTS_BYTES = GIB  # logs of a night
WEIGHTS_BYTES = 20 * GIB  # of one 8B model in bfloat16, with some air
HOST_BYTES = 4 * GIB
SHARED_BYTES = GIB  # vLLM's ranks and NCCL talk through it
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class State(StrEnum):
    """``fail``: no measurement is possible; ``warn``: some are not, or may go wrong."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. ``what_to_do`` is empty when it is ok."""

    name: str
    state: State
    what: str
    what_to_do: str = ""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders and environment to check."""

    results: Path
    environment: Mapping[str, str]
    shared_memory: Path = Path("/dev/shm")  # noqa: S108 # looked at, never written


def checks(
    results: Path,
    here: Inventory,
    find_engine: Callable[[], Engine],
    import_engine: Callable[[], str | None] = lambda: None,
    places: Places | None = None,
) -> list[Finding]:
    """Check everything a measurement needs, in the order in which to fix it.

    ``find_engine`` raises NotReady where there is no engine; ``import_engine`` returns why it does not import (None:
    it does). Both start the engine's interpreter.
    """
    places = places or Places(results, os.environ)
    return [
        _python(),
        *_engine(find_engine, import_engine, here),
        *_gpus(here),
        *_left_overs(),
        _host_memory(),
        _shared_memory(places.shared_memory),
        _disk("results", places.results, RESULTS_BYTES, is_needed=True),
        _disk("weights", hub_cache(places.environment), WEIGHTS_BYTES, is_needed=False),
        _token(places),
    ]


def is_ready(findings: Sequence[Finding]) -> bool:
    """Return whether a measurement can be tried at all."""
    return all(finding.state is not State.FAIL for finding in findings)


def to_json(findings: Sequence[Finding], here: Inventory) -> str:
    """Return the findings and every fact about every GPU; unknown is null."""
    content = {
        "ready": is_ready(findings),
        "findings": [asdict(finding) for finding in findings],
        "driver": here.driver,
        "cuda": here.cuda,
        "gpus": [asdict(gpu) for gpu in here.gpus],
        "problem": here.problem,
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings for a terminal: one line each, and one more for what to do."""
    width = max((len(finding.name) for finding in findings), default=0)
    text = []
    for finding in findings:
        text.append(f"{finding.state.value:4}  {finding.name:{width}}  {finding.what}")
        if finding.what_to_do:
            text.append(f"{'':4}  {'':{width}}  → {finding.what_to_do}")
    return text


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", State.OK, f"{version} runs the prober")


def _engine(
    find: Callable[[], Engine], why_not_imported: Callable[[], str | None], here: Inventory
) -> Iterator[Finding]:
    try:
        engine = find()
    except NotReady as refusal:
        yield Finding("engine", State.FAIL, str(refusal), "make engine, or name one that you have: --python PATH")
        return
    device = "CPU" if engine.is_cpu_build else "CUDA"
    what = f"vLLM {engine.vllm_version} ({device} build, torch {engine.torch_version or 'unknown'}) in {engine.python}"
    why_not = why_not_imported()
    if why_not is not None:
        fix = f"{engine.python} -c 'import vllm' shows it all; make engine builds one that imports"
        yield Finding("engine", State.FAIL, f"{what} does not import: {why_not}", fix)
    elif not engine.is_cpu_build and not here.gpus:
        fix = "fix the GPU (below), or use a CPU build: make engine on a machine without a driver, or --python PATH"
        yield Finding("engine", State.FAIL, f"{what} needs a GPU and none is visible", fix)
    elif engine.is_cpu_build and here.gpus:
        fix = "--python PATH of a CUDA build, to measure the GPU"
        yield Finding("engine", State.WARN, f"{what} leaves the GPU unused", fix)
    else:
        yield Finding("engine", State.OK, what)


def _gpus(here: Inventory) -> Iterator[Finding]:
    if not here.gpus:
        what = f"none: {here.problem or 'the driver lists none'}; ceilings of the CPU backend can be measured"
        yield Finding("gpu", State.WARN, what, f"for the CPU ({system.cpu_name()}) nothing; else fix the driver")
        return
    yield Finding("driver", State.OK, f"{here.driver or 'version unknown'}, CUDA up to {here.cuda or 'unknown'}")
    if here.problem:
        yield Finding("driver", State.WARN, here.problem, "nvidia-smi shows what the driver says itself")
    for gpu in here.gpus:
        yield _gpu(gpu)


def _gpu(gpu: Gpu) -> Finding:
    name = f"gpu {gpu.index}"
    what = describe(gpu)
    if any(one.owner is Owner.OURS_LEFT_OVER for one in gpu.processes or ()):
        return Finding(name, State.WARN, f"{what}; held by {idle.describe(gpu)}", "prober probe … --kill-stale")
    if not gpu.is_idle:
        pids = ",".join(str(one.pid) for one in gpu.processes or () if one.owner is not Owner.HIDDEN)
        look = f"ps -fp {pids}" if pids else "nvidia-smi on the host shows more"
        return Finding(name, State.WARN, f"{what}; held by {idle.describe(gpu)}", f"{look}; a probe waits for it")
    if gpu.is_memory_shared:
        sharer = "Windows" if gpu.is_under_windows else "the host"
        fix = f"keep {sharer} idle while measuring: what it holds lowers the ceiling"
        return Finding(name, State.WARN, f"{what}; memory shared with {sharer}", fix)
    if gpu.memory_used_bytes is None and gpu.processes is None:
        fix = "make sure that no other process uses it"
        return Finding(name, State.WARN, f"{what}; the driver reports neither its memory nor its processes", fix)
    return Finding(name, State.OK, f"{what}; idle")


def describe(gpu: Gpu) -> str:
    """Describe a GPU on one line; facts that the driver does not report are left out."""
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    memory = None if total is None else f"{total / GIB:.1f} GiB"
    facts = (
        gpu.name,
        memory if used is None or memory is None else f"{memory} ({used / GIB:.1f} used)",
        gpu.compute_capability and f"capability {gpu.compute_capability}",
        gpu.ecc and "ECC",
        gpu.parent_uuid and "MIG device",
        gpu.power_limit_watts and f"cap {gpu.power_limit_watts:.0f} W",
        gpu.nvlink_links and f"{gpu.nvlink_links} NVLinks",
        gpu.uuid,
    )
    return ", ".join(fact for fact in facts if fact)


def _left_overs() -> Iterator[Finding]:
    found = idle.stale_processes()
    if found:
        what = ", ".join(f"pid {one.pid} ({one.name}, trial {one.trial})" for one in found)
        yield Finding("left over", State.WARN, f"of earlier trials: {what}", "prober probe … --kill-stale ends them")


def _host_memory() -> Finding:
    available, total = system.memory_available_bytes(), system.memory_total_bytes()
    what = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < HOST_BYTES:
        return Finding("host memory", State.WARN, what, "end something: vLLM's CPU side alone takes some GiB")
    return Finding("host memory", State.OK, what)


def _shared_memory(place: Path) -> Finding:
    try:
        space = shutil.disk_usage(place)
    except OSError as error:
        return Finding("shared memory", State.WARN, f"{place}: {error.strerror}", "mount a tmpfs there, --tp needs it")
    what = f"{space.free / GIB:.1f} of {space.total / GIB:.1f} GiB free in {place}"
    if space.free < SHARED_BYTES:
        fix = "in a container: --shm-size=8g or --ipc=host; else remove what fills it"
        return Finding("shared memory", State.WARN, what, fix)
    return Finding("shared memory", State.OK, what)


def _disk(name: str, place: Path, wanted_bytes: int, *, is_needed: bool) -> Finding:
    """Check a folder that may not exist yet: its nearest existing parent must be writable."""
    worst = State.FAIL if is_needed else State.WARN
    there = next((one for one in (place.absolute(), *place.absolute().parents) if one.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        where = "--results DIR" if is_needed else "HF_HOME=DIR"
        return Finding(name, worst, f"{there} cannot be written", f"choose another place: {where}")
    free = shutil.disk_usage(there).free
    what = f"{free / GIB:.1f} GiB free for {place}"
    if free < wanted_bytes:
        state = worst if free < 64 * MIB else State.WARN
        return Finding(name, state, what, f"free some space, {wanted_bytes / GIB:.0f} GiB are comfortable")
    return Finding(name, State.OK, what)


def _token(places: Places) -> Finding:
    """Check whether Hugging Face finds a token, and where; the token itself is never shown."""
    environment = places.environment
    login = "hf auth login, or set HF_TOKEN; without it only models with terms to accept are refused"
    file = Path(environment.get("HF_TOKEN_PATH") or hf_home(environment) / "token")
    source = next((name for name in TOKEN_VARIABLES if environment.get(name, "").strip()), None)
    if source is None and _is_filled(file):
        source = str(file)
    if source is None:
        return Finding("hub token", State.WARN, "none for gated models (Llama, Gemma, …)", login)
    if environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        fix = "unset HF_HUB_DISABLE_IMPLICIT_TOKEN"
        return Finding(
            "hub token", State.WARN, f"found in {source}, but disabled by HF_HUB_DISABLE_IMPLICIT_TOKEN", fix
        )
    return Finding("hub token", State.OK, f"found in {source}")


def _is_filled(file: Path) -> bool:
    try:
        return bool(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False

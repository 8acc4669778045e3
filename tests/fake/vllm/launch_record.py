"""Which scenario, which launch of it, and the journal beside it that lets tests count launches and processes."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from functools import cache
from pathlib import Path

from fake_scenario import Scenario, read_scenario

TOLD_PREFIXES = ("PROBER", "VLLM_", "CUDA_VISIBLE", "HF_HUB_OFFLINE", "NO_COLOR", "PYTHONUNBUFFERED")


def scenario_path() -> Path:
    """The file that FAKE_VLLM_SCENARIO names."""
    return Path(os.environ["FAKE_VLLM_SCENARIO"])


@cache
def scenario() -> Scenario:
    """The scenario of this process."""
    return read_scenario(scenario_path())


def start_time(pid: int) -> int:
    """The kernel's start time of a process in clock ticks: with it a pid names one process for ever."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def _told_environment() -> dict[str, str]:
    told = {name: text for name, text in os.environ.items() if name.startswith(TOLD_PREFIXES)}
    return {name: "(set)" if "KEY" in name or "TOKEN" in name else text for name, text in told.items()}


def _append(line: dict[str, object], counts_launches: bool = False) -> int:
    path = scenario_path().with_suffix(".journal.jsonl")
    with path.open("a+", encoding="utf-8") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        launch = 0
        if counts_launches:
            journal.seek(0)
            launch = 1 + sum('"event": "start"' in earlier for earlier in journal)
            line = {**line, "launch": launch}
        journal.write(json.dumps(line) + "\n")
    return launch


def record_start(entrypoint: str, argv: list[str] | None = None) -> int:
    """Journal this start; returns the launch's number, from 1."""
    line: dict[str, object] = {
        "event": "start",
        "entrypoint": entrypoint,
        "argv": sys.argv[1:] if argv is None else argv,
        "environment": _told_environment(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "born": start_time(os.getpid()),
        "time": time.time(),
    }
    return _append(line, counts_launches=True)


def record_process(launch: int, role: str, pid: int | None = None) -> None:
    """Journal a process of this launch."""
    pid = os.getpid() if pid is None else pid
    _append({"event": "process", "launch": launch, "role": role, "pid": pid, "born": start_time(pid)})


def record(launch: int, event: str, **facts: object) -> None:
    """Journal something else of this launch: the length asked for, a request, the way it ended."""
    _append({"event": event, "launch": launch, "time": time.time(), **facts})

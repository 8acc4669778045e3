"""Process ownership: a trial of a running prober, a leftover of a dead one, or another process.

Every process of a trial carries two environment variables: the trial's id, and the pid and start time of its prober.
Names, command lines and process groups prove nothing and are not read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

TRIAL_VARIABLE = "PROBER_TRIAL"
PROBER_VARIABLE = "PROBER_PID"


class Owner(StrEnum):
    """Who started a process, as far as this process can see."""

    OURS = "ours"  # a trial whose prober runs
    OURS_LEFT_OVER = "ours_left_over"  # a trial whose prober is dead
    OTHER = "other"
    HIDDEN = "hidden"  # a pid reported by the driver but not visible here: in another container, or just ending


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A process of a trial whose prober is dead."""

    pid: int
    start: str
    trial: str
    name: str


def tag(trial: str) -> dict[str, str]:
    """Return the environment variables that tag every process of a trial.

    ``SPT_NOENV`` keeps setproctitle (used by vLLM and Ray) from overwriting the environment in ``/proc``, where the tag
    is read.
    """
    pid = os.getpid()
    return {TRIAL_VARIABLE: trial, PROBER_VARIABLE: f"{pid}:{start_of(pid)}", "SPT_NOENV": "1"}


def start_of(pid: int) -> str | None:
    """Return the process's start time in clock ticks since boot (immune to clock changes); None if not running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name may hold spaces and brackets; field 22 is the start
    return None if state in "ZX" else rest[18]


def is_running(pid: int, start: str) -> bool:
    """Whether the process with this pid and start time runs: a pid alone can be reused."""
    now = start_of(pid)
    return now is not None and now == start


def owner_of(pid: int) -> Owner:
    """Return who owns a process; OTHER if it cannot be inspected or is in another pid namespace.

    An ending process loses its environment before its GPU memory is released: it is HIDDEN, not OTHER.
    """
    if not psutil.pid_exists(pid):
        return Owner.HIDDEN
    return _owner_and_trial(pid)[0]


def left_over() -> list[LeftOver]:
    """List the processes of earlier trials whose prober is dead, ordered by pid."""
    found = []
    for pid in psutil.pids():
        owner, trial = _owner_and_trial(pid)
        start = start_of(pid)
        if owner is Owner.OURS_LEFT_OVER and start is not None:
            found.append(LeftOver(pid, start, trial, name_of(pid) or "?"))
    return found


def name_of(pid: int) -> str | None:
    """Return the process's short name; None if it is gone or inaccessible."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def end(processes: list[LeftOver], grace_seconds: float = 5.0) -> list[LeftOver]:
    """Kill these processes and return those still alive after ``grace_seconds``.

    Each is checked again first: only a process that is still a leftover with the same start time is killed.
    """
    for one in processes:
        if is_running(one.pid, one.start) and _owner_and_trial(one.pid)[0] is Owner.OURS_LEFT_OVER:
            with contextlib.suppress(psutil.Error):
                psutil.Process(one.pid).kill()
    psutil.wait_procs(list(_handles(processes)), timeout=grace_seconds)
    return [one for one in processes if is_running(one.pid, one.start)]


def _handles(processes: list[LeftOver]) -> Iterator[psutil.Process]:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(one.pid)


def _owner_and_trial(pid: int) -> tuple[Owner, str]:
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid() or not _shares_pid_namespace(pid):
            return Owner.OTHER, ""
        environment = process.environ()
    except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):  # a zombie is a NoSuchProcess, too
        return Owner.HIDDEN, ""
    except (psutil.Error, OSError):
        return Owner.OTHER, ""
    if not environment:
        return Owner.HIDDEN, ""
    trial = environment.get(TRIAL_VARIABLE, "")
    prober, _, start = environment.get(PROBER_VARIABLE, "").partition(":")
    if not trial or not prober.isdigit() or not start:
        return Owner.OTHER, ""
    return (Owner.OURS if is_running(int(prober), start) else Owner.OURS_LEFT_OVER), trial


def _shares_pid_namespace(pid: int) -> bool:
    """In another pid namespace the prober's pid from the tag means another process or none."""
    return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")

"""Run one command so that none of its processes outlives this one. A standalone script, never imported.

    python -I supervisor.py LOG COMMAND…

It is the subreaper of everything that the command starts: processes that call ``setsid`` or double-fork become its
children. Its stdin is a pipe held by the prober: when it closes, on purpose or because the prober was killed, the whole
tree is killed. On stdout it writes ``exit N`` (the command's status, negative for a signal) and finally ``ended N``
(the number of processes it had to kill). Linux only: prctl(2), /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 1.5  # for the command to stop its workers and remove its shared memory
TICK_SECONDS = 0.05
LOOK_SECONDS = 1.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # where the kernel keeps POSIX shared memory
MAPPED = re.compile(rf" {SHARED_MEMORY}/([^/\s]+)$", re.MULTILINE)


def main() -> None:
    log_path, *command = sys.argv[1:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    segments = Segments()
    try:
        child = start(command, log_path)
        report(f"exit {wait(child, segments)}")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        report(f"ended {end_tree(segments)}")


def start(command: list[str], log_path: str) -> subprocess.Popen[bytes]:
    """Start the command in its own group; it dies with this process and is the OOM killer's first choice."""

    def before_exec() -> None:  # pragma: no cover  # between fork and exec nothing is measured
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")

    with open(log_path, "ab") as log:
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0, preexec_fn=before_exec
            )
        except OSError as error:
            log.write(f"prober: cannot run {command[0]}: {error.strerror}\n".encode())
            report("exit 127")
            sys.exit(0)


def wait(child: subprocess.Popen[bytes], segments: Segments) -> int | None:
    """Return the command's exit status; None if the prober closes stdin first."""
    next_look = time.monotonic()
    while True:
        status = child.poll()
        if status is not None:
            return status
        if select.select([sys.stdin], [], [], TICK_SECONDS)[0] and not os.read(0, 64):
            return None
        if time.monotonic() > next_look:
            tree = descendants()
            segments.note(tree)
            reap(process for process in tree if process.pid != child.pid)
            next_look = time.monotonic() + LOOK_SECONDS


def reap(processes: Iterable[psutil.Process]) -> None:
    """Reap exited processes, re-parented ones included, so that none stays a zombie."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def end_tree(segments: Segments) -> int:
    """Terminate, then kill every descendant; return how many there were. SIGTERM lets them remove shared memory."""
    tree = descendants()
    segments.note(tree)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.terminate()
    grace_until = time.monotonic() + GRACE_SECONDS
    while living := descendants():
        reap(living)
        if time.monotonic() > grace_until:
            segments.note(living)
            for process in living:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(TICK_SECONDS)
    segments.remove_unused()
    return len(tree)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


class Segments:
    """Shared memory segments of this process tree: a killed process cannot remove its own.

    Only new segments directly in /dev/shm; directories there (a model, a cache) are the user's.
    """

    def __init__(self) -> None:
        self._before = set(self._names())
        self._seen: set[str] = set()

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Record the segments that these processes map."""
        for process in processes:
            with contextlib.suppress(OSError):
                self._seen.update(MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text(errors="replace")))

    def remove_unused(self) -> None:
        """Remove the segments that no process maps any more."""
        ours = (self._seen - self._before) & set(self._names())
        if not ours:
            return
        self._seen = set()
        self.note(psutil.process_iter())
        for name in ours - self._seen:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHARED_MEMORY}/{name}")

    def _names(self) -> list[str]:
        try:
            return os.listdir(SHARED_MEMORY)
        except OSError:
            return []


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def report(line: str) -> None:
    with contextlib.suppress(OSError):  # the prober may be gone
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()

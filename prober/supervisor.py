"""Run one command so that nothing of it can outlive us. A script of its own, never imported by the prober.

    python -I supervisor.py LOG COMMAND…

It is the sub-reaper of everything that the command starts: whatever calls ``setsid`` or forks twice comes back to it as
a child. Its standard input is a pipe held by the prober: when that closes, by intent or because the prober was killed,
the whole tree ends. On standard output it says ``exit N`` (the command's status, a negative signal) and, last,
``ended N`` (how many processes had to be ended). Linux only: prctl(2), /proc.
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
GRACE_SECONDS = 1.5  # for the command to end its own workers and to remove its shared memory
TICK_SECONDS = 0.05
REAP_SECONDS = 1.0
SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


def main() -> None:
    log_path, *command = sys.argv[1:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    child = start(command, log_path)
    try:
        report(f"exit {wait(child)}")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        report(f"ended {end_tree(child)}")


def start(command: list[str], log_path: str) -> subprocess.Popen[bytes]:
    """Start the command in its own group; it dies with us and is the kernel's first choice when memory is out."""

    def before_exec() -> None:
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


def wait(child: subprocess.Popen[bytes]) -> int | None:
    """The command's exit status; None when the prober lets go of our standard input first."""
    next_reap = time.monotonic() + REAP_SECONDS
    while True:
        status = child.poll()
        if status is not None:
            return status
        if select.select([sys.stdin], [], [], TICK_SECONDS)[0] and not os.read(0, 64):
            return None
        if time.monotonic() > next_reap:
            reap_orphans(child)
            next_reap += REAP_SECONDS


def reap_orphans(child: subprocess.Popen[bytes]) -> None:
    """Collect re-parented processes that have ended, so that none stays a zombie."""
    for process in descendants():
        if process.pid != child.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def end_tree(child: subprocess.Popen[bytes]) -> int:
    """End every descendant; return how many there were. First politely, so that shared memory is removed."""
    tree = descendants()
    shared = shared_memory(tree)
    if child.poll() is None:
        child.terminate()
    polite_until = time.monotonic() + (GRACE_SECONDS if tree else 0)
    while living := descendants():
        reap_orphans(child)
        child.poll()
        if time.monotonic() > polite_until:
            shared |= shared_memory(living)
            for process in living:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(TICK_SECONDS)
    remove_unused(shared)
    return len(tree)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """The files in /dev/shm that these processes have mapped."""
    paths: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            paths.update(SHARED_MEMORY.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return paths


def remove_unused(paths: set[str]) -> None:
    """Remove what only the ended processes had mapped; killed processes cannot do it themselves."""
    if not paths:
        return
    for path in paths - shared_memory(psutil.process_iter()):
        with contextlib.suppress(OSError):
            os.unlink(path)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def report(line: str) -> None:
    with contextlib.suppress(OSError):  # the prober may be gone
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()

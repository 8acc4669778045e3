"""Forked engine and worker processes: what they inherit, how long they may live, how their parent hears of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fake_scenario import Fault, FaultKind

from vllm import gpu_memory
from vllm.launch_record import record_process, scenario


@dataclass
class Child:
    """A forked process and the line to it. An empty answer means that it is gone."""

    pid: int
    role: str
    line: socket.socket
    status: int | None = None  # exit status as the shell would say: negative is the signal
    _rest: bytes = field(default=b"", repr=False)

    def say(self, text: str) -> None:
        """Send one line; a dead child is noticed when it is asked for an answer."""
        with suppress(OSError):
            self.line.sendall(text.encode() + b"\n")

    def hear(self) -> str:
        """The next line, or an empty one when the process is gone."""
        while b"\n" not in self._rest:
            try:
                more = self.line.recv(65536)
            except OSError:
                more = b""
            if not more:
                return ""
            self._rest += more
        head, self._rest = self._rest.split(b"\n", 1)
        return head.decode()

    def wait(self) -> int:
        """Wait for its end; negative is the signal that ended it."""
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Signal it, if it is still there."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, how)


def fork(launch: int, role: str, body: Callable[[Child], None], closes: tuple[socket.socket, ...] = ()) -> Child:
    """Run ``body`` in a child that has a line to its parent; the parent gets the other end."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, role, ours)
    status = 1
    try:
        ours.close()
        for other in closes:
            other.close()
        begin(launch, role)
        body(Child(os.getppid(), "parent", theirs))
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        os._exit(status)


def begin(launch: int, role: str) -> None:
    """What every process of the fake does first: be journalled, be named, and be mortal."""
    record_process(launch, role)
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write(f"VLLM::{role}"[:15])
    signal.setitimer(signal.ITIMER_REAL, scenario().lifetime_seconds)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def obey_signals(active: tuple[Fault, ...], on_term: Callable[[], None] | None = None) -> None:
    """Set what SIGTERM does in this process: end it, end it late, or nothing."""
    slow = max((fault.amount for fault in active if fault.kind is FaultKind.SLOW_DEATH), default=0.0)
    if any(fault.kind is FaultKind.IGNORE_SIGTERM for fault in active):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return

    def end(*_: object) -> None:
        time.sleep(slow)
        if on_term:
            on_term()
        os._exit(0 if on_term else 143)

    if slow or on_term:
        signal.signal(signal.SIGTERM, end)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def stay() -> None:
    """Do nothing until somebody ends this process (or its lifetime does)."""
    while True:
        time.sleep(3600)


def leave_behind(launch: int, fault: Fault) -> None:
    """Start a process that outlives its parents, as the fault says."""
    said, saying = os.pipe()
    pid = os.fork()
    if pid:
        os.close(saying)
        if fault.kind is not FaultKind.SETSID_GRANDCHILD:
            os.waitpid(pid, 0)
        os.read(said, 1)  # it is in its session and journalled
        os.close(said)
        return
    try:
        os.setsid()
        if fault.kind is not FaultKind.SETSID_GRANDCHILD and os.fork():
            os._exit(0)
        begin(launch, fault.kind.value)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gpu_memory.take(0)
        os.write(saying, b"1")
        os.closerange(3, 1024)  # the lines between engine and front end must end with them; the log stays open
        if fault.kind is FaultKind.CLEAN_ENV_GRANDCHILD:  # the interval timer survives exec and ends it
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)"], {})
        stay()
    finally:
        os._exit(1)

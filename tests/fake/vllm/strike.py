"""Let the faults of a stage happen in the process that plays the stage."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from typing import Any

from fake_scenario import Fault, FaultKind

from vllm import wording
from vllm.launch_record import scenario
from vllm.processes import leave_behind, stay
from vllm.speech import STDOUT, ConfigError, Speech, SpokenError, write

SIDE_EFFECTS = frozenset({FaultKind.SETSID_GRANDCHILD, FaultKind.DOUBLE_FORK, FaultKind.CLEAN_ENV_GRANDCHILD})

HELD: list[Any] = []


def strike(
    faults: tuple[Fault, ...], stage: str, rank: int | None, max_num_seqs: int, speech: Speech, number: int
) -> None:
    """Play every fault of the stage (and rank); returns, raises, or never comes back.

    ``rank`` is None in a process that is no worker; a fault without a rank strikes the first worker.
    """
    for fault in faults:
        if fault.stage == stage and (rank is None or rank == (fault.rank or 0)):
            _disturb(fault, speech, number)
            _leave(fault, speech)
            _raise(fault, stage, max_num_seqs)


def _disturb(fault: Fault, speech: Speech, number: int) -> None:
    if fault.kind in SIDE_EFFECTS:
        leave_behind(number, fault)
    elif fault.kind is FaultKind.LOG_FLOOD:
        line = b"INFO 12-01 12:00:00 [flood.py:1] " + b"x" * 990 + b"\n"
        chunk = line * 1024
        for _ in range(max(1, int(fault.amount))):
            write(STDOUT, chunk)
    elif fault.kind is FaultKind.GARBAGE:
        write(STDOUT, bytes(range(256)) * 64 + b"\n\x00\xff\xfe\xf0\x9f\x98\n")
    elif fault.kind is FaultKind.GROW_HOST_MEMORY:
        _grow(fault)
    elif fault.kind is FaultKind.FILL_DISK:
        _fill(fault)
    elif fault.kind is FaultKind.SAYS:
        write(STDOUT, fault.text + "\n")


def _grow(fault: Fault) -> None:
    taken: list[bytes] = []
    step = max(1, int(fault.rate / 10))
    while sum(map(len, taken)) < fault.amount * 2**20:
        taken.append(b"\x01" * (step * 2**20))
        time.sleep(0.1)


def _fill(fault: Fault) -> None:
    file = tempfile.TemporaryFile(dir=fault.text or "/dev/shm")  # noqa: SIM115  # nameless: gone with its last holder
    HELD.append(file)
    step = max(1, int(fault.rate / 10))
    for _ in range(0, int(fault.amount), step):
        file.write(bytes(step * 2**20))
        file.flush()
        time.sleep(0.1)


def _leave(fault: Fault, speech: Speech) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if fault.kind is FaultKind.HANG:
        stay()
    elif fault.kind is FaultKind.EXIT:
        os._exit(int(fault.amount))
    elif fault.kind is FaultKind.SEGFAULT:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault.kind is FaultKind.KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind is FaultKind.NO_NEWLINE:
        write(STDOUT, fault.text or "INFO 12-01 12:00:00 [core.py:109] Initializing a V1 LLM eng")
        os._exit(int(fault.amount) or 1)


def _raise(fault: Fault, stage: str, max_num_seqs: int) -> None:
    played = scenario()
    if fault.kind is FaultKind.CRASH:
        name, colon, message = fault.text.partition(": ")
        if colon and " " not in name:
            raise SpokenError(name, message)
        raise RuntimeError(fault.text or "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")
    if fault.kind is FaultKind.DEVICE_OOM:
        raise SpokenError(*wording.device_oom(played, stage, max_num_seqs))
    if fault.kind is FaultKind.NO_KV_MEMORY:
        raise ValueError(wording.no_kv_memory(played))
    if fault.kind is FaultKind.DEVICE_BUSY:
        total = played.total_gib
        raise ValueError(wording.device_busy(played, wording.default_utilization(played), total * 0.3, total))
    if fault.kind is FaultKind.PROFILE_ASSERT:
        raise AssertionError(wording.profile_assert(played))
    if fault.kind is FaultKind.SEQUENCE_SLOTS and max_num_seqs > fault.amount:
        raise ValueError(wording.sequence_slots(max_num_seqs, int(fault.amount)))
    if fault.kind is FaultKind.TOO_SHORT:
        raise ValueError(wording.too_short(8192))
    if fault.kind is FaultKind.BAD_CONFIG:
        text = fault.text or wording.heads_by_tp(40, 3)
        raise ConfigError(wording.config_error(played, "ModelConfig", text)) if stage == "config" else ValueError(text)

"""The fault table: whatever goes wrong in a trial, its outcome is the right one, it ends, and nothing of it lives on.

One row a fault. What each version does when it fails: exit statuses, fake_scenario (the fake's faults).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench import QUICK, TRIAL, bench
from fake_engine import Fault, FaultKind, Scenario

from prober.records import Entrypoint, Outcome, Stage
from prober.search.interpret import answer_of
from prober.search.next_length import Answer
from prober.trial.run import log_path
from prober.trial.timeouts import Limits

LLM = Entrypoint.LLM
TOO_LONG = 5000  # of 32 blocks of 16
F = FaultKind


DECIDED_BY_LOG = (Outcome.BAD_CONFIG, Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY, Outcome.OVER_MODEL_LIMIT)


@dataclass(frozen=True)
class Row:
    """A fault and what it must come to. ``status`` None: we ended the trial; ...: both are right."""

    name: str
    outcome: Outcome
    stage: Stage | None  # None: wherever the log happened to stand
    status: Any = ...
    faults: tuple[Fault, ...] = ()
    length: int | None = 64
    entrypoint: Entrypoint = Entrypoint.SERVE
    tp: int = 1
    flags: tuple[str, ...] = ()
    played: tuple[tuple[str, Any], ...] = ()
    says: str = ""  # part of the evidence


def row(name: str, outcome: Outcome, stage: Stage | None, status: Any, *faults: Fault, **more: Any) -> Row:
    known = set(Row.__dataclass_fields__)
    played = tuple((key, value) for key, value in more.items() if key not in known)
    return Row(name, outcome, stage, status, faults, **{k: v for k, v in more.items() if k in known}, played=played)


def refused(version: str, status: Any, **more: Any) -> Row:
    name = f"refusal of {version} {' '.join(map(str, more.values()))}"
    return row(name, Outcome.KV_TOO_SMALL, Stage.KV_CACHE, status, length=TOO_LONG, version=version, **more)


def silent(version: str, outcome: Outcome, status: Any, **more: Any) -> Row:
    """The engine's process is gone without a word: only the front end's words and status are left."""
    fault = Fault(F.EXIT, "kv_cache", amount=1)
    name = f"silent death of {version} {' '.join(map(str, more.values()))}"
    return row(name, outcome, None, status, fault, version=version, **more)


PLENTY = Limits(dict.fromkeys(Stage, 20.0))  # a row that should not run into a limit
TABLE = (
    # How each version's front end leaves when a start is refused
    refused("0.4.0", ..., entrypoint=LLM),
    refused("0.5.0", ...),
    refused("0.5.4", None),  # waits for ever for an answer that never comes
    refused("0.5.5", ...),
    refused("0.6.3", ...),
    refused("0.6.4", ...),
    refused("0.6.6", ..., generation="V1"),
    refused("0.8.0", ...),
    refused("0.8.5", ...),
    refused("0.32.0", ...),
    refused("0.32.0", ..., entrypoint=LLM),
    # … and when the engine has died without a word
    silent("0.5.4", Outcome.TIMEOUT, None),
    silent("0.5.5", Outcome.CRASH, 0),
    silent("0.6.2", Outcome.CRASH, 1),
    silent("0.6.4", Outcome.CRASH, 1),
    silent("0.6.6", Outcome.CRASH, 1, generation="V1"),
    silent("0.8.0", Outcome.CRASH, 1),
    silent("0.8.5", Outcome.CRASH, 1),
    silent("0.32.0", Outcome.CRASH, 1),
    silent("0.32.0", Outcome.CRASH, 1, entrypoint=LLM),
    row("0.8.0 kills its own tree", Outcome.CRASH, None, -9, Fault(F.CRASH), version="0.8.0"),
    row("unknown flag", Outcome.BAD_CONFIG, Stage.CONFIG, 2, flags=("--no-such-flag",)),
    row("bad configuration", Outcome.BAD_CONFIG, Stage.CONFIG, 1, Fault(F.BAD_CONFIG, "config")),
    row("length above the model's limit", Outcome.OVER_MODEL_LIMIT, Stage.CONFIG, 1, length=200_000),
    row("length lowered in silence", Outcome.OVER_MODEL_LIMIT, Stage.READY, None, silently_lowered_to=50),
    row("exit 0 with a living worker", Outcome.CRASH, None, 0, Fault(F.EXIT_ZERO), says="status 0"),
    # Processes that die
    row("segfault in the engine", Outcome.CRASH, None, 1, Fault(F.SEGFAULT)),
    row("segfault of a rank", Outcome.CRASH, None, 1, Fault(F.SEGFAULT, rank=1), tp=2),
    row("SIGKILL of a worker while loading", Outcome.CRASH, None, 1, Fault(F.KILLED, rank=1), tp=2),
    row("SIGKILL of the engine", Outcome.CRASH, None, 1, Fault(F.KILLED, "profile")),
    row("SIGKILL of a worker at a request", Outcome.CRASH, Stage.SERVE, ..., Fault(F.KILLED, "serve", rank=1), tp=2),
    row("NCCL error", Outcome.CRASH, None, 1, Fault(F.CRASH), tp=2, says="NCCL"),
    row("engine dies serving", Outcome.CRASH, Stage.SERVE, ..., Fault(F.DIES_SERVING)),
    row("crash offline", Outcome.CRASH, None, 1, Fault(F.CRASH, "capture"), entrypoint=LLM),
    # Hangs: the stage is the last one that the log shows
    *(
        row(f"hang at {stage}", Outcome.TIMEOUT, shown, None, Fault(F.HANG, stage), says="no progress for 2 s at")
        for stage, shown in {
            "config": Stage.CONFIG,
            "download": Stage.CONFIG,
            "load": Stage.LOAD,
            "compile": Stage.PROFILE,
            "profile": Stage.PROFILE,
            "kv_cache": Stage.KV_CACHE,
            "capture": Stage.KV_CACHE,
        }.items()
    ),
    row("hang at ready", Outcome.TIMEOUT, Stage.CAPTURE, None, Fault(F.HANG, "ready")),
    row("hang at serve", Outcome.TIMEOUT, Stage.SERVE, None, Fault(F.HANG, "serve")),
    row("hang of one rank", Outcome.TIMEOUT, Stage.KV_CACHE, None, Fault(F.HANG, "profile", rank=1), tp=2),
    row("hang offline", Outcome.TIMEOUT, Stage.LOAD, None, Fault(F.HANG), entrypoint=LLM),
    row("health fails for ever", Outcome.TIMEOUT, Stage.READY, None, Fault(F.HEALTH_FAILS)),
    row("request hangs", Outcome.TIMEOUT, Stage.SERVE, None, Fault(F.COMPLETION_HANGS)),
    row("request hangs offline", Outcome.TIMEOUT, Stage.SERVE, None, Fault(F.COMPLETION_HANGS), entrypoint=LLM),
    # Answers that are none
    row("request fails", Outcome.CRASH, Stage.SERVE, None, Fault(F.COMPLETION_FAILS)),
    row("request is too long", Outcome.UNSERVABLE, Stage.SERVE, None, Fault(F.COMPLETION_TOO_LONG)),
    row("request is too long offline", Outcome.UNSERVABLE, Stage.SERVE, ..., Fault(F.COMPLETION_TOO_LONG),
        entrypoint=LLM),
    row("answer without a token", Outcome.CRASH, Stage.SERVE, None, Fault(F.COMPLETION_EMPTY)),
    row("answer without a token offline", Outcome.CRASH, Stage.SERVE, ..., Fault(F.COMPLETION_EMPTY), entrypoint=LLM),
    row("V0 ignores a prompt", Outcome.UNSERVABLE, Stage.SERVE, ..., length=1600, version="0.6.3", kv_blocks=100),
    row("V0 ignores a prompt offline", Outcome.UNSERVABLE, Stage.SERVE, ..., length=1600, version="0.6.3",
        kv_blocks=100, entrypoint=LLM),
    row("last block is never granted", Outcome.UNSERVABLE, Stage.SERVE, None, length=512, version="0.28.0"),
    # Memory and configuration
    row("no KV memory", Outcome.NO_KV_MEMORY, Stage.KV_CACHE, ..., Fault(F.NO_KV_MEMORY, "kv_cache")),
    *(
        row(f"out of memory at {stage}", Outcome.DEVICE_OOM, stage, ..., Fault(F.DEVICE_OOM, stage))
        for stage in (Stage.LOAD, Stage.PROFILE, Stage.CAPTURE)
    ),
    row("out of memory at a request", Outcome.DEVICE_OOM, Stage.SERVE, ..., Fault(F.DEVICE_OOM, "serve")),
    row("neighbour on the device", Outcome.DEVICE_BUSY, Stage.CONFIG, ..., Fault(F.DEVICE_BUSY)),
    row("neighbour frees memory", Outcome.DEVICE_BUSY, Stage.PROFILE, ..., Fault(F.PROFILE_ASSERT, "profile")),
    row("too many sequences", Outcome.SEQUENCE_SLOTS, Stage.CAPTURE, ..., Fault(F.SEQUENCE_SLOTS, "capture", amount=9)),
    row("too short", Outcome.TOO_SHORT, Stage.CONFIG, ..., Fault(F.TOO_SHORT, "profile")),
    row("port taken", Outcome.CRASH, Stage.CONFIG, 1, Fault(F.PORT_TAKEN)),
    # Logs
    row("flood of 1 GiB", Outcome.FITS, Stage.SERVE, None, Fault(F.LOG_FLOOD, amount=1024)),
    row("refusal behind a flood", Outcome.KV_TOO_SMALL, Stage.KV_CACHE, ..., Fault(F.LOG_FLOOD, amount=32),
        length=TOO_LONG),
    row("garbage", Outcome.FITS, Stage.SERVE, None, Fault(F.GARBAGE)),
    row("refusal behind garbage", Outcome.KV_TOO_SMALL, Stage.KV_CACHE, ..., Fault(F.GARBAGE), length=TOO_LONG),
    row("no newline at the end", Outcome.CRASH, Stage.LOAD, 1, Fault(F.NO_NEWLINE)),
    row(
        *("refusal without a newline at the end", Outcome.DEVICE_OOM, Stage.LOAD, ...),
        Fault(F.NO_NEWLINE, text="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    ),
    row("words about a failure that is none", Outcome.FITS, Stage.SERVE, None,
        Fault(F.SAYS, text="INFO 12-01 12:00:00 [x.py:1] a ValueError, Traceback (most recent call last), no memory")),
    row("slow death", Outcome.FITS, Stage.SERVE, None, Fault(F.SLOW_DEATH, amount=20)),
    row("everything at once", Outcome.KV_TOO_SMALL, Stage.KV_CACHE, None, Fault(F.LINGER, amount=30), Fault(F.GARBAGE),
        Fault(F.IGNORE_SIGTERM), Fault(F.SETSID_GRANDCHILD), length=TOO_LONG),
)  # fmt: skip
SKIPS = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.DEVICE_BUSY)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name.replace(" ", "-"))
def test_fault(row: Row, tmp_path: Path) -> None:
    scenario = Scenario(faults=row.faults, **dict(row.played))
    limits = QUICK if row.outcome is Outcome.TIMEOUT else PLENTY
    asked = {"entrypoint": row.entrypoint, "tensor_parallel_size": row.tp, "flags": row.flags}
    trial = bench(tmp_path, scenario, limits=limits, **asked)  # type: ignore[arg-type]  # of three types
    began = time.monotonic()
    verdict, status = trial.attempt(row.length)  # fails by itself if anything lives on
    assert (verdict.outcome, verdict.stage) == (row.outcome, row.stage or verdict.stage), (
        f"{verdict.outcome} {verdict.stage} {status} {verdict.evidence[:120]}"
    )
    assert row.says in verdict.evidence
    # Whether it ends by itself before we end it is a matter of milliseconds where the log already tells.
    assert row.status in (..., status) or (status is None and verdict.outcome in DECIDED_BY_LOG)
    assert verdict.evidence
    log = log_path(trial.setting, TRIAL)
    assert log.stat().st_size, "the log is kept"
    assert time.monotonic() - began < 25
    if row.outcome is Outcome.TIMEOUT:
        assert "no progress for 2 s" in verdict.evidence, "our own questions in the log are no progress"
    if row.outcome in SKIPS:
        assert answer_of(verdict) is Answer.UNKNOWN, "could not tell never means too long"
    log.unlink()  # one of them has a gigabyte


def test_table_is_long_and_its_rows_differ() -> None:
    assert len(TABLE) >= 40
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("day", [-86_400.0, 86_400.0])
def test_jump_of_the_clock_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, day: float) -> None:
    looks = iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0 + day * next(looks))
    trial = bench(tmp_path, Scenario(), limits=QUICK)
    assert trial.attempt()[0].outcome is Outcome.FITS
    assert trial.attempt(TOO_LONG, "t2")[0].outcome is Outcome.KV_TOO_SMALL

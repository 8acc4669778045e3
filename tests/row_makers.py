"""Rows, trials and ceilings for the tests: plain ones to change a field of, and hypothesis' any."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from prober.records import (
    Bracket,
    Ceiling,
    Combination,
    Figures,
    Machine,
    Outcome,
    Stage,
    Status,
    Trial,
    Verdict,
    Verify,
)
from prober.results.from_ceiling import row_of
from prober.results.schema import HEADER, Row
from prober.results.store import Store

HOSTILE = (
    "a,b", 'say "x"', "two\nlines", "cr\rhere", "crlf\r\nhere", "=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "\tx",
    "\rx", "'quoted", "''", "<script>alert(1)</script>", "x" * 1000, "Mô hình tiếng Việt", "🦙 llama", " spaced ",
    "NA", "null", "None", "nan", "true", "0123", "1e5", "\u2028", "\x85", "＝1", " =1", "#", "<<<<<<< HEAD", "\x00",
    "\x1b[31m",
)  # fmt: skip


def a_row(**changes: Any) -> Row:
    """A measured, proven row."""
    values: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "gpu": "NVIDIA L4",
        "gpu_memory_mib": 23034,
        "gpu_count": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "vllm_version": "0.28.0",
        "status": Status.EXACT,
        "max_model_len": 3968,
        "starts_max_model_len": 4096,
        "verified": Verify.FULL,
        "machine": "m1",
        "measured_at": "2026-01-01T00:00:00Z",
    }
    return Row(**(values | changes))


def a_trial(
    length: int | None = 3968, outcome: Outcome = Outcome.FITS, *, id: str = "", evidence: str = "", **figures: Any
) -> Trial:
    return Trial(
        id=id or f"trial-{length}-{outcome}",
        combination_key="combination",
        state_key="state",
        length=length,
        is_default_length=False,
        verify=Verify.FULL,
        verdict=Verdict(
            outcome, Stage.SERVE if outcome is Outcome.FITS else Stage.KV_CACHE, evidence, figures=Figures(**figures)
        ),
        seconds=12.5,
        started_at="2026-01-01T00:00:00Z",
        prober_version="0.1.0",
    )


def a_ceiling(**changes: Any) -> Ceiling:
    """An exact ceiling at 3,968: it starts up to 4,096 and is refused at 3,969."""
    values: dict[str, Any] = {
        "combination": Combination("Qwen/Qwen3-8B"),
        "machine": Machine("NVIDIA L4", "cuda", "m1", gpu_memory_mib=23034, vllm_version="0.28.0", driver="550.1"),
        "status": Status.EXACT,
        "bracket": Bracket(3968, 3969),
        "verify": Verify.FULL,
        "why": "It serves at 3,968 and is refused at 3,969.",
        "trials": (
            a_trial(5000, Outcome.KV_TOO_SMALL, estimated_max_len=4096),
            a_trial(4096, Outcome.UNSERVABLE, estimated_max_len=None),
            a_trial(3968, gpu_blocks=32, block_size=128, kv_cache_tokens=4096, available_gib=0.0078),
            a_trial(3969, Outcome.KV_TOO_SMALL, evidence="larger than the available KV cache", estimated_max_len=3968),
        ),
        "seconds": 120.04,
        "launches": 4,
        "measured_at": "2026-01-01T00:00:00Z",
    }
    return Ceiling(**(values | changes))


_TEXT = st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1, max_size=20))
_NUMBERS = {int: st.integers(min_value=0, max_value=2**53), float: st.floats(0, 2**53)}


def _field(hint: Any) -> st.SearchStrategy[Any]:
    options = get_args(hint)
    kind = next((option for option in options if option is not type(None)), hint)
    if kind is str:
        values: st.SearchStrategy[Any] = _TEXT
    else:
        values = _NUMBERS[kind] if kind in _NUMBERS else st.sampled_from(kind)
    return st.one_of(st.none(), values) if options else values


def _any_row() -> st.SearchStrategy[Row]:
    hints = get_type_hints(Row)
    fields = {name: _field(hints[name]) for name in HEADER if name != "schema_version"}
    return st.builds(Row, **fields)


rows = _any_row()
figures = st.builds(
    Figures, **{f.name: _field(get_type_hints(Figures)[f.name]) for f in dataclasses.fields(Figures)}
)  # fmt: skip
trials = st.builds(
    Trial,
    id=st.text(),
    combination_key=st.text(),
    state_key=st.text(),
    length=st.one_of(st.none(), st.integers(min_value=0)),
    is_default_length=st.booleans(),
    verify=st.sampled_from(Verify),
    verdict=st.builds(
        Verdict,
        outcome=st.sampled_from(Outcome),
        stage=st.sampled_from(Stage),
        evidence=st.text(alphabet=st.characters()),
        line=st.one_of(st.none(), st.integers()),
        process=st.one_of(st.none(), st.text()),
        rank=st.one_of(st.none(), st.integers()),
        rule=st.one_of(st.none(), st.text()),
        figures=figures,
    ),
    seconds=st.floats(0, 1e8),
    started_at=st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
    exit_status=st.one_of(st.none(), st.integers()),
    leaked_mib=st.one_of(st.none(), st.integers()),
    prober_version=st.text(),
)


def record(store: Store, ceiling: Ceiling) -> Row:
    """Write the ceiling's row into the matrix."""
    row = row_of(ceiling)
    store.put([row])
    return row

"""Table lines of a report: cells, proof, commands and kind of answer for each row of the matrix.

Pure. A start, a report or a lower bound never looks like a proven ceiling.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from prober.engine.versions import version_order
from prober.records import Source, Status
from prober.results.lookup import answer, utilization
from prober.results.query import Query
from prober.results.schema import COLUMNS, SHARED_KEY, Column, Row
from prober.results.serve_command import Unproven, command, is_beyond_limit


class RowKind(StrEnum):
    """Kind of answer in a row, best first."""

    PROVEN = "proven"  # a full-length request was answered, and one token more is refused or not allowed
    BOUND = "bound"  # a full-length request was answered; longer lengths are undecided
    STARTS = "starts"  # the server started, here or by report; no full-length request was answered
    NO_FIT = "no-fit"
    REFUSED = "refused"  # a refused length is all that is known
    UNKNOWN = "unknown"

    @property
    def is_proven(self) -> bool:
        """Whether a full-length request was answered."""
        return self in (RowKind.PROVEN, RowKind.BOUND)


@dataclass(frozen=True, slots=True)
class Heading:
    """One column of the page's table."""

    key: str
    label: str
    is_number: bool = False


HEADINGS = (
    Heading("model", "Model"),
    Heading("gpu", "GPU"),
    Heading("tp", "TP", is_number=True),
    Heading("utilization", "Utilization", is_number=True),
    Heading("kv", "KV dtype"),
    Heading("settings", "Settings"),
    Heading("vllm", "vLLM"),
    Heading("ceiling", "max_model_len", is_number=True),
    Heading("starts", "Starts at", is_number=True),
    Heading("answer", "Answer"),
    Heading("source", "Source"),
    Heading("measured", "Measured"),
)

_ANSWERS = {
    Status.EXACT: "exact",
    Status.MODEL_LIMIT: "the model's limit",
    Status.AT_LEAST: "at least",
    Status.DOES_NOT_FIT: "does not fit",
    Status.UNSTABLE: "unstable",
    Status.INCONCLUSIVE: "inconclusive",
    Status.BAD_CONFIG: "bad config",
}
_UNKNOWN = "–"
_MOST_FLAG_CHARACTERS = 80
_SHOWN_ELSEWHERE = {  # in the row itself or as its proof
    "model", "gpu", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_dtype", "vllm_version",
    "max_model_len", "starts_max_model_len", "status", "why", "source", "source_url", "schema_version",
    "served_trial", "served_evidence", "refused_trial", "refused_outcome", "refused_evidence",
    "served_max_model_len", "refused_max_model_len",
}  # fmt: skip
_FACT_COLUMNS: tuple[Column, ...] = tuple(c for c in COLUMNS if c.name not in _SHOWN_ELSEWHERE)


@dataclass(frozen=True, slots=True)
class Line:
    """One row as a report shows it, with one cell for each of ``HEADINGS``."""

    row: Row
    cells: tuple[str, ...]
    kind: RowKind
    tokens: int | None  # the length that the kind refers to; None: there is none
    combination: tuple[object, ...]  # equal for rows that differ only in the machine
    serve: str | None  # command that starts vLLM at the proven length; None: no length is proven
    measure: str  # command that measures the row again
    proof: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    url: str | None


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """Return the lines, sorted by model, GPU and size, then newest vLLM and longest length first."""
    return [_line(row) for row in sorted(rows, key=_reading_order)]


def _reading_order(row: Row) -> tuple[object, ...]:
    newest_first = tuple(-part for part in version_order(row.vllm_version or "")[:3])
    return (
        row.model.casefold(), row.model, row.gpu, row.tensor_parallel_size or 0, row.pipeline_parallel_size or 0,
        newest_first, -(row.max_model_len or 0), -(row.starts_max_model_len or 0),
    )  # fmt: skip


def _line(row: Row) -> Line:
    kind, tokens = answer_of(row)
    origin = (row.source, row.source_url if row.source is Source.REPORTED else None)
    return Line(
        row=row,
        cells=_cells(row, kind, tokens),
        kind=kind,
        tokens=tokens,
        combination=(*origin, *(getattr(row, name) for name in SHARED_KEY)),
        serve=serve_command(row),
        measure=_measure_command(row),
        proof=_proof(row),
        facts=tuple(_fact(column, row) for column in _FACT_COLUMNS if getattr(row, column.name) is not None),
        url=row.source_url if (row.source_url or "").startswith(("https://", "http://")) else None,
    )


def answer_of(row: Row) -> tuple[RowKind, int | None]:
    """Return the kind of answer in a row and the length in tokens that it refers to."""
    if row.status is Status.DOES_NOT_FIT:
        return RowKind.NO_FIT, None
    if row.status is Status.UNSTABLE:
        return RowKind.UNKNOWN, None  # an interval, never one number
    if is_beyond_limit(row):
        return RowKind.UNKNOWN, None  # beyond the model's own limit answers may be wrong
    if row.source is not Source.MEASURED:
        claimed = row.max_model_len or row.served_max_model_len or row.starts_max_model_len
        if claimed is not None:
            return RowKind.STARTS, claimed
    elif row.max_model_len is not None:
        return (RowKind.BOUND if row.status is Status.AT_LEAST else RowKind.PROVEN), row.max_model_len
    elif row.served_max_model_len is not None:
        return RowKind.BOUND, row.served_max_model_len
    elif row.starts_max_model_len is not None:
        return RowKind.STARTS, row.starts_max_model_len
    if row.refused_max_model_len is not None:
        return RowKind.REFUSED, row.refused_max_model_len
    return RowKind.UNKNOWN, None


def answer_text(kind: RowKind, tokens: int | None) -> str:
    """Format an answer for one cell."""
    number = f"{tokens:,}" if tokens is not None else "?"
    return {
        RowKind.PROVEN: number,
        RowKind.BOUND: f"≥ {number}",
        RowKind.STARTS: f"starts {number}",
        RowKind.NO_FIT: "no fit",
        RowKind.REFUSED: f"< {number}",
        RowKind.UNKNOWN: "?",
    }[kind]


def _cells(row: Row, kind: RowKind, tokens: int | None) -> tuple[str, ...]:
    proven = answer_text(kind, tokens) if kind.is_proven else _UNKNOWN
    starts = row.starts_max_model_len
    if kind is RowKind.STARTS:
        starts = tokens
    return (
        row.model,
        row.gpu,
        _number(row.tensor_parallel_size),
        _utilization(row),
        row.kv_cache_dtype or "default",
        _settings(row),
        row.vllm_version or "unknown",
        proven,
        _number(starts),
        _answer_words(row, kind),
        str(row.source),
        (row.measured_at or _UNKNOWN)[:10],
    )


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _utilization(row: Row) -> str:
    share = utilization(row)
    if row.gpu_memory_utilization is None:
        return "default" if share is None else f"default {share:g}"
    return f"{share:g}"


def _settings(row: Row) -> str:
    parts = [
        f"PP {row.pipeline_parallel_size}" if (row.pipeline_parallel_size or 1) > 1 else None,
        row.dtype,
        row.quantization,
        str(row.compile_state) if row.compile_state else None,
        str(row.entrypoint) if row.entrypoint else None,
        _shortened(row.other_flags or ""),
    ]
    return " · ".join(part for part in parts if part) or _UNKNOWN


def _shortened(flags: str) -> str:
    """Truncate flags that would make the row many lines high; the facts show them in full."""
    return flags if len(flags) <= _MOST_FLAG_CHARACTERS else flags[: _MOST_FLAG_CHARACTERS - 1] + "…"


def _answer_words(row: Row, kind: RowKind) -> str:
    if row.status is Status.UNSTABLE and row.served_max_model_len and row.refused_max_model_len:
        return f"unstable, {row.served_max_model_len:,} to {row.refused_max_model_len:,}"
    if row.status is not None:
        return _ANSWERS[row.status]
    return {RowKind.STARTS: "a start only", RowKind.REFUSED: f"refused at {_number(row.refused_max_model_len)}"}.get(
        kind, "unknown"
    )


def serve_command(row: Row) -> str | None:
    """Return the command that serves at the row's proven length, or None without one."""
    if not answer_of(row)[0].is_proven:
        return None
    try:
        return command(row)
    except (Unproven, ValueError):  # ValueError: unbalanced quotes in the flags of an imported row
        return None


def _measure_command(row: Row) -> str:
    query = Query(
        model=row.model,
        tensor_parallel_size=row.tensor_parallel_size,
        pipeline_parallel_size=row.pipeline_parallel_size if row.pipeline_parallel_size != 1 else None,
        gpu_memory_utilization=row.gpu_memory_utilization,
        dtype=row.dtype,
        quantization=row.quantization,
        kv_cache_dtype=row.kv_cache_dtype,
        entrypoint=row.entrypoint,
        compile_state=row.compile_state,
    )
    return answer((), query, datetime.now(UTC)).command or shlex.join(["prober", "probe", row.model])


def _proof(row: Row) -> tuple[tuple[str, str], ...]:
    """Both ends of the bracket: length, outcome, trial and evidence line."""
    served = _bracket_end(row.served_max_model_len or row.max_model_len, None, row.served_trial, row.served_evidence)
    outcome = str(row.refused_outcome).replace("_", " ") if row.refused_outcome else None
    refused = _bracket_end(row.refused_max_model_len, outcome, row.refused_trial, row.refused_evidence)
    return tuple((title, text) for title, text in (("Served", served), ("Refused", refused)) if text)


def _bracket_end(tokens: int | None, outcome: str | None, trial: str | None, evidence: str | None) -> str:
    head = [f"{tokens:,} tokens" if tokens is not None else None, outcome, f"trial {trial}" if trial else None]
    return ": ".join(part for part in (", ".join(part for part in head if part), evidence) if part)


def _fact(column: Column, row: Row) -> tuple[str, str]:
    value = getattr(row, column.name)
    if isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value)
    return column.name, f"{text} {column.unit}" if column.unit else text


def choices(lines: Sequence[Line], key: str) -> list[str]:
    """List the values of a column for its filter: versions newest first, numbers by size, text alphabetically."""
    index = next(index for index, heading in enumerate(HEADINGS) if heading.key == key)
    values = {line.cells[index] for line in lines}
    if key == "vllm":
        return sorted(values, key=version_order, reverse=True)
    return sorted(
        values, key=lambda text: (text == _UNKNOWN, len(text) if text.isdigit() else 0, text.casefold(), text)
    )

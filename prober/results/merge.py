"""Merge matrices: the newest proof wins, and every dropped row is listed.

Pure. Reads both sides of a text with git conflict markers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prober.records import Source
from prober.results.csv_format import (
    CONFLICT_MARKS,
    HEADER_LINE,
    ForeignMatrix,
    Key,
    proof,
    read_cells,
    row_key,
    stands_before,
)
from prober.results.schema import Row, from_cells, to_values
from prober.results.text import printable


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row left out of the merged matrix, and the row kept instead."""

    row: Row
    kept: Row
    why: str


@dataclass(frozen=True, slots=True)
class Merged:
    """The merged rows, sorted by key, and the dropped ones."""

    rows: tuple[Row, ...]
    dropped: tuple[Dropped, ...]
    identical: int  # exact duplicates


def merge(matrices: Iterable[Iterable[Row]]) -> Merged:
    """Merge matrices. Their order matters only between equals, where the later one is kept."""
    standing: dict[Key, Row] = {}
    losers: list[tuple[Key, Row]] = []
    identical = 0
    for row in (row for rows in matrices for row in rows):
        key = row_key(row)
        old = standing.get(key)
        if old == row:
            identical += 1
        elif old is None or stands_before(row, old):
            standing[key] = row
            if old is not None:
                losers.append((key, old))
        else:
            losers.append((key, row))
    dropped = tuple(Dropped(row, standing[key], _why(row, standing[key])) for key, row in losers)
    return Merged(tuple(standing[key] for key in sorted(standing)), dropped, identical)


def _why(row: Row, kept: Row) -> str:
    ranks = list(Source)
    if ranks.index(row.source) > ranks.index(kept.source):
        return f"{row.source}, and the same is {kept.source}"
    if proof(row) < proof(kept):
        return "it proves less than the row that stands"
    return "a newer row stands" if row.measured_at != kept.measured_at else "another row of the same time stands"


def read_rows(text: str, name: str = "matrix.csv") -> list[Row]:
    """Read a matrix, also one with git conflict markers. Raises ``ForeignMatrix`` if it is not a prober's."""
    try:
        return list(map(from_cells, read_cells(text, name)))
    except ForeignMatrix:
        sides = conflict_sides(text)
        if len(sides) < 2:
            raise
    return [from_cells(cells) for side in sides for cells in read_cells(side, name)]


def conflict_sides(text: str) -> list[str]:
    """Split a text with git conflict markers into both sides; without markers, return the text alone.

    Common lines go to the first side only, because the sides are merged. A diff3 base is left out.
    """
    sides: list[list[str]] = [[], []]
    side: int | None = 0
    marks = 0
    for line in io.StringIO(text, newline="\n"):
        mark = next((mark for mark in CONFLICT_MARKS if line.startswith(mark)), None)
        if mark is None:
            if side is not None:
                sides[side].append(line)
            continue
        marks += 1
        side = {"=======": 1, "|||||||": None}.get(mark, 0)
    if not marks:
        return [text]
    header = next((line for lines in sides for line in lines if _is_header(line)), HEADER_LINE)
    return ["".join(lines if lines and _is_header(lines[0]) else [header, *lines]) for lines in sides]


def _is_header(line: str) -> bool:
    return {"model", "gpu", "source", "schema_version"} <= set(line.strip().split(","))


def render_merged(merged: Merged) -> str:
    """Summarise a merge for the terminal: counts, then each dropped row with the reason."""
    lines = [f"{len(merged.rows)} rows; {merged.identical} were there more than once; {len(merged.dropped)} dropped."]
    lines += [f"  dropped {_name(d.row)}: {d.why} ({_length(d.row)} -> {_length(d.kept)})" for d in merged.dropped]
    return "\n".join(lines) + "\n"


def merged_json(merged: Merged) -> str:
    """Write the outcome as one JSON object, without the merged rows: they are in the file."""
    dropped: Sequence[dict[str, object]] = [
        {"why": d.why, "row": to_values(d.row), "kept": to_values(d.kept)} for d in merged.dropped
    ]
    counts = {"rows": len(merged.rows), "identical": merged.identical}
    return json.dumps(counts | {"dropped": dropped}, indent=2, ensure_ascii=False)


def _name(row: Row) -> str:
    parts = (
        row.model,
        row.gpu,
        f"TP {row.tensor_parallel_size}",
        f"vLLM {row.vllm_version}",
        row.machine or row.source_url,
    )
    return printable(", ".join(part for part in parts if part))


def _length(row: Row) -> str:
    return f"{row.max_model_len:,}" if row.max_model_len is not None else str(row.status or row.source)

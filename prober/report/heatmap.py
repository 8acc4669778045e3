"""The heatmap: models down, GPU and parallel sizes across; each cell is the longest length known for it.

Pure. Of one combination measured on several machines the lowest counts; of several combinations (utilization,
version, dtypes) the longest. All rules are here: each row's `HeatEntry` carries its text, its colour and its two ranks
to the page, where report.js repeats only the selection by rank, on the rows that pass the filters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from prober.report.rows import Line, RowKind, answer_text

STEPS = 9  # colours, one for each doubling: below 4,096, from 4,096, …, from 524,288
_FIRST_STEP_BITS = 12

# Which machine speaks for a combination: one where it does not fit first, one without an answer last.
_CAUTION = {
    RowKind.NO_FIT: 0,
    RowKind.PROVEN: 1,
    RowKind.BOUND: 1,
    RowKind.STARTS: 2,
    RowKind.REFUSED: 3,
    RowKind.UNKNOWN: 4,
}
# Which combination speaks for a cell: a proven length first.
_MERIT = {
    RowKind.PROVEN: 0,
    RowKind.BOUND: 0,
    RowKind.STARTS: 1,
    RowKind.NO_FIT: 2,
    RowKind.REFUSED: 3,
    RowKind.UNKNOWN: 4,
}


@dataclass(frozen=True, slots=True, order=True)
class HeatColumn:
    """One column: a type of GPU and how many of them."""

    gpu: str
    tensor_parallel_size: int  # 0: unknown
    pipeline_parallel_size: int

    @property
    def label(self) -> str:
        """Abbreviate the parallel sizes."""
        size = f"TP {self.tensor_parallel_size or '?'}"
        return f"{size} · PP {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else size


@dataclass(frozen=True, slots=True)
class HeatEntry:
    """What one row contributes to the heatmap."""

    place: tuple[int, int]  # indices of its model and column
    combination: int
    caution: int  # of the rows of one combination, the lowest caution wins
    merit: int  # of the winners in one cell, the lowest merit wins
    text: str
    style: str  # CSS class


@dataclass(frozen=True, slots=True)
class Heatmap:
    """The whole map. ``cells[model][column]`` is None where nothing is known; ``entries`` follow the given lines."""

    models: tuple[str, ...]
    columns: tuple[HeatColumn, ...]
    cells: tuple[tuple[HeatEntry | None, ...], ...]
    entries: tuple[HeatEntry, ...]

    @property
    def gpus(self) -> list[tuple[str, int]]:
        """List each GPU with its number of columns, from left to right."""
        return [(gpu, len(list(group))) for gpu, group in groupby(self.columns, key=attrgetter("gpu"))]


def heatmap_of(lines: Sequence[Line]) -> Heatmap:
    """Place the lines and choose each cell's entry."""
    models = _ranks(dict.fromkeys(line.row.model for line in lines))
    columns = _ranks(sorted({_column(line) for line in lines}))
    combinations = _ranks(dict.fromkeys(line.combination for line in lines))
    cautions = _ranks(sorted({_caution(line) for line in lines}))
    merits = _ranks(sorted({_merit(line) for line in lines}))
    entries = tuple(
        HeatEntry(
            place=(models[line.row.model], columns[_column(line)]),
            combination=combinations[line.combination],
            caution=cautions[_caution(line)],
            merit=merits[_merit(line)],
            text=answer_text(line.kind, line.tokens),
            style=_style(line),
        )
        for line in lines
    )
    best = _select(entries)
    cells = tuple(tuple(best.get((down, across)) for across in columns.values()) for down in models.values())
    return Heatmap(tuple(models), tuple(columns), cells, entries)


def colour_step(tokens: int) -> int:
    """Return the index of a length's colour."""
    return min(max(tokens.bit_length() - _FIRST_STEP_BITS, 0), STEPS - 1)


def _ranks(ordered: Iterable[Any]) -> dict[Any, int]:
    return {value: index for index, value in enumerate(ordered)}


def _column(line: Line) -> HeatColumn:
    row = line.row
    return HeatColumn(row.gpu, row.tensor_parallel_size or 0, row.pipeline_parallel_size or 1)


def _caution(line: Line) -> tuple[int, int]:
    return _CAUTION[line.kind], line.tokens or 0


def _merit(line: Line) -> tuple[int, int]:
    return _MERIT[line.kind], -(line.tokens or 0)


def _style(line: Line) -> str:
    if line.kind.is_proven and line.tokens is not None:
        return f"h{colour_step(line.tokens)}"
    return line.kind


def _select(entries: Iterable[HeatEntry]) -> dict[tuple[int, int], HeatEntry]:
    """Choose the entry of each place: the lowest per combination, then the best of those."""
    lowest: dict[int, HeatEntry] = {}
    for entry in sorted(entries, key=attrgetter("caution")):
        lowest.setdefault(entry.combination, entry)
    best: dict[tuple[int, int], HeatEntry] = {}
    for entry in sorted(lowest.values(), key=attrgetter("merit")):
        best.setdefault(entry.place, entry)
    return best

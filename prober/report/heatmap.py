"""The heatmap: models down, GPU and parallel sizes across, each cell the longest length known for it.

Pure. Of one combination measured on several machines the lowest counts; of several combinations (utilization,
version, dtypes) the longest. report.js does the same again for what the filters leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from prober.report.rows import Line, RowKind

STEPS = 9  # colours, one for each doubling: below 4,096, from 4,096, …, from 524,288
_FIRST_STEP_BITS = 12

# What stands for a combination: a machine where it does not fit first, one that could not tell last.
_LOWNESS = {
    RowKind.NO_FIT: 0,
    RowKind.PROVEN: 1,
    RowKind.BOUND: 1,
    RowKind.STARTS: 2,
    RowKind.REFUSED: 3,
    RowKind.UNKNOWN: 4,
}
# What stands for a cell: a proven length first.
_WORTH = {
    RowKind.PROVEN: 4,
    RowKind.BOUND: 4,
    RowKind.STARTS: 3,
    RowKind.NO_FIT: 2,
    RowKind.REFUSED: 1,
    RowKind.UNKNOWN: 0,
}


@dataclass(frozen=True, slots=True, order=True)
class HeatColumn:
    """One column: a type of GPU and how many of them."""

    gpu: str
    tensor_parallel_size: int  # 0: unknown
    pipeline_parallel_size: int

    @property
    def label(self) -> str:
        """The sizes in a few letters."""
        size = f"TP {self.tensor_parallel_size or '?'}"
        return f"{size} · PP {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else size


@dataclass(frozen=True, slots=True)
class HeatCell:
    """What a cell shows; ``step`` is its colour, None: nothing proven."""

    kind: RowKind
    tokens: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Heat:
    """The whole map. ``cells[model][column]``; None: nothing known. ``places`` says where each line went."""

    models: tuple[str, ...]
    columns: tuple[HeatColumn, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]
    places: tuple[tuple[int, int], ...]

    @property
    def gpus(self) -> list[tuple[str, int]]:
        """Each GPU and how many columns it has, from left to right."""
        return [(gpu, len(list(group))) for gpu, group in groupby(self.columns, key=attrgetter("gpu"))]


def heat_of(lines: Sequence[Line]) -> Heat:
    """Lay the lines out and work out each cell."""
    models = list(dict.fromkeys(line.row.model for line in lines))
    columns = sorted({_column(line) for line in lines})
    model_places = {model: index for index, model in enumerate(models)}
    column_places = {column: index for index, column in enumerate(columns)}
    places = tuple((model_places[line.row.model], column_places[_column(line)]) for line in lines)
    by_place: dict[tuple[int, int], list[Line]] = {}
    for line, place in zip(lines, places, strict=True):
        by_place.setdefault(place, []).append(line)
    cells = tuple(
        tuple(_cell(by_place.get((down, across), [])) for across in range(len(columns))) for down in range(len(models))
    )
    return Heat(tuple(models), tuple(columns), cells, places)


def step_of(tokens: int) -> int:
    """Say which colour a length has."""
    return min(max(tokens.bit_length() - _FIRST_STEP_BITS, 0), STEPS - 1)


def _column(line: Line) -> HeatColumn:
    row = line.row
    return HeatColumn(row.gpu, row.tensor_parallel_size or 0, row.pipeline_parallel_size or 1)


def _cell(lines: Iterable[Line]) -> HeatCell | None:
    lowest: dict[tuple[object, ...], Line] = {}
    for line in lines:
        other = lowest.get(line.combination)
        if other is None or _lowness(line) < _lowness(other):
            lowest[line.combination] = line
    if not lowest:
        return None
    best = max(lowest.values(), key=lambda line: (_WORTH[line.kind], line.tokens or 0))
    is_proven = best.kind in (RowKind.PROVEN, RowKind.BOUND) and best.tokens is not None
    return HeatCell(best.kind, best.tokens, step_of(best.tokens) if is_proven and best.tokens is not None else None)


def _lowness(line: Line) -> tuple[int, int]:
    return _LOWNESS[line.kind], line.tokens or 0

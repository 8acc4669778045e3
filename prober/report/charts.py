"""Charts of how the ceiling changes with one setting while all others stay the same. Pure.

Finds the series in the rows and computes coordinates; the page's template draws the SVG. Only proven lengths count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from prober.engine.versions import version_order
from prober.report.rows import Line
from prober.results.lookup import utilization
from prober.results.schema import SHARED_KEY, Row

MOST_SERIES = 8  # as many colours as the style sheet has
WIDTH, HEIGHT = 440, 250  # of a chart, in SVG user units
LEFT, RIGHT, TOP = 62, WIDTH - 14, 10  # edges of the plot area
_MOST_LEVEL_LABELS = 5  # more x labels than that are tilted
_MOST_LABELS = 12
_SHORT_NAMES = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "gpu_memory_utilization": "utilization",
    "kv_cache_dtype": "KV",
    "vllm_version": "vLLM",
    "gpu_memory_mib": "MiB",
    "model_revision": "revision",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """The setting on a chart's x axis, and the key columns that change with it."""

    title: str
    value_of: Callable[[Row], Any]
    order: Callable[[Any], Any]
    columns: tuple[str, ...]


AXES = (
    Axis("gpu_memory_utilization", utilization, lambda v: v, ("gpu_memory_utilization",)),
    Axis("tensor_parallel_size", lambda row: row.tensor_parallel_size, lambda v: v,
         ("tensor_parallel_size", "gpu_count")),
    Axis("vLLM version", lambda row: row.vllm_version, version_order, ("vllm_version",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: its points differ in nothing but the axis."""

    label: str
    points: tuple[tuple[Any, int], ...]  # value on the axis -> tokens, in the axis' order


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over one axis, with the coordinates to draw them. ``left_out`` counts series that are not drawn."""

    title: str
    series: tuple[Series, ...]
    left_out: int
    values: tuple[Any, ...]  # on the x axis, in its order

    @property
    def is_tilted(self) -> bool:
        """Whether the x labels need more room than a horizontal line gives."""
        return len(self.values) > _MOST_LEVEL_LABELS

    @property
    def bottom(self) -> int:
        """The y coordinate of zero tokens."""
        return HEIGHT - (62 if self.is_tilted else 26)

    @property
    def x_labels(self) -> list[tuple[float, str]]:
        """At most twelve coordinates and texts."""
        every = -(-len(self.values) // _MOST_LABELS)
        return [(self.x(value), f"{value:g}" if isinstance(value, float) else str(value)[:20])
                for value in self.values[::every]]  # fmt: skip

    @property
    def y_ticks(self) -> range:
        """Three to six round numbers of tokens, from zero to the longest length or above."""
        longest = max(tokens for series in self.series for _, tokens in series.points)
        rough = max(longest // 4, 1)
        magnitude = 10 ** (len(str(rough)) - 1)
        step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
        return range(0, longest + step, step)

    def x(self, value: Any) -> float:
        """Scale a value: by distance where all are fractions, else by position."""
        if all(isinstance(each, float) for each in self.values):
            share: float = (value - self.values[0]) / (self.values[-1] - self.values[0])
        else:
            share = self.values.index(value) / (len(self.values) - 1)
        return round(LEFT + share * (RIGHT - LEFT), 1)

    def y(self, tokens: int) -> float:
        """Scale a number of tokens."""
        return round(self.bottom - tokens / self.y_ticks[-1] * (self.bottom - TOP), 1)


@dataclass(frozen=True, slots=True)
class ModelCharts:
    """The charts of one model on one type of GPU."""

    model: str
    gpu: str
    charts: tuple[Chart, ...]


def charts_of(lines: Iterable[Line]) -> list[ModelCharts]:
    """Find every series of at least two points, grouped by model and GPU."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.kind.is_proven:
            groups.setdefault((line.row.model, line.row.gpu), []).append(line)
    found = []
    for (model, gpu), group in groups.items():
        charts = tuple(chart for chart in (_chart(axis, group) for axis in AXES) if chart)
        if charts:
            found.append(ModelCharts(model, gpu, charts))
    return found


def _chart(axis: Axis, lines: Sequence[Line]) -> Chart | None:
    series = _series(axis, lines)
    if not series:
        return None
    drawn = tuple(series[:MOST_SERIES])
    values = sorted({value for each in drawn for value, _ in each.points}, key=axis.order)
    return Chart(axis.title, drawn, len(series) - len(drawn), tuple(values))


def _series(axis: Axis, lines: Sequence[Line]) -> list[Series]:
    """Group lines that differ only on the axis; of several machines the lowest counts."""
    fixed = [name for name in SHARED_KEY if name not in axis.columns]
    groups: dict[tuple[object, ...], dict[Any, int]] = {}
    for line in lines:
        value = axis.value_of(line.row)
        if value is not None and line.tokens is not None and not (isinstance(value, float) and not isfinite(value)):
            points = groups.setdefault(tuple(getattr(line.row, name) for name in fixed), {})
            points[value] = min(points.get(value, line.tokens), line.tokens)
    curves = {key: points for key, points in groups.items() if len(points) > 1}
    differing = [index for index in range(len(fixed)) if len({key[index] for key in curves}) > 1]
    found = [
        Series(
            label=_label([(fixed[index], key[index]) for index in differing]),
            points=tuple(sorted(points.items(), key=lambda point: axis.order(point[0]))),
        )
        for key, points in curves.items()
    ]
    return sorted(found, key=lambda series: (-len(series.points), series.label))


def _label(settings: Sequence[tuple[str, object]]) -> str:
    return ", ".join(
        f"{_SHORT_NAMES.get(name, name)} {'default' if value is None else str(value)[:60]}"
        for name, value in settings
        if name != "gpu_count"
    )

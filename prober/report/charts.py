"""How the ceiling moves with one setting while all others stay: series out of rows, and their drawings.

pygal draws; of its SVG only shapes, classes and text are kept (no script, style or link), so that the page's own
style sheet colours it, in light and dark. Only proven lengths are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any
from xml.etree.ElementTree import Element

from prober.engine.versions import version_order
from prober.records import NotReady
from prober.report.rows import Line, RowKind
from prober.results.lookup import utilization
from prober.results.schema import KEY, Row

MOST_SERIES = 8  # that eyes can tell apart, and colours that the style sheet has
_SVG = "{http://www.w3.org/2000/svg}"
_DROPPED_CLASSES = ("tooltip-overlay", "text-overlay", "legends", "titles")
_KEPT = {"class", "d", "cx", "cy", "r", "x", "y", "width", "height", "transform"}


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting that curves follow, and which key columns it takes along."""

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
    """One curve: everything but the axis is the same at each of its points."""

    label: str
    points: tuple[tuple[Any, int], ...]  # value on the axis -> tokens, in the axis' order


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over one axis. ``left_out`` counts further curves that are not drawn."""

    title: str
    series: tuple[Series, ...]
    left_out: int
    svg: str


@dataclass(frozen=True, slots=True)
class Curves:
    """The charts of one model on one type of GPU."""

    model: str
    gpu: str
    charts: tuple[Chart, ...]


def curves_of(lines: Iterable[Line]) -> list[Curves]:
    """Find and draw every curve that has at least two points. Raises ``NotReady`` where pygal is missing."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.kind in (RowKind.PROVEN, RowKind.BOUND):
            groups.setdefault((line.row.model, line.row.gpu), []).append(line)
    found = []
    for (model, gpu), group in groups.items():
        charts = tuple(chart for chart in (_chart(axis, group) for axis in AXES) if chart)
        if charts:
            found.append(Curves(model, gpu, charts))
    return found


def _chart(axis: Axis, lines: Sequence[Line]) -> Chart | None:
    series = _series(axis, lines)
    if not series:
        return None
    drawn = series[:MOST_SERIES]
    return Chart(axis.title, tuple(drawn), len(series) - len(drawn), _draw(axis, drawn))


def _series(axis: Axis, lines: Sequence[Line]) -> list[Series]:
    """Group what differs in nothing but the axis (and the machine, of which the lowest counts)."""
    fixed = [name for name in KEY if name not in (*axis.columns, "machine")]
    groups: dict[tuple[object, ...], dict[Any, int]] = {}
    for line in lines:
        value = axis.value_of(line.row)
        if value is not None and line.tokens is not None and not (isinstance(value, float) and not isfinite(value)):
            points = groups.setdefault(tuple(getattr(line.row, name) for name in fixed), {})
            points[value] = min(points.get(value, line.tokens), line.tokens)
    several = {key: points for key, points in groups.items() if len(points) > 1}
    differing = [index for index in range(len(fixed)) if len({key[index] for key in several}) > 1]
    found = [
        Series(_label([(fixed[index], key[index]) for index in differing]), _in_order(points, axis))
        for key, points in several.items()
    ]
    return sorted(found, key=lambda one: (-len(one.points), one.label))


def _in_order(points: dict[Any, int], axis: Axis) -> tuple[tuple[Any, int], ...]:
    return tuple(sorted(points.items(), key=lambda point: axis.order(point[0])))


def _label(settings: Sequence[tuple[str, object]]) -> str:
    names = {"tensor_parallel_size": "TP", "pipeline_parallel_size": "PP", "gpu_memory_utilization": "utilization",
             "kv_cache_dtype": "KV", "vllm_version": "vLLM", "gpu_memory_mib": "MiB",
             "model_revision": "revision"}  # fmt: skip
    shown = [
        f"{names.get(name, name)} {str(value)[:60] if value is not None else 'default'}"
        for name, value in settings
        if name != "gpu_count"
    ]
    return ", ".join(shown)


def _draw(axis: Axis, series: Sequence[Series]) -> str:
    pygal = _drawing_library()
    values = sorted({value for one in series for value, _ in one.points}, key=axis.order)
    is_scale = all(isinstance(value, float) for value in values)  # distances mean something
    kind = pygal.XY if is_scale else pygal.Line
    chart = kind(
        js=[], css=[], no_prefix=True, width=440, height=250, show_legend=False, margin=4, min_scale=3, max_scale=6,
        dots_size=3, include_x_axis=True, truncate_label=-1, x_label_rotation=35 if len(values) > 5 else 0,
        y_value_formatter=lambda y: f"{y:,.0f}", value_formatter=lambda y: f"{y:,.0f}",
    )  # fmt: skip
    chart.x_labels = values if is_scale else [str(value)[:20] for value in values]
    if is_scale:
        chart.x_value_formatter = lambda x: f"{x:g}"
    elif len(values) > 12:
        chart.show_minor_x_labels = False
        chart.x_labels_major_every = -(-len(values) // 12)
    for one in series:
        known = dict(one.points)
        chart.add(one.label, list(one.points) if is_scale else [known.get(value) for value in values])
    return _plain_svg(chart.render_tree(), series, axis)


def _drawing_library() -> Any:
    try:
        import pygal  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotReady("The page's curves need pygal: pip install jinja2 pygal.") from error
    # It leaves an importer behind for plug-ins of old, at which Python 3.11 warns with every later import.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]
    return pygal


def _plain_svg(root: Element, series: Sequence[Series], axis: Axis) -> str:
    from markupsafe import escape

    curves = ", ".join(f"{one.label or 'ceiling'}: {_spoken(one)}" for one in series)
    name = escape(f"max_model_len over {axis.title}. {curves}")
    parts: list[str] = []
    for child in root:
        _write(child, parts)
    return f'<svg viewBox="{escape(root.get("viewBox"))}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _spoken(series: Series) -> str:
    return "; ".join(f"{tokens:,} at {value}" for value, tokens in series.points)


def _write(element: Element, parts: list[str]) -> None:
    """Write shapes and text, and of their attributes those that say where and what they are."""
    from markupsafe import escape

    tag = element.tag.removeprefix(_SVG) if isinstance(element.tag, str) else ""
    if tag not in ("g", "path", "rect", "circle", "text"):
        return
    classes = (element.get("class") or "").split()
    if any(name in classes for name in _DROPPED_CLASSES):
        return
    attributes = "".join(f' {name}="{escape(_short(value))}"' for name, value in element.items() if name in _KEPT)
    parts.append(f"<{tag}{attributes}>")
    if tag == "text" and element.text:
        parts.append(str(escape(element.text)))
    if "dots" in classes:  # what a pointer that rests on the dot is told
        said = next((child.text for child in element if child.get("class") == "value"), None)
        parts.append(f"<title>{escape(said or '')}</title>")
    for child in element if tag != "circle" else ():
        _write(child, parts)
    parts.append(f"</{tag}>")


def _short(number: str) -> str:
    try:
        return f"{float(number):.1f}".removesuffix(".0")
    except ValueError:
        return number

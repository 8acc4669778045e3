"""A night in words: Markdown for a job's page, and JSON.

Pure.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise

from prober.engine.versions import version_order
from prober.fleet.compare import Compared, ExitCode, ceiling_of, exit_code, one_diff
from prober.fleet.jobs import Cell, FleetNode, Jobs, RefusedCell
from prober.fleet.known_rows import About, about_row
from prober.measure.summary import describe
from prober.records import Status
from prober.results.diff import Change, ChangeKind, Diff, markdown_diff
from prober.results.from_ceiling import public_model
from prober.results.schema import Row, to_values
from prober.results.table import markdown_table
from prober.results.text import printable

MOST_ROWS = 200  # of one table on a page; the JSON has all


@dataclass(frozen=True, slots=True)
class NightSummary:
    """All that is told of one run."""

    name: str
    began: datetime
    ended: datetime
    compared: Sequence[Compared]
    fresh: Sequence[Row]  # proven before, and still young enough
    refused: Sequence[RefusedCell]
    gone: Sequence[RefusedCell]  # of them, those the matrix knows
    skipped: Sequence[str] = ()  # nodes that were passed over, and why

    @property
    def code(self) -> ExitCode:
        return exit_code(self.compared, self.gone)


def markdown(night: NightSummary) -> str:
    """The summary for people: what fell first, then what is missing, then everything."""
    minutes = (night.ended - night.began).total_seconds() / 60
    lines = [f"# {_cell(night.name)}: {_headline(night)}", ""]
    lines += [f"{night.began:%Y-%m-%d %H:%M} UTC, {minutes:.0f} min. {_counts(night)}", ""]
    lines += [_changes(night), ""]
    lines += _section("Regressions", [_regression(one) for one in night.compared if one.is_regression])
    lines += _section("Fell once, not confirmed", [_doubt(one) for one in night.compared if _is_doubtful(one)])
    lines += _section("Without an answer", [_unanswered(one) for one in night.compared if one.is_unanswered])
    lines += _section("Cannot run on this fleet", [_refused(one, night.gone) for one in night.refused])
    lines += _section("Passed over", [_cell(line) for line in night.skipped])
    lines += _section("Between versions", list(between_versions(rows_of(night))))
    return "\n".join([*lines, "## Ceilings", "", *_table(rows_of(night))]) + "\n"


def _headline(night: NightSummary) -> str:
    regressions = sum(one.is_regression for one in night.compared)
    if regressions:
        return f"{regressions} regression{'s' * (regressions != 1)}"
    return "partly failed" if night.code is ExitCode.PARTLY_FAILED else "fine"


def _counts(night: NightSummary) -> str:
    answered = sum(not one.is_unanswered for one in night.compared)
    return (
        f"{answered} of {len(night.compared)} cells answered, {len(night.fresh)} still fresh, "
        f"{len(night.refused)} cannot run here."
    )


def _changes(night: NightSummary) -> str:
    """Every difference to the night before, as `prober diff --markdown` shows it."""
    changes: list[Change] = []
    alike = 0
    for one in night.compared:
        if one.old is not None and one.new is not None:
            found = one_diff(one.old, one.new, one.tolerance)
            changes += found.changes
            alike += found.alike
    order = list(ChangeKind)
    changes.sort(key=lambda change: order.index(change.kind))
    return markdown_diff(Diff(tuple(changes), alike)).rstrip()


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    more = [f"- and {len(lines) - MOST_ROWS} more"] if len(lines) > MOST_ROWS else []
    return [f"## {title}", "", *(f"- {line}" for line in lines[:MOST_ROWS]), *more, ""]


def _name(one: Compared) -> str:
    version = one.new.vllm_version if one.new is not None else one.cell.vllm_version
    return _cell(f"{_described(one.cell)} on {one.cell.gpu}, vLLM {version or 'unknown'}")


def _described(cell: Cell) -> str:
    """The combination on one line, without a path of the nodes."""
    return describe(replace(cell.combination, model=public_model(cell.combination.model)))


def _regression(one: Compared) -> str:
    first = f", first bad version {one.first_bad_version}" if one.first_bad_version else ""
    return f"{_name(one)}: {_length(one.old)} -> {_length(one.new)}, proven twice{_cell(first)}"


def _is_doubtful(one: Compared) -> bool:
    return one.again is not None and not one.is_regression


def _doubt(one: Compared) -> str:
    again = _length(one.again.row) if one.again is not None and one.again.row is not None else "no answer"
    return f"{_name(one)}: {_length(one.old)} -> {_length(one.answer.row)}, then {again}"


def _unanswered(one: Compared) -> str:
    return f"{_name(one)}: {str(one.answer.end).replace('_', ' ')}, {_cell(one.answer.why)}"


def _refused(one: RefusedCell, gone: Sequence[RefusedCell]) -> str:
    lost = " (the matrix has a row of it: machines are missing)" if one in gone else ""
    return f"{_cell(f'{one.model}, TP {one.tensor_parallel_size} on {one.gpu}, vLLM {one.engine}: {one.why}')}{lost}"


def between_versions(rows: Iterable[Row]) -> Iterator[str]:
    """How the ceiling moved from version to version on one machine, and where starting is not serving."""
    groups: dict[tuple[About, str | None], list[Row]] = defaultdict(list)
    for row in rows:
        if ceiling_of(row) is not None:
            groups[about_row(row), row.machine].append(row)
    for group in groups.values():
        ordered = sorted(group, key=lambda row: version_order(row.vllm_version or ""))
        for old, new in pairwise(ordered):
            if old.vllm_version == new.vllm_version:
                continue
            name = _cell(f"{old.model}, TP {old.tensor_parallel_size} on {old.gpu}")
            versions = f"vLLM {old.vllm_version} -> {new.vllm_version}"
            yield f"{name}, {versions}: serves {_length(old)} -> {_length(new)}{_starts(old, new)}"


def _starts(old: Row, new: Row) -> str:
    lengths = ((row.vllm_version, row.starts_max_model_len, row.max_model_len) for row in (old, new))
    return "".join(
        f"; {version} starts at {starts:,} at least, where a full-length request is never answered"
        for version, starts, serves in lengths
        if starts and serves and starts > serves
    )


def rows_of(night: NightSummary) -> list[Row]:
    rows = [one.new for one in night.compared if one.new is not None]
    return [*rows, *night.fresh]


def _table(rows: Sequence[Row]) -> list[str]:
    headings = ("model", "GPU", "TP", "utilization", "KV", "vLLM", "max_model_len")
    ordered = sorted(rows, key=lambda row: (row.model, row.gpu, row.tensor_parallel_size or 0))
    lines = [
        (
            *(_cell(row.model), _cell(row.gpu), str(row.tensor_parallel_size), str(row.gpu_memory_utilization or "")),
            *(_cell(row.kv_cache_dtype or ""), _cell(row.vllm_version or ""), _length(row)),
        )
        for row in ordered[:MOST_ROWS]
    ]
    table = markdown_table(headings, lines, numbers={2, 3, 6})
    return [table, *([f"\n{len(rows) - MOST_ROWS} more rows."] if len(rows) > MOST_ROWS else [])]


def _length(row: Row | None) -> str:
    if row is None:
        return "nothing"
    if row.max_model_len is not None:
        return f"{row.max_model_len:,}"
    return "does not fit" if row.status is Status.DOES_NOT_FIT else str(row.status or "unknown").replace("_", " ")


def _cell(text: str) -> str:
    plain = printable(text)
    for mark in ("\\", "|", "`", "*", "[", "]"):
        plain = plain.replace(mark, "\\" + mark)
    return plain.replace("<", "&lt;")


def summary_json(night: NightSummary) -> str:
    """The same for programs."""
    return json.dumps(
        {
            "name": night.name,
            "began": night.began.isoformat(timespec="seconds"),
            "ended": night.ended.isoformat(timespec="seconds"),
            "exit_code": int(night.code),
            "cells": [_cell_values(one) for one in night.compared],
            "fresh": [to_values(row) for row in night.fresh],
            "refused": [
                {"model": r.model, "gpu": r.gpu, "tp": r.tensor_parallel_size, "engine": r.engine, "why": r.why}
                for r in night.refused
            ],
            "skipped": list(night.skipped),
        },
        indent=2,
        ensure_ascii=False,
    )


def _cell_values(one: Compared) -> dict[str, object]:
    return {
        "model": public_model(one.cell.combination.model),
        "gpu": one.cell.gpu,
        "tp": one.cell.combination.tensor_parallel_size,
        "end": one.answer.end,
        "why": one.answer.why,
        "change": one.kind,
        "regression": one.is_regression,
        "first_bad_version": one.first_bad_version,
        "tolerance": one.tolerance,
        "old": to_values(one.old) if one.old else None,
        "new": to_values(one.new) if one.new else None,
    }


def dry_run(laid: Jobs, nodes: Sequence[FleetNode]) -> str:
    """What would be done, for the terminal: the nodes, the cells in their order, what cannot run and why."""
    lines = [f"{len(nodes)} nodes:"]
    lines += [f"  {node.name}  {_devices(node)}" for node in nodes]
    lines += [f"    {printable(note)}" for node in nodes for note in node.notes]
    lines += [f"{len(laid.cells)} cells, {laid.expected_launches} launches expected:"]
    lines += [
        f"  {printable(_described(cell))} on {cell.gpu}, vLLM {cell.vllm_version or '?'}: "
        f"{cell.expected_launches} launch{'es' * (cell.expected_launches != 1)}"
        for cell in laid.cells
    ]
    if laid.fresh:
        lines += [f"{len(laid.fresh)} cells are still fresh:"]
        lines += [f"  {printable(_described(cell))} on {cell.gpu}: {_length(row)}" for cell, row in laid.fresh]
    if laid.refused:
        lines += [f"{len(laid.refused)} cells cannot run on this fleet:"]
        lines += [
            f"  {printable(r.model)}, TP {r.tensor_parallel_size} on {r.gpu}, vLLM {r.engine}: {printable(r.why)}"
            for r in laid.refused
        ]
    return "\n".join(lines) + "\n"


def _devices(node: FleetNode) -> str:
    if node.problem is not None:
        return f"not used: {printable(node.problem)}"
    return f"{node.gpus} × {printable(node.gpu)}" if node.gpus else f"CPU: {printable(node.gpu)}"

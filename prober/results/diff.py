"""Compare two matrices: rows gained, lost or changed, and whether that is a regression.

Pure. Rows are paired by key without the vLLM version, so that a new vLLM shows as a change, not as a row lost and one
gained. With several versions, equal ones are paired first, then the newest with the newest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from prober.engine.versions import version_order
from prober.records import Source, Status
from prober.results.csv_format import row_key
from prober.results.schema import KEY, Row, to_values
from prober.results.table import markdown_table, markdown_text
from prober.results.text import printable

_VERSION_INDEX = KEY.index("vllm_version")


class ChangeKind(StrEnum):
    """The kind of change of one combination on one machine."""

    GAINED = "gained"  # only in the new matrix
    LOST = "lost"  # only in the old matrix
    SHORTER = "shorter"  # the ceiling fell by more than the tolerance, or it no longer fits
    LONGER = "longer"  # the ceiling rose by more than the tolerance, or it fits now
    UNSETTLED = "unsettled"  # a proven ceiling before, none now: inconclusive, not a regression
    SETTLED = "settled"  # no proven ceiling before, one now


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``old`` or ``new`` is None for a row gained or lost."""

    kind: ChangeKind
    old: Row | None
    new: Row | None

    @property
    def row(self) -> Row:
        """The new row, or the old one if it is lost."""
        row = self.new or self.old
        assert row is not None, "a change has a side"
        return row

    @property
    def share(self) -> float | None:
        """Relative change of the ceiling; None if one of them is not proven."""
        old, new = _ceiling(self.old), _ceiling(self.new)
        return (new - old) / old if old and new is not None else None


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences, regressions first, and the number of rows equal within the tolerance."""

    changes: tuple[Change, ...]
    alike: int

    @property
    def has_regression(self) -> bool:
        """Whether a ceiling fell or a row is lost."""
        return any(change.kind in (ChangeKind.SHORTER, ChangeKind.LOST) for change in self.changes)


def diff(old: Iterable[Row], new: Iterable[Row], tolerance: float = 0.0) -> Diff:
    """Compare the measured rows of two matrices. ``tolerance`` is relative: 0.01 ignores changes up to 1 %."""
    changes, alike = [], 0
    for before, after in _pairs(old, new):
        kind = _kind(before, after, tolerance)
        if kind is None:
            alike += 1
        else:
            changes.append(Change(kind, before, after))
    order = [
        ChangeKind.SHORTER,
        ChangeKind.LOST,
        ChangeKind.UNSETTLED,
        ChangeKind.LONGER,
        ChangeKind.SETTLED,
        ChangeKind.GAINED,
    ]
    changes.sort(key=lambda change: (order.index(change.kind), row_key(change.row)))
    return Diff(tuple(changes), alike)


def _pairs(old: Iterable[Row], new: Iterable[Row]) -> list[tuple[Row | None, Row | None]]:
    groups: dict[tuple[str, ...], tuple[list[Row], list[Row]]] = {}
    for side, rows in enumerate((old, new)):
        for row in rows:
            if row.source is Source.MEASURED:
                key = row_key(row)
                about = key[:_VERSION_INDEX] + key[_VERSION_INDEX + 1 :]
                groups.setdefault(about, ([], []))[side].append(row)
    return [pair for before, after in groups.values() for pair in _pair(before, after)]


def _pair(before: list[Row], after: list[Row]) -> list[tuple[Row | None, Row | None]]:
    """Pair the rows of one combination: equal versions, then the newest of each side, then the rest unpaired."""
    old_by, new_by = ({row.vllm_version or "": row for row in rows} for rows in (before, after))
    pairs: list[tuple[Row | None, Row | None]] = [(old_by[v], new_by[v]) for v in old_by if v in new_by]
    old_left = sorted((v for v in old_by if v not in new_by), key=version_order)
    new_left = sorted((v for v in new_by if v not in old_by), key=version_order)
    if old_left and new_left:
        pairs.append((old_by[old_left.pop()], new_by[new_left.pop()]))
    return pairs + [(old_by[v], None) for v in old_left] + [(None, new_by[v]) for v in new_left]


def _kind(old: Row | None, new: Row | None, tolerance: float) -> ChangeKind | None:
    if old is None or new is None:
        return ChangeKind.GAINED if old is None else ChangeKind.LOST
    before, after = _ceiling(old), _ceiling(new)
    if before is None or after is None:
        if before is after:
            return None
        return ChangeKind.UNSETTLED if after is None else ChangeKind.SETTLED
    if abs(after - before) <= tolerance * before:
        return None
    return ChangeKind.SHORTER if after < before else ChangeKind.LONGER


def _ceiling(row: Row | None) -> int | None:
    """Return the proven tokens; 0 if proven not to fit at all; None if nothing is proven."""
    if row is None:
        return None
    return 0 if row.status is Status.DOES_NOT_FIT else row.max_model_len


def render_diff(difference: Diff) -> str:
    """Write the differences for the terminal, one per line."""
    if not difference.changes:
        return f"No difference in {difference.alike} rows.\n"
    lines = [f"{change.kind:<9}  {'  '.join(map(printable, _cells(change)))}" for change in difference.changes]
    return "\n".join([*lines, f"{difference.alike} rows are alike."]) + "\n"


def markdown_diff(difference: Diff) -> str:
    """Write the differences as a Markdown table, for a pull request or a CI summary."""
    if not difference.changes:
        return f"No difference in {difference.alike} rows.\n"
    headings = ("", "model", "GPU", "TP", "vLLM", "max_model_len")
    lines = [list(map(markdown_text, (change.kind, *_cells(change)))) for change in difference.changes]
    return (
        "\n".join([markdown_table(headings, lines, numbers={3, 5}), "", f"{difference.alike} rows are alike."]) + "\n"
    )


def diff_json(difference: Diff) -> str:
    """Write the differences as one JSON object with both rows of each change."""
    changes = [
        {
            "kind": str(change.kind),
            "share": change.share,
            "old": to_values(change.old) if change.old else None,
            "new": to_values(change.new) if change.new else None,
        }
        for change in difference.changes
    ]
    summary = {"regression": difference.has_regression, "alike": difference.alike, "changes": changes}
    return json.dumps(summary, indent=2, ensure_ascii=False)


def _cells(change: Change) -> tuple[str, str, str, str, str]:
    row = change.row
    versions = [side.vllm_version or "unknown" for side in (change.old, change.new) if side]
    lengths = " -> ".join(_length(side) for side in (change.old, change.new) if side)
    moved = f" ({change.share:+.1%})" if change.share is not None else ""
    tp = str(row.tensor_parallel_size) if row.tensor_parallel_size is not None else ""
    return row.model, row.gpu, tp, " -> ".join(dict.fromkeys(versions)), lengths + moved


def _length(row: Row) -> str:
    return f"{row.max_model_len:,}" if row.max_model_len is not None else str(row.status or "unknown").replace("_", " ")

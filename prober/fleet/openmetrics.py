"""A night as OpenMetrics text, for a node exporter's textfile collector.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prober.fleet.compare import ceiling_of
from prober.fleet.summary import NightSummary, rows_of
from prober.results.schema import KEY, Row


def open_metrics(night: NightSummary) -> str:
    """One gauge a row, with the columns that say what it is about as labels, and the night's own counts."""
    by_labels = {_labels(row): row for row in rows_of(night)}  # a sample may be there once
    lengths = {labels: ceiling_of(row) for labels, row in sorted(by_labels.items())}
    ends = Counter(str(one.answer.end) for one in night.compared)
    ends.update({"fresh": len(night.fresh), "refused": len(night.refused)})
    regressions = sum(one.is_regression for one in night.compared)
    lines = [
        *_gauge(
            "prober_ceiling_tokens",
            "Longest max_model_len at which a full-length request was answered; 0: the model does not fit.",
            ((labels, length) for labels, length in lengths.items() if length is not None),
            unit="tokens",
        ),
        *_gauge(
            "prober_fleet_cells",
            "Cells of the last run by how they ended.",
            ((f'end="{end}"', count) for end, count in sorted(ends.items())),
        ),
        *_gauge("prober_fleet_regressions", "Ceilings that fell, proven twice.", [("", regressions)]),
        *_gauge(
            "prober_fleet_ended_timestamp_seconds",
            "When the last run ended.",
            [("", int(night.ended.timestamp()))],
            unit="seconds",
        ),
    ]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _gauge(name: str, meaning: str, samples: Iterable[tuple[str, int]], unit: str | None = None) -> Iterator[str]:
    yield f"# TYPE {name} gauge"
    if unit is not None:
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {meaning}"
    yield from (f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples)


def _labels(row: Row) -> str:
    values = ((name, getattr(row, name)) for name in KEY)
    return ",".join(f'{name}="{_label(str(value))}"' for name, value in values if value is not None)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""What the matrix already says about a cell: a row that is still fresh, a row that hints, rows to compare with.

Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from prober.records import Combination, Source, Status, Verify
from prober.results.from_ceiling import columns_of, public_model
from prober.results.schema import COMBINATION, Row
from prober.results.serve_command import is_beyond_limit

About = tuple[object, ...]
_SETTLED = (Status.EXACT, Status.MODEL_LIMIT, Status.DOES_NOT_FIT)


@dataclass(frozen=True, slots=True)
class Freshness:
    """What a row must have to spare a cell its launches."""

    since: datetime | None  # None: nothing is fresh enough
    vllm_version: str | None
    drivers: frozenset[str | None]  # that the nodes of the type have now
    verify: Verify
    high: int | None = None  # the upper end that is asked for


class KnownRows:
    """The measured rows of a matrix by what they are about."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._exact: dict[About, list[Row]] = defaultdict(list)
        self._alike: dict[About, list[Row]] = defaultdict(list)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        # What was measured with memory held back, or beyond the model's limit, is no answer of a fleet's.
        if row.source is Source.MEASURED and row.reserve_mib is None and not is_beyond_limit(row):
            self._exact[about_row(row)].append(row)
            self._alike[row.model, row.gpu].append(row)

    def fresh(self, combination: Combination, gpu: str, asked: Freshness) -> Row | None:
        """A row that still answers: settled as it was asked for, on the same versions, and young enough."""
        if asked.since is None or asked.vllm_version is None:
            return None
        for row in self._exact.get(about(combination, gpu), ()):
            revision = combination.model_revision
            if (
                row.vllm_version == asked.vllm_version
                and row.driver in asked.drivers
                and row.verified is asked.verify
                and (revision is None or row.model_revision == revision)
                and _is_settled(row, asked.high)
                and _is_since(row, asked.since)
            ):
                return row
        return None

    def same(self, combination: Combination, gpu: str) -> tuple[Row, ...]:
        """Rows of the same combination and type of GPU, of any machine and version."""
        return tuple(self._exact.get(about(combination, gpu), ()))

    def settled_at(self, combination: Combination, gpu: str) -> str:
        """When the newest settled row was measured (ISO 8601); empty: there is none."""
        settled = [row.measured_at or "" for row in self.same(combination, gpu) if row.status in _SETTLED]
        return max(settled, default="")

    def hints(self, combination: Combination, gpu: str, most: int) -> tuple[Row, ...]:
        """Rows to begin a search from: of the same combination, then of the same model on the same type of GPU."""
        rows = [*self._exact.get(about(combination, gpu), ())[::-1], *self._of_model(combination, gpu)[::-1]]
        return tuple(dict.fromkeys(rows))[:most]

    def expected_launches(self, combination: Combination, gpu: str) -> int:
        """3 from nothing, 2 where a row hints, 1 where the model's own limit is known to fit."""
        limits = [
            row.status is Status.MODEL_LIMIT
            for row in self._of_model(combination, gpu)
            if row.max_model_len and row.tensor_parallel_size == combination.tensor_parallel_size
        ]
        return 3 if not limits else 1 if all(limits) else 2

    def _of_model(self, combination: Combination, gpu: str) -> list[Row]:
        return self._alike.get((public_model(combination.model), gpu), [])


def about(combination: Combination, gpu: str) -> About:
    """Key of a combination on a type of GPU, whatever the machine and the version."""
    return (gpu, *columns_of(combination).values())


def about_row(row: Row) -> About:
    """The same key of a row."""
    return (row.gpu, *(getattr(row, name) for name in COMBINATION))


def _is_settled(row: Row, high: int | None) -> bool:
    if row.status is Status.AT_LEAST:
        return high is not None and row.max_model_len is not None and row.max_model_len >= high
    return row.status in _SETTLED


def _is_since(row: Row, since: datetime) -> bool:
    try:
        return datetime.fromisoformat(row.measured_at or "") >= since
    except (ValueError, TypeError):
        return False

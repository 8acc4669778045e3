"""Tonight against what was known: which ceilings fell, whether that held when proven again, what to exit with.

Pure. Machines of a fleet take turns, so cells are compared, not machines: a row of the same machine first, else any of
the same type of GPU. How far a ceiling may move comes from the row's own spread, over earlier nights and machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from prober.engine.versions import version_order
from prober.fleet.jobs import Cell, RefusedCell
from prober.fleet.known_rows import KnownRows
from prober.fleet.protocol import End, Reply
from prober.records import Source, Status
from prober.results.diff import ChangeKind, Diff, diff
from prober.results.naming import same_gpu
from prober.results.schema import COMBINATION, KEY, Row

QUIET_SHARE = 0.001  # nobody is woken for a tenth of a percent, however still the row has stood
# How a search ends that answers; a wrong configuration is an answer, too.
SETTLED = (Status.EXACT, Status.MODEL_LIMIT, Status.AT_LEAST, Status.DOES_NOT_FIT, Status.BAD_CONFIG)


class ExitCode(IntEnum):
    """How a night is told to the calendar that started it."""

    FINE = 0
    REGRESSION = 1
    PARTLY_FAILED = 4


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell tonight. ``kind`` None: alike within ``tolerance``, a share of the old ceiling."""

    cell: Cell
    answer: Reply
    old: Row | None
    kind: ChangeKind | None
    tolerance: float = 0.0
    again: Reply | None = None  # what re-proving showed, where the ceiling had fallen
    first_bad_version: str | None = None

    @property
    def new(self) -> Row | None:
        """The row that counts: the second one where it was proven again and gave an answer."""
        return self.again.row if self.again is not None and self.again.row is not None else self.answer.row

    @property
    def needs_proof(self) -> bool:
        """It fell, and nobody has looked twice."""
        return self.kind is ChangeKind.SHORTER and self.again is None

    @property
    def is_regression(self) -> bool:
        """It fell, and fell again."""
        return self.kind is ChangeKind.SHORTER and self.again is not None and ceiling_of(self.again.row) is not None

    @property
    def is_unanswered(self) -> bool:
        """Nothing is known of it tonight, or its fall could not be proven a second time."""
        is_settled = self.answer.row is not None and self.answer.row.status in SETTLED
        is_doubtful = self.kind is ChangeKind.SHORTER and not self.is_regression
        return self.answer.end is not End.ANSWERED or not is_settled or is_doubtful or self.kind is ChangeKind.UNSETTLED


def compare(
    cells: Iterable[tuple[Cell, Reply]], previous: Sequence[Row], history: Mapping[str, Sequence[Row]]
) -> list[Compared]:
    """Compare tonight's answers with the matrix of the night before; ``history``: rows of earlier nights by cell."""
    known = KnownRows(previous)
    return [_compared(cell, answer, known, history.get(cell.key, ())) for cell, answer in cells]


def _compared(cell: Cell, answer: Reply, known: KnownRows, history: Sequence[Row]) -> Compared:
    rows = known.same(cell.combination, cell.gpu)
    old = _baseline(rows, answer.row, cell.vllm_version)
    if old is None:
        return Compared(cell, answer, None, ChangeKind.GAINED if answer.row is not None else None)
    if answer.row is None:
        return Compared(cell, answer, old, ChangeKind.LOST)
    tolerance = max(QUIET_SHARE, _spread([*rows, *history], old, answer.row))
    return Compared(cell, answer, old, _kind(old, answer.row, tolerance), tolerance)


def proven_again(compared: Compared, again: Reply) -> Compared:
    """Judge a fallen ceiling by its second proof. One that stood up again was no regression."""
    if again.row is None or ceiling_of(again.row) is None:
        return replace(compared, again=again)
    assert compared.old is not None, "a ceiling fell from somewhere"
    return replace(compared, again=again, kind=_kind(compared.old, again.row, compared.tolerance))


def _baseline(rows: Sequence[Row], new: Row | None, version: str | None) -> Row | None:
    """The row to compare with: of the same version, else of the newest older one; of this machine; the newest."""
    version = (new.vllm_version if new is not None else None) or version
    order = version_order(version or "")
    same = [row for row in rows if row.vllm_version == version]
    older = [row for row in rows if version_order(row.vllm_version or "") < order]
    newest = max((version_order(row.vllm_version or "") for row in older), default=None)
    rows = same or [row for row in older if version_order(row.vllm_version or "") == newest]
    machine = new.machine if new is not None else None
    return max(rows, key=lambda row: (row.machine == machine, row.measured_at or ""), default=None)


def _spread(rows: Iterable[Row], old: Row, new: Row) -> float:
    """How far ceilings of the old version stand apart, as a share: on this machine if it was this one, else on any."""
    of_version = [row for row in rows if row.vllm_version == old.vllm_version]
    if old.machine == new.machine:
        of_version = [row for row in of_version if row.machine == new.machine]
    lengths = [length for row in of_version if (length := ceiling_of(row))]
    return (max(lengths) - min(lengths)) / max(lengths) if lengths else 0.0


def _kind(old: Row, new: Row, tolerance: float) -> ChangeKind | None:
    changes = one_diff(old, new, tolerance).changes
    return changes[0].kind if changes else None


def one_diff(old: Row, new: Row, tolerance: float) -> Diff:
    """Compare two rows of one combination, whatever machine, model commit and environment each names."""
    ignored = (name for name in KEY if name not in (*COMBINATION, "gpu", "vllm_version"))
    as_new = replace(old, **{name: getattr(new, name) for name in ignored})
    return diff([as_new], [new], tolerance)


def ceiling_of(row: Row | None) -> int | None:
    """The proven number of tokens; 0 where it is proven not to fit; None where nothing is proven."""
    if row is None:
        return None
    return 0 if row.status is Status.DOES_NOT_FIT else row.max_model_len


def first_bad_version(rows: Iterable[Row], tolerance: float = QUIET_SHARE) -> str | None:
    """The oldest version whose ceiling is below that of a version before it; None: there is none."""
    best: dict[str, int] = {}
    for row in rows:
        length = ceiling_of(row)
        if row.vllm_version and length is not None:
            best[row.vllm_version] = min(length, best.get(row.vllm_version, length))
    most = 0
    for version in sorted(best, key=version_order):
        if best[version] < most * (1 - tolerance):
            return version
        most = max(most, best[version])
    return None


def with_first_bad(compared: Iterable[Compared], previous: Sequence[Row]) -> list[Compared]:
    """Name the first bad version of each regression, from tonight's rows and the earlier ones of the same cell."""
    compared = list(compared)
    known = KnownRows([*previous, *(one.new for one in compared if one.new is not None)])
    return [
        replace(one, first_bad_version=first_bad_version(_of_machine(known, one), one.tolerance))
        if one.is_regression
        else one
        for one in compared
    ]


def _of_machine(known: KnownRows, one: Compared) -> Sequence[Row]:
    """Rows of this machine where it probed several versions, else of any: cards of one type differ."""
    rows = known.same(one.cell.combination, one.cell.gpu)
    own = [row for row in rows if one.new is not None and row.machine == one.new.machine]
    return own if len({row.vllm_version for row in own}) > 1 else rows


def gone_from_fleet(refused: Iterable[RefusedCell], previous: Iterable[Row]) -> list[RefusedCell]:
    """Cells that no machine can run tonight, although the matrix holds a row of them: machines are missing."""
    rows = [row for row in previous if row.source is Source.MEASURED]
    return [
        one
        for one in refused
        if any(
            row.model == one.model
            and row.tensor_parallel_size == one.tensor_parallel_size
            and (row.gpu == one.gpu or same_gpu(one.gpu, row.gpu))
            for row in rows
        )
    ]


def exit_code(compared: Iterable[Compared], gone: Sequence[RefusedCell] = ()) -> ExitCode:
    """A regression first; then whatever is left unanswered; then fine."""
    compared = list(compared)
    if any(one.is_regression for one in compared):
        return ExitCode.REGRESSION
    if gone or any(one.is_unanswered for one in compared):
        return ExitCode.PARTLY_FAILED
    return ExitCode.FINE

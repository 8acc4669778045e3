"""Read and write the text of matrix.csv, and decide which of two rows with the same key is kept.

Pure. An unchanged record keeps its text byte for byte, so that a git diff shows only what was measured. Line ends are
LF; cells are quoted only if necessary.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prober.records import NotReady, Source, Status, Verify
from prober.results.schema import COLUMNS, HEADER, POSITION, SCHEMA_VERSION, Row, current_names, to_cells

CONFLICT_MARKS = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")
_SOURCES = tuple(Source)
_KEY_CELLS = tuple((POSITION[c.name], c.kind == "integer") for c in COLUMNS if c.is_key)
_SOURCE_CELL, _URL_CELL, _VERSION_CELL = POSITION["source"], POSITION["source_url"], POSITION["schema_version"]

_THIS_VERSION = str(SCHEMA_VERSION)
_REQUIRED = {c.name for c in COLUMNS if c.is_required}

Key = tuple[str, ...]
Cells = list[str]


class ForeignMatrix(NotReady):
    """The file is not a matrix that this version can read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class CsvRecord:
    """One record: its key, its cells in the order of ``HEADER``, and its text including the newline."""

    key: Key
    cells: Cells
    text: str


def record_of(row: Row) -> CsvRecord:
    """Write a row as a record."""
    cells = to_cells(row)
    return CsvRecord(_key(cells), cells, _line(cells))


def row_key(row: Row) -> Key:
    """Return the row's key: combination, vLLM version, devices and machine; for reported rows also the URL."""
    return _key(to_cells(row))


def _key(cells: Sequence[str]) -> Key:
    parts = [cells[index].zfill(9) if numeric else cells[index] for index, numeric in _KEY_CELLS]
    parts.append(cells[_URL_CELL] if cells[_SOURCE_CELL] == Source.REPORTED else "")
    return tuple(parts)


def _line(cells: Sequence[str]) -> str:
    return ",".join(map(_quoted, cells)) + "\n"


def _quoted(cell: str) -> str:
    # Not csv.writer: before Python 3.13 it leaves a lone carriage return unquoted, and readers end the record there.
    if any(mark in cell for mark in ',"\n\r') or cell != cell.strip():
        return '"' + cell.replace('"', '""') + '"'
    return cell


HEADER_LINE = _line(HEADER)


def read_cells(text: str, name: str = "matrix.csv") -> Iterator[Cells]:
    """Yield the cells of each record in the order of ``HEADER``, from any column order and earlier schema version.

    Raises ``ForeignMatrix`` for a file that was not written by a prober, was written by a newer one, or contains git
    conflict markers. Empty text is an empty matrix.
    """
    for cells, _ in _scan(io.StringIO(text, newline="\n"), name):
        yield cells


def read_records(text: str, name: str = "matrix.csv") -> list[CsvRecord]:
    """Read every record, sorted; records in the current format keep their text. Raises as ``read_cells`` does."""
    lines = list(io.StringIO(text, newline="\n"))
    verbatim = text.startswith(HEADER_LINE) and text.endswith("\n") and "\r" not in text
    records, start = [], 1
    for cells, end in _scan(iter(lines), name):
        records.append(CsvRecord(_key(cells), cells, "".join(lines[start:end]) if verbatim else _line(cells)))
        start = end
    records.sort(key=_sort_key)
    return records


def _scan(lines: Iterator[str], name: str) -> Iterator[tuple[Cells, int]]:
    """Yield the cells of each record and the number of the line it ends on."""
    reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        order = _order(header, name)
        width = len(header)
        for cells in reader:
            if len(cells) != width:
                if not cells:
                    continue
                raise ForeignMatrix(_bad_record(cells, reader.line_num, name))
            if cells == header:  # a union merge in git can leave a second one
                continue
            ours = cells if order is None else [cells[i] if i is not None else "" for i in order]
            _refuse_newer(ours[_VERSION_CELL], name)
            if order is not None:  # rewritten in the current columns, it has the current version
                ours[_VERSION_CELL] = _THIS_VERSION
            yield ours, reader.line_num
    except csv.Error as error:
        raise ForeignMatrix(f"{name}, line {reader.line_num}: {error}; restore the file from git.") from error


def _bad_record(cells: Cells, line: int, name: str) -> str:
    if cells and cells[0].startswith(CONFLICT_MARKS):
        return f"{name}, line {line}: a git conflict is left in the file; run `prober merge` on it."
    return f"{name}, line {line}: the number of cells differs from the header; restore the file from git."


def _order(header: Cells, name: str) -> list[int | None] | None:
    """Return the position of each column of ``HEADER`` in the file; None: exactly as written here."""
    if tuple(header) == HEADER:
        return None
    # A spreadsheet adds the byte order mark.
    names = current_names([header[0].removeprefix("\ufeff"), *header[1:]]) if header else []
    if names and names[0].startswith(CONFLICT_MARKS):
        raise ForeignMatrix(f"{name}: a git conflict is left in the file; run `prober merge` on it.")
    if not set(names) >= _REQUIRED or len(set(names)) != len(names):
        raise ForeignMatrix(
            f"{name} is not a matrix of the prober (its first line starts with {','.join(names)[:60]!r}); "
            "move it away or name another folder with --results."
        )
    foreign = [column for column in names if column not in POSITION]
    if foreign:
        raise ForeignMatrix(
            f"{name} has columns that this prober does not know ({', '.join(foreign[:3])}): "
            "update the prober, or remove them."
        )
    places = {column: index for index, column in enumerate(names)}
    return [places.get(column) for column in HEADER]


def _refuse_newer(version: str, name: str) -> None:
    if version != _THIS_VERSION and version.isdecimal() and int(version) > SCHEMA_VERSION:
        raise ForeignMatrix(
            f"{name} was written by a newer prober (schema {version}, this one knows {SCHEMA_VERSION}): update it."
        )


def _sort_key(record: CsvRecord) -> tuple[Key, str]:
    return record.key, record.text


def render(records: Iterable[CsvRecord]) -> str:
    """Write the whole file: header and sorted records."""
    return HEADER_LINE + "".join(record.text for record in sorted(records, key=_sort_key))


def stands_before(new: Row, old: Row) -> bool:
    """Whether ``new`` replaces ``old``, which has the same key.

    Measured beats imported beats reported. Within one source the newest proof wins: a row that proves less (an
    inconclusive search, a start without a full-length request) never replaces one that proves more.
    """
    rank = (-_SOURCES.index(new.source), proof(new), new.measured_at or "")
    return rank >= (-_SOURCES.index(old.source), proof(old), old.measured_at or "")


def proof(row: Row) -> int:
    """Rank what a row proves: 3 a settled ceiling or that nothing fits, 2 a lower bound, 1 a start, 0 nothing."""
    if row.status in (Status.DOES_NOT_FIT, Status.UNSTABLE):
        return 3
    if row.verified is Verify.FULL and row.max_model_len is not None:
        return 2 if row.status is Status.AT_LEAST else 3
    return 1 if row.starts_max_model_len is not None or row.refused_max_model_len is not None else 0

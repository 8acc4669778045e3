"""The results folder: trials.jsonl (evidence, append-only), matrix.csv (answers, replaced atomically), logs/.

Writers hold the folder's lock (``.lock``, never removed); readers need none, because a trial is one complete line and
the matrix is replaced atomically. Everything is on disk (fsync) before a call returns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from prober.host.files import replace_file
from prober.records import NotReady, Trial
from prober.results.csv_format import CsvRecord, read_cells, read_records, record_of, render, stands_before
from prober.results.schema import Row, UnreadableRow, from_cells
from prober.results.trial_json import dump_trial, load_trial

_LOCK_SECONDS = 60
_POLL_SECONDS = 0.005  # a writer holds the lock for milliseconds
_SPACE_BYTES = 16 * 2**20  # what a search may write: logs of a few launches


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line of trials.jsonl that is not a trial. It stays in the file; reading continues."""

    line: int  # from 1
    why: str


class Store:
    """One results folder. Any number of processes may use the same one at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials_path = folder / "trials.jsonl"
        self.matrix_path = folder / "matrix.csv"

    def check_writable(self) -> None:
        """Raise ``NotReady`` before the first launch: not writable, no space, or not a prober's matrix."""
        with self._locked():
            check = self.folder / ".check.draft"  # ignored by git
            with self._disk():
                replace_file(check, b"x" * 65536)
                check.unlink()
            free = shutil.disk_usage(self.folder).free
            if free < _SPACE_BYTES:
                raise NotReady(f"Only {free // 2**20} MiB are free for {self.folder}: free some space first.")
            for _ in read_cells(self._matrix_text(), str(self.matrix_path)):
                pass

    def trials(self) -> list[Trial]:
        """Read every readable trial, in recorded order. No file: no trials."""
        return self._read_trials()[0]

    def unreadable(self) -> list[Unreadable]:
        """List the lines of trials.jsonl that are not trials, without a torn last line: that was never recorded."""
        return self._read_trials()[1]

    def append(self, trial: Trial) -> None:
        """Record one trial. Raises ``NotReady`` on failure and leaves the file as it was."""
        line = dump_trial(trial).encode() + b"\n"
        with self._locked(), self._disk():
            fd = os.open(self.trials_path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                end = self._repair(fd)
                try:
                    _write_at(fd, line, end)
                except OSError:
                    os.ftruncate(fd, end)
                    raise
            finally:
                os.close(fd)

    def rows(self) -> list[Row]:
        """Read the matrix, sorted. No file: no rows. Raises ``NotReady`` for a file that is not a prober's matrix."""
        records = read_records(self._matrix_text(), str(self.matrix_path))
        try:
            return [from_cells(record.cells) for record in records]
        except UnreadableRow as error:
            raise UnreadableRow(f"{self.matrix_path}: {error} Fix it, or restore the file from git.") from error

    def put(self, rows: Iterable[Row]) -> list[Row]:
        """Write rows of any source in one step; return those not written because an existing row proves more.

        A row replaces the one with the same key unless that one proves more (`csv_format.stands_before`). The trials
        stay in trials.jsonl either way.
        """
        left_out: list[Row] = []
        with self._locked(), self._disk():
            records = {record.key: record for record in self._newest_records()}
            for row in rows:
                new = record_of(row)
                old = records.get(new.key)
                if old is None or stands_before(row, from_cells(old.cells)):
                    records[new.key] = new
                else:
                    left_out.append(row)
            replace_file(self.matrix_path, render(records.values()).encode())
        return left_out

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Store]:
        """Lock out other writers, to read, decide and replace in one step."""
        with self._locked():
            yield self

    def replace_all(self, rows: Iterable[Row]) -> None:
        """Replace all rows of the matrix, for example after a merge."""
        text = render(map(record_of, rows))
        with self._locked(), self._disk():
            replace_file(self.matrix_path, text.encode())

    def log_path(self, trial_id: str) -> Path:
        """Return the path of a trial's log, creating its folder."""
        logs = self.folder / "logs"
        with self._disk():
            logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{trial_id}.log"

    def _read_trials(self) -> tuple[list[Trial], list[Unreadable]]:
        try:
            lines = self.trials_path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise NotReady(f"{self.trials_path} cannot be read: {error.strerror}.") from error
        trials, unreadable = [], []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                trials.append(load_trial(line.decode()))
            except ValueError as error:
                if number < len(lines):
                    unreadable.append(Unreadable(number, str(error)))
        return trials, unreadable

    def _repair(self, fd: int) -> int:
        """Make the file end with a complete line and return its size; move a torn line to a .torn file."""
        size = os.fstat(fd).st_size
        if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
            return size
        tail_start = _last_line_start(fd, size)
        tail = os.pread(fd, size - tail_start, tail_start)
        with contextlib.suppress(ValueError):
            load_trial(tail.decode())
            return _write_at(fd, b"\n", size)  # complete but for its newline
        torn = os.open(self.trials_path.with_name("trials.jsonl.torn"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(torn, tail + b"\n")
            os.fsync(torn)
        finally:
            os.close(torn)
        os.ftruncate(fd, tail_start)
        return tail_start

    def _matrix_text(self) -> str:
        try:
            return self.matrix_path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError as error:
            raise NotReady(f"{self.matrix_path} is not UTF-8 text: restore it from git.") from error
        except OSError as error:
            raise NotReady(f"{self.matrix_path} cannot be read: {error.strerror}.") from error

    def _newest_records(self) -> list[CsvRecord]:
        """Read the records, the best one per key (a union merge in git can leave two)."""
        standing: dict[tuple[str, ...], CsvRecord] = {}
        for record in read_records(self._matrix_text(), str(self.matrix_path)):
            old = standing.get(record.key)
            if old is None or stands_before(from_cells(record.cells), from_cells(old.cells)):
                standing[record.key] = record
        return list(standing.values())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS, is_singleton=True)
            try:
                lock.acquire(poll_interval=_POLL_SECONDS)
            except Timeout as error:
                raise NotReady(
                    f"Another process has held {self.folder} for {_LOCK_SECONDS} s: wait for it or stop it."
                ) from error
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Translate OSError into NotReady."""
        try:
            yield
        except OSError as error:
            raise NotReady(
                f"{self.folder} cannot be written: {error.strerror or error}; what was recorded before is intact."
            ) from error


def _write_at(fd: int, content: bytes, offset: int) -> int:
    """Write everything, fsync, and return the end offset. A full disk may write a part before it raises OSError."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], offset + done)
    os.fsync(fd)
    return offset + done


def _last_line_start(fd: int, size: int) -> int:
    position, step = size, 65536
    while position > 0:
        start = max(0, position - step)
        found = os.pread(fd, position - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0

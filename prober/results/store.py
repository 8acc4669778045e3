"""The results folder: trials.jsonl (evidence, append-only), matrix.csv (answers, replaced whole), logs/.

Every writer holds the folder's lock (``.lock``, never removed); readers need none, because a trial is one complete
line and the matrix is exchanged in one step. Everything written is on disk (fsync) before the call returns.
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
    """A line of trials.jsonl that is no trial. It stays in the file; nothing is lost by reading on."""

    line: int  # from 1
    why: str


class Store:
    """One results folder. Any number of processes may use the same one at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials_path = folder / "trials.jsonl"
        self.matrix_path = folder / "matrix.csv"

    def check_writable(self) -> None:
        """Raise ``NotReady`` now rather than after the first launch: not writable, no space, or not our matrix."""
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
        """Read every readable trial, in the order they were recorded. No file: none."""
        return self._read_trials()[0]

    def unreadable(self) -> list[Unreadable]:
        """Say which lines of trials.jsonl are no trials. A torn last line is not one of them: it was never recorded."""
        return self._read_trials()[1]

    def append(self, trial: Trial) -> None:
        """Record one trial. It is on disk when this returns; on failure the file is as it was (``NotReady``)."""
        line = dump_trial(trial).encode() + b"\n"
        with self._locked(), self._disk():
            fd = os.open(self.trials_path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                end = self._mend(fd)
                try:
                    _write_at(fd, line, end)
                except OSError:
                    os.ftruncate(fd, end)
                    raise
            finally:
                os.close(fd)

    def rows(self) -> list[Row]:
        """Read the matrix, sorted. No file: no rows. Raises ``NotReady`` for a file that is not ours."""
        records = read_records(self._matrix_text(), str(self.matrix_path))
        try:
            return [from_cells(record.cells) for record in records]
        except UnreadableRow as error:
            raise UnreadableRow(f"{self.matrix_path}: {error} Mend it, or restore the file from git.") from error

    def put(self, rows: Iterable[Row]) -> list[Row]:
        """Write rows of any source in one step; return those that were left out for a row that proves more.

        A row replaces the one of the same combination, version, devices and machine unless that one proves more
        (`table.stands_before`): what a search saw stays in trials.jsonl either way.
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
        """Let nobody else write the folder meanwhile: read, decide and replace in one step."""
        with self._locked():
            yield self

    def replace_all(self, rows: Iterable[Row]) -> None:
        """Make the matrix hold exactly these rows (after a merge). The caller answers for what is dropped."""
        text = render(map(record_of, rows))
        with self._locked(), self._disk():
            replace_file(self.matrix_path, text.encode())

    def log_path(self, trial_id: str) -> Path:
        """Name the file that a trial's output goes to; its folder exists afterwards."""
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

    def _mend(self, fd: int) -> int:
        """End the file at a complete line and return its size. What a crash left is moved into a .torn file."""
        size = os.fstat(fd).st_size
        if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
            return size
        tail_start = _last_line_start(fd, size)
        tail = os.pread(fd, size - tail_start, tail_start)
        with contextlib.suppress(ValueError):
            load_trial(tail.decode())
            return _write_at(fd, b"\n", size)  # whole but for its line end
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
        """The file's records, of one key only the one that stands (a union merge in git can leave two)."""
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
        """Translate what the file system says into a sentence."""
        try:
            yield
        except OSError as error:
            raise NotReady(
                f"{self.folder} cannot be written: {error.strerror or error}; what was recorded before is intact."
            ) from error


def _write_at(fd: int, content: bytes, offset: int) -> int:
    """Write all of it, sync, and return where it ends. A full disk writes a part first: only then does it raise."""
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

"""What a fleet keeps beside the matrix, in ``fleet/`` of the results folder.

``journal.jsonl``: one line an event, so that a driver that was killed goes on where it was. ``previous.csv``: the
matrix before this run, to compare with. ``summary.md``, ``summary.json``, ``ceilings.prom``, ``report.html``: what the
last run found, each replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from filelock import FileLock, Timeout

from prober.fleet.jobs import AGAIN, Cell
from prober.fleet.protocol import End, Known, Reply, Streamed
from prober.host.files import replace_file
from prober.records import Machine, NotReady
from prober.results.merge import read_rows
from prober.results.schema import Row, from_values, to_values
from prober.results.store import Store

HISTORY_DAYS = 30  # of earlier runs' rows, from which a row's own spread is known


@dataclass(frozen=True, slots=True)
class Run:
    """One run as the journal knows it. ``known`` and ``answers`` are of a run that is gone on with, by cell."""

    began: datetime
    known: Mapping[str, Sequence[Known]] = field(default_factory=dict)
    answers: Mapping[str, Reply] = field(default_factory=dict)
    is_resumed: bool = False


class FleetFiles:
    """The files of one results folder; only one driver at a time may use them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.folder = store.folder / "fleet"
        self._journal = self.folder / "journal.jsonl"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other drivers out. Raises NotReady where one is at work."""
        with self._disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / ".lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                raise NotReady(f"Another fleet run is at work in {self.folder}: wait for it or stop it.") from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, now: datetime, longest: timedelta) -> Run:
        """Go on with a run that did not end and is not older than it may take; else begin a new one."""
        events = self._read()
        began, unfinished = _unfinished(events)
        if began is not None and now - began < longest:
            return Run(began, self._known(unfinished), _answers(unfinished), is_resumed=True)
        since = (now - timedelta(days=HISTORY_DAYS)).isoformat()
        kept = [event for event in events if event["event"] == "answer" and str(event["at"]) >= since]
        matrix = self._store.matrix_path
        self._replace("previous.csv", matrix.read_text(encoding="utf-8") if matrix.exists() else "")
        began_event = {"event": "begin", "at": now.isoformat(timespec="seconds")}
        self._replace("journal.jsonl", "".join(_line(event) for event in [*kept, began_event]))
        return Run(now)

    def finish(self) -> None:
        """The run is over: the next one begins anew."""
        self._append([{"event": "finish"}])

    def trial(self, streamed: Streamed) -> None:
        """Keep a trial as evidence, its log, and which machine it belongs to."""
        trial = streamed.known.trial
        self._store.append(trial)
        if streamed.log:
            with self._disk():
                self._store.log_path(trial.id).write_bytes(zlib.decompress(streamed.log))
        machine = asdict(streamed.known.machine)
        self._append([{"event": "trial", "cell": streamed.cell_key, "trial": trial.id, "machine": machine}])

    def answers(self, answers: Sequence[tuple[Cell, Reply]], now: datetime) -> None:
        """Write the rows into the matrix, and the answers down."""
        self._store.put([answer.row for _, answer in answers if answer.row is not None])
        at = now.isoformat(timespec="seconds")
        self._append([{"event": "answer", "cell": cell.key, "at": at, **_plain(answer)} for cell, answer in answers])

    def history(self) -> dict[str, list[Row]]:
        """The rows of earlier answers by cell, the oldest first; those of the run under way are not among them."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for event in self._read():
            if event["event"] == "begin":
                break
            if event["event"] == "answer" and (answer := _answer(event)).row is not None:
                rows[event["cell"].removesuffix(AGAIN)].append(answer.row)
        return rows

    def previous(self) -> list[Row]:
        """The matrix as it was before this run."""
        path = self.folder / "previous.csv"
        return read_rows(path.read_text(encoding="utf-8"), str(path)) if path.exists() else []

    def write(self, texts: Mapping[str, str]) -> None:
        """Replace files, each in one step: a collector may read at any time."""
        for name, text in texts.items():
            self._replace(name, text)

    def _known(self, events: Sequence[dict[str, Any]]) -> dict[str, list[Known]]:
        trials = {trial.id: trial for trial in self._store.trials()}
        known: dict[str, list[Known]] = defaultdict(list)
        for event in events:
            if event["event"] == "trial" and event["trial"] in trials:
                known[event["cell"]].append(Known(Machine(**event["machine"]), trials[event["trial"]]))
        return known

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self._journal.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the torn end of a killed driver: it was not yet kept
                events.append(json.loads(line))
        return [event for event in events if isinstance(event, dict) and "event" in event]

    def _append(self, events: Sequence[dict[str, Any]]) -> None:
        with self._disk(), self._journal.open("ab+") as journal:
            size = journal.seek(0, os.SEEK_END)
            if size and os.pread(journal.fileno(), 1, size - 1) != b"\n":
                journal.write(b"\n")
            journal.write("".join(map(_line, events)).encode())
            journal.flush()
            os.fsync(journal.fileno())

    def _replace(self, name: str, text: str) -> None:
        with self._disk():
            replace_file(self.folder / name, text.encode())

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NotReady(f"{self.folder} cannot be written: {error.strerror or error}.") from error


def _unfinished(events: Sequence[dict[str, Any]]) -> tuple[datetime | None, Sequence[dict[str, Any]]]:
    """When the last run began and what it did; None where it ended, or there was none."""
    begins = [index for index, event in enumerate(events) if event["event"] == "begin"]
    if not begins or any(event["event"] == "finish" for event in events[begins[-1] :]):
        return None, ()
    return datetime.fromisoformat(events[begins[-1]]["at"]), events[begins[-1] :]


def _answers(events: Sequence[dict[str, Any]]) -> dict[str, Reply]:
    """What was answered; what was not for want of time or machines is tried again."""
    answers = {event["cell"]: _answer(event) for event in events if event["event"] == "answer"}
    return {cell: answer for cell, answer in answers.items() if answer.end is End.ANSWERED}


def _plain(answer: Reply) -> dict[str, Any]:
    row = None
    if answer.row is not None:
        row = {name: value for name, value in to_values(answer.row).items() if value is not None}
    return {"end": answer.end, "why": answer.why, "row": row}


def _answer(event: Mapping[str, Any]) -> Reply:
    row = event["row"]
    return Reply(End(event["end"]), event["why"], None if row is None else from_values(row))


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"

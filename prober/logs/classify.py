"""What a log shows: the root cause of a failed start, its stage and figures, or that the server is ready.

Pure: bytes in, a Verdict out. A log is read as a stream, so one of any size costs little memory; every search is
linear. Sources of the messages: vLLM 0.2 to 0.33 (see rules.py, messages.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from prober.logs.line_wraps import CONTEXT, LINES_AROUND, Window, torn
from prober.logs.lines import Framer, records
from prober.logs.messages import (
    ENGINE_STARTS,
    EXCEPTIONS,
    FIGURES,
    FRAME,
    FRAMES,
    LOGGING_ERROR,
    LOGGING_ERROR_END,
    OUTER_FRAMES,
    READY,
    SERVER_STARTS,
    SERVING,
    STAGES,
    TRACEBACK,
)
from prober.logs.prefilter import Needles
from prober.logs.rules import ONLY_BEFORE_READY, RULES, WRAPPERS
from prober.logs.state import ORDER, StartupState
from prober.logs.template import Template
from prober.records import Figures, Outcome, Stage, Verdict

_PIECE = 1 << 18  # bytes scanned at a time
_SEEN = 4_096  # distinct lines remembered, so that a line repeated for ever costs nothing
_USAGE_STATUS = 2  # argparse's
# Lines that change how the next ones are read: read again, however often they are repeated.
_NEVER_SKIPPED = frozenset((*SERVER_STARTS, *ENGINE_STARTS, TRACEBACK, LOGGING_ERROR, LOGGING_ERROR_END))


class Reader:
    """Reads a growing log. feed() bytes as they come; look at verdict() at any time."""

    def __init__(self) -> None:
        self._framer = Framer()
        self._line = 1  # the number of the line that the next block begins in
        self._before = b""
        self._windows: list[Window] = []
        self._is_finished = False
        self._seen: set[bytes] = set()
        self._start = StartupState()
        self._earlier: Verdict | None = None  # how the last start in this log ended, when another one followed it

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log, cut anywhere."""
        for start in range(0, len(chunk), _PIECE):
            self._scan(self._framer.feed(chunk[start : start + _PIECE]))

    def finish(self) -> None:
        """No more bytes: a torn last line counts as a line."""
        self._is_finished = True
        self._scan(self._framer.finish())
        for window in self._windows:
            self._start.read_window(window)
        self._windows.clear()

    @property
    def stage(self) -> Stage:
        """How far the start-up has come."""
        return Stage.READY if self._start.is_ready else self._start.progress

    @property
    def figures(self) -> Figures:
        """What the log has printed so far; of several ranks the one that binds."""
        return self._start.ledger.figures()

    @property
    def is_decided(self) -> bool:
        """A root cause stands in the log that the start-up cannot survive: waiting shows nothing more.

        Troubles of the machine (``crash``) do not decide: some starts survive them.
        """
        return any(hit.rule.outcome is not Outcome.CRASH for hit in self._start.hits.values())

    def verdict(self) -> Verdict:
        """The best reading now: a failure's outcome, READY, or UNFINISHED.

        Of several starts in one log the last one counts, unless it shows nothing yet and the one before it failed.
        """
        found = self._start.verdict(self._is_finished)
        shows_nothing = found.outcome in (Outcome.UNFINISHED, Outcome.CRASH) and not self._start.hits
        return self._earlier if shows_nothing and self._earlier is not None else found

    def _scan(self, block: bytes) -> None:
        self._fill_windows(block)
        position, number, counted = 0, self._line, 0
        while match := self._needles().pattern.search(block, position):
            start, end = _bounds(block, match.start(), position)
            number += block.count(b"\n", counted, start)
            counted = start
            self._read_line(block, start, end, number)
            position = end
        self._line += block.count(b"\n")
        self._before = (self._before + block[-CONTEXT:])[-CONTEXT:]

    def _needles(self) -> Needles:
        return _needles(self._start.progress, self._start.is_ready)

    def _read_line(self, block: bytes, start: int, end: int, number: int) -> None:
        line = block[start:end]
        if line in self._seen:
            return
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        owners = self._needles().owners(line)
        if self._begins_start(owners, line):
            self._begin()
        elif not _NEVER_SKIPPED.intersection(owners):
            self._seen.add(line)
        missing: list[Template] = []
        process = None
        for record in records(line):
            missing += torn(self._start.read(record, owners, number), record.text)
            process = record.process or process
        if missing:
            self._open_window(block, start, end, number, tuple(missing), process)

    def _begins_start(self, owners: Iterable[Template], line: bytes) -> bool:
        """A new server begins in this log: what stood before was another start."""
        begins = (self._start.is_over, SERVER_STARTS), (self._start.is_dead, ENGINE_STARTS)
        text = line.decode("utf-8", "replace")
        return any(is_over and t in templates and t.regex.search(text) for t in owners for is_over, templates in begins)

    def _begin(self) -> None:
        ended = self.verdict()
        self._earlier = None if ended.outcome is Outcome.READY else ended
        self._start = StartupState()
        self._seen.clear()

    def _open_window(
        self, block: bytes, start: int, end: int, number: int, missing: tuple[Template, ...], process: str | None
    ) -> None:
        before = (self._before + block[max(0, start - CONTEXT) : start])[-CONTEXT:]
        lines = before.split(b"\n")[-LINES_AROUND:]
        window = Window(number - len(lines) + 1, bytearray(b"\n".join(lines) + block[start:end]), missing, process)
        self._windows.append(window)
        window.fill(block, end)
        self._read_full_windows()

    def _fill_windows(self, block: bytes) -> None:
        for window in self._windows:
            window.fill(block, 0)
        self._read_full_windows()

    def _read_full_windows(self) -> None:
        for window in [window for window in self._windows if not window.missing]:
            self._windows.remove(window)
            self._start.read_window(window)


def classify(log: bytes) -> Verdict:
    """Read a whole log."""
    reader = Reader()
    reader.feed(log)
    reader.finish()
    return reader.verdict()


def conclude(reader: Reader, exit_status: int | None) -> Verdict:
    """The process has ended by itself: what its log and its exit status (negative: the signal) show. Never ``fits``.

    A log without a cause is a crash, whatever the status: a kill is no proof that memory ran out.
    """
    reader.finish()
    found = reader.verdict()
    if exit_status == _USAGE_STATUS and found.rule == "usage":
        return replace(found, outcome=Outcome.BAD_CONFIG, stage=Stage.CONFIG)
    if found.outcome not in (Outcome.READY, Outcome.UNFINISHED):
        return found
    stage = Stage.SERVE if found.outcome is Outcome.READY else found.stage
    ended = "an unknown status" if exit_status is None else f"status {exit_status}"
    return replace(found, outcome=Outcome.CRASH, stage=stage, evidence=f"ended with {ended}", rule="exit_status")


def _bounds(block: bytes, position: int, first: int) -> tuple[int, int]:
    """Where the line (or a progress bar's redraw) that holds ``position`` begins and ends."""
    start = max(first, block.rfind(b"\n", first, position) + 1)
    start = max(start, block.rfind(b"\r", start, position) + 1)
    end = block.find(b"\n", position)
    end = len(block) if end < 0 else end
    redraw = block.find(b"\r", position, end)
    return start, end if redraw < 0 else redraw


@lru_cache(maxsize=32)
def _needles(progress: Stage, is_ready: bool) -> Needles:
    """What is worth a closer look now. Stages that lie behind are not, and a ready server has less to say."""
    rules = [rule for rule in RULES if not (is_ready and rule.outcome in ONLY_BEFORE_READY)]
    once = [rule.template for rule in WRAPPERS] + [*SERVER_STARTS, *ENGINE_STARTS]
    twice: tuple[Template, ...] = ()
    if not is_ready:
        twice = FIGURES
        once += [*READY, *SERVING, *(template for _, template in FRAMES + OUTER_FRAMES), FRAME, *EXCEPTIONS]
        once += [template for stage, template in STAGES if ORDER[stage] > ORDER[progress]]
    wanted = [(rule.template, 3) for rule in rules] + [(template, 2) for template in twice]
    return Needles(wanted + [(template, 1) for template in once])

"""What a log shows: the root cause of a failed start, its stage and figures, or that the server is ready.

Pure: bytes in, a Verdict out. A log is read as a stream, so one of any size costs little memory; every search is
linear. Sources of the messages: vLLM 0.2 to 0.33 (see rules.py, marks.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from prober.figures import Ledger
from prober.logtext import Framer, Record, excerpt, level_before, records
from prober.marks import ENGINE_STARTS, FIGURES, FRAMES, READY, SERVER_STARTS, SERVING, STAGES
from prober.patterns import Template, any_of
from prober.records import Figures, Outcome, Stage, Verdict
from prober.rules import RULES, WRAPPERS, Rule

_PIECE = 1 << 18  # bytes scanned at a time
_LINES_AROUND = 4  # a message is wrapped over at most this many further lines
_CONTEXT = 1 << 11  # bytes kept of what stood before, to put a wrapped message together
_SEEN = 4_096  # distinct lines remembered, so that a line repeated for ever costs nothing
_ORDER = {stage: place for place, stage in enumerate(Stage)}
_TRACEBACK = "Traceback (most recent call last)"
_LOGGING_ERROR = "--- Logging error ---"
_LOGGING_ERROR_END = "Arguments: "
_QUOTED = ("Message: ", "Arguments: ")
_EXCEPTION = re.compile(r"(?:^|\] )(?:[A-Za-z_][\w.]{0,120})?(?:Error|Exception|Exit|Interrupt)(?:: |$|\()")
_SOURCE_ECHO = re.compile(r"^(?:raise|assert|f?[\"'])")
_HARMLESS_LEVELS = ("DEBUG", "INFO", "WARNING")
_WARNING_TEXT = re.compile(r"\b[A-Z]\w{0,40}Warning: ")
# A request's own trouble reads like one of these, so they count only while the server starts.
_ONLY_BEFORE_READY = (Outcome.BAD_CONFIG, Outcome.OVER_MODEL_LIMIT, Outcome.TOO_SHORT)


@dataclass(frozen=True, slots=True)
class _Hit:
    """Where a rule matched."""

    rule: Rule
    stage: Stage
    evidence: str
    line: int
    process: str | None
    rank: int | None

    def verdict(self, figures: Figures, evidence: _Hit | None = None) -> Verdict:
        shown = evidence or self
        return Verdict(
            outcome=self.rule.outcome,
            stage=self.stage,
            evidence=shown.evidence,
            line=shown.line,
            process=shown.process,
            rank=shown.rank,
            rule=self.rule.name,
            figures=figures,
        )


@dataclass(slots=True)
class _Window:
    """Lines around one that holds part of a message: the message may be wrapped over several."""

    first_line: int
    raw: bytearray
    missing: int
    process: str | None

    def lines(self) -> list[bytes]:
        return bytes(self.raw).split(b"\n")


class Reader:
    """Reads a growing log. feed() bytes as they come; look at verdict() at any time."""

    def __init__(self) -> None:
        self._framer = Framer()
        self._line = 1  # the number of the line that the next block begins in
        self._before = b""
        self._windows: list[_Window] = []
        self._is_finished = False
        self._earlier: Verdict | None = None  # how the last start in this log ended, when another one followed it
        self._begin()

    def _begin(self) -> None:
        self._ledger = Ledger()
        self._progress = Stage.CONFIG
        self._frame: dict[str | None, Stage] = {}
        self._has_engine = False  # the engine's own start was seen: weights come next
        self._is_ready = False
        self._hits: dict[int, _Hit] = {}
        self._wrapper: _Hit | None = None
        self._exception: _Hit | None = None
        self._in_logging_error = False
        self._seen: set[bytes] = set()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log, cut anywhere."""
        for start in range(0, len(chunk), _PIECE):
            self._scan(self._framer.feed(chunk[start : start + _PIECE]))

    def finish(self) -> None:
        """No more bytes: a torn last line counts as a line."""
        if self._is_finished:
            return
        self._is_finished = True
        self._scan(self._framer.finish())
        for window in self._windows:
            self._read_window(window)
        self._windows.clear()

    @property
    def stage(self) -> Stage:
        """How far the start-up has come."""
        return Stage.READY if self._is_ready else self._progress

    @property
    def figures(self) -> Figures:
        """What the log has printed so far; of several ranks the one that binds."""
        return self._ledger.figures()

    @property
    def is_decided(self) -> bool:
        """A root cause stands in the log that the start-up cannot survive: waiting shows nothing more."""
        return bool(self._hits)

    def verdict(self) -> Verdict:
        """The best reading now: a failure's outcome, READY, or UNFINISHED."""
        found = self._verdict()
        weak = found.outcome is Outcome.UNFINISHED or (found.rule is not None and found.outcome is Outcome.CRASH)
        if weak and self._earlier is not None and not self._hits:
            return self._earlier
        return found

    def _verdict(self) -> Verdict:
        figures = self.figures
        if self._hits:
            return self._hits[min(self._hits)].verdict(figures)
        if self._is_ready and self._wrapper is None:
            return Verdict(Outcome.READY, Stage.READY, figures=figures)
        if not self._is_ready and self._ledger.no_room is not None:
            shown = self._ledger.no_room
            return Verdict(
                Outcome.NO_KV_MEMORY, Stage.KV_CACHE, shown.evidence, shown.line, shown.process, shown.rank,
                rule="no_room", figures=figures,
            )  # fmt: skip
        if self._wrapper is not None:
            return self._wrapper.verdict(figures, self._exception)
        if self._exception is not None and self._is_finished:
            return self._exception.verdict(figures)
        return Verdict(Outcome.UNFINISHED, self.stage, figures=figures)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _scan(self, block: bytes) -> None:
        if not block:
            return
        self._fill_windows(block, 0)
        position, number, counted = 0, self._line, 0
        while match := self._needles().search(block, position):
            start = block.rfind(b"\n", position, match.start()) + 1
            start = max(position, start, block.rfind(b"\r", start, match.start()) + 1)
            end = _line_end(block, match.end())
            number += block.count(b"\n", counted, start)
            counted = start
            self._read_segment(block, start, end, number)
            position = end
        self._line += block.count(b"\n")
        self._before = (self._before + block)[-_CONTEXT:]

    def _needles(self) -> re.Pattern[bytes]:
        return _needles(self._progress, self._is_ready)

    def _read_segment(self, block: bytes, start: int, end: int, number: int) -> None:
        segment = block[start:end]
        if segment in self._seen:
            return
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen.add(segment)
        is_torn = False
        process = None
        for record in records(segment):
            is_torn |= self._read(record, number)
            process = record.process or process
        if is_torn:
            before = (self._before + block[:start])[-_CONTEXT:] if start < _CONTEXT else block[start - _CONTEXT : start]
            lines = before.split(b"\n")[-_LINES_AROUND:]
            raw = bytearray(b"\n".join(lines) + segment)
            window = _Window(number - len(lines) + 1, raw, _LINES_AROUND, process)
            self._windows.append(window)
            self._fill_windows(block, end, only=window)

    def _fill_windows(self, block: bytes, position: int, only: _Window | None = None) -> None:
        """Give lines that have come since to the windows that wait for them; read those that are full."""
        for window in [only] if only is not None else list(self._windows):
            at = position
            while window.missing and at < len(block):
                end = block.find(b"\n", at, at + _CONTEXT) + 1 or min(len(block), at + _CONTEXT)
                window.raw += block[at:end]
                window.missing -= block[end - 1] == 10 or end - at == _CONTEXT
                at = end
            if not window.missing:
                self._windows.remove(window)
                self._read_window(window)

    def _read_window(self, window: _Window) -> None:
        """Put wrapped lines together and look for what no single line held."""
        text, offsets, owners = "", [], []
        for index, raw in enumerate(window.lines()):
            for record in records(raw.strip(b"\r")):
                if window.process and record.process and record.process != window.process:
                    continue
                offsets.append((len(text), window.first_line + index))
                owners.append(record)
                text += record.text.strip()
        if not owners:
            return
        process = window.process or next((record.process for record in owners if record.process), None)
        rank = next((record.rank for record in owners if record.rank is not None), None)
        compact = text.replace(" ", "")
        for index, rule, match in _matches(text, compact):
            line, owner = _owner(offsets, owners, match.start())
            self._strike(index, rule, match, Record(text, process, rank, owner.level), line)
        self._ledger.read(text, compact, FIGURES, 0)

    def _read(self, record: Record, number: int) -> bool:
        """Read one undressed line; say whether it holds a piece of a message that it does not hold whole."""
        text = record.text
        self._notice_start(text)
        if self._is_quoted(text):
            return False
        compact = text.replace(" ", "")
        self._notice_progress(record, compact)
        known = {rule.template for _, rule, match in self._struck(record, compact, number)}
        known |= self._ledger.read(text, compact, FIGURES, number, record)
        self._notice_wrapper(record, compact, number)
        return any(template not in known for template in _owners(text))

    def _struck(self, record: Record, compact: str, number: int) -> Iterator[tuple[int, Rule, re.Match[str]]]:
        for index, rule, match in _matches(record.text, compact):
            self._strike(index, rule, match, record, number)
            yield index, rule, match

    def _strike(self, index: int, rule: Rule, match: re.Match[str], record: Record, number: int) -> None:
        if _is_harmless(record, match.start()):
            return
        if self._is_ready and rule.outcome in _ONLY_BEFORE_READY:
            return
        self._ledger.take(match, number, record)
        hit = self._hit(rule, record, match.start(), match.end(), number)
        known = self._hits.get(index)
        if known is None or (_SOURCE_ECHO.match(known.evidence) and not _SOURCE_ECHO.match(hit.evidence)):
            self._hits[index] = hit

    def _hit(self, rule: Rule, record: Record, start: int, end: int, number: int) -> _Hit:
        evidence = excerpt(record.text, start, end)
        stage = rule.stage or self._where(record.process)
        if rule.outcome is Outcome.DEVICE_OOM and rule.stage is None:
            stage = self._oom_stage(stage)
        return _Hit(rule, stage, evidence, number, record.process, record.rank)

    def _oom_stage(self, stage: Stage) -> Stage:
        """Where device memory ran out. A log that does not say never reads as "does not fit at all" (``load``)."""
        if stage is Stage.COMPILE or (stage is Stage.CONFIG and not self._has_engine):
            return Stage.PROFILE
        return Stage.LOAD if stage in (Stage.CONFIG, Stage.DOWNLOAD) else stage

    def _where(self, process: str | None) -> Stage:
        if self._is_ready:
            return Stage.SERVE
        return self._frame.get(process) or self._progress

    def _notice_start(self, text: str) -> None:
        """A new server begins in this log: what stood before was another start."""
        is_over = bool(self._hits) or self._is_ready or self._wrapper is not None
        is_dead = self._wrapper is not None and self._wrapper.rule.name in ("engine_core", "engine_process")
        if is_over and any(template.regex.search(text) for template in SERVER_STARTS):
            self._turn_page()
        if any(template.regex.search(text) for template in ENGINE_STARTS):
            if is_dead:
                self._turn_page()
            self._has_engine = True

    def _turn_page(self) -> None:
        ended = self.verdict()
        self._earlier = ended if ended.outcome not in (Outcome.READY, Outcome.UNFINISHED) else None
        self._begin()

    def _is_quoted(self, text: str) -> bool:
        """A logging error's report quotes messages that nobody meant."""
        if text.startswith(_LOGGING_ERROR):
            self._in_logging_error = True
        elif self._in_logging_error and text.startswith(_LOGGING_ERROR_END):
            self._in_logging_error = False
        return text.startswith(_QUOTED) or self._in_logging_error

    def _notice_progress(self, record: Record, compact: str) -> None:
        if any(template.core in compact for template in READY):
            self._become_ready(takes_back=True)
        elif any(template.core in compact for template in SERVING):
            self._become_ready(takes_back=False)
        if _TRACEBACK in record.text:
            self._frame.pop(record.process, None)
        for stage, template in FRAMES:
            if template.core in compact and "line" in compact:
                self._frame[record.process] = stage
        for stage, template in STAGES:
            if _ORDER[stage] > _ORDER[self._progress] and template.search(record.text, compact):
                self._progress = stage
                self._exception = None

    def _become_ready(self, takes_back: bool) -> None:
        if self._is_ready or (not takes_back and (self._hits or self._wrapper)):
            return
        self._is_ready = True
        self._hits.clear()
        self._wrapper = self._exception = None

    def _notice_wrapper(self, record: Record, compact: str, number: int) -> None:
        """Remember what only says that something failed, and the last exception that nobody knows."""
        for rule in WRAPPERS:
            match = rule.template.search(record.text, compact)
            if match and not _is_harmless(record, match.start()):
                known = self._wrapper
                if known is None or (known.rule.outcome, rule.outcome) == (Outcome.CRASH, Outcome.TIMEOUT):
                    self._wrapper = self._hit(rule, record, match.start(), match.end(), number)
                return
        match = None if self._is_ready or self._hits else _EXCEPTION.search(record.text)
        if match and not _is_harmless(record, match.start()):
            self._exception = self._hit(_UNKNOWN, record, match.start(), match.end(), number)


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
    if found.outcome not in (Outcome.READY, Outcome.UNFINISHED):
        return found
    stage = Stage.SERVE if found.outcome is Outcome.READY else found.stage
    ended = "an unknown status" if exit_status is None else f"status {exit_status}"
    return replace(found, outcome=Outcome.CRASH, stage=stage, evidence=f"ended with {ended}", rule="exit_status")


_UNKNOWN = Rule("exception", Outcome.CRASH, None, Template("Error"))


def _matches(text: str, compact: str) -> Iterator[tuple[int, Rule, re.Match[str]]]:
    for index, rule in enumerate(RULES):
        if match := rule.template.search(text, compact):
            yield index, rule, match


def _is_harmless(record: Record, position: int) -> bool:
    """vLLM itself says that this is no error."""
    level = level_before(record.text, position) or record.level
    return level in _HARMLESS_LEVELS or _WARNING_TEXT.search(record.text, 0, position) is not None


def _line_end(block: bytes, position: int) -> int:
    """Where the line or redraw that holds ``position`` ends."""
    end = block.find(b"\n", position)
    end = len(block) if end < 0 else end
    redraw = block.find(b"\r", position, end)
    return end if redraw < 0 else redraw


def _owner(offsets: list[tuple[int, int]], owners: list[Record], position: int) -> tuple[int, Record]:
    place = max(i for i, (offset, _) in enumerate(offsets) if offset <= position)
    return offsets[place][1], owners[place]


@lru_cache(maxsize=32)
def _needles(progress: Stage, is_ready: bool) -> re.Pattern[bytes]:
    """What is worth a closer look now. Stages that lie behind are not, and a ready server has less to say."""
    rules = [rule for rule in RULES if not (is_ready and rule.outcome in _ONLY_BEFORE_READY)]
    wanted = [fragment for rule in rules for fragment in rule.template.fragments(3)]
    wanted += [rule.template.fragments(1)[0] for rule in WRAPPERS]
    wanted += [fragment for template in SERVER_STARTS + ENGINE_STARTS for fragment in template.fragments(1)]
    if not is_ready:
        wanted += [fragment for template in FIGURES for fragment in template.fragments(2)]
        wanted += [template.fragments(1)[0] for template in READY + SERVING]
        wanted += [template.fragments(1)[0] for stage, template in STAGES if _ORDER[stage] > _ORDER[progress]]
        wanted += [template.fragments(1)[0] for _, template in FRAMES]
        wanted += [_TRACEBACK[:12], _LOGGING_ERROR, _LOGGING_ERROR_END, "Error: ", "Exception: "]
    return any_of(wanted)


@lru_cache(maxsize=1)
def _pieces() -> tuple[re.Pattern[bytes], dict[str, tuple[Template, ...]]]:
    """Pieces of the messages that carry a verdict or figures, and whose they are."""
    owners: dict[str, tuple[Template, ...]] = {}
    for template in [*(rule.template for rule in RULES), *FIGURES]:
        for fragment in template.fragments(3):
            owners[fragment] = (*owners.get(fragment, ()), template)
    return any_of(owners), owners


def _owners(text: str) -> Iterator[Template]:
    pattern, owners = _pieces()
    for piece in pattern.findall(text.encode()):
        yield from owners.get(piece.decode(), ())

"""What a log shows: the root cause of a failed start, its stage and figures, or that the server is ready.

Pure: bytes in, a Verdict out. A log is read as a stream, so one of any size costs little memory; every search is
linear. Sources of the messages: vLLM 0.2 to 0.33 (see rules.py, marks.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from prober.figures import Ledger
from prober.logtext import Framer, Record, excerpt, level_before, records
from prober.marks import ENGINE_STARTS, FIGURES, FRAMES, READY, SERVER_STARTS, SERVING, STAGES
from prober.needles import Needles
from prober.patterns import Template
from prober.records import Figures, Outcome, Stage, Verdict
from prober.rules import RULES, WRAPPERS, Rule
from prober.wrapped import CONTEXT, LINES_AROUND, Window, join, torn

_PIECE = 1 << 18  # bytes scanned at a time
_USAGE_STATUS = 2  # argparse's
_SEEN = 4_096  # distinct lines remembered, so that a line repeated for ever costs nothing
_ORDER = {stage: place for place, stage in enumerate(Stage)}

_TRACEBACK = Template("Traceback (most recent call last)")
_LOGGING_ERROR = Template("--- Logging error ---")
_LOGGING_ERROR_END = Template("Arguments: ")
_EXCEPTIONS = (_TRACEBACK, _LOGGING_ERROR, _LOGGING_ERROR_END, Template("Error: "), Template("Exception: "))
_QUOTED = ("Message: ", "Arguments: ")
_EXCEPTION = re.compile(r"(?:^|\] )(?:[A-Za-z_][\w.]{0,120})?(?:Error|Exception|Exit|Interrupt)(?:: |$|\()")
_SOURCE_ECHO = re.compile(r"^(?:raise|assert|f?[\"'])")
_HARMLESS_LEVELS = ("DEBUG", "INFO", "WARNING")
_WARNING_TEXT = re.compile(r"\b[A-Z]\w{0,40}Warning: ")

_RULE_AT = {rule.template: index for index, rule in enumerate(RULES)}
_WRAPPER_AT = {rule.template: index for index, rule in enumerate(WRAPPERS)}
_STAGE_OF = {template: stage for stage, template in STAGES}
_FRAME_OF = {template: stage for stage, template in FRAMES}
_FIGURES = frozenset(FIGURES)
_UNKNOWN = Rule("exception", Outcome.CRASH, None, Template("Error"))
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

    def verdict(self, figures: Figures, shown: _Hit | None = None) -> Verdict:
        at = shown or self
        return Verdict(
            self.rule.outcome, self.stage, at.evidence, at.line, at.process, at.rank, self.rule.name, figures
        )


class _Start:
    """What one start-up has shown so far, line by line."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.progress = Stage.CONFIG
        self.is_ready = False
        self.hits: dict[int, _Hit] = {}  # by the rule's place in the order of priority
        self.wrapper: _Hit | None = None
        self._exception: _Hit | None = None
        self._frames: dict[str | None, Stage] = {}
        self._has_engine = False  # the engine's own start was seen: weights come next
        self._in_logging_error = False

    @property
    def is_over(self) -> bool:
        """A server that starts after this is another start."""
        return bool(self.hits) or self.is_ready or self.wrapper is not None

    @property
    def is_dead(self) -> bool:
        """The front end has given up, so an engine that starts after this belongs to another start."""
        return self.wrapper is not None and self.wrapper.rule.name in ("engine_core", "engine_process")

    def verdict(self, is_finished: bool) -> Verdict:
        figures = self.ledger.figures()
        if self.hits:
            return self.hits[min(self.hits)].verdict(figures)
        if self.is_ready and self.wrapper is None:
            return Verdict(Outcome.READY, Stage.READY, figures=figures)
        room = None if self.is_ready else self.ledger.no_room
        if room is not None:
            hit = _Hit(_NO_ROOM, Stage.KV_CACHE, room.evidence, room.line, room.process, room.rank)
            return hit.verdict(figures)
        if self.wrapper is not None:
            return self.wrapper.verdict(figures, self._exception)
        if self._exception is not None and is_finished:
            return self._exception.verdict(figures)
        return Verdict(Outcome.UNFINISHED, self.progress, figures=figures)

    def read(self, record: Record, owners: Collection[Template], number: int) -> list[Template]:
        """Read one undressed line; return the messages that it may hold a part of."""
        text = record.text
        if self._is_quoted(text):
            return []
        self._has_engine |= any(template.regex.search(text) for template in ENGINE_STARTS if template in owners)
        self._notice_progress(record, owners)
        known = self._strike(owners, record, number)
        known |= self.ledger.read(text, [t for t in owners if t in _FIGURES], number, record)
        self._notice_wrapper(record, owners, number)
        telling = _FIGURES if record.level in _HARMLESS_LEVELS else _FIGURES | _RULE_AT.keys()
        return [template for template in owners if template in telling and template not in known]

    def read_window(self, window: Window) -> None:
        """Look for the messages that no single line of the window held."""
        joined = join(window)
        if not joined.parts:
            return
        for index in sorted(_RULE_AT[template] for template in window.templates if template in _RULE_AT):
            if match := RULES[index].template.regex.search(joined.text):
                line, owner = joined.at(match.start())
                record = Record(joined.text, joined.process, joined.rank, owner.level)
                self._keep(index, match, record, line, is_gated=owner.level in _HARMLESS_LEVELS)
        self.ledger.read(joined.text, [t for t in window.templates if t in _FIGURES], window.first_line)

    def _strike(self, owners: Collection[Template], record: Record, number: int) -> set[Template]:
        known: set[Template] = set()
        for index in sorted(_RULE_AT[template] for template in owners if template in _RULE_AT):
            template = RULES[index].template
            if match := template.regex.search(record.text):
                known.add(template)
                self._keep(index, match, record, number, is_gated=_is_harmless(record, match.start()))
        return known

    def _keep(self, index: int, match: re.Match[str], record: Record, number: int, *, is_gated: bool) -> None:
        rule = RULES[index]
        is_warned = rule.outcome is Outcome.UNSERVABLE  # V0 only warns of a prompt that it will never admit
        if (is_gated and not is_warned) or (self.is_ready and rule.outcome in _ONLY_BEFORE_READY):
            return
        self.ledger.take(match, number, record)
        hit = self._hit(rule, record, match, number)
        known = self.hits.get(index)
        if known is None or (_SOURCE_ECHO.match(known.evidence) and not _SOURCE_ECHO.match(hit.evidence)):
            self.hits[index] = hit

    def _hit(self, rule: Rule, record: Record, match: re.Match[str], number: int) -> _Hit:
        evidence = excerpt(record.text, match.start(), match.end())
        stage = rule.stage or self._where(record.process, rule.outcome)
        return _Hit(rule, stage, evidence, number, record.process, record.rank)

    def _where(self, process: str | None, outcome: Outcome) -> Stage:
        """Where it happened. A log that does not say never reads as "does not fit at all" (OOM at ``load``)."""
        if self.is_ready:
            return Stage.SERVE
        stage = self._frames.get(process) or self.progress
        if outcome is not Outcome.DEVICE_OOM:
            return stage
        if stage is Stage.COMPILE or (stage is Stage.CONFIG and not self._has_engine):
            return Stage.PROFILE
        return Stage.LOAD if stage in (Stage.CONFIG, Stage.DOWNLOAD) else stage

    def _is_quoted(self, text: str) -> bool:
        """A logging error's report quotes messages that nobody meant."""
        if text.startswith(_LOGGING_ERROR.text):
            self._in_logging_error = True
        elif self._in_logging_error and text.startswith(_LOGGING_ERROR_END.text):
            self._in_logging_error = False
        return text.startswith(_QUOTED) or self._in_logging_error

    def _notice_progress(self, record: Record, owners: Collection[Template]) -> None:
        for template in owners:
            if template in READY and template.regex.search(record.text):
                self._become_ready(takes_back=True)
            elif template in SERVING and template.regex.search(record.text):
                self._become_ready(takes_back=False)
            elif template == _TRACEBACK:
                self._frames.pop(record.process, None)
            elif template in _FRAME_OF and template.regex.search(record.text):
                self._frames[record.process] = _FRAME_OF[template]
            elif template in _STAGE_OF and template.regex.search(record.text):
                self._advance(_STAGE_OF[template])

    def _advance(self, stage: Stage) -> None:
        if _ORDER[stage] > _ORDER[self.progress]:
            self.progress = stage
            self._exception = None  # the start went on after it

    def _become_ready(self, takes_back: bool) -> None:
        if self.is_ready or (not takes_back and (self.hits or self.wrapper)):
            return
        self.is_ready = True
        self.hits.clear()
        self.wrapper = self._exception = None

    def _notice_wrapper(self, record: Record, owners: Collection[Template], number: int) -> None:
        """Remember what only says that something failed, and the last exception that nobody knows."""
        for index in sorted(_WRAPPER_AT[template] for template in owners if template in _WRAPPER_AT):
            rule = WRAPPERS[index]
            match = rule.template.regex.search(record.text)
            if match and not _is_harmless(record, match.start()):
                self._keep_wrapper(self._hit(rule, record, match, number))
                return
        match = None if self.is_ready or self.hits else _EXCEPTION.search(record.text)
        if match and not _is_harmless(record, match.start()):
            self._exception = self._hit(_UNKNOWN, record, match, number)

    def _keep_wrapper(self, hit: _Hit) -> None:
        known = self.wrapper
        says_more = known is not None and (known.rule.outcome, hit.rule.outcome) == (Outcome.CRASH, Outcome.TIMEOUT)
        if known is None or says_more or _SOURCE_ECHO.match(known.evidence):
            self.wrapper = hit


class Reader:
    """Reads a growing log. feed() bytes as they come; look at verdict() at any time."""

    def __init__(self) -> None:
        self._framer = Framer()
        self._line = 1  # the number of the line that the next block begins in
        self._before = b""
        self._windows: list[Window] = []
        self._is_finished = False
        self._seen: set[bytes] = set()
        self._start = _Start()
        self._earlier: Verdict | None = None  # how the last start in this log ended, when another one followed it

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
        self._seen.add(line)
        owners = self._needles().owners(line)
        self._notice_start(owners, line)
        missing: list[Template] = []
        process = None
        for record in records(line):
            missing += torn(self._start.read(record, owners, number), record.text)
            process = record.process or process
        if missing:
            self._open_window(block, start, end, number, tuple(missing), process)

    def _notice_start(self, owners: Iterable[Template], line: bytes) -> None:
        """A new server begins in this log: what stood before was another start."""
        begins = (self._start.is_over, SERVER_STARTS), (self._start.is_dead, ENGINE_STARTS)
        text = line.decode("utf-8", "replace")
        if any(is_over and t in templates and t.regex.search(text) for t in owners for is_over, templates in begins):
            ended = self.verdict()
            self._earlier = ended if ended.outcome not in (Outcome.READY, Outcome.UNFINISHED) else None
            self._start = _Start()
            self._seen = {line}

    def _open_window(
        self, block: bytes, start: int, end: int, number: int, missing: tuple[Template, ...], process: str | None
    ) -> None:
        before = block[max(0, start - CONTEXT) : start]
        if start < CONTEXT:
            before = (self._before + before)[-CONTEXT:]
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


_NO_ROOM = Rule("no_room", Outcome.NO_KV_MEMORY, Stage.KV_CACHE, Template("no room"))


def _is_harmless(record: Record, position: int) -> bool:
    """vLLM itself says that this is no error."""
    level = level_before(record.text, position) or record.level
    return level in _HARMLESS_LEVELS or _WARNING_TEXT.search(record.text, 0, position) is not None


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
    rules = [rule for rule in RULES if not (is_ready and rule.outcome in _ONLY_BEFORE_READY)]
    once = [rule.template for rule in WRAPPERS] + [*SERVER_STARTS, *ENGINE_STARTS]
    twice: tuple[Template, ...] = ()
    if not is_ready:
        twice = FIGURES
        once += [*READY, *SERVING, *(template for _, template in FRAMES), *_EXCEPTIONS]
        once += [template for stage, template in STAGES if _ORDER[stage] > _ORDER[progress]]
    wanted = [(rule.template, 3) for rule in rules] + [(template, 2) for template in twice]
    return Needles(wanted + [(template, 1) for template in once])

"""One start-up, line by line: how far it has come, what was struck, and what that amounts to."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from prober.logs.figures import FigureCollector
from prober.logs.line_wraps import Window, join
from prober.logs.lines import LogRecord, excerpt, level_before
from prober.logs.messages import (
    ENGINE_STARTS,
    FIGURES,
    LOGGING_ERROR,
    LOGGING_ERROR_END,
    READY,
    SERVING,
    STAGES,
    TRACEBACK,
)
from prober.logs.rules import ONLY_BEFORE_READY, ONLY_WHILE_STARTING, OPENING, RULES, WRAPPERS, Rule
from prober.logs.template import Template
from prober.logs.tracebacks import Tracebacks
from prober.records import Figures, Outcome, Stage, Verdict

ORDER = {stage: place for place, stage in enumerate(Stage)}

# A logging error's report; and what vLLM tries first and does without (logged as errors, with what the Hub answered).
_QUOTED = ("Message: ", "Arguments: ", "Error retrieving ")
# At the beginning of a line, behind a prefix, or quoted there as people paste it.
_EXCEPTION = re.compile(
    r"(?:^[\s`\"'“>*]{0,4}|\]:? ?)(?:[A-Za-z_][\w.]{0,120})?(?:Error|Exception|Exit|Interrupt|CompilerFailed)"
    r"(?:: |$|\()"
)
# What other processes and threads raise when one has failed; and what a user does about a start that hangs.
_AFTERMATH = re.compile(r"CancelledError|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError|EOFError")
_SOURCE_ECHO = re.compile(r"^(?:raise|assert|f?[\"'])")
_HARMLESS_LEVELS = ("DEBUG", "INFO", "WARNING")
_WARNING_TEXT = re.compile(r"\b[A-Z]\w{0,40}Warning: ")

_RULE_AT = {rule.template: index for index, rule in enumerate(RULES)}
_WRAPPER_AT = {rule.template: index for index, rule in enumerate(WRAPPERS)}
_STAGE_OF = {template: stage for stage, template in STAGES}
_FIGURES = frozenset(FIGURES)
_NO_ROOM = Rule("no_room", Outcome.NO_KV_MEMORY, Stage.KV_CACHE, Template("no room"))
_UNKNOWN = Rule("exception", Outcome.CRASH, None, Template("Error"))
_SOMEWHERE = Rule("device_oom_somewhere", Outcome.DEVICE_OOM, None, Template("out of memory"))
_CUT = Rule("traceback", Outcome.CRASH, None, Template("Traceback"))


@dataclass(frozen=True, slots=True)
class _Hit:
    """Where a rule matched."""

    rule: Rule
    stage: Stage
    evidence: str
    line: int
    process: str | None
    rank: int | None
    is_placed: bool = True  # something in the log tells the stage

    def verdict(self, figures: Figures) -> Verdict:
        name, outcome = self.rule.name, self.rule.outcome
        return Verdict(outcome, self.stage, self.evidence, self.line, self.process, self.rank, name, figures)


class StartupState:
    """What one start-up has shown so far, line by line."""

    def __init__(self) -> None:
        self.ledger = FigureCollector()
        self.progress = Stage.CONFIG
        self.is_ready = False
        self.hits: dict[int, _Hit] = {}  # by the rule's place in the order of priority
        self.wrapper: _Hit | None = None
        self._exception: _Hit | None = None
        self._tracebacks = Tracebacks()
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
            return self._placed(self.hits[min(self.hits)]).verdict(figures)
        if self.is_ready and self.wrapper is None:
            return Verdict(Outcome.READY, Stage.READY, figures=figures)
        room = None if self.is_ready else self.ledger.no_room
        if room is not None:
            hit = _Hit(_NO_ROOM, Stage.KV_CACHE, room.evidence, room.line, room.process, room.rank)
            return hit.verdict(figures)
        failure = self._unexplained()
        if failure is not None and (self.wrapper is not None or is_finished):
            return failure.verdict(figures)
        return Verdict(Outcome.UNFINISHED, self.progress, figures=figures)

    def _placed(self, hit: _Hit) -> _Hit:
        """A log that shows no step: the traceback below a failure may tell where it was."""
        if hit.rule.outcome is Outcome.CRASH and not hit.is_placed:
            return replace(hit, stage=self._tracebacks.last_stage(self.progress) or hit.stage)
        if hit.rule.outcome is not Outcome.DEVICE_OOM or hit.is_placed:
            return hit
        stage = self._tracebacks.stage(hit.process, self.progress)
        if stage is None:
            return replace(hit, rule=_SOMEWHERE)
        return replace(hit, stage=Stage.PROFILE if stage in (Stage.CONFIG, Stage.COMPILE) else stage)

    def _unexplained(self) -> _Hit | None:
        """A failure that no rule knows: the exception itself, else where its traceback is cut, else who complains."""
        known = self._exception or self._cut() or self.wrapper
        if known is None or self.is_ready:
            return known
        if self.wrapper is not None and self.wrapper.rule.outcome is Outcome.TIMEOUT:
            return replace(known, rule=self.wrapper.rule)
        return replace(known, stage=self._tracebacks.last_stage(self.progress) or known.stage)

    def _cut(self) -> _Hit | None:
        """Inside which traceback the log stops; None: it does not, or who complains below it has said enough."""
        frame = self._tracebacks.cut
        if frame is None or (self.wrapper is not None and not OPENING.search(self.wrapper.evidence)):
            return None
        return _Hit(_CUT, self.progress, frame.evidence, frame.line, frame.process, frame.rank)

    def read(self, record: LogRecord, owners: Collection[Template], number: int) -> list[Template]:
        """Read one undressed line; return the messages that it may hold a part of."""
        text = record.text
        if self._is_quoted(text):
            return []
        self._has_engine |= any(template.regex.search(text) for template in ENGINE_STARTS if template in owners)
        self._notice_progress(record, owners, number)
        known = self._match_rules(owners, record, number)
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
                record = LogRecord(joined.since(match.start()), joined.process, joined.rank, owner.level)
                self._keep(index, match, record, line, is_gated=owner.level in _HARMLESS_LEVELS)
        self.ledger.read(joined.text, [t for t in window.templates if t in _FIGURES], window.first_line)

    def _match_rules(self, owners: Collection[Template], record: LogRecord, number: int) -> set[Template]:
        known: set[Template] = set()
        for index in sorted(_RULE_AT[template] for template in owners if template in _RULE_AT):
            template = RULES[index].template
            if match := template.regex.search(record.text):
                known.add(template)
                self._keep(index, match, record, number, is_gated=_is_harmless(record, match.start()))
        return known

    def _keep(self, index: int, match: re.Match[str], record: LogRecord, number: int, *, is_gated: bool) -> None:
        rule = RULES[index]
        is_warned = rule.outcome is Outcome.UNSERVABLE  # V0 only warns of a prompt that it will never admit
        if (is_gated and not is_warned) or (self.is_ready and rule.outcome in ONLY_BEFORE_READY):
            return
        self.ledger.take(match, number, record)
        hit = self._hit(rule, record, match, number)
        known = self.hits.get(index)
        if known is None or (_SOURCE_ECHO.match(known.evidence) and not _SOURCE_ECHO.match(hit.evidence)):
            self.hits[index] = hit

    def _hit(self, rule: Rule, record: LogRecord, match: re.Match[str], number: int) -> _Hit:
        evidence = excerpt(record.text, match.start(), match.end())
        stage = rule.stage or self._where(record.process, rule.outcome)
        is_placed = rule.stage is not None or self._tells(record.process)
        return _Hit(rule, stage, evidence, number, record.process, record.rank, is_placed)

    def _tells(self, process: str | None) -> bool:
        """The log shows where it is: by a step that it names, or by the frames of a traceback."""
        has_step = self.progress is not Stage.CONFIG or self._has_engine
        return self.is_ready or has_step or self._tracebacks.stage(process, self.progress) is not None

    def _where(self, process: str | None, outcome: Outcome) -> Stage:
        """Where it happened. A log that does not say never reads as "does not fit at all" (OOM at ``load``)."""
        if self.is_ready:
            return Stage.SERVE
        stage = self._tracebacks.stage(process, self.progress)
        if stage is Stage.CONFIG and outcome is Outcome.DEVICE_OOM:
            return stage  # before any weight: whoever holds the device is at fault, and no length
        if stage is None and outcome is Outcome.CRASH:
            stage = self._tracebacks.last_stage(self.progress)
        stage = stage or self.progress
        if outcome is not Outcome.DEVICE_OOM:
            return stage
        if stage is Stage.COMPILE or (stage is Stage.CONFIG and not self._has_engine):
            return Stage.PROFILE
        return Stage.LOAD if stage in (Stage.CONFIG, Stage.DOWNLOAD) else stage

    def _is_quoted(self, text: str) -> bool:
        """Some lines quote messages that nobody meant."""
        if text.startswith(LOGGING_ERROR.text):
            self._in_logging_error = True
        elif self._in_logging_error and text.startswith(LOGGING_ERROR_END.text):
            self._in_logging_error = False
        return text.startswith(_QUOTED) or self._in_logging_error

    def _notice_progress(self, record: LogRecord, owners: Collection[Template], number: int) -> None:
        if TRACEBACK in owners:
            self._tracebacks.begin(record.process)
        if record.level not in _HARMLESS_LEVELS:
            self._tracebacks.read(record, owners, number)
        for template in owners:
            if template in READY and template.regex.search(record.text):
                self._become_ready(takes_back=True)
            elif template in SERVING and template.regex.search(record.text):
                self._become_ready(takes_back=False)
            elif template in _STAGE_OF and template.regex.search(record.text):
                self._advance(_STAGE_OF[template])

    def _advance(self, stage: Stage) -> None:
        if ORDER[stage] > ORDER[self.progress]:
            self.progress = stage
            self._exception = None  # the start went on after it
            self._tracebacks.forget()

    def _become_ready(self, takes_back: bool) -> None:
        if self.is_ready or (not takes_back and (self.hits or self.wrapper)):
            return
        self.is_ready = True
        self.hits.clear()
        self.wrapper = self._exception = None
        self._tracebacks.forget()

    def _notice_wrapper(self, record: LogRecord, owners: Collection[Template], number: int) -> None:
        """Remember what only says that something failed, and the last exception that nobody knows."""
        for index in sorted(_WRAPPER_AT[template] for template in owners if template in _WRAPPER_AT):
            rule = WRAPPERS[index]
            match = rule.template.regex.search(record.text)
            if self.is_ready and rule.name in ONLY_WHILE_STARTING:
                continue
            if match and not _is_harmless(record, match.start()):
                self._keep_wrapper(self._hit(rule, record, match, number))
                self._tracebacks.end(record.process)
                return
        match = None if self.is_ready or self.hits else _EXCEPTION.search(record.text)
        if match and not _is_harmless(record, match.start()):
            self._tracebacks.end(record.process)
            if self._is_complaint(record, number):
                return
            if self._exception is None or not _AFTERMATH.search(match[0]):
                self._exception = self._hit(_UNKNOWN, record, match, number)

    def _is_complaint(self, record: LogRecord, number: int) -> bool:
        """The line that raises a complaint stands right above: this is the complaint, however it is cut."""
        known = self.wrapper
        return (
            known is not None
            and _SOURCE_ECHO.match(known.evidence) is not None
            and known.process == record.process
            and number - known.line <= 3  # the call's further lines, and a row of ^
        )

    def _keep_wrapper(self, hit: _Hit) -> None:
        known = self.wrapper
        says_more = known is not None and (known.rule.outcome, hit.rule.outcome) == (Outcome.CRASH, Outcome.TIMEOUT)
        if known is None or says_more or _SOURCE_ECHO.match(known.evidence):
            self.wrapper = hit


def _is_harmless(record: LogRecord, position: int) -> bool:
    """vLLM itself says that this is no error."""
    level = level_before(record.text, position) or record.level
    return level in _HARMLESS_LEVELS or _WARNING_TEXT.search(record.text, 0, position) is not None

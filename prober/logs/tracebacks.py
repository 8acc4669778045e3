"""Where a failure was raised: what the frames of tracebacks tell, of each process its own."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from prober.logs.lines import LogRecord, excerpt
from prober.logs.messages import FRAME, FRAMES, OUTER_FRAMES
from prober.logs.template import Template
from prober.records import Stage


def _pattern(name: str) -> re.Pattern[str]:
    """A function as a frame names it, or as the line of source below a frame calls it; or a file."""
    if "/" in name:
        return re.compile(re.escape(name))
    return re.compile(rf"(?:\bin (?:\w{{1,80}}\.){{0,4}}|[.\"']){name}(?=[\s(\"',]|$)")


_SURE = {template: (stage, _pattern(template.text)) for stage, template in FRAMES}
_OUTER = {template: (stage, _pattern(template.text)) for stage, template in OUTER_FRAMES}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a traceback whose last line, the one that names the error, has not come."""

    evidence: str
    line: int
    process: str | None
    rank: int | None


@dataclass(slots=True)
class _Told:
    """What the frames of one traceback told so far."""

    sure: Stage | None = None
    likely: Stage | None = None


class Tracebacks:
    """The outermost frame that tells a stage decides: profiling and warming up call the same functions inside."""

    def __init__(self) -> None:
        self._of: dict[str | None, _Told] = {}
        self._open: dict[str | None, Frame] = {}
        self._last = _Told()

    def begin(self, process: str | None) -> None:
        """A process starts to print a traceback."""
        self._of.pop(process, None)

    def read(self, record: LogRecord, owners: Collection[Template], number: int) -> None:
        """Take what the line tells, if it belongs to a traceback."""
        if FRAME in owners and (match := FRAME.regex.search(record.text)):
            evidence = excerpt(record.text, match.start(), match.end())
            self._open.pop(record.process, None)  # so that the last one stands last
            self._open[record.process] = Frame(evidence, number, record.process, record.rank)
        sure, likely = _first(_SURE, owners, record.text), _first(_OUTER, owners, record.text)
        if sure is None and likely is None:
            return
        told = self._of.setdefault(record.process, _Told())
        told.sure, told.likely = told.sure or sure, likely or told.likely
        self._last = told

    def end(self, process: str | None) -> None:
        """The line that names the error has come."""
        self._open.pop(process, None)

    def forget(self) -> None:
        """The start went on: what was raised before did no harm."""
        self._open.clear()
        self._last = _Told()

    def stage(self, process: str | None, progress: Stage) -> Stage | None:
        """Where the traceback that this process prints was raised; None: its frames do not say."""
        return _stage(self._of.get(process, _Told()), progress)

    def last_stage(self, progress: Stage) -> Stage | None:
        """Where the last traceback of any process was raised."""
        return _stage(self._last, progress)

    @property
    def cut(self) -> Frame | None:
        """The last frame of a traceback that does not end in this log."""
        return next(reversed(self._open.values()), None)


def _stage(told: _Told, progress: Stage) -> Stage | None:
    """A frame that several stages share never takes back how far the start had come."""
    order = list(Stage)
    if told.sure is None and told.likely is not None and order.index(told.likely) < order.index(progress):
        return progress
    return told.sure or told.likely


def _first(
    frames: dict[Template, tuple[Stage, re.Pattern[str]]], owners: Collection[Template], text: str
) -> Stage | None:
    found = [
        (match.start(), stage)
        for stage, pattern in (frames[template] for template in owners if template in frames)
        if (match := pattern.search(text))
    ]
    return min(found, key=lambda one: one[0])[1] if found else None

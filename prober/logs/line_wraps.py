"""Messages that a terminal or a collector has broken over several lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prober.logs.lines import LogRecord, records
from prober.logs.template import Template

LINES_AROUND = 4  # a message is wrapped over at most this many further lines
CONTEXT = 1 << 11  # bytes kept of what stood before


@dataclass(slots=True)
class Window:
    """The lines around one that holds a part of a message, and the messages it may be."""

    first_line: int
    raw: bytearray
    templates: tuple[Template, ...]
    process: str | None
    missing: int = LINES_AROUND

    def fill(self, block: bytes, position: int) -> None:
        """Take the lines that follow, as far as they have come."""
        while self.missing and position < len(block):
            end = block.find(b"\n", position, position + CONTEXT) + 1 or min(len(block), position + CONTEXT)
            self.raw += block[position:end]
            self.missing -= block[end - 1 : end] == b"\n" or end - position == CONTEXT
            position = end


@dataclass(slots=True)
class Joined:
    """The lines of a window as one text. Breaks vanish: a template's blanks match nothing as well."""

    text: str = ""
    parts: list[tuple[int, int, LogRecord]] = field(default_factory=list)  # offset, line number, record

    @property
    def process(self) -> str | None:
        return next((record.process for _, _, record in self.parts if record.process), None)

    @property
    def rank(self) -> int | None:
        return next((record.rank for _, _, record in self.parts if record.rank is not None), None)

    def at(self, position: int) -> tuple[int, LogRecord]:
        """The line number and the record that a place in the text stands in."""
        return next((line, record) for offset, line, record in reversed(self.parts) if offset <= position)

    def since(self, position: int) -> str:
        """The text with everything blanked that stands before the line of a place: no place moves."""
        begin = max(offset for offset, _, _ in self.parts if offset <= position)
        return " " * begin + self.text[begin:]


def join(window: Window) -> Joined:
    """Undress and join the lines of a window; lines that name another process are left out."""
    joined = Joined()
    for index, raw in enumerate(bytes(window.raw).split(b"\n")):
        for record in records(raw.strip(b"\r")):
            if window.process and record.process and record.process != window.process:
                continue
            joined.parts.append((len(joined.text), window.first_line + index, record))
            joined.text += record.text.strip()
    return joined


def torn(templates: Iterable[Template], text: str) -> Iterator[Template]:
    """Those of the templates whose message may go on in the lines around ``text``."""
    stripped = text.strip()
    return (template for template in templates if template.is_torn_in(stripped))

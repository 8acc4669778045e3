"""Tables as aligned text for a terminal and as Markdown. Pure.

Not ``rich.table``: its import takes nearly as long as all of a look-up's, and its Markdown box has no alignment.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Sequence

from prober.results.text import printable


def text_table(lines: Iterable[Sequence[str]], numbers: Collection[int]) -> str:
    """Align columns by terminal width, two spaces apart, without a final line end.

    ``lines`` includes the headings; columns whose index is in ``numbers`` are right-aligned. Control characters are
    replaced.
    """
    texts = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(_width, cells)) for cells in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(_padded(cell, widths[i], i in numbers) for i, cell in enumerate(line)).rstrip() for line in texts
    )


def markdown_table(headings: Sequence[str], lines: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Write a Markdown table without a final line end.

    Cells are Markdown already (see `markdown_text`); columns whose index is in ``numbers`` are right-aligned.
    """
    rule = "|".join("---:" if index in numbers else "---" for index in range(len(headings)))
    rows = [f"| {' | '.join(line)} |" for line in (headings, *lines)]
    return "\n".join([rows[0], f"|{rule}|", *rows[1:]])


def markdown_text(text: str) -> str:
    """Escape text that must not become markup or end a table cell."""
    plain = printable(text)
    for mark in ("\\", "|", "`", "*", "[", "]"):
        plain = plain.replace(mark, "\\" + mark)
    return plain.replace("<", "&lt;")


def _padded(cell: str, width: int, is_number: bool) -> str:
    gap = " " * (width - _width(cell))
    return gap + cell if is_number else cell + gap


def _width(text: str) -> int:
    """Columns on a terminal: wide East Asian characters and emoji take two, combining marks none."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)

"""The matrix as a Markdown table, for a README or a pull request. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prober.report.rows import HEADINGS, lines_of
from prober.results.schema import Row
from prober.results.table import markdown_table
from prober.results.text import printable

_PLAIN = re.compile(r"[\w .,·≥–-]*")
_IN_CODE = {"model"}


def markdown_of(rows: Iterable[Row]) -> str:
    """Write one line a row. Nothing in a row can break the table, make a link, a mention or markup."""
    headings = [heading.label.replace("_", r"\_") for heading in HEADINGS]
    numbers = {index for index, heading in enumerate(HEADINGS) if heading.is_number}
    lines = (
        [_cell(heading.key, text) for heading, text in zip(HEADINGS, line.cells, strict=True)]
        for line in lines_of(rows)
    )
    return markdown_table(headings, lines, numbers) + "\n"


def _cell(key: str, text: str) -> str:
    if key not in _IN_CODE and _PLAIN.fullmatch(text) and "_" not in text:
        return text
    return _code(printable(text))


def _code(text: str) -> str:
    """Quote as code: only there a mark-up language leaves @, #, <, * and _ alone."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if longest or text != text.strip() or not text.strip() else ""
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", r"\|")

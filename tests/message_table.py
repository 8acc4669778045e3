"""A table of log messages, one for each entry of the rule tables, and what the prober must read in each.

``tests/data/messages.csv``: the table and the name of the entry, the vLLM versions that print the message (empty: not
vLLM's own, or unknown), the expected outcome, stage, rule and figures, and the log itself. All figures are invented.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from prober.logs.classify import classify

MESSAGES = Path(__file__).with_name("data") / "messages.csv"


@dataclass(frozen=True, slots=True)
class Message:
    """One row: a log and its expected reading."""

    table: str
    name: str
    versions: str
    outcome: str
    stage: str
    rule: str
    figures: str  # name=value, separated by blanks
    log: str


def messages() -> list[Message]:
    """Read the table."""
    with MESSAGES.open(newline="", encoding="utf-8") as file:
        return [Message(**row) for row in csv.DictReader(file)]


def reading(log: str) -> tuple[str, str, str, str]:
    """Classify a log: outcome, stage, rule, figures."""
    found = classify(f"{log}\n".encode())
    figures = " ".join(f"{name}={value}" for name, value in asdict(found.figures).items() if value is not None)
    return found.outcome, found.stage, found.rule or "", figures


def misread() -> Iterator[str]:
    """Describe every message that is not read as the table says."""
    for message in messages():
        expected = (message.outcome, message.stage, message.rule, message.figures)
        if (found := reading(message.log)) != expected:
            yield f"{message.table} {message.name}: {message.log!r} is {found}, expected {expected}"

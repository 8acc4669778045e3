"""A table of log messages, one for each entry of the rule tables, and what the prober must read in each.

``tests/data/messages.csv``: the table and the name of the entry, the vLLM versions that print the message (empty: not
vLLM's own, or unknown), the expected outcome, stage, rule, figures and first advice (of configuration errors and
crashes), the exit status and the log itself. All figures are invented.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from prober.advice.advise import fixes
from prober.logs.classify import Reader, conclude
from prober.records import Outcome

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
    advice: str
    exit_status: str  # empty: the process has not ended
    log: str


def messages() -> list[Message]:
    """Read the table."""
    with MESSAGES.open(newline="", encoding="utf-8") as file:
        return [Message(**row) for row in csv.DictReader(file)]


def reading(log: str, exit_status: str = "") -> tuple[str, str, str, str, str]:
    """Classify a log: outcome, stage, rule, figures, advice."""
    reader = Reader()
    reader.feed(f"{log}\n".encode())
    reader.finish()
    found = conclude(reader, int(exit_status)) if exit_status else reader.verdict()
    figures = " ".join(f"{name}={value}" for name, value in asdict(found.figures).items() if value is not None)
    advice = [fix.action for fix in fixes(found)] if found.outcome in (Outcome.BAD_CONFIG, Outcome.CRASH) else []
    return found.outcome, found.stage, found.rule or "", figures, advice[0] if advice else ""


def misread() -> Iterator[str]:
    """Describe every message that is not read as the table says."""
    for message in messages():
        expected = (message.outcome, message.stage, message.rule, message.figures, message.advice)
        if (found := reading(message.log, message.exit_status)) != expected:
            yield f"{message.table} {message.name}: {message.log!r} is {found}, expected {expected}"

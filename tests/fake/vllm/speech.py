"""Log lines as vLLM's logger, its process prefixes and Python's tracebacks make them."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass

from fake_scenario import Scenario

STDOUT, STDERR = 1, 2


def write(descriptor: int, text: str | bytes) -> None:
    """Write all of it, past Python's buffers: several processes share the log."""
    rest = text.encode() if isinstance(text, str) else text
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@dataclass(frozen=True)
class Speech:
    """One process's voice. ``name`` is empty for a front end of versions that do not name it."""

    scenario: Scenario
    name: str = ""

    def _prefix(self, stream: int) -> str:
        release = self.scenario.release
        if not self.name or (stream == STDERR and release >= (0, 31, 0)):
            return ""
        is_worker = "orker" in self.name
        if not is_worker and (release < (0, 10, 1) or not self.scenario.is_v1):
            return ""
        name = f"({self.name} pid={os.getpid()})"
        obeys = release >= (0, 12, 0) and "NO_COLOR" in os.environ
        is_coloured = (0, 10, 1) <= release < (0, 16, 0) and not obeys  # into a pipe, too
        return f"\x1b[1;36m{name}\x1b[0;0m " if is_coloured else f"{name} "

    def _log(self, level: str, place: str, text: str) -> None:
        place = f"[{place}]" if self.scenario.release >= (0, 8, 0) else f"{place}]"
        head = f"{self._prefix(STDOUT)}{level} {time.strftime('%m-%d %H:%M:%S')} {place} "
        write(STDOUT, "\r\n".join(head + line for line in text.split("\n")) + "\n")

    def info(self, text: str, place: str = "core.py:109") -> None:
        """A line of the logger."""
        self._log("INFO", place, text)

    def warning(self, text: str, place: str = "model.py:2170") -> None:
        """A warning of the logger."""
        self._log("WARNING", place, text)

    def error(self, text: str, place: str = "core.py:1136") -> None:
        """An error of the logger; every line of it carries the prefix."""
        self._log("ERROR", place, text)

    def bare(self, text: str, stream: int = STDERR) -> None:
        """Text that no logger formats: tracebacks, progress bars, uvicorn."""
        prefix = self._prefix(stream)
        write(stream, "".join(f"{prefix}{line}\n" for line in text.rstrip("\n").split("\n")))

    def traceback(self, error: BaseException, stream: int = STDERR) -> None:
        """Python's own traceback, as an uncaught exception leaves it."""
        self.bare(traceback_text(error), stream)


def traceback_text(error: BaseException) -> str:
    """The traceback with the exception's true name: some stand in for torch's or pydantic's."""
    lines = traceback.format_exception(error)
    spoken = getattr(error, "spoken_name", None)
    if spoken:
        lines[-1] = f"{spoken}: {error}\n"
    return "".join(lines).rstrip("\n")


class SpokenError(Exception):
    """An exception of a type that is not installed here; its traceback says the true name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.spoken_name = name


class ConfigError(ValueError):
    """What pydantic raises: a ValueError whose traceback names pydantic."""

    spoken_name = "pydantic_core._pydantic_core.ValidationError"

"""The tables of a plan: every key is read once and judged, a mistake is told with its line, what is left over is one.

Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prober.records import UsageError

T = TypeVar("T")


class PlanError(UsageError):
    """The plan says something that makes no sense."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The plan's text, to say where a key stands: tomllib does not keep it."""

    name: str
    text: str

    def number(self, table: str, index: int, key: str) -> int | None:
        """The line of ``key`` in the ``index``-th table of that name; of the table itself where the key is absent."""
        here, seen, header = "", -1, None
        sets_key = re.compile(rf"\s*['\"]?{re.escape(key)}['\"]?\s*=")
        for number, line in enumerate(self.text.splitlines(), start=1):
            if found := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]\]?", line):
                here = found[1]
                seen += here == table
                header = number if (here, seen) == (table, index) else header
            elif here == table and (seen == index or not table) and sets_key.match(line):
                return number
        return header


@dataclass(slots=True)
class Table:
    """One table of the plan: every key is read once, what is left over is a mistake."""

    lines: Lines
    name: str
    values: Mapping[str, Any]
    index: int = 0
    read: set[str] = field(default_factory=set)
    behind: Table | None = None  # where keys come from that are absent here

    def over(self, defaults: Table) -> Table:
        return Table(self.lines, self.name, self.values, self.index, self.read, defaults)

    def error(self, key: str, what: str) -> PlanError:
        is_inherited = self.behind is not None and key in self.behind.values and key not in self.values
        owner = self.behind if is_inherited and self.behind is not None else self
        line = self.lines.number(owner.name, owner.index, key)
        where = f", line {line}" if line is not None else ""
        path = ".".join(part for part in (owner.name, key) if part)
        return PlanError(f"{self.lines.name}{where}: {path}: {what}." if path else f"{self.lines.name}{where}: {what}.")

    def get(self, key: str) -> Any:
        self.read.add(key)
        if self.behind is not None:
            self.behind.read.add(key)
            return self.values.get(key, self.behind.values.get(key))
        return self.values.get(key)

    def one(self, key: str, kind: type[T], default: Any) -> Any:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            words = {str: "a text in quotes", int: "a whole number"}[kind]
            raise self.error(key, f"takes {words}, not {value!r}")
        return value

    def positive(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, f"takes a number above 0, not {value!r}")
        return float(value)

    def choice(self, key: str, kind: Callable[[str], T], default: T) -> T:
        value = self.get(key)
        try:
            return default if value is None else kind(value)
        except ValueError:
            names = ", ".join(map(str, kind))  # type: ignore[call-overload]  # an enum's class lists its members
            raise self.error(key, f"takes one of {names}, not {value!r}") from None

    def axis(self, key: str, read: Callable[[object], T], default: tuple[T, ...]) -> tuple[T, ...]:
        """One value or a list of values; each once."""
        value = self.get(key)
        if value is None:
            return default
        values = value if isinstance(value, list) else [value]
        if not values:
            raise self.error(key, "is empty, so that nothing would be measured")
        try:
            return tuple(dict.fromkeys(map(read, values)))
        except ValueError as error:
            raise self.error(key, f"{str(error).rstrip('.')} (not {value!r})") from None

    def table(self, key: str) -> Table:
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(key, f"is a table: write [{key}]")
        return Table(self.lines, key, value)

    def tables(self, key: str) -> Iterator[Table]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise self.error(key, f"a plan needs at least one [[{key}]]")
        return (Table(self.lines, key, one, index) for index, one in enumerate(value))

    def refuse_unread(self) -> None:
        for key in self.values:
            if key not in self.read:
                near = difflib.get_close_matches(key, self.read, n=1)
                raise self.error(key, f"is unknown here{f' ({near[0]}?)' if near else ''}")

"""Message templates, and how a pattern and a fast pre-filter are made of them.

A template is a log message with holes, so that a rule reads like the line it is for:

``{name}``      a number that is kept under this name (``131,072``, ``-0.94``, ``32768.0``)
``{name:gib}``  a number with its unit (``GiB``, ``GB``, ``MB``, ``bytes``, …), kept in GiB
``{name:word}`` a word that is kept: no blank, comma, quote or bracket
``{}``          a number that is not kept
``{*}``         at most 120 characters of anything
``{a|b}``       either text; an empty side makes the other optional

A blank matches any run of blanks or none, because wrapped terminals lose and add them. Every hole is bounded, so a
search is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_NUMBER = r"-?\d[\d,]{0,24}(?:\.\d{1,12})?"
_UNIT = r"(?:[KMGT]i?[Bb]|bytes|B)\b"
_HOLE = re.compile(r"\{([^{}]*)\}")
_GIB_OF_UNIT = {"K": 1 / 2**20, "M": 1 / 2**10, "G": 1.0, "T": 2.0**10}
_FRAGMENT_LENGTH = 12
_SHORTEST_FRAGMENT = 7
# Characters that few places in a log begin a piece with, rarest first (counted in start-up and serving logs).
_RARE = "xMVLCBW`UTKGHXZQYz#j'vkwbEq=>SAD)FRNP(fu_-y"
_FRAGMENT_DISTANCE = 24  # further apart than a fragment is long: one break of a wrapped line spoils only one of them


@dataclass(frozen=True)
class Template:
    """A message with holes; see the module's text for the syntax."""

    text: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The pattern to search cleaned text with."""
        parts = _HOLE.split(self.text)
        return re.compile("".join(_hole(part) if i % 2 else _literal(part) for i, part in enumerate(parts)))

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """The fixed texts between the holes, in order."""
        return tuple(part for i, part in enumerate(_HOLE.split(self.text)) if i % 2 == 0 and part.strip())

    @cached_property
    def core(self) -> str:
        """The longest fixed text without its blanks: it must stand in a text (without blanks) that can match."""
        return max((literal.replace(" ", "") for literal in self.literals), key=len, default="")

    def fragments(self, count: int) -> tuple[str, ...]:
        """At most ``count`` short pieces, far enough apart that a hard line break spoils only one of them.

        Each begins with a character that is rare in logs where it can: a scan for pieces is as fast as their first
        characters are rare.
        """
        pieces: list[str] = []
        for literal in sorted(self.literals, key=len, reverse=True):
            body = literal.strip()
            for start in range(0, max(1, len(body) - _SHORTEST_FRAGMENT), _FRAGMENT_DISTANCE):
                last = max(start, min(len(body), start + _FRAGMENT_DISTANCE) - _SHORTEST_FRAGMENT)
                place = min(range(start, last + 1), key=lambda place: (_commonness(body[place]), place))
                pieces.append(body[place : place + _FRAGMENT_LENGTH].rstrip())
        pieces.sort(key=lambda piece: _commonness(piece[0]) == len(_RARE))
        useful = [piece for piece in pieces if len(piece) >= _SHORTEST_FRAGMENT] or pieces
        return tuple(dict.fromkeys(useful))[:count]

    def search(self, text: str, compact: str) -> re.Match[str] | None:
        """Find the message in ``text``; ``compact`` is the same text without blanks (computed once by the caller)."""
        return self.regex.search(text) if self.core in compact else None


def _commonness(character: str) -> int:
    place = _RARE.find(character)
    return len(_RARE) if place < 0 else place


def number(text: str) -> float:
    """Read a number as vLLM prints it: thousands separators, a sign, a fraction."""
    return float(text.replace(",", ""))


def numbers(match: re.Match[str]) -> dict[str, float | str]:
    """What a match holds: GiB for quantities with a unit, plain numbers, words."""
    found: dict[str, float | str] = {}
    for name, text in match.groupdict().items():
        if text is None or name.endswith("__unit"):
            continue
        if name.endswith("__word"):
            found[name.removesuffix("__word")] = text
            continue
        unit = match.groupdict().get(f"{name}__unit")
        found[name] = number(text) * (gib_of(unit) if unit else 1)
    return found


def gib_of(unit: str) -> float:
    """How many GiB one unit is. vLLM means 2**30 bytes by "GB", and writes "GB", "GiB", "Gib", "MB" and "bytes"."""
    return _GIB_OF_UNIT.get(unit[0].upper(), 1 / 2**30) if unit.lower() not in ("b", "bytes") else 1 / 2**30


def any_of(literals: Iterable[str]) -> re.Pattern[bytes]:
    """One pattern that finds any of the texts in raw bytes; common beginnings are tried once (a trie)."""
    trie: dict[str, dict[str, object]] = {}
    for literal in sorted(set(literals)):
        _grow(trie, literal)
    return re.compile(_branches(trie).encode())


def _grow(trie: dict[str, dict[str, object]], literal: str) -> None:
    node: dict[str, object] = trie  # type: ignore[assignment]
    for character in literal:
        if "" in node:  # a shorter text already matches here
            return
        node = node.setdefault(character, {})  # type: ignore[assignment]
    node.clear()
    node[""] = {}


def _branches(node: dict[str, dict[str, object]]) -> str:
    if "" in node or not node:
        return ""
    branches = [re.escape(character) + _branches(child) for character, child in node.items()]  # type: ignore[arg-type]
    return branches[0] if len(branches) == 1 else "(?:" + "|".join(branches) + ")"


def _literal(text: str) -> str:
    escaped = re.escape(re.sub(r" +", " ", text)).replace(r"\ ", r"\s{0,40}")
    return escaped.replace("'", "['’]")


def _hole(hole: str) -> str:
    if hole == "":
        return _NUMBER
    if hole == "*":
        return r".{0,120}?"
    if "|" in hole:
        return "(?:" + "|".join(_literal(side) for side in hole.split("|")) + ")"
    name, _, kind = hole.partition(":")
    if kind == "gib":
        return rf"(?P<{name}>{_NUMBER})\s*(?P<{name}__unit>{_UNIT})"
    if kind == "word":
        return rf"(?P<{name}__word>[^\s,'\"()\[\]]{{1,200}})"
    return rf"(?P<{name}>{_NUMBER})"

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
from dataclasses import dataclass
from functools import cached_property

_NUMBER = r"-?\d[\d,]{0,24}(?:\.\d{1,12})?"
_UNIT = r"(?:[KMGT]i?[Bb]|bytes|B)\b"
_HOLE = re.compile(r"\{([^{}]*)\}")
_GIB_OF_UNIT = {"K": 1 / 2**20, "M": 1 / 2**10, "G": 1.0, "T": 2.0**10}
_REACH = 40  # characters between a text of a message and the edge of a line that cuts it
_WIDE_REACH = 160
_PIECE_LENGTH = 12
_SHORTEST_PIECE = 7
# Where a scan looks closer, rarest first (counted in start-up and serving logs). A scan is as fast as these are rare.
_RARE = "xMVLCBWUTKGHXZQYzj`#qA'SEDNPvkwbRF(y_-"
_PIECE_DISTANCE = 24  # further apart than a piece is long: one break of a wrapped line spoils only one of them


@dataclass(frozen=True, slots=True)
class Piece:
    """A short text of a message, and the rare character in it that a scan stops at."""

    text: str
    anchor: int

    @property
    def is_rare(self) -> bool:
        """Its anchor is a character that a scan seldom meets."""
        return self.text[self.anchor] in _RARE


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

    def pieces(self, count: int) -> tuple[Piece, ...]:
        """At most ``count`` short pieces, far enough apart that a hard line break spoils only one of them."""
        found: list[Piece] = []
        for literal in sorted(self.literals, key=len, reverse=True):
            for start in range(0, max(1, len(literal) - _SHORTEST_PIECE), _PIECE_DISTANCE):
                found.append(_piece(literal[start : start + _PIECE_DISTANCE].strip()))
        useful = [piece for piece in found if len(piece.text) >= _SHORTEST_PIECE] or found
        rare = [piece for piece in useful if piece.is_rare] or useful
        return tuple(dict.fromkeys(rare))[:count]

    def is_torn_in(self, text: str) -> bool:
        """A part of the message stands at an edge of this line, so that the rest may stand on the lines around it."""
        for place, literal in enumerate(self.literals):
            body = literal.strip()
            if len(body) < _SHORTEST_PIECE:
                continue
            at = text.find(body)
            if at >= 0:
                reach = _WIDE_REACH if "{*}" in self.text else _REACH
                is_first, is_last = place == 0, place == len(self.literals) - 1
                if (not is_first and at <= reach) or (not is_last and len(text) - at - len(body) <= reach):
                    return True
                if is_last and self.text.endswith("}") and at + len(body) == len(text):
                    return True
            elif _is_cut(body, text):
                return True
        return False


def _is_cut(message: str, text: str) -> bool:
    """The text ends with the beginning of the message, or begins with its end."""
    cuts = range(_SHORTEST_PIECE, len(message))
    return any(text.endswith(message[:cut]) or text.startswith(message[-cut:]) for cut in cuts)


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


def _piece(text: str) -> Piece:
    """The best piece of a text: around its rarest character."""
    ranks = [_RARE.find(character) for character in text]
    anchor = min(range(len(text)), key=lambda place: (ranks[place] if ranks[place] >= 0 else len(_RARE), place))
    start = max(0, min(anchor - _PIECE_LENGTH // 2, len(text) - _PIECE_LENGTH))
    return Piece(text[start : start + _PIECE_LENGTH], anchor - start)


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

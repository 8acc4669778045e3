"""Mask secrets in text and logs: values of secret-looking variables, well-known token formats, passwords in URLs.

Every pattern begins with literal characters, so that Python's search scans whole logs fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

# Names of environment variables and flags, except those that count tokens or name a tokenizer.
NAME = re.compile(
    r"TOKEN(?!IZER|S(?:_|$))|SECRET|PASSW|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE
)
PASSWORD_IN_URL = re.compile(r"://[^\s/@:]*:([^\s/@]+)@")
MASK = b"***"
SHORTEST = 8  # shorter values occur inside ordinary words
CHUNK_BYTES = 1 << 20
LONGEST = 4096  # bytes of a secret, where a long line must be split
KEPT_BYTES = 64 << 20  # per log: half from its beginning, half from its end


def _spellings(words: Iterable[str]) -> Iterator[str]:
    return (spelling for word in words for spelling in dict.fromkeys((word, word.title(), word.upper())))


# "password=…", "api_key: …" of any length, as Python, JSON and YAML write them; "token" alone not inside a longer word.
_ASSIGNED = r"""['"]?[ \t]*[=:][ \t]*(?:[bu]?['"])?(?P<secret>[^\s'",;)}\]<>]{6,})"""
_KEYWORDS = (
    *("api_key", "api-key", "apikey", "access_key", "secret_key", "private_key", "password", "passwd", "secret"),
    *("hf_token", "access_token", "auth_token"),
)
SHAPES = tuple(
    re.compile(pattern.encode())
    for pattern in (
        r"hf_(?<!\w...)(?P<secret>[A-Za-z0-9]{8,})",
        r"sk-(?<!\w...)(?P<secret>[A-Za-z0-9_-]{16,})",
        r"gh[pous]_(?<!\w....)(?P<secret>[A-Za-z0-9]{16,})",
        r"github_pat_(?P<secret>[A-Za-z0-9_]{16,})",
        r"AKIA(?P<secret>[0-9A-Z]{16})\b",
        r"://(?P<secret>[^\s/@:'\"]*:[^\s/@'\"]+)@",
        *(rf"{word}[ \t]+(?P<secret>[A-Za-z0-9._~+/=-]{{8,}})" for word in _spellings(["bearer"])),
        *(rf"{word}(?<!\w{'.' * len(word)}){_ASSIGNED}" for word in _spellings(["token"])),
        *(rf"{word}{_ASSIGNED}" for word in _spellings(_KEYWORDS)),
    )
)


class Scrubber:
    """Replaces secrets with ``***``: values from `environment` and `further`, and known token formats."""

    def __init__(self, environment: Mapping[str, str], further: Iterable[str] = ()) -> None:
        values = {value for name, value in environment.items() if NAME.search(name)} | set(further)
        values |= {found for value in environment.values() for found in PASSWORD_IN_URL.findall(value)}
        self._values = tuple(value.encode(errors="surrogateescape") for value in values if len(value) >= SHORTEST)

    def mask(self, content: bytes) -> bytes:
        pieces, done = [], 0
        for start, end in sorted(self._spans(content)):
            if end > done:
                pieces += [content[done:start], MASK] if start >= done else []
                done = end
        return b"".join([*pieces, content[done:]])

    def text(self, content: str) -> str:
        return self.mask(content.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def move(self, source: Path, target: Path, most_bytes: int = KEPT_BYTES) -> None:
        """Move a log while masking secrets, in bounded memory; beyond ``most_bytes`` the middle is left out."""
        if not source.exists():
            return
        with source.open("rb") as log, target.open("wb") as out:
            left_out = max(0, os.fstat(log.fileno()).st_size - most_bytes)
            head = most_bytes // 2 if left_out else most_bytes
            for piece in self._pieces(log, head):
                out.write(piece)
            if left_out:
                out.write(f"\nprober: {left_out} bytes left out here\n".encode())
                log.seek(head + left_out)
                log.readline(LONGEST)  # the cut may be inside a secret
                for piece in self._pieces(log, most_bytes - head):
                    out.write(piece)
        os.unlink(source)

    def _pieces(self, log: BinaryIO, most_bytes: int) -> Iterator[bytes]:
        """Yield the next ``most_bytes`` of a log, masked, split at line ends if there are any."""
        rest = b""
        while most_bytes > 0 and (chunk := log.read(min(CHUNK_BYTES, most_bytes))):
            most_bytes -= len(chunk)
            rest += chunk
            cut = self._cut(rest)
            yield self.mask(rest[:cut])
            rest = rest[cut:]
        yield self.mask(rest)

    def _cut(self, content: bytes) -> int:
        """Return an offset at which content can be split without splitting a secret."""
        if line_end := content.rfind(b"\n") + 1:
            return line_end
        cut = max(0, len(content) - LONGEST)
        return max([cut, *(end for start, end in self._spans(content) if start < cut < end)])

    def _spans(self, content: bytes) -> Iterator[tuple[int, int]]:
        for value in self._values:
            at = content.find(value)
            while at >= 0:
                yield at, at + len(value)
                at = content.find(value, at + len(value))
        for shape in SHAPES:
            for match in shape.finditer(content):
                yield match.span("secret")


def secrets_in(flags: Iterable[str]) -> Iterator[str]:
    """Yield the values of vLLM flags whose names look like secrets."""
    name = ""
    for flag in flags:
        key, equals, value = flag.partition("=")
        if not flag.startswith("-"):
            if NAME.search(name):
                yield flag
            name = ""
        elif equals and NAME.search(key.replace("-", "_")):
            yield value
        else:
            name = key.replace("-", "_")

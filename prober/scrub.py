"""Keep secrets out of what is kept: values of secret-looking variables, well-known token shapes, passwords in URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|CREDENTIAL|AUTH", re.IGNORECASE)
SHAPES = re.compile(
    rb"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{16,}|\b(?:ghp|gho|ghs)_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}\b"
    rb"|(?i:\b(?:api[_-]?key|token|password|secret)['\"]?\s*[=:]\s*['\"]?)[^\s'\",)}\]]{6,}"
    rb"|(?i:\bbearer\s+)[A-Za-z0-9._~+/-]{8,}"
    rb"|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)
MASK = b"***"
SHORTEST = 8  # a shorter value would be found inside ordinary words
CHUNK_BYTES = 1 << 20


class Scrubber:
    """Replaces secrets by ``***``."""

    def __init__(self, environment: Mapping[str, str], further: Iterable[str] = ()) -> None:
        values = {value for name, value in environment.items() if NAME.search(name)} | set(further)
        longest_first = sorted((v for v in values if len(v) >= SHORTEST), key=len, reverse=True)
        self._values = re.compile(b"|".join(re.escape(v.encode()) for v in longest_first)) if longest_first else None

    def bytes(self, content: bytes) -> bytes:
        if self._values is not None:
            content = self._values.sub(MASK, content)
        return SHAPES.sub(MASK, content)

    def text(self, content: str) -> str:
        return self.bytes(content.encode(errors="surrogateescape")).decode(errors="surrogateescape")

    def move(self, source: Path, target: Path) -> None:
        """Write a scrubbed copy, line by line in bounded memory, and remove the original."""
        if not source.exists():
            return
        with source.open("rb") as lines, target.open("wb") as out:
            while chunk := lines.read(CHUNK_BYTES) + lines.readline(CHUNK_BYTES):
                out.write(self.bytes(chunk))
        os.unlink(source)

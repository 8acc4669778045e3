"""From the bytes of a log to its lines: encodings, prefixes, colours, JSON, progress bars.

Nothing here knows what a message means.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass

LONGEST_LINE = 1 << 16  # bytes; a longer one is read in overlapping pieces of this size
OVERLAP = 1 << 11
_HEAD = 64  # bytes that tell the encoding
EVIDENCE_LENGTH = 1_000

_ANSI = re.compile(r"(?:\x1b|\^\[|#033|\\x1b|\\u001b|\\033)\[[0-9;?]{0,20}[A-Za-z]|\[(?:\d{1,3}(?:;\d{1,3}){0,4})?m")
_REPEATED = re.compile(r"\s*\[repeated \d{1,9}x across cluster\][^\n]{0,200}")
_PROCESS = r"\((?P<process>[A-Za-z_]\w{0,80})(?:\s+rank=(?P<rank>\d{1,6}))?\s+pid=[\d.]{1,12}(?:,\s*ip=[\w.:]{1,45})?\)"
_HEADER = (
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:\.\.\.\s+)?(?:\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?\s+)?"
    r"(?:\[?[\w./-]{1,200}\.py(?::\d{1,6})?\]|\[\.\.\.\])"
)
_HEADER_ONLY = re.compile(_HEADER)
_PREFIX = re.compile(
    "|".join(
        (
            r"\s+",
            _PROCESS,
            _HEADER,
            r"(?:\[rank\d{1,6}\]:)?\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[^\]\n]{1,200}\]",  # torch's own log
            r"\[rank(?P<torch_rank>\d{1,6})\]:",
            r"\[\d+,\d+\]<std(?:out|err)>:",  # mpirun
            r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]{0,12}(?:Z|[+-]\d\d:?\d\d)?\]?"
            r"(?: (?:stdout|stderr) [FP](?= )|(?: \| \w{1,20}){0,3} \|)?",  # CRI, docker, loguru
            r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,100} [\w./@-]{1,100}(?:\[\d{1,9}\])?:",  # syslog, journald
            r"\d\d:\d\d:\d\d(?:\.\d{1,9}Z?)?(?=\s)",
            r"\[pod/[\w./-]{1,200}\]",
            r"[\w.-]{1,100}\s{1,60}\|(?=\s)",  # compose
            r"[│┃|>](?=\s)",  # a terminal's box, a quotation
            r"\[(?:[Ee]rror|[Ww]arn|[Ww]arning|[Ii]nfo|[Dd]ebug)\](?: \(Process\))?",  # a launcher's own level
        )
    )
)
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_JSON_TEXT = ("log", "message", "msg", "text", "textPayload", "MESSAGE", "line", "body")
_JSON_MORE = ("exc_info", "exception", "traceback", "stack_trace", "stack")
_JSON_LEVEL = ("level", "levelname")  # not "severity": collectors set it by stream, and vLLM refuses on stdout


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line without its dress. ``level`` is vLLM's own; None: a traceback, another program, a bare message."""

    text: str
    process: str | None = None
    rank: int | None = None
    level: str | None = None


class Framer:
    """Cuts a stream into blocks that end where a line (or a progress bar's redraw) ends."""

    def __init__(self) -> None:
        self._rest = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_first = True

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes; return everything that is complete by now, as UTF-8 (or whatever eight-bit text it was)."""
        if self._is_first:
            chunk = self._rest + chunk
            self._rest = b""
            if len(chunk) < _HEAD:
                self._rest = chunk
                return b""
            chunk = self._open(chunk)
        elif self._decoder is not None:
            chunk = self._decoder.decode(chunk).encode("utf-8", "replace")
        return self._cut(self._rest + chunk)

    def finish(self) -> bytes:
        """Return what is left: a last line that nobody ended."""
        rest, self._rest = self._rest, b""
        if self._is_first:
            rest = self._open(rest)
        if self._decoder is not None:
            rest += self._decoder.decode(b"", final=True).encode("utf-8", "replace")
        return rest

    def _open(self, chunk: bytes) -> bytes:
        self._is_first = False
        encoding = _wide_encoding(chunk[:_HEAD])
        if encoding is None:
            return chunk.removeprefix(codecs.BOM_UTF8)
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        return self._decoder.decode(chunk).encode("utf-8", "replace").removeprefix(codecs.BOM_UTF8)

    def _cut(self, text: bytes) -> bytes:
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - end <= LONGEST_LINE:
            self._rest = text[end:]
            return text[:end]
        self._rest = text[-OVERLAP:]
        return text


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 by its mark, or (a redirection of PowerShell's, cut at its beginning) by where its zero bytes stand."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if max(even, odd) * 4 < len(head) or min(even, odd) * 8 > len(head):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def records(segment: bytes) -> list[LogRecord]:
    """Undress one line. A JSON record may hold several."""
    text = segment.decode("utf-8", "replace").replace("\0", "")
    if "{" in text[:400]:
        unpacked = _from_json(text)
        if unpacked is not None:
            return unpacked
    return [undress(text)]


def undress(text: str, level: str | None = None) -> LogRecord:
    """Take colours and prefixes off one line, and remember the process, the rank and vLLM's level."""
    text = _REPEATED.sub("", _ANSI.sub("", text))
    process: str | None = None
    rank: int | None = None
    position = 0
    while match := _PREFIX.match(text, position):
        if match.end() == position:
            break
        position = match.end()
        process = match["process"] or process
        level = match["level"] or _GLOG.get(match["glog"]) or level
        found = match["rank"] or match["torch_rank"]
        rank = int(found) if found else rank
    if rank is None and process is not None:
        rank = _rank_in(process)
    return LogRecord(text[position:].rstrip(" \t│┃"), process, rank, level)


def level_before(text: str, position: int) -> str | None:
    """The level of the last record that begins in ``text`` before ``position`` (records glued on one line)."""
    level = None
    for match in _HEADER_ONLY.finditer(text, 0, position):
        level = match["level"]
    return level


def excerpt(text: str, start: int, end: int) -> str:
    """The record around a match: records glued before and after it are left out."""
    for match in _HEADER_ONLY.finditer(text):
        if match.end() <= start:
            text, start, end = " " * match.end() + text[match.end() :], start, end
        elif match.start() >= end:
            text = text[: match.start()]
            break
    text = text.strip()
    return text if len(text) <= EVIDENCE_LENGTH else text[:EVIDENCE_LENGTH] + " …"


def _rank_in(process: str) -> int | None:
    if (match := re.search(r"TP(\d{1,5})", process)) and not re.search(r"PP[1-9]", process):
        return int(match[1])
    return None


def _from_json(text: str) -> list[LogRecord] | None:
    start = text.find("{")
    head = undress(text[:start]) if start else None
    if head is not None and head.text:
        return None
    try:
        fields = json.loads(text[start:].strip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    level = next((str(fields[name]).upper() for name in _JSON_LEVEL if name in fields), None)
    texts = [str(fields[name]) for name in (*_JSON_TEXT, *_JSON_MORE) if fields.get(name)]
    if not texts:
        return None
    lines = [line for part in texts for line in re.split(r"[\r\n]+", part) if line.strip()]
    return [undress(line, level) for line in lines]

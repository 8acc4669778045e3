"""Text for public files: without paths, secrets and control characters.

Pure. Only the last component of a path is kept.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from prober.redact import Scrubber

_SECRET_FLAG = re.compile(r"^--?(?:.*[-_.])?(?:api[-_]?key|token|password|passwd|secret|key)$", re.IGNORECASE)
_HIDDEN = "***"
_SCRUBBER = Scrubber({})
# An absolute path inside a longer text; not the middle of a URL or of a Hub name.
_PATH = re.compile(r"(?<![\w.:/~-])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\\"'`,;:()<>\[\]{}=]+[/\\]+)+")
_HOME = re.compile(r"(?<![\w.:/-])(?:/root|/home/[\w.-]+|/Users/[\w.-]+|~)(?![\w./-])")
# Environment variables: plain values, and names of what differs from host to host.
_PLAIN_VALUE = re.compile(r"(?!\d+\.\d+\.\d+)[\w.,:=+-]{1,60}")
_PLACE = re.compile(
    r"_(?:HOST|IP|ADDR|ADDRESS|IFNAME|PORT|PATH|DIR|DIRECTORY|HOME|ROOT|FILE|CONFIG|HCA|RANK|URI|URL|ID)(?:_|$)"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def public_text(text: str) -> str:
    """Shorten absolute paths to their last component, mask secrets, and replace control characters."""
    text = _CONTROL.sub("\ufffd", text).replace("\r\n", "\n")
    text = _SCRUBBER.text(text)
    return _HOME.sub("", _PATH.sub("", text)).strip()


def printable(text: str) -> str:
    """Replace characters that move a terminal's cursor, change its colours or break the line."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "\ufffd" for c in text)


def public_flags(flags: Iterable[str]) -> str:
    """Join vLLM flags as for a POSIX shell, in order, without secrets and paths."""
    safe: list[str] = []
    hide_next = False
    for flag in flags:
        if hide_next and not flag.startswith("-"):
            safe.append(_HIDDEN)
            hide_next = False
            continue
        name, equals, value = flag.partition("=")
        is_secret = name.startswith("-") and bool(_SECRET_FLAG.match(name))
        hide_next = is_secret and not equals
        if is_secret and equals:
            safe.append(f"{name}={_HIDDEN}")
        elif equals and name.startswith("-"):
            safe.append(f"{name}={_public_value(value)}")
        else:
            safe.append(_public_value(flag))
    return shlex.join(safe)


def public_environment(settings: Iterable[str]) -> str:
    """Join NAME=value settings as for a POSIX shell, sorted.

    Leaves out variables that name places, and masks values that are not plain words: a masked variable still tells the
    row from one without it.
    """
    split = (setting.split("=", 1) for setting in settings)
    return shlex.join(sorted(f"{name}={_public_setting(value)}" for name, value in split if not _PLACE.search(name)))


def _public_setting(value: str) -> str:
    is_plain = _PLAIN_VALUE.fullmatch(value) and public_text(value) == value
    return value if is_plain else _HIDDEN


def _public_value(value: str) -> str:
    """A value that is a path as a whole may contain spaces; elsewhere a space ends the path."""
    if re.match(r"(?:~|\.{1,2}(?=[/\\])|[A-Za-z]:(?=[/\\]))?[/\\]", value) and "\n" not in value:
        return public_text(re.split(r"[/\\]", value.rstrip("/\\"))[-1])
    return public_text(value)

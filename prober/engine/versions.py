"""Facts that differ between vLLM versions: defaults, memory accounting, and what a version supports.

Sources: vLLM 0.4 to 0.33 (``CacheConfig``, ``kv_cache_utils.py``, ``block_manager.py``, ``arg_utils.py``), and
measurements on 0.28 where a function says so. Versions are strings as vLLM logs them; None: unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Release = tuple[int, int, int]

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
_HIGHER_DEFAULT_SINCE = (0, 20, 0)  # CacheConfig.gpu_memory_utilization: 0.92, before 0.90
_NULL_BLOCK_SINCE = (0, 8, 3)  # V1's block pool keeps block 0 to itself
_NULL_BLOCK_COUNTED_SINCE = (0, 29, 0)  # the check at startup, and so vLLM's estimate, subtracts it
_AUTO_SINCE = (0, 20, 0)  # --max-model-len auto exists since 0.14, but until 0.20 the server named the wrong length
_V0_CHUNKED_PREFILL = (0, 5, 3), (0, 10, 2)  # first and last release that switches it on by length
_V0_CHUNKED_PREFILL_ABOVE = 32_768  # tokens


def release(version: str | None) -> Release | None:
    """Parse a version: ``0.9.2rc2.dev1`` gives (0, 9, 2). None: unknown or unreadable."""
    found = _VERSION.match(version or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def version_order(version: str) -> tuple[int, int, int, str]:
    """Sort key of a version: the release, then the rest as text; unreadable versions come first."""
    found = _VERSION.match(version)
    return (*(release(version) or (-1, 0, 0)), version[found.end() :] if found else version)


def default_gpu_memory_utilization(version: str | None) -> float:
    """Return the share of device memory that vLLM uses when no flag sets it; an unknown version counts as old."""
    return 0.92 if (release(version) or (0, 0, 0)) >= _HIGHER_DEFAULT_SINCE else 0.90


def counts_null_block(version: str | None) -> bool:
    """Whether the startup check subtracts the null block, so that every accepted length can be served.

    An unknown version counts as a recent one.
    """
    return (release(version) or _NULL_BLOCK_COUNTED_SINCE) >= _NULL_BLOCK_COUNTED_SINCE


def ungranted_blocks(version: str | None) -> int:
    """Return how many blocks (0 or 1) the startup check accepts but the scheduler never grants.

    V1 from 0.8.3 to 0.28 accepts lengths that need the null block. An unknown version counts as one of these.
    """
    known = release(version)
    return 1 if known is None or _NULL_BLOCK_SINCE <= known < _NULL_BLOCK_COUNTED_SINCE else 0


def supports_auto_length(version: str | None) -> bool:
    """Whether ``--max-model-len auto`` works and the server then names the length that it chose."""
    return (release(version) or (0, 0, 0)) >= _AUTO_SINCE


def length_regimes(version: str | None, flags: Iterable[str]) -> tuple[int, ...]:
    """Return the lengths above which vLLM changes a default, so that a longer one may fit where a shorter did not.

    V0 (0.5.3 to 0.10.2, arg_utils.py) enables chunked prefill above 32,768 tokens unless a flag decides; activations
    then take less memory.
    """
    known = release(version)
    first, last = _V0_CHUNKED_PREFILL
    is_set = any("chunked-prefill" in flag or "max-num-batched-tokens" in flag for flag in flags)
    return (_V0_CHUNKED_PREFILL_ABOVE,) if known is not None and first <= known <= last and not is_set else ()

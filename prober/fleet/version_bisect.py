"""The first bad vLLM version between a good and a bad one. Pure; a version that cannot tell is passed over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prober.engine.versions import version_order
from prober.records import UsageError


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The answer. ``untold``: versions before it that could not tell, any of which may be the first."""

    version: str
    last_good: str
    untold: tuple[str, ...] = ()


def between(versions: Iterable[str], good: str, bad: str) -> tuple[str, ...]:
    """The versions from good to bad, in order. Raises UsageError where they make no interval of the plan's versions."""
    ordered = sorted(set(versions), key=version_order)
    missing = [version for version in (good, bad) if version not in ordered]
    if missing:
        raise UsageError(f"The plan has no vLLM {missing[0]}; it has {', '.join(ordered)}.")
    first, last = ordered.index(good), ordered.index(bad)
    if first >= last:
        raise UsageError(f"GOOD comes before BAD, and {good} is not older than {bad}.")
    return tuple(ordered[first : last + 1])


def next_version(versions: tuple[str, ...], is_bad: Mapping[str, bool | None]) -> str | FirstBad:
    """What to measure next; `versions` begin with a good and end with a bad one. None in ``is_bad``: could not tell."""
    low = max(index for index, version in enumerate(versions) if index == 0 or is_bad.get(version) is False)
    high = min(
        index
        for index, version in enumerate(versions)
        if index == len(versions) - 1 or (index > low and is_bad.get(version))
    )
    inside = [version for version in versions[low + 1 : high] if version not in is_bad]
    if not inside:
        return FirstBad(versions[high], versions[low], versions[low + 1 : high])
    middle = (low + high) / 2
    return min(inside, key=lambda version: (abs(versions.index(version) - middle), versions.index(version)))

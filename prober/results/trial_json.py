"""A trial as one line of trials.jsonl, and back.

Pure. Unknown keys (of later versions) are ignored; missing keys become the field's default, or ``None`` if the field is
optional. ASCII only, so that any log line survives, including lone surrogates.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

from prober.records import Trial

LONGEST_SECONDS = 1e9


def dump_trial(trial: Trial) -> str:
    """Write a trial as one line of JSON, without a newline."""
    return json.dumps(dataclasses.asdict(trial), ensure_ascii=True, separators=(",", ":"))


def load_trial(line: str) -> Trial:
    """Read a line that ``dump_trial`` wrote. Raises ``ValueError`` for anything else."""
    try:
        trial: Trial = _build(Trial, json.loads(line))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a trial: {error}") from error
    if datetime.fromisoformat(trial.started_at).tzinfo is None:
        raise ValueError("not a trial: started_at has no time zone")
    if not 0 <= trial.seconds < LONGEST_SECONDS or (trial.length is not None and trial.length < 0):
        raise ValueError("not a trial: a number is out of range")
    return trial


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _build(kind: type, plain: dict[str, Any]) -> Any:
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(kind):
        if spec.name in plain:
            values[spec.name] = _value(hints[spec.name], plain[spec.name])
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            if type(None) not in get_args(hints[spec.name]):
                raise ValueError(f"not a trial: {spec.name} is missing")
            values[spec.name] = None
    return kind(**values)


def _value(hint: Any, plain: Any) -> Any:
    options = get_args(hint)
    if plain is None:
        if type(None) not in options:
            raise ValueError(f"not a trial: null where {hint} is expected")
        return None
    kind = next((option for option in options if option is not type(None)), hint)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, plain)
    if issubclass(kind, Enum):
        return kind(plain)
    if kind is float and type(plain) is int:
        return float(plain)
    if type(plain) is not kind:
        raise ValueError(f"not a trial: {plain!r} where {kind.__name__} is expected")
    return plain

"""Recommend a length to serve with: the ceiling minus the usual difference between two machines. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prober.records import Ceiling, Status
from prober.search.interpret import served_figures

SHARE = 0.02  # observed difference between machines with the same card and settings
GRID = 128  # tokens, where the block size is not known


@dataclass(frozen=True, slots=True)
class Advice:
    """A length in tokens, and why that one."""

    length: int
    why: str


def recommended(ceiling: Ceiling) -> Advice | None:
    """Return a length with headroom below a proven ceiling; None where nothing is proven.

    Where the model's own limit ends the search, memory is left over and the limit itself is recommended.
    """
    proven = ceiling.max_model_len
    if proven is None:
        return None
    if ceiling.status is not Status.EXACT:
        return Advice(proven, "recommended: the whole length, for memory does not end it")
    grid = served_figures(ceiling.trials, proven).block_size or GRID
    length = int(proven * (1 - SHARE)) // grid * grid
    if length < grid:
        return Advice(proven, "recommended: the ceiling itself, which is shorter than a block")
    return Advice(length, f"recommended: {SHARE:.0%} below the ceiling in whole blocks of {grid}, for another machine")

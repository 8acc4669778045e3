"""A search that lost its node goes on elsewhere: trials of another machine guide it, and never decide it.

Pure. Two cards of one type differ (the same length was refused on one and had tokens to spare on the other), so the
bracket of the lost machine only says where to look: both its edges are launched again where the search ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from prober.fleet.protocol import Known
from prober.measure.search_loop import state_key
from prober.records import Ceiling, Machine, Outcome, Status, Trial, Verify
from prober.search.interpret import interpret
from prober.search.next_length import Answer


def split(known: Iterable[Known], here: Machine, settings: Sequence[str] = ()) -> tuple[list[Trial], list[Trial]]:
    """Return the trials of this machine in this state, and those of machines alike, made to look like ours.

    Alike is the same type of device with the same memory and vLLM. Other machines' trials are left out.
    """
    own, carried = [], []
    ours = state_key(here, settings)
    for one in known:
        if one.trial.state_key == ours:
            own.append(one.trial)
        elif _facts(one.machine) == _facts(here) and one.trial.verdict.outcome is not Outcome.SEQUENCE_SLOTS:
            carried.append(replace(one.trial, state_key=ours, at_rest_mib=None))
    return own, carried


def recorded_here(
    recorded: Iterable[Trial], own: Iterable[Trial], here: Machine, settings: Sequence[str] = ()
) -> list[Trial]:
    """Return the recorded trials of this machine in this state that are not among ``own``."""
    ours, known = state_key(here, settings), {trial.id for trial in own}
    return [trial for trial in recorded if trial.state_key == ours and trial.id not in known]


def _facts(machine: Machine) -> tuple[object, ...]:
    return machine.gpu, machine.device, machine.gpu_memory_mib, machine.mig, machine.vllm_version


def still_guiding(ceiling: Ceiling, carried: Sequence[Trial]) -> list[Trial] | None:
    """Return the carried trials that may guide the next attempt; None: the answer stands without any of them.

    An answer with a number stands where both its edges were seen here; what was carried at those lengths is dropped,
    so that they are launched. Any other answer (nothing fits, contradictions, could not tell) must be found alone.
    """
    if not carried:
        return None
    numbers = (Status.EXACT, Status.MODEL_LIMIT, Status.AT_LEAST)
    if ceiling.status not in numbers:
        return []
    foreign = {trial.id for trial in carried}
    own = [trial for trial in ceiling.trials if trial.id not in foreign]
    edges = {ceiling.bracket.serves: Answer.SERVES}
    if ceiling.status is Status.EXACT:
        edges[ceiling.bracket.refused] = Answer.TOO_LONG
    unseen = {length for length, reading in edges.items() if not _is_seen(length, reading, own, ceiling.verify)}
    return None if not unseen else _without(carried, unseen)


def _is_seen(length: int | None, reading: Answer, own: Iterable[Trial], verify: Verify) -> bool:
    seen = (interpret(trial, verify) for trial in own)
    return any(one is not None and (one.length, one.reading) == (length, reading) for one in seen)


def _without(carried: Iterable[Trial], lengths: Collection[int | None]) -> list[Trial]:
    return [trial for trial in carried if trial.length not in lengths]

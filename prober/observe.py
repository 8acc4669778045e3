"""What a trial says to the search: which outcomes move the bracket, and what length its figures suggest."""

from __future__ import annotations

from prober.records import Figures, Outcome, Stage, Trial, Verdict, Verify
from prober.search import Observation, Reading

PROVES = {Verify.NONE: 0, Verify.SHORT: 1, Verify.FULL: 2}


def observe(trial: Trial, verify: Verify) -> Observation | None:
    """Read a trial for a search that demands ``verify``; None: a weaker proof than that, it says nothing."""
    verdict = trial.verdict
    reading = reading_of(verdict)
    if reading is Reading.SERVES and PROVES[trial.verify] < PROVES[verify]:
        return None
    if verdict.outcome is Outcome.UNSERVABLE and verify is not Verify.FULL:
        reading = Reading.SERVES  # it started, and no more was asked for
    is_answer = reading in (Reading.SERVES, Reading.TOO_LONG)
    limit = verdict.figures.model_limit if reading is Reading.OVER_LIMIT else None
    if trial.is_default_length and is_answer:
        limit = trial.length
    return Observation(trial.length, reading, hints(verdict), verdict.figures.block_size, limit)


def reading_of(verdict: Verdict) -> Reading:
    """Map an outcome to what it says about lengths. What is not listed says nothing."""
    match verdict.outcome:
        case Outcome.FITS:
            return Reading.SERVES
        case Outcome.KV_TOO_SMALL | Outcome.NO_KV_MEMORY | Outcome.UNSERVABLE:
            return Reading.TOO_LONG
        case Outcome.DEVICE_OOM if verdict.stage is Stage.LOAD:
            return Reading.NO_LENGTH
        case Outcome.DEVICE_OOM if verdict.stage in (Stage.PROFILE, Stage.KV_CACHE, Stage.CAPTURE, Stage.SERVE):
            return Reading.TOO_LONG
        case Outcome.HOST_OOM if verdict.rule == "guard":
            return Reading.TOO_LONG
        case Outcome.OVER_MODEL_LIMIT if verdict.figures.model_limit is not None:
            return Reading.OVER_LIMIT
        case Outcome.TOO_SHORT:
            return Reading.TOO_SHORT
        case Outcome.BAD_CONFIG:
            return Reading.WRONG
    return Reading.UNKNOWN


def hints(verdict: Verdict) -> tuple[int, ...]:
    """Lengths that the figures suggest as the ceiling, best first; (0,): nothing fits. Hints may lie."""
    figures = verdict.figures
    if verdict.outcome is Outcome.NO_KV_MEMORY:
        return (0,)
    if verdict.outcome in (Outcome.FITS, Outcome.UNSERVABLE):
        return _from_blocks(figures)
    return tuple(hint for hint in (figures.estimated_max_len, figures.max_tokens_in_cache) if hint)


def _from_blocks(figures: Figures) -> tuple[int, ...]:
    """From a start: every block but the null block, which V1 takes from the pool (0.8.3 and later); V0 has none.

    Where the check at start-up forgets the null block (before 0.29.0), one token more than those blocks hold is served:
    the last token of a request is never written to the cache (measured on 0.28.0).
    """
    if not (figures.gpu_blocks and figures.block_size):
        return ()
    usable, whole = (blocks * figures.block_size for blocks in (figures.gpu_blocks - 1, figures.gpu_blocks))
    return tuple(length for length in (usable, usable + 1, whole) if length > 1)

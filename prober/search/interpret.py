"""What a trial says to the search: which outcomes move the bracket, and what length its figures suggest."""

from __future__ import annotations

from collections.abc import Iterable

from prober.engine.versions import counts_null_block
from prober.records import Figures, Outcome, Stage, Trial, Verdict, Verify
from prober.search.next_length import Answer, Observation

PROVES = {Verify.NONE: 0, Verify.SHORT: 1, Verify.FULL: 2}


def interpret(trial: Trial, verify: Verify) -> Observation | None:
    """Read a trial for a search that demands ``verify``; None: a weaker proof than that, it says nothing."""
    verdict = trial.verdict
    reading = answer_of_trial(trial)
    if reading is Answer.SERVES and PROVES[trial.verify] < PROVES[verify]:
        return None
    if verdict.outcome is Outcome.UNSERVABLE and PROVES[trial.verify] > PROVES[verify]:
        reading = Answer.SERVES  # it started, and no more was asked for
    limit = verdict.figures.model_limit if reading is Answer.OVER_LIMIT else None
    if trial.is_default_length and limit is None:
        limit = trial.length  # what vLLM makes of the model's configuration, whatever became of the start
    suggested = (0,) if leaves_too_little(trial) else hints(verdict)
    return Observation(trial.length, reading, suggested, verdict.figures.block_size, limit)


def answer_of_trial(trial: Trial) -> Answer:
    """What the trial says about lengths, with what was demanded of it: memory that stays free, too."""
    if trial.verdict.outcome is Outcome.FITS and trial.reserve_mib is not None:
        if trial.least_free_mib is None:
            return Answer.UNKNOWN
        if leaves_too_little(trial):
            return Answer.TOO_LONG
    return answer_of(trial.verdict)


def leaves_too_little(trial: Trial) -> bool:
    """It served, and less device memory stayed free than was demanded."""
    served = trial.verdict.outcome is Outcome.FITS
    return served and trial.least_free_mib is not None and trial.least_free_mib < (trial.reserve_mib or 0)


def answer_of(verdict: Verdict) -> Answer:
    """Map an outcome to what it says about lengths. What is not listed says nothing."""
    match verdict.outcome:
        case Outcome.FITS:
            return Answer.SERVES
        case Outcome.KV_TOO_SMALL | Outcome.NO_KV_MEMORY | Outcome.UNSERVABLE:
            return Answer.TOO_LONG
        case Outcome.DEVICE_OOM if verdict.stage is Stage.LOAD:
            return Answer.NO_LENGTH
        case Outcome.DEVICE_OOM if verdict.stage in (Stage.PROFILE, Stage.KV_CACHE, Stage.CAPTURE, Stage.SERVE):
            return Answer.TOO_LONG
        case Outcome.HOST_OOM if verdict.rule == "guard":
            return Answer.TOO_LONG
        case Outcome.OVER_MODEL_LIMIT if verdict.figures.model_limit is not None:
            return Answer.OVER_LIMIT
        case Outcome.TOO_SHORT:
            return Answer.TOO_SHORT
        case Outcome.BAD_CONFIG:
            return Answer.WRONG
    return Answer.UNKNOWN


def hints(verdict: Verdict) -> tuple[int, ...]:
    """Lengths that the figures suggest as the ceiling, best first; (0,): nothing fits. Hints may lie."""
    figures = verdict.figures
    if verdict.outcome is Outcome.NO_KV_MEMORY:
        return (0,)
    if verdict.outcome in (Outcome.FITS, Outcome.UNSERVABLE):
        return _from_blocks(figures, has_served=verdict.outcome is Outcome.FITS)
    said = (figures.estimated_max_len, figures.max_tokens_in_cache)
    return tuple(hint for hint in said if hint) or _from_memory(figures)


def served_figures(trials: Iterable[Trial], length: int) -> Figures:
    """The figures of the last start that served ``length``."""
    served = [t for t in trials if t.length == length and t.verdict.outcome is Outcome.FITS]
    return served[-1].verdict.figures if served else Figures()


def _from_blocks(figures: Figures, has_served: bool) -> tuple[int, ...]:
    """From a start: every block but the null block, which V1 takes from the pool (0.8.3 and later); V0 has none.

    Where the check at start-up forgets the null block (before 0.29.0), one token more than those blocks hold is served:
    the last token of a request is never written to the cache (measured on 0.28.0). A start that did not serve is such.
    """
    if not (figures.gpu_blocks and figures.block_size):
        return ()
    usable, whole = (blocks * figures.block_size for blocks in (figures.gpu_blocks - 1, figures.gpu_blocks))
    tokens, length = figures.kv_cache_tokens, figures.requested_max_model_len or whole
    # Since 0.20.1 the log counts requests of this length and multiplies: a last block that is not full counts less.
    as_counted = figures.gpu_blocks * length / -(-length // figures.block_size)
    if tokens and min(abs(tokens - whole), abs(tokens - as_counted)) >= figures.block_size:
        # A hybrid model's groups share the blocks: only the log knows what requests find room for.
        counted = tokens // figures.block_size * figures.block_size
        if has_served or counted < length:
            return (counted,)
        shorter = (-(-length // figures.block_size) - 1) * figures.block_size  # the null block is not counted
        return (shorter + 1, shorter) if shorter > 0 else ()
    edge = (usable + 1, usable)
    if has_served and counts_null_block(figures.vllm_version):
        edge = (usable, usable + 1)
    lengths = (*edge, whole) if has_served else edge
    return tuple(length for length in lengths if length > 1)


def _from_memory(figures: Figures) -> tuple[int, ...]:
    """From a refusal without an estimate (0.7.0 to 0.9.0.1): what the memory holds, if every token needs the same."""
    asked, needed, available = figures.requested_max_model_len, figures.needed_gib, figures.available_gib
    if not (asked and needed and available and 0 < available < needed):
        return ()
    return (int(asked * available / needed),)

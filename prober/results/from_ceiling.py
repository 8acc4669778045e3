"""A ceiling as a row of the matrix: which trial a figure is taken from, and what must never stand in a public file.

Pure. Only a full-length request proves service, so ``max_model_len`` is whatever ``Ceiling.max_model_len`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath, PureWindowsPath
from typing import Any

from prober.records import Ceiling, Combination, Entrypoint, Figures, Outcome, Source, Status, Trial, Verify
from prober.results.schema import COMBINATION, CeilingKind, Row
from prober.results.serve_command import Unproven, command
from prober.results.text import public_environment, public_flags, public_text
from prober.search.interpret import answer_of_trial, leaves_too_little
from prober.search.next_length import Answer

_KINDS = {
    Status.EXACT: CeilingKind.MEMORY,
    Status.UNSTABLE: CeilingKind.MEMORY,
    Status.DOES_NOT_FIT: CeilingKind.MEMORY,
    Status.MODEL_LIMIT: CeilingKind.MODEL,
    Status.AT_LEAST: CeilingKind.CONFIG,
}


def row_of(
    ceiling: Ceiling,
    *,
    is_directory: bool = False,
    model_revision: str | None = None,
    recommended_max_model_len: int | None = None,
    ceiling_kind: CeilingKind | None = None,
    notes: Sequence[str] = (),
) -> Row:
    """Write a measured ceiling as a row.

    ``is_directory`` says that the model's name is that of a directory here, which the name alone cannot always tell.
    ``model_revision`` is the resolved commit where the combination names none (or a branch). ``ceiling_kind``
    overrides what the status implies: a limit that is neither memory nor the model's.
    """
    served, refused = _served(ceiling), _refused(ceiling)
    row = _what_was_asked(ceiling, is_directory)
    row = _with_figures(row, served.verdict.figures if served else Figures())
    row = _with_evidence(row, served, refused)
    seen = [t.verdict.figures.vllm_version for t in (served, refused) if t]
    return _with_command(
        replace(
            row,
            model_revision=model_revision or row.model_revision,
            vllm_version=next((version for version in (ceiling.machine.vllm_version, *seen) if version), None),
            status=ceiling.status,
            ceiling_kind=ceiling_kind or _kind(ceiling),
            max_model_len=ceiling.max_model_len,
            recommended_max_model_len=recommended_max_model_len,
            served_max_model_len=ceiling.bracket.serves if ceiling.verify is Verify.FULL else None,
            starts_max_model_len=_starts(ceiling),
            estimated_max_model_len=_estimated(ceiling),
            refused_max_model_len=ceiling.bracket.refused,
            verified=ceiling.verify,
            trials=ceiling.launches,
            seconds=round(ceiling.seconds, 1),
            why=public_text(ceiling.why) or None,
            notes=public_text("; ".join(notes)) or None,
            measured_at=ceiling.measured_at or None,
            prober_version=next((t.prober_version for t in reversed(ceiling.trials) if t.prober_version), None),
        )
    )


def _kind(ceiling: Ceiling) -> CeilingKind | None:
    """What limits the length; where a quick search tried no longer one, memory if vLLM itself says so."""
    if ceiling.is_quick and ceiling.status is Status.AT_LEAST:
        return CeilingKind.MEMORY if ceiling.bracket.refused or _estimated(ceiling) else None
    return _KINDS.get(ceiling.status)


def _with_command(row: Row) -> Row:
    """Only of the server: vllm.LLM has other defaults, and other ceilings."""
    if row.entrypoint is Entrypoint.LLM:
        return row
    try:
        return replace(row, launch_command=command(row))
    except Unproven:
        return row


def _what_was_asked(ceiling: Ceiling, is_directory: bool) -> Row:
    """The combination and the machine."""
    combination, machine = ceiling.combination, ceiling.machine
    return Row(
        **columns_of(combination, is_directory),
        model_revision=combination.model_revision or None,
        gpu=machine.gpu,
        gpu_memory_mib=machine.gpu_memory_mib,
        gpu_count=combination.world_size,
        environment=public_environment(ceiling.settings) or None,
        reserve_mib=ceiling.reserve_mib,
        source=Source.MEASURED,
        machine=machine.machine or None,
        device=machine.device or None,
        driver=machine.driver or None,
        cuda=machine.cuda or None,
        torch_version=machine.torch_version or None,
        host_memory_mib=machine.host_memory_mib,
        ecc=_on_off(machine.ecc),
        mig=_on_off(machine.mig),
        power_limit_watts=machine.power_limit_watts,
        gpu_hash=machine.gpu_hash,
    )


def columns_of(combination: Combination, is_directory: bool = False) -> dict[str, Any]:
    """Return a combination as the row columns of `schema.COMBINATION`, without paths; unknown is ``None``."""
    return {
        **{name: getattr(combination, name) or None for name in COMBINATION},
        "model": public_model(combination.model, is_directory),
        "other_flags": public_flags(combination.other_flags) or None,
    }


def _on_off(fact: bool | None) -> str | None:
    return None if fact is None else "on" if fact else "off"


def _with_figures(row: Row, figures: Figures) -> Row:
    """What vLLM logged of the start at the ceiling."""
    return replace(
        row,
        num_gpu_blocks=figures.gpu_blocks,
        block_size=figures.block_size,
        kv_cache_tokens=figures.kv_cache_tokens,
        kv_cache_gib=figures.available_gib,
        weights_gib=figures.weights_gib,
        max_num_seqs=figures.max_num_seqs,
        max_num_batched_tokens=figures.max_num_batched_tokens,
    )


def _with_evidence(row: Row, served: Trial | None, refused: Trial | None) -> Row:
    """Both edges of the bracket, so that each can be looked up in trials.jsonl and logs/."""
    if served:
        evidence = public_text(served.verdict.evidence) or None
        row = replace(row, served_trial=served.id, served_evidence=evidence, least_free_mib=served.least_free_mib)
    if refused:
        evidence = public_text(_evidence(refused)) or None
        outcome = refused.verdict.outcome
        row = replace(row, refused_trial=refused.id, refused_outcome=outcome, refused_evidence=evidence)
    return row


def _evidence(refused: Trial) -> str:
    if leaves_too_little(refused):
        return f"it served with {refused.least_free_mib} MiB left free, where {refused.reserve_mib} MiB were asked for"
    return refused.verdict.evidence


def public_model(model: str, is_directory: bool = False) -> str:
    """Name the model without a path: a Hub name stays, of a directory the last name is kept."""
    is_path = (
        is_directory
        or model.startswith(("/", "~", "."))
        or "\\" in model
        or model.count("/") > 1
        or model.endswith("/")
    )
    if not is_path:
        return public_text(model) or "unknown"
    last = PureWindowsPath(model).name if "\\" in model else PurePath(model).name
    return public_text(last) or "unknown"


def _served(ceiling: Ceiling) -> Trial | None:
    """The trial that fitted at the lower end; the last one, as the figures of a retried length are the newest."""
    at_end = [t for t in ceiling.trials if t.length == ceiling.bracket.serves and answer_of_trial(t) is Answer.SERVES]
    return at_end[-1] if at_end and ceiling.bracket.serves is not None else None


def _refused(ceiling: Ceiling) -> Trial | None:
    """The trial that was refused at the upper end; where the search had no such end, the trial that ended it."""
    if ceiling.bracket.refused is not None:
        ends = [t for t in ceiling.trials if t.length == ceiling.bracket.refused and _is_too_long(t)]
    elif ceiling.status is Status.MODEL_LIMIT:
        ends = [t for t in ceiling.trials if t.verdict.outcome is Outcome.OVER_MODEL_LIMIT]
    elif ceiling.status in (Status.EXACT, Status.AT_LEAST):
        ends = []
    else:
        ends = [t for t in ceiling.trials if t.verdict.outcome is not Outcome.FITS]
    return ends[-1] if ends else None


def _is_too_long(trial: Trial) -> bool:
    return answer_of_trial(trial) is Answer.TOO_LONG


def _starts(ceiling: Ceiling) -> int | None:
    """The longest length at which the server came up, whether or not it then served."""
    started = (Outcome.FITS, Outcome.UNSERVABLE, Outcome.READY)
    lengths = [t.length for t in ceiling.trials if t.length is not None and t.verdict.outcome in started]
    if ceiling.bracket.serves is not None:
        lengths.append(ceiling.bracket.serves)
    return max(lengths, default=None)


def _estimated(ceiling: Ceiling) -> int | None:
    """vLLM's estimate nearest to the ceiling (what it chose itself, or its refusal): it depends on the length asked."""
    guesses = [
        (t.length if t.length is not None else t.verdict.figures.requested_max_model_len or 0, t.verdict.figures)
        for t in ceiling.trials
        if t.verdict.figures.estimated_max_len is not None
    ]
    return min(guesses, key=lambda guess: guess[0])[1].estimated_max_len if guesses else None

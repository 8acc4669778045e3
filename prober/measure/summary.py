"""Render results: text for the terminal, and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from prober.records import Ceiling, Combination, CompileState, Entrypoint, Outcome, Status, Trial, Verify
from prober.redact import Scrubber, secrets_in
from prober.results import serve_command
from prober.results.schema import CeilingKind, Row
from prober.results.table import text_table
from prober.search.interpret import answer_of_trial, leaves_too_little
from prober.search.next_length import Answer

HEADLINES = {
    Status.EXACT: "proven ceiling",
    Status.MODEL_LIMIT: "the model's own limit fits",
    Status.AT_LEAST: "serves; longer was not tried",
    Status.DOES_NOT_FIT: "does not fit",
    Status.UNSTABLE: "unstable: trials contradict each other",
    Status.INCONCLUSIVE: "no answer: could not tell",
    Status.BAD_CONFIG: "no length can work",
}
PROOFS = {
    Verify.FULL: "a request of exactly that length was answered",
    Verify.SHORT: "it starts and answers a short request; a full one was not sent (--verify full)",
    Verify.NONE: "it starts; no request was sent (--verify full)",
}


def render(ceiling: Ceiling, row: Row) -> str:
    """The answer on several lines, without a trailing newline."""
    lines = [title(ceiling), "", *(f"  {name:<15}{value}" for name, value in _facts(ceiling, row)), ""]
    if row.max_model_len is not None:
        lines += ["Serve it with:", f"  {command(ceiling, row)}"]
    else:
        lines += [_next_step(ceiling)]
    return "\n".join(lines)


def title(ceiling: Ceiling) -> str:
    return f"{describe(ceiling.combination)} on {ceiling.machine.gpu}, vLLM {ceiling.machine.vllm_version}"


def describe(combination: Combination) -> str:
    """A combination on one line."""
    parts = [combination.model, f"TP {combination.tensor_parallel_size}"]
    if combination.pipeline_parallel_size > 1:
        parts.append(f"PP {combination.pipeline_parallel_size}")
    if combination.gpu_memory_utilization is not None:
        parts.append(f"utilization {combination.gpu_memory_utilization:g}")
    for value in (combination.dtype, combination.quantization):
        if value:
            parts.append(value)
    if combination.kv_cache_dtype:
        parts.append(f"KV {combination.kv_cache_dtype}")
    if combination.entrypoint is Entrypoint.LLM:
        parts.append("vllm.LLM")
    if combination.compile_state is not CompileState.COLD:
        parts.append(combination.compile_state)
    return ", ".join(parts)


def describe_with_flags(combination: Combination) -> str:
    """A combination on one line with its further vLLM flags, to tell several apart."""
    flags = masked(shlex.join(combination.other_flags), combination)
    return ", ".join(filter(None, (describe(combination), shorten(flags, 60))))


def _facts(ceiling: Ceiling, row: Row) -> list[tuple[str, str]]:
    facts = [("answer", HEADLINES[ceiling.status])]
    if ceiling.bracket.serves is not None:
        name = "max_model_len" if row.max_model_len is not None else "longest"
        facts.append((name, f"{ceiling.bracket.serves:,}  ({PROOFS[ceiling.verify]})"))
    if ceiling.bracket.refused is not None:
        facts.append(("refused", f"{ceiling.bracket.refused:,}  ({_why_refused(ceiling)})"))
    facts.append(("because", _because(ceiling, row)))
    if row.num_gpu_blocks and row.block_size:
        tokens = row.kv_cache_tokens or row.num_gpu_blocks * row.block_size
        facts.append(("KV cache", f"{row.num_gpu_blocks:,} blocks of {row.block_size}, {tokens:,} tokens"))
    if row.starts_max_model_len and row.starts_max_model_len != ceiling.bracket.serves:
        facts.append(
            ("starts at", f"{row.starts_max_model_len:,}  ({_why_no_more(ceiling, row.starts_max_model_len)})")
        )
    if row.recommended_max_model_len and row.recommended_max_model_len != row.max_model_len:
        facts.append(("recommended", f"{row.recommended_max_model_len:,}  (with headroom for another machine)"))
    if ceiling.lowered_sequences:
        facts.append(
            ("max_num_seqs", f"{ceiling.lowered_sequences:,}  (vLLM allows no more: so many requests at once)")
        )
    if row.least_free_mib is not None:
        facts.append(("left free", f"{row.least_free_mib:,} MiB on the fullest GPU at the peak"))
    if row.estimated_max_model_len:
        facts.append(("vLLM's guess", f"{row.estimated_max_model_len:,}"))
    launches = "1 launch" if ceiling.launches == 1 else f"{ceiling.launches} launches"
    facts.append(("took", f"{launches}, {duration(ceiling.seconds)}"))
    return facts


def _why_no_more(ceiling: Ceiling, length: int) -> str:
    if any(t.length == length and leaves_too_little(t) for t in ceiling.trials):
        return f"but it leaves less than {ceiling.reserve_mib:,} MiB free"
    return "but a full-length request is never answered"


def _because(ceiling: Ceiling, row: Row) -> str:
    kind = {CeilingKind.MEMORY: "memory: ", CeilingKind.MODEL: "the model: ", CeilingKind.CONFIG: "the configuration: "}
    why = (kind[row.ceiling_kind] if row.ceiling_kind else "") + ceiling.why
    if ceiling.status in (Status.BAD_CONFIG, Status.DOES_NOT_FIT, Status.INCONCLUSIVE) and (
        last := _last_failure(ceiling)
    ):
        why += f"; vLLM said: {last.verdict.evidence}" if last.verdict.evidence else f"; {last.verdict.outcome}"
    return why


def _last_failure(ceiling: Ceiling) -> Trial | None:
    return next((t for t in reversed(ceiling.trials) if t.verdict.outcome is not Outcome.FITS), None)


def _why_refused(ceiling: Ceiling) -> str:
    at_end = [t for t in ceiling.trials if t.length == ceiling.bracket.refused]
    trial = next((t for t in reversed(at_end) if answer_of_trial(t) is Answer.TOO_LONG), None)
    if trial is None:
        return "refused"
    if leaves_too_little(trial):
        return f"it leaves {trial.least_free_mib:,} MiB free, and {trial.reserve_mib:,} MiB were asked for"
    return f"{trial.verdict.outcome}: {shorten(trial.verdict.evidence)}"


def _next_step(ceiling: Ceiling) -> str:
    match ceiling.status:
        case Status.BAD_CONFIG if any("model weights" in t.verdict.evidence for t in ceiling.trials):
            return "Without the weights at hand: run again with --dummy-weights, which measures the same."
        case Status.BAD_CONFIG:
            return "Fix the configuration, then run the same command again."
        case Status.DOES_NOT_FIT if any(map(leaves_too_little, ceiling.trials)):
            return "Ask for less with --reserve-mib, or lower --gpu-memory-utilization."
        case Status.DOES_NOT_FIT:
            return "Try more GPUs (--tp), a quantized checkpoint, or a higher --gpu-memory-utilization."
        case Status.EXACT | Status.MODEL_LIMIT | Status.AT_LEAST:
            return "Not proven to serve: run again with --verify full."
    if ceiling.status is Status.UNSTABLE:
        return "Run again with --fresh on an idle machine; both logs are among the results."
    if "the shortest asked for" in ceiling.why:
        return "Ask for shorter lengths with --low."
    logs = ", ".join(f"logs/{t.id}.log" for t in ceiling.trials[-2:])
    return f"Run the same command again to go on from here (--fresh starts over); the last logs, in the results: {logs}"


def command(ceiling: Ceiling, row: Row) -> str:
    """The shell command that serves this, with the user's own paths, which the row does not keep."""
    combination = ceiling.combination
    own = replace(
        row,
        model=combination.model,
        model_revision=combination.model_revision,
        other_flags=shlex.join(combination.other_flags) or None,
    )
    return masked(serve_command.command(own), combination)


def masked(text: str, combination: Combination) -> str:
    """Return the text without the secrets in the user's flags: terminal output often ends up in logs."""
    return Scrubber({}, secrets_in(combination.other_flags)).text(text)


def table(answers: Sequence[tuple[Ceiling, Row]]) -> str:
    """Several answers, one a line."""
    lines = [["combination", "status", "max_model_len", "refused", "launches"]]
    for ceiling, row in answers:
        numbers = (row.max_model_len, ceiling.bracket.refused, ceiling.launches)
        cells = ("" if number is None else f"{number:,}" for number in numbers)
        lines.append([describe_with_flags(ceiling.combination), str(ceiling.status), *cells])
    return text_table(lines, numbers={2, 3, 4})


def to_json(answers: Sequence[tuple[Ceiling, Row]]) -> str:
    """A list with one object a combination."""
    return json.dumps([_values(ceiling, row) for ceiling, row in answers], indent=2)


def _values(ceiling: Ceiling, row: Row) -> dict[str, Any]:
    return {
        "model": ceiling.combination.model,
        "status": ceiling.status,
        "max_model_len": row.max_model_len,
        "bracket": asdict(ceiling.bracket),
        "why": ceiling.why,
        "command": command(ceiling, row) if row.max_model_len is not None else None,
        "launches": ceiling.launches,
        "seconds": round(ceiling.seconds, 1),
        "trials": [
            {"id": t.id, "length": t.length, "outcome": t.verdict.outcome, "evidence": t.verdict.evidence}
            for t in ceiling.trials
        ],
        "row": {name: value for name, value in asdict(row).items() if value is not None},
    }


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def shorten(text: str, width: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"

"""A log explained: what happened, where, the memory as the budget it is, and the ways out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from prober.advice import estimate
from prober.advice.advise import fixes
from prober.advice.fixes import Fix
from prober.logs.classify import Reader
from prober.records import Figures, Outcome, Stage, Verdict


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict in words. ``budget`` holds only what the log printed."""

    verdict: Verdict
    sentence: str
    budget: tuple[str, ...]
    fixes: tuple[Fix, ...]


def explain(chunks: Iterable[bytes]) -> Explanation:
    """Read a log that comes in pieces, cut anywhere."""
    reader = Reader()
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    return explain_verdict(reader.verdict())


def explain_verdict(verdict: Verdict) -> Explanation:
    """Put a verdict into words."""
    return Explanation(verdict, _sentence(verdict), tuple(_budget(verdict.figures)), fixes(verdict))


def to_dict(explanation: Explanation) -> dict[str, object]:
    """The keys that ``prober explain --json`` promises; unknown figures are null."""
    verdict = explanation.verdict
    return {
        "outcome": str(verdict.outcome),
        "stage": str(verdict.stage),
        "evidence": verdict.evidence,
        "line": verdict.line,
        "process": verdict.process,
        "rank": verdict.rank,
        "rule": verdict.rule,
        "sentence": explanation.sentence,
        "figures": asdict(verdict.figures),
        "fixes": [asdict(fix) for fix in explanation.fixes],
    }


def render(explanation: Explanation) -> str:
    """Plain text for a terminal."""
    verdict = explanation.verdict
    lines = [explanation.sentence, ""]
    if verdict.evidence:
        where = [f"stage {verdict.stage}", f"line {verdict.line}" if verdict.line else "", verdict.process or ""]
        where.append(f"rank {verdict.rank}" if verdict.rank is not None else "")
        lines += [f"Where: {', '.join(part for part in where if part)}", f"  {verdict.evidence}", ""]
    if explanation.budget:
        lines += ["Memory of one device:", *(f"  {line}" for line in explanation.budget), ""]
    if explanation.fixes:
        lines += ["Ways out, best first:", *_ways_out(explanation.fixes), ""]
    return "\n".join(lines).rstrip() + "\n"


def _ways_out(ways: tuple[Fix, ...]) -> Iterator[str]:
    for place, fix in enumerate(ways, 1):
        setting = " ".join(str(part) for part in (fix.flag, fix.value) if part is not None)
        length = f" → about {fix.expected_max_model_len:,} tokens" if fix.expected_max_model_len else ""
        yield f"  {place}. {fix.action}{f': {setting}' if setting else ''}{length}"
        yield f"     {fix.why}"


def _sentence(verdict: Verdict) -> str:
    figures = verdict.figures
    length = f"{figures.requested_max_model_len:,} tokens" if figures.requested_max_model_len else "the length"
    if verdict.outcome is Outcome.KV_TOO_SMALL:
        return f"One request of {length} needs more KV cache than there is{_than(figures)}."
    if verdict.outcome is Outcome.OVER_MODEL_LIMIT and figures.model_limit:
        return f"{length} is more than the model's own limit of {figures.model_limit:,}."
    if verdict.outcome is Outcome.SEQUENCE_SLOTS and figures.sequence_slots is not None:
        return f"The Mamba cache has {figures.sequence_slots:,} slots, fewer than max_num_seqs asks for."
    stage = _STAGES.get(str(verdict.stage), str(verdict.stage))
    if verdict.outcome is Outcome.CRASH and verdict.rule in ("engine_core", "engine_process", "worker"):
        when = "" if verdict.stage is Stage.CONFIG else f" while {stage}"
        return f"The start failed{when}, but this part of the log only wraps a cause that it does not show."
    if verdict.outcome is Outcome.CRASH and verdict.rule == "traceback":
        when = "" if verdict.stage is Stage.CONFIG else f", raised while {stage}"
        return f"The log stops inside a traceback{when}: the line that names the error is missing."
    if verdict.rule == "device_oom_somewhere":
        return "Device memory ran out; the log does not show at which step."
    if verdict.stage is Stage.CONFIG and verdict.outcome in _SOMEWHERE:
        return _SOMEWHERE[verdict.outcome]  # where every log begins: it may as well show only another part
    if verdict.outcome is Outcome.CRASH and verdict.stage is Stage.SERVE:
        return "The server failed while serving a request, for a reason that says nothing about memory."
    return _SENTENCES[verdict.outcome].format(stage=stage)


def _than(figures: Figures) -> str:
    if figures.needed_gib is not None and figures.available_gib is not None:
        return f": {figures.needed_gib:g} GiB against {figures.available_gib:g} GiB"
    if figures.max_tokens_in_cache is not None:
        return f": the cache holds {figures.max_tokens_in_cache:,} tokens"
    return ""


def _budget(figures: Figures) -> Iterator[str]:
    if figures.total_gib is not None:
        share = estimate.utilization(figures)
        assumed = "" if figures.gpu_memory_utilization is not None else " (the default; the log does not say)"
        yield f"{figures.total_gib:.2f} GiB × {share:g}{assumed} = {figures.total_gib * share:.2f} GiB for vLLM"
    parts = [
        (figures.weights_gib, "weights"),
        (figures.activation_gib, "activation"),
        (figures.non_torch_gib, "outside PyTorch"),
        (figures.cuda_graph_gib, "CUDA graphs"),
        (figures.available_gib, "KV cache"),
    ]
    known = [f"{gib:.2f} {name}" for gib, name in parts if gib is not None]
    if known:
        yield " + ".join(known) + " (GiB)"
    if figures.free_gib is not None and figures.total_gib is not None:
        yield f"{figures.free_gib:.2f} of {figures.total_gib:.2f} GiB were free"
    if figures.needed_gib is not None and figures.requested_max_model_len:
        per_token = figures.needed_gib * 2**20 / figures.requested_max_model_len
        request = f"one request of {figures.requested_max_model_len:,} tokens"
        yield f"{request} needs {figures.needed_gib:g} GiB of KV cache ({per_token:.1f} KiB per token)"
    tokens = figures.kv_cache_tokens or figures.max_tokens_in_cache
    if tokens is not None:
        yield f"the KV cache holds {tokens:,} tokens"


_STAGES = {
    "config": "reading the configuration",
    "download": "downloading",
    "load": "loading the weights",
    "compile": "compiling",
    "profile": "measuring memory",
    "kv_cache": "sizing the KV cache",
    "capture": "capturing CUDA graphs or warming up",
    "ready": "being ready",
    "serve": "serving a request",
}
_SOMEWHERE = {
    Outcome.HOST_OOM: "Host memory ran out.",
    Outcome.TIMEOUT: "A part of the engine did not answer in time.",
    Outcome.CRASH: "The start failed, for a reason that says nothing about memory.",
    Outcome.UNFINISHED: "The log holds neither a failure nor readiness, nor any step after the configuration.",
}
_SENTENCES = {
    Outcome.FITS: "The server answered a request of this length.",
    Outcome.KV_TOO_SMALL: "The KV cache is too small.",
    Outcome.NO_KV_MEMORY: "Weights and working memory leave nothing for the KV cache.",
    Outcome.DEVICE_OOM: "Device memory ran out while {stage}.",
    Outcome.HOST_OOM: "Host memory ran out while {stage}.",
    Outcome.UNSERVABLE: "The server starts, but can never answer a request of full length.",
    Outcome.SEQUENCE_SLOTS: "The Mamba cache has fewer slots than max_num_seqs asks for.",
    Outcome.OVER_MODEL_LIMIT: "The length is more than the model's own limit.",
    Outcome.TOO_SHORT: "The length or the batch is too short for what the model must hold at once.",
    Outcome.DEVICE_BUSY: "The device was not free: somebody else holds, or moved, its memory.",
    Outcome.BAD_CONFIG: "The configuration cannot work at any length.",
    Outcome.TIMEOUT: "A part of the engine did not answer in time while {stage}.",
    Outcome.CRASH: "The start failed while {stage}, for a reason that says nothing about memory.",
    Outcome.READY: "The log claims that the server became ready, and holds no failure after that.",
    Outcome.UNFINISHED: "The log holds neither a failure nor readiness; it stops while {stage}.",
}

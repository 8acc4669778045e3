"""The Python API: look up a ceiling, read the matrix, measure a model. ``import prober`` loads these lazily.

    answer = prober.lookup("Qwen3-8B", gpu="L4")
    frame = prober.read_matrix()
    ceiling = prober.probe("Qwen/Qwen3-8B", tensor_parallel_size=2)

Errors are subclasses of ``prober.records.ProberError``; the message says what to do next.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prober.records import Bracket, Ceiling, CompileState, Entrypoint, Stage, Trial, Verify
from prober.results.query import LookupResult, Query

if TYPE_CHECKING:
    import pandas

    from prober.search.next_length import Try


def lookup(
    model: str | None = None,
    *,
    results: Path | str = "results",
    gpu: str | None = None,
    gpu_memory_mib: int | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    gpu_memory_utilization: float | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    entrypoint: Entrypoint | None = None,
    compile_state: CompileState | None = None,
    vllm_version: str | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    need: int | None = None,
    concurrency: int | None = None,
) -> LookupResult:
    """Look up known ceilings, offline. ``None`` matches anything; ``need`` finds what serves that many tokens.

    Hits are sorted, best first: ``answer.hits[0].row.max_model_len`` is a proven ceiling in tokens, or ``None``
    where ``hits[0].grade`` is only "unproven" or "reported". No hits: ``answer.command`` measures it. A folder without
    a matrix gives no hits. Raises ``NotReady`` for a file that is not a matrix.
    """
    from prober.results.lookup import look_up

    question = Query(
        model=model,
        gpu=gpu,
        gpu_memory_mib=gpu_memory_mib,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        entrypoint=entrypoint,
        compile_state=compile_state,
        vllm_version=vllm_version,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        need=need,
        concurrency=concurrency,
    )
    return look_up(Path(results), question)


def read_matrix(results: Path | str = "results") -> pandas.DataFrame:
    """Read the matrix as a DataFrame, one line per row.

    Types are nullable: tokens and MiB Int64, GiB Float64, unknown ``pandas.NA``.
    Without a matrix the frame is empty, with all columns. Raises ``NotReady`` for a file that is not a matrix.
    """
    from prober.results.frame import read_matrix

    return read_matrix(results)


def probe(
    model: str,
    *,
    python: Path | str | None = None,
    results: Path | str = "results",
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float | None = None,
    entrypoint: Entrypoint = Entrypoint.SERVE,
    compile_state: CompileState = CompileState.COLD,
    device: str = "auto",
    gpus: Sequence[str] | None = None,
    low: int | None = None,
    high: int | None = None,
    verify: Verify = Verify.FULL,
    fresh: bool = False,
    vllm_flags: Sequence[str] = (),
    on_trial: Callable[[Trial], None] | None = None,
) -> Ceiling:
    """Measure one combination (a Hub name or a directory), record it in ``results``, and return its ceiling.

    ``python`` is the interpreter that has vLLM (default: $ENGINE_PYTHON, else the current one). ``device`` is auto,
    cuda or cpu; ``low`` and ``high`` are tokens; ``on_trial`` is called with each trial as it ends. The
    result is ``ceiling.max_model_len``, ``None`` where nothing was proven; ``ceiling.status`` and ``why`` give the
    reason. Takes minutes. Raises ``UsageError`` for invalid options, ``NotReady`` where this machine cannot
    measure now.
    """
    from prober.measure.measure import probe as measured
    from prober.measure.request import Axes, Request, combinations
    from prober.search.next_length import LOWEST

    axes = Axes(
        model,
        (tensor_parallel_size,),
        (gpu_memory_utilization,),
        entrypoint=entrypoint,
        compile_states=(compile_state,),
        vllm_flags=tuple(vllm_flags),
    )
    request = Request(
        combinations=combinations(axes),
        python=Path(python or os.environ.get("ENGINE_PYTHON") or sys.executable),
        results=Path(results),
        device=device,
        gpus=None if gpus is None else tuple(gpus),
        low=low or LOWEST,
        high=high,
        verify=verify,
        is_fresh=fresh,
    )
    [(ceiling, _)] = measured(request, lambda _combination: _Quiet(on_trial))
    return ceiling


class _Quiet:
    """Display that prints nothing and passes on each trial."""

    def __init__(self, on_trial: Callable[[Trial], None] | None) -> None:
        self._on_trial = on_trial

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None: ...
    def resumed(self, trials: Sequence[Trial]) -> None: ...
    def launching(self, step: Try, launch: int, bracket: Bracket) -> None: ...
    def running(self, stage: Stage, age_seconds: float) -> None: ...
    def say(self, line: str) -> None: ...

    def finished(self, trial: Trial) -> None:
        if self._on_trial:
            self._on_trial(trial)

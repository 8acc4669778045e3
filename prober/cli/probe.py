"""The `probe` command: its options and its output."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prober.records import Combination, CompileState, Entrypoint, NotReady, Stage, Status, Verify

if TYPE_CHECKING:
    from prober.measure.measure import Display, PlannedCombination
    from prober.measure.request import Request

UNANSWERED = (Status.INCONCLUSIVE, Status.UNSTABLE, Status.BAD_CONFIG)


def numbers(
    kind: type, most: float | None = None
) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """Return a callback that parses a list such as 1,2,4."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        if text is None:
            return None
        try:
            values = _once(kind(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a number or a list such as 1,2", context, parameter) from None
        if any(not 0 < value <= (most or value) for value in values):
            raise click.BadParameter(f"{text!r} is out of range", context, parameter)
        return values

    return read


def words(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Parse a list of words such as auto,fp8."""
    return None if text is None else _once(text.split(","))


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    """Remove duplicates, so that a value given twice is measured once."""
    return tuple(dict.fromkeys(values))


def varied(context: click.Context, parameter: click.Parameter, pairs: Sequence[str]) -> tuple[Any, ...]:
    """Parse FLAG=V1,V2 pairs; the leading dashes are optional."""
    found = []
    for pair in pairs:
        flag, _, values = pair.partition("=")
        if not flag or not values:
            raise click.BadParameter(f"{pair!r} is not FLAG=VALUE,VALUE", context, parameter)
        if "," in values and any(mark in values for mark in "{["):
            raise click.BadParameter(f"{pair!r}: a comma separates values; vary one key of JSON as FLAG.KEY=V,V")
        found.append((flag if flag.startswith("-") else f"--{flag}", _once(values.split(","))))
    return tuple(found)


def compile_states(context: click.Context, parameter: click.Parameter, text: str) -> tuple[CompileState, ...]:
    """Parse a list such as cold,eager."""
    try:
        return _once(CompileState(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not one or more of {','.join(CompileState)}", context, parameter
        ) from None


def finite(context: click.Context, parameter: click.Parameter, number: float | None) -> float | None:
    """Reject nan and infinity."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"{number} is not a finite number", context, parameter)
    return number


def positive(text: str) -> float:
    """Parse a finite number above 0. Raises ValueError."""
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(text)
    return number


def stage_limits(context: click.Context, parameter: click.Parameter, pairs: Sequence[str]) -> dict[Stage, float]:
    """Parse STAGE=SECONDS pairs."""
    limits = {}
    for pair in pairs:
        name, _, seconds = pair.partition("=")
        try:
            limits[Stage(name)] = positive(seconds)
        except ValueError:
            names = ", ".join(Stage)
            raise click.BadParameter(f"{pair!r} is not STAGE=SECONDS; stages: {names}", context, parameter) from None
    return limits


def default_python() -> Path:
    """Return the engine's interpreter: $ENGINE_PYTHON, else the one that `make engine` created, else `python3`."""
    if named := os.environ.get("ENGINE_PYTHON"):
        return Path(named)
    made = Path(".venv-engine/bin/python")
    return made if made.exists() else Path("python3")


@click.command()
@click.argument("model")
@click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--tp", default="1", callback=numbers(int), metavar="N[,N]", help="Tensor-parallel sizes. [1]")
@click.option(
    "--gpu-memory-utilization",
    callback=numbers(float, most=1),
    metavar="X[,X]",
    help="Fractions of the GPU's memory. [vLLM's default]",
)
@click.option(
    "--kv-cache-dtype", callback=words, metavar="T[,T]", help="KV cache data types: auto,fp8. [vLLM's default]"
)
@click.option("--max-num-seqs", callback=numbers(int), metavar="N[,N]", help="Concurrent sequences. [vLLM's default]")
@click.option(
    "--vary",
    multiple=True,
    callback=varied,
    metavar="FLAG=V[,V]",
    help="Another axis: a vLLM flag and its values; on and off for a switch.",
)
@click.option(
    "--entrypoint",
    type=click.Choice([e.value for e in Entrypoint]),
    default="serve",
    show_default=True,
    help="Start vLLM's server, or vllm.LLM in a Python process.",
)
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Python interpreter that has vLLM. [$ENGINE_PYTHON, .venv-engine, python3]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="Device that vLLM runs on.",
)
@click.option(
    "--gpus",
    callback=words,
    metavar="ID[,ID]",
    help="GPUs to use, by index or UUID. [idle GPUs]",
)
@click.option("--low", type=click.IntRange(2), help="Shortest length to try, in tokens. [16]")
@click.option("--high", type=click.IntRange(2), help="Longest length to try, in tokens. [the model's limit]")
@click.option(
    "--verify",
    type=click.Choice([v.value for v in Verify]),
    default="full",
    show_default=True,
    help="How to prove a length: startup only, a short request, or a full-length request.",
)
@click.option(
    "--compile",
    "compile_states",
    callback=compile_states,
    default="cold",
    show_default=True,
    metavar="STATE[,STATE]",
    help="Compile cache at launch: empty (cold), pre-filled (warm), or --enforce-eager (eager).",
)
@click.option("--enforce-eager", is_flag=True, help="Same as --compile eager.")
@click.option("--dummy-weights", is_flag=True, help="Use random weights; only the configuration is downloaded.")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be measured, without starting vLLM.")
@click.option(
    "--quick", is_flag=True, help="Prove the length that vLLM chooses (usually 1 launch); try nothing longer."
)
@click.option("--certify", is_flag=True, help="Prove an existing row again (2 launches if it still holds).")
@click.option(
    "--reserve-mib", type=click.IntRange(1), metavar="MIB", help="GPU memory that must stay free at the peak."
)
@click.option(
    "--beyond-model-limit",
    is_flag=True,
    help="Let vLLM exceed the model's limit, up to --high; the row carries a warning.",
)
@click.option(
    "--budget-launches", type=click.IntRange(1), metavar="N", help="Stop after N launches, with the bracket so far."
)
@click.option(
    "--budget-minutes",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    metavar="M",
    help="Start no launch after M minutes.",
)
@click.option("--fresh", is_flag=True, help="Measure again; use recorded trials only as hints.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    callback=finite,
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a busy GPU.",
)
@click.option("--kill-stale", is_flag=True, help="Kill leftover processes of earlier prober runs first.")
@click.option(
    "--stage-limit",
    multiple=True,
    callback=stage_limits,
    metavar="STAGE=SECONDS",
    help="Longest time that a stage may go without progress.",
)
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(model: str, vllm_flags: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Find and prove the longest max_model_len of MODEL, a Hub name or a directory.

    Arguments after -- are passed to vLLM unchanged:

    \b
      prober probe Qwen/Qwen3-8B --gpu-memory-utilization 0.9 -- --kv-cache-dtype fp8
      prober probe ./my-model --tp 1,2 --gpu-memory-utilization 0.85,0.9
      prober probe ./my-model --max-num-seqs 16,256 --vary block-size=16,32 --plan
      prober probe ./my-model --quick
    """
    from prober.measure.measure import plan
    from prober.measure.measure import probe as run
    from prober.measure.summary import render, table, to_json

    request = _request(model, vllm_flags, options)
    if options["only_plan"]:
        click.echo(_plan_table(plan(request)))
        return 0
    if options["kill_stale"]:
        _end_stale()
    answers = []
    for ceiling, row in run(request, _display(request.verify)):
        answers.append((ceiling, row))
        if not as_json:
            click.echo(("\n" if len(answers) > 1 else "") + render(ceiling, row))
    if as_json:
        click.echo(to_json(answers))
    elif len(answers) > 1:
        click.echo("\n" + table(answers))
    return 1 if any(ceiling.status in UNANSWERED for ceiling, _ in answers) else 0


def _plan_table(cells: list[PlannedCombination]) -> str:
    """Render one line per combination, then the total."""
    from prober.measure.summary import describe_with_flags

    lines, total = [], sum(cell.launches for cell in cells)
    for cell in cells:
        expected = f"impossible: {cell.impossible}" if cell.impossible else f"about {_launches(cell.launches)}"
        lines.append(f"{describe_with_flags(cell.combination)}: {expected}")
    combinations = "1 combination" if len(cells) == 1 else f"{len(cells)} combinations"
    return "\n".join([*lines, f"{combinations}, about {_launches(total)}"])


def _launches(count: int) -> str:
    return "1 launch" if count == 1 else f"{count} launches"


def _sequences(counts: tuple[int, ...] | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return () if counts is None else (("--max-num-seqs", tuple(map(str, counts))),)


def _display(verify: Verify) -> Callable[[Combination], Display]:
    """Return a live table where stderr is a terminal, plain lines elsewhere."""
    from prober.cli.progress import LiveDisplay, PlainDisplay

    is_logging = logging.getLogger("prober").isEnabledFor(logging.INFO)  # its lines would tear a live table
    if is_logging or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return lambda combination: PlainDisplay(combination, verify, _say)
    from rich.console import Console

    console = Console(stderr=True)
    return lambda combination: LiveDisplay(combination, verify, console)


def _say(line: str) -> None:
    """Print progress; a closed pipe or a full disk does not end the search."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _end_stale() -> None:
    from prober.host import idle

    ended, alive = idle.end_stale()
    for one in ended:
        click.echo(f"Ended process {one.pid} ({one.name}) of our earlier trial {one.trial}.", err=True)
    if alive:
        pids = ",".join(str(one.pid) for one in alive)
        raise NotReady(f"processes of earlier trials cannot be killed; inspect them with `ps -fp {pids}`")


def _request(model: str, vllm_flags: tuple[str, ...], options: dict[str, Any]) -> Request:
    from prober.measure.measure import DUMMY_WEIGHTS
    from prober.measure.request import Axes, Request, combinations
    from prober.search.next_length import LOWEST
    from prober.trial.timeouts import Limits

    if options["quick"] and options["certify"]:
        raise click.UsageError("--quick skips the refusal that --certify proves; use one of them.")
    if vllm_flags and not vllm_flags[0].startswith("-"):
        raise click.UsageError(f"{vllm_flags[0]!r} is neither MODEL nor a flag of vLLM: probe takes one model.")
    dummy = DUMMY_WEIGHTS if options["dummy_weights"] else ()
    axes = Axes(
        model=model,
        tensor_parallel_sizes=options["tp"],
        utilizations=options["gpu_memory_utilization"] or (None,),
        kv_cache_dtypes=options["kv_cache_dtype"] or (None,),
        varied=(*_sequences(options["max_num_seqs"]), *options["vary"]),
        entrypoint=Entrypoint(options["entrypoint"]),
        compile_states=(CompileState.EAGER,) if options["enforce_eager"] else options["compile_states"],
        vllm_flags=(*vllm_flags, *dummy),
    )
    minutes = options["budget_minutes"]
    return Request(
        combinations=combinations(axes),
        python=options["python"] or default_python(),
        results=options["results"],
        device=options["device"],
        gpus=options["gpus"],
        low=options["low"] or LOWEST,
        high=options["high"],
        verify=Verify(options["verify"]),
        is_fresh=options["fresh"],
        is_certifying=options["certify"],
        is_quick=options["quick"],
        reserve_mib=options["reserve_mib"],
        is_beyond_limit=options["beyond_model_limit"],
        most_launches=options["budget_launches"],
        most_seconds=None if minutes is None else 60 * minutes,
        wait_seconds=options["wait"],
        limits=Limits(options["stage_limit"]),
    )

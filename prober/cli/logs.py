"""The commands that read vLLM startup logs: `explain` and `import`. Neither needs vLLM or a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO

import click

from prober.cli.results import AS_JSON, RESULTS

CHUNK_BYTES = 1 << 20


@click.command()
@click.argument("log", type=click.File("rb"), default="-")
@AS_JSON
def explain(log: BinaryIO, as_json: bool) -> int:
    """Explain a vLLM startup LOG (default: standard input): cause, figures and fixes.

    \b
      prober explain vllm.log
      kubectl logs my-vllm | prober explain
    """
    from prober.advice import explain as reading
    from prober.records import Outcome

    explanation = reading.explain(_chunks(log))
    if as_json:
        click.echo(json.dumps(reading.to_dict(explanation), ensure_ascii=False, indent=2))
    else:
        text = reading.render(explanation)
        click.echo(text, nl=not text.endswith("\n"))
    return 1 if explanation.verdict.outcome in (Outcome.UNFINISHED, Outcome.CRASH) else 0


def _chunks(log: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: log.read(CHUNK_BYTES), b"")


@click.command("import")
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpu", help="GPU name as the driver reports it.")
@click.option("--gpu-memory-mib", type=click.IntRange(1), help="Memory of one GPU.")
@click.option("--model", help="Model, if the log does not name it.")
@click.option("--model-revision", help="Commit of the model.")
@click.option("--tp", "tensor_parallel_size", type=click.IntRange(1), help="Tensor-parallel size.")
@click.option("--pp", "pipeline_parallel_size", type=click.IntRange(1), help="Pipeline-parallel size.")
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    help="As vLLM was started with.",
)
@click.option(
    "--date", "measured_at", callback=lambda *given: day(*given), metavar="YYYY-MM-DD", help="When the log was written."
)
@click.option("--vllm", "vllm_version", help="vLLM version, if the log does not name it.")
@click.option("--source-url", help="Where the log was published.")
@RESULTS
def import_logs(logs: tuple[Path, ...], results: Path, **fields: Any) -> int:
    """Import rows from vLLM startup LOGS. They are unverified and never replace measured rows.

    A startup does not prove service, so an imported row has no ceiling. What the log does not show is left empty.

    \b
      prober import vllm.log --gpu "NVIDIA L4" --gpu-memory-mib 23034
      prober import old/*.log --gpu "NVIDIA L4" --vllm 0.9.2 --date 2025-07-01
    """
    from prober import __version__
    from prober.logs.classify import Reader
    from prober.records import UsageError
    from prober.results.from_log import ImportFields, import_row, unknown
    from prober.results.store import Store

    store, skipped = Store(results), False
    for path in logs:
        reader = Reader()
        with path.open("rb") as log:
            for chunk in _chunks(log):
                reader.feed(chunk)
        reader.finish()
        try:
            row = import_row(reader.verdict(), ImportFields(**fields), __version__)
        except UsageError as error:
            click.echo(f"{path}: {error}", err=True)
            skipped = True
            continue
        stronger = store.put([row])
        length = row.starts_max_model_len or row.refused_max_model_len
        kind = "starts at" if row.starts_max_model_len else "refuses"
        click.echo(f"{path}: {row.model} on {row.gpu} {kind} {length:,}" if length else f"{path}: {row.model}")
        if stronger:
            click.echo("  not kept: the existing row proves more or is newer")
        elif missing := unknown(row):
            click.echo(f"  missing; supply with: {' '.join(missing)}")
    return 1 if skipped else 0


def day(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Parse an ISO date."""
    try:
        return None if text is None else date.fromisoformat(text).isoformat()
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a date such as 2025-07-01", context, parameter) from None

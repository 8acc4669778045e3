"""The commands that read and repair the matrix: `lookup`, `merge`, `diff`. None of them needs a GPU, vLLM or pandas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prober.records import CompileState, Entrypoint, NotReady, UsageError

if TYPE_CHECKING:
    from prober.results.lookup import LookupResult
    from prober.results.schema import Row

RESULTS = click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("model", required=False)
@click.option("--gpu", help="GPU name, or the part that names its type: L4, A100, H100 PCIe.")
@click.option("--tp", "tensor_parallel_size", type=click.IntRange(1), help="Tensor-parallel size.")
@click.option("--vllm", "vllm_version", help="vLLM version; the nearest come first.")
@click.option("--gpu-memory-utilization", type=float, metavar="X", help="As the row was measured with.")
@click.option("--kv-cache-dtype", metavar="T", help="KV cache data type: fp8, auto.")
@click.option("--dtype", metavar="T", help="Data type of the weights: bfloat16.")
@click.option("--quantization", metavar="T", help="Quantization method: awq, fp8.")
@click.option("--entrypoint", type=click.Choice([e.value for e in Entrypoint]), help="vLLM's server, or vllm.LLM.")
@click.option("--compile", "compile_state", type=click.Choice([c.value for c in CompileState]), help="As for probe.")
@click.option("--need", type=click.IntRange(1), metavar="N", help="Find configurations that serve N tokens.")
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="With --need: N concurrent requests.")
@RESULTS
@AS_JSON
@click.option("--flags", "form", flag_value="flags", help="Print flags for `vllm serve`.")
@click.option("--yaml", "form", flag_value="yaml", help="Print a file for vLLM's --config.")
@click.option("--env", "form", flag_value="env", help="Print an environment file for a container.")
def lookup(results: Path, as_json: bool, form: str | None, **question: Any) -> int:
    """Look up known-good ceilings of MODEL, or what serves --need tokens.

    \b
      prober lookup Llama-3.1-8B-Instruct --gpu L4
      prober lookup Qwen3-8B --gpu H100 --flags
      prober lookup --need 32768 --concurrency 8
    """
    from prober.results.lookup import Query, look_up, render_table, to_json

    if as_json and form is not None:
        raise UsageError(f"--json and --{form} exclude each other; use one.")
    if not question["model"] and question["need"] is None:
        raise UsageError("Give a MODEL, or --need with the number of tokens.")
    if question["concurrency"] is not None and question["need"] is None:
        raise UsageError("--concurrency needs --need.")
    for name, kind in (("entrypoint", Entrypoint), ("compile_state", CompileState)):
        question[name] = None if question[name] is None else kind(question[name])
    answer = look_up(results, Query(**question))
    if answer.is_empty:  # on stderr: it is not an answer about the model
        click.echo(f"prober: {results} holds no rows. Name a folder that has some with --results.", err=True)
    if as_json:
        click.echo(to_json(answer))
    elif form is not None and answer.is_found:
        click.echo(_best(answer, form), nl=False)
    else:
        click.echo(render_table(answer), nl=False)
    return 0 if answer.is_found else 1


def _best(answer: LookupResult, form: str) -> str:
    """The best answer as what vLLM is started with."""
    from prober.results import serve_command

    row = answer.hits[0].row
    text: str = getattr(serve_command, form)(row)
    if not text.replace("\n", "").isprintable():  # it could move the cursor, and is not to be pasted
        raise serve_command.Unproven("A setting of this row holds a control character: look at it with --json.")
    if serve_command.is_beyond_limit(row) and form != "env":
        raise serve_command.Unproven(f"vLLM takes this length only with {row.environment}: see --env, or --json.")
    if row.environment and form != "env":
        click.echo(f"It was measured with this in the environment: {row.environment}", err=True)
    return text if text.endswith("\n") else text + "\n"


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@RESULTS
@AS_JSON
def merge(sources: tuple[Path, ...], results: Path, as_json: bool) -> int:
    """Merge SOURCES (folders or matrix files) into the matrix in --results.

    The newest proof wins; measured beats imported beats reported. Name a file with git conflict markers to repair it.

    \b
      prober merge ../theirs/results
      prober merge results/matrix.csv
    """
    from prober.results.merge import merge as merged_of
    from prober.results.merge import merged_json, render_merged
    from prober.results.store import Store

    target = results / "matrix.csv"
    theirs = [_rows(file) for file in map(_matrix, sources) if file.resolve() != target.resolve()]
    with Store(results).exclusive() as store:  # keeps rows that a probe writes in the meantime
        ours = [_rows(target)] if target.exists() else []
        merged = merged_of([*theirs, *ours])
        store.replace_all(merged.rows)
    click.echo(merged_json(merged) if as_json else render_merged(merged), nl=as_json)
    return 0


@click.command()
@click.argument("old", type=click.Path(exists=True, path_type=Path))
@click.argument("new", type=click.Path(exists=True, path_type=Path))
@click.option("--tolerance", default="0%", show_default=True, help="How far a ceiling may move: 1%, 0.01.")
@AS_JSON
@click.option("--markdown", is_flag=True, help="A table for a pull request.")
def diff(old: Path, new: Path, tolerance: str, as_json: bool, markdown: bool) -> int:
    """Compare two matrices (folders or files): gained, lost, changed. Exit code 1 on a regression.

    \b
      prober diff yesterday/ results/
      prober diff main.csv results/matrix.csv --tolerance 1% --markdown
    """
    from prober.results.diff import diff as difference_of
    from prober.results.diff import diff_json, markdown_diff, render_diff

    difference = difference_of(_rows(_matrix(old)), _rows(_matrix(new)), _share(tolerance))
    text = diff_json(difference) if as_json else markdown_diff(difference) if markdown else render_diff(difference)
    click.echo(text, nl=not text.endswith("\n"))
    return 1 if difference.has_regression else 0


def _share(text: str) -> float:
    """Read 1% or 0.01."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--tolerance takes a share such as 1% or 0.01, not {text!r}.")
    return share


def _matrix(source: Path) -> Path:
    return source / "matrix.csv" if source.is_dir() else source


def _rows(file: Path) -> list[Row]:
    from prober.results.merge import read_rows

    try:
        return read_rows(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise NotReady(f"{file} cannot be read: {error}.") from None

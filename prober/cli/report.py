"""The `report` command."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import click

from prober.records import NotReady, ProberError


@click.command()
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Output file; - is stdout. [report.html in --results; Markdown goes to stdout]",
)
@click.option("--markdown", is_flag=True, help="Print a Markdown table for a README or a pull request.")
def report(results: Path, output: str | None, markdown: bool) -> int:
    """Render the matrix as a self-contained HTML page, or as Markdown.

    \b
      prober report
      prober report --markdown
    """
    from prober.report.markdown import markdown_of
    from prober.report.page import page_of
    from prober.results.store import Store

    rows = Store(results).rows()
    if not rows:
        raise ProberError(f"{results} holds no rows yet: `prober probe MODEL` measures one.")
    text = markdown_of(rows) if markdown else page_of(rows, datetime.now(UTC))
    target = output or ("-" if markdown else str(results / "report.html"))
    if target == "-":
        click.echo(text, nl=False)
    else:
        _write(target, text)
        click.echo(target)
    return 0


def _write(target: str, text: str) -> None:
    """Replace the file in one step, so that no reader sees half a page."""
    try:
        is_file = not os.path.exists(target) or os.path.isfile(target)  # /dev/null must stay what it is
        with click.open_file(target, "w", encoding="utf-8", atomic=is_file) as file:
            file.write(text)
    except OSError as error:
        raise NotReady(f"{target} cannot be written: {error.strerror or error}.") from error

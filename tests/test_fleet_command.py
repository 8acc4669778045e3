"""`prober fleet` at its edge: no Ray, no cluster, a plan that is wrong."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_cluster import DRIVER

PLAN = '[[engine]]\nversion = "0.32.0"\n[[model]]\nname = "org/model"\n'
WITHOUT_RAY = f"import sys; sys.modules['ray'] = None; {DRIVER}"


def run(program: str, folder: Path, plan: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "plan.toml").write_text(plan)
    return subprocess.run(
        [sys.executable, "-c", program, "fleet", "plan.toml", *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    done = run(WITHOUT_RAY, tmp_path, PLAN, "--dry-run")
    assert done.returncode == 3
    assert done.stderr == "prober: A fleet needs Ray: pip install ray.\n"


@pytest.mark.parametrize("words", [["--deadline", "0"], ["--bisect-version", "org/model", "0.1"]])
def test_options_that_make_no_sense_are_usage_errors(tmp_path: Path, words: list[str]) -> None:
    done = run(WITHOUT_RAY, tmp_path, PLAN, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_wrong_plan_is_told_before_anything_is_connected(tmp_path: Path) -> None:
    done = run(WITHOUT_RAY, tmp_path, PLAN.replace("name", "nam"))
    assert done.returncode == 2
    assert "plan.toml, line 3: model.name: every model needs one" in done.stderr
    assert not (tmp_path / "results").exists()


def test_help_names_the_exit_codes(tmp_path: Path) -> None:
    done = run(WITHOUT_RAY, tmp_path, PLAN, "--help")
    assert done.returncode == 0
    for word in ("--dry-run", "--bisect-version", "Exit codes: 0 no"):
        assert word in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `fleet` is not installed")
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("no-such-host.invalid:6379", "Name or service not known|Temporary failure in name resolution"),
        ("elsewhere", ".+"),  # what Ray says
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence_and_no_fallen_ceiling(
    tmp_path: Path, address: str, why: str
) -> None:
    done = run(DRIVER, tmp_path, PLAN, "--dry-run", "--address", address)
    assert done.returncode == 3, done.stderr  # Ray itself would end the command with 1
    assert re.match(f"prober: there is no Ray cluster at {address}: ({why})", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr

"""The documents tell the truth: commands that exist, options that are taken, files that are there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md")
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, without prompts and comments."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "prober ", "make "))]
    return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


ALL = [command for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("command", [c for c in ALL if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    targets = [word for word in shlex.split(command)[1:] if "=" not in word]
    assert targets
    assert set(targets) <= set(TARGETS)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "-- --load-format dummy --max-num-seqs 16"),
        ("--quick", "--quick -- --load-format dummy --max-num-seqs 16"),
        ("--quick -- --max-num-seqs 4", "--quick -- --load-format dummy --max-num-seqs 16 --max-num-seqs 4"),
    ],
)
def test_arguments_come_on_top_of_what_the_tiny_model_needs(args: str, words: str) -> None:
    line = making(f"ARGS={args}").replace(" --kv-cache-memory-bytes 8388608", "")
    assert line.endswith(" ".join(["--compile", "eager", *shlex.split(words)]))


def test_another_model_has_only_its_own_arguments() -> None:
    assert making("MODEL=org/m", "ARGS=--quick -- --dtype half").endswith("--results results --quick -- --dtype half")


def making(*settings: str) -> str:
    """What `make probe` would run last."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    command = ["make", "-n", "probe", *settings]  # as typed, also where `make test` runs this
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", [c for c in ALL if c.startswith("prober lookup")])
def test_look_ups_answer_from_the_committed_results(run_prober: Run, command: str) -> None:
    done = run_prober(*shlex.split(command)[1:], "--results", ROOT / "results")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", re.findall(r"^\| `prober ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
def test_listed_commands_have_help(run_prober: Run, name: str) -> None:
    done = run_prober(name, "--help")
    assert done.returncode == 0
    assert "Usage: prober" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_help_is_quick_and_imports_nothing_heavy(run_prober: Run) -> None:
    script = (
        "import sys; from prober.cli.main import commands; commands.main(['--help'], standalone_mode=False);"
        "heavy = {'pandas', 'numpy', 'ray', 'rich', 'pynvml', 'jinja2'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

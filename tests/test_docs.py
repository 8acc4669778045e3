"""The pages under docs/ are run from top to bottom, as a reader would in a clone, and print what they show.

A `console` block is run and its output compared: `…` stands for anything. An `sh` block is run and must succeed. What
no test machine has is stood in for: vLLM by the fake engine, `docker` and the like by a few lines of shell that run, or
check, what they were asked to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_engine import Scenario, make_engine

from prober.cli.main import commands as command_line

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
AGE = re.compile(r"today|yesterday|\d+ (?:day|week|month|year)s? old")
COPIED = ("docs", "prober/models", "results", "scripts", "tests/logs", "Makefile", "pyproject.toml", "README.md")
LOG = "tests/logs/v1-parent-wraps.kv_too_small.log"
# `make` says what it would run. An image's command is run here. Interpreters under /opt are ours, with the fake vLLM.
STAND_INS = {
    "make": f'exec {shutil.which("make")} --dry-run "$@"',
    "docker": f"""
        case $1 in
        build) [[ $2 == -f && -e $3 ]] ;;
        logs) cat {LOG} ;;
        run) while [[ $1 != prober ]]; do shift; done; shift; exec "$@" ;;
        *) exit 1 ;;
        esac""",
    "sbatch": '[[ -x $1 && -e $2 ]] && bash -n "$1"',
    "pipx": '[[ $1 == install ]] && exec check-source "$2"',
    "uv": '[[ "$1 $2" == "tool install" ]] && exec check-source "$3"',
    "check-source": """
        extra=$(sed -n 's/^\\.\\[\\(.*\\)\\]$/\\1/p' <<<"$1")
        [[ -e ${1%%\\[*}/pyproject.toml ]] && { [[ -z $extra ]] || grep -q "^$extra = \\[" pyproject.toml; }""",
}


@dataclass(frozen=True)
class Step:
    """One command of a page and what the page shows; None: it shows nothing, and the command must succeed."""

    command: str
    shown: str | None


def steps(page: Path) -> list[Step]:
    found = []
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                found.append(Step(command, shown))
        elif kind == "sh":
            found += [Step(line, None) for line in block.splitlines() if line and not line.startswith("#")]
    return found


def looks_like(printed: str, shown: str) -> bool:
    """Compare line by line, without the spaces at the ends; `…` in what is shown stands for anything."""
    lines = [line.rstrip() for line in AGE.sub("…", printed).strip().splitlines()]
    wanted = [line.rstrip() for line in AGE.sub("…", shown).strip().splitlines()]
    patterns = [".*".join(map(re.escape, line.split("…"))) for line in wanted]
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


@pytest.fixture
def reader(tmp_path: Path) -> dict[str, str]:
    """A reader's clone in ``tmp_path / "clone"``, and the environment of the reader's shell."""
    clone, tools = tmp_path / "clone", tmp_path / "tools"
    for name in COPIED:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "logs/*.log"))
        else:
            shutil.copy2(ROOT / name, clone / name)
    tools.mkdir()
    for name, script in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tools / name).chmod(0o755)
    (tools / "engine").symlink_to(sys.executable)
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    engine = make_engine(tmp_path / "engine", Scenario(on_cpu=True, kv_blocks=600, model_limit=40_960))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PROBER_", "ENGINE_"))},
        **engine.environment,
        **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def run_page(page: Path, environment: dict[str, str], clone: Path) -> list[tuple[Step, str, int]]:
    """Run the steps in one shell, so that what one exports the next one sees; each one's output and exit code."""
    mark = "-- end of a step:"
    script = ["exec 2>&1"]
    for step in steps(page):
        command = re.sub(r"/opt/[^ /]+/bin/python", sys.executable, step.command)
        script += [command, f'echo "{mark}$?"']
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        env=environment, cwd=clone, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    parts = re.split(rf"{mark}(\d+)\n", done.stdout)
    outputs, codes = parts[:-1:2], parts[1::2]
    return [(step, printed, int(code)) for step, printed, code in zip(steps(page), outputs, codes, strict=True)]


@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=lambda page: page.stem)
@pytest.mark.xdist_group("docs")
def test_a_page_prints_what_it_shows(page: Path, reader: dict[str, str], tmp_path: Path) -> None:
    for step, printed, code in run_page(page, reader, tmp_path / "clone"):
        if step.shown is None:
            assert code == 0, f"$ {step.command}\n{printed}"
        else:
            assert looks_like(printed, step.shown), f"$ {step.command}\n{printed}"


def test_a_page_that_shows_something_else_is_found() -> None:
    assert looks_like("a  b \nc 3 months old d\n", "a  b\nc yesterday d")
    assert looks_like("/somewhere/python\n", "…/python\n")
    assert not looks_like("one\ntwo\n", "one\n")
    assert not looks_like("3,968\n", "3,969\n")


def test_the_pages_show_something() -> None:
    shown = {page.stem: len([step for step in steps(page) if step.shown]) for page in PAGES}
    assert shown["kv-cache-error"] >= 4
    assert shown["reading"] >= 3
    assert shown["sharing"] >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        file = (page.parent / target) if target else page
        assert target.startswith("https://") or file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_named_in_a_page_exist(page: Path) -> None:
    """Of every command in backticks or a block, also the ones that no block runs."""
    text = page.read_text(encoding="utf-8")
    for name, rest in re.findall(r"prober ([a-z]+)((?: [^`\n|]*)?)", text):
        if name in command_line.commands:
            known = {option for parameter in command_line.commands[name].params for option in parameter.opts}
            assert set(re.findall(r"--[a-z][\w-]*", rest.partition(" -- ")[0])) <= known | {"--help"}


def blocks_of(readme: str) -> list[str]:
    return [block for _, block in BLOCK.findall((ROOT / readme).read_text(encoding="utf-8"))]


def test_the_vietnamese_readme_says_the_same_in_the_same_order() -> None:
    """The same commands with the same output, the same sections, tables and numbers."""
    english, vietnamese = "README.md", "README.vi.md"
    assert [re.sub(r" +#.*", "", block) for block in blocks_of(english)] == [
        re.sub(r" +#.*", "", block) for block in blocks_of(vietnamese)
    ]
    for pattern in (r"^(#+) ", r"^\| (`[^`]*`)", r"(?<![\w.])\d+(?:[.,]\d+)*(?![\w.])", r"\]\(([^)]*)\)"):
        mine, theirs = (re.findall(pattern, (ROOT / name).read_text("utf-8"), re.M) for name in (english, vietnamese))
        assert sorted(set(mine) - {"README.vi.md"}) == sorted(set(theirs) - {"README.md"}), pattern


def test_the_first_screen_shows_the_row_that_was_measured() -> None:
    """The output in the README is that of the trials in docs/example, figure by figure."""
    screen = next(block for block in blocks_of("README.md") if "proven ceiling" in block)
    header, row = (line.split(",") for line in (DOCS / "example" / "matrix.csv").read_text().splitlines()[:2])
    measured = dict(zip(header[: header.index("verified")], row, strict=False))
    assert f"eager on {measured['gpu']}, vLLM {measured['vllm_version']}" in screen
    for fact, column in (
        ("max_model_len", "max_model_len"), ("refused", "refused_max_model_len"),
        ("recommended", "recommended_max_model_len"), ("vLLM's guess", "estimated_max_model_len"),
    ):  # fmt: skip
        assert re.search(rf"^  {fact} +{int(measured[column]):,}\b", screen, re.MULTILINE), fact
    assert f"{measured['num_gpu_blocks']} blocks of {measured['block_size']}" in screen

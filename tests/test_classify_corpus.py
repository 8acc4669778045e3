"""Public start-ups: no misreading that would make a wrong ceiling, and nearly all outcomes and figures right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CORPUS = REPOSITORY.parent / "shared" / "corpus"


@pytest.mark.skipif(not CORPUS.exists(), reason="no public start-ups beside the repository")
def test_the_corpus_is_read_right() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/corpus.py", str(CORPUS)],
        cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dangerous misreads  0" in done.stdout
    assert "misread)" not in done.stdout
    right, total = map(int, next(line for line in done.stdout.splitlines() if "figures right" in line).split()[2:5:2])
    assert right / total >= 0.98

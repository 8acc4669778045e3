"""The vLLM of a cell on this node: an interpreter that is there, or an environment that ``uv`` makes here once."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from prober.engine.install import inspect
from prober.fleet.jobs import NodeEngine
from prober.fleet.plan import EngineSpec
from prober.records import NotReady
from prober.trial.process import output_of

MAKE_SECONDS = 3600.0  # vLLM and what it needs are several GiB


def python_of(wish: EngineSpec) -> Path:
    """The interpreter; of a version to be made, where `make` puts it."""
    return Path(wish.python) if wish.python is not None else _folder() / f"vllm-{wish.version}" / "bin" / "python"


def look(wish: EngineSpec) -> NodeEngine:
    """Say what is there now. An engine that can be made here counts as there."""
    python = python_of(wish)
    if wish.version is not None and not python.exists():
        if shutil.which("uv") is None:
            return NodeEngine(problem=f"{wish.name} cannot be made: there is no uv on the node")
        return NodeEngine(version=wish.version)
    try:
        return NodeEngine(version=inspect(python, output_of).vllm_version)
    except NotReady as error:
        return NodeEngine(problem=str(error))


def make(wish: EngineSpec) -> NodeEngine:
    """Make the environment if it is not there, and say what is there now. It appears whole or not at all."""
    target = _folder() / f"vllm-{wish.version}"
    if wish.version is None or target.exists():
        return look(wish)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for command in (
            ["uv", "venv", "--quiet", "--relocatable", str(draft / "venv")],
            ["uv", "pip", "install", "--quiet", "--python", str(draft / "venv/bin/python"), wish.name],
        ):
            status, said = output_of(command, MAKE_SECONDS)
            if status != 0:
                last = (said.strip().splitlines() or ["it took too long"])[-1]
                return NodeEngine(problem=f"{wish.name} could not be made: {last}")
        _move(draft / "venv", target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return look(wish)


def _move(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.exists():  # another driver was faster: its environment is as good
            raise


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prober" / "engines"

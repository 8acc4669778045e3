"""Who may import whom, and the one home of everything that touches the world."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "prober"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))
# From the bottom up: a module imports from its own row or the rows before it, never from one after it.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nouns", ("records", "answers", "schema", "prompts")),
    (
        "pure",
        (
            *("search", "observe", "flags", "axes", "margin", "predict", "checkpoint", "patience"),
            *("scrub", "public_text"),
            *("patterns", "rules", "marks", "figures", "logtext", "needles", "wrapped", "startup", "verdict"),
            *("estimates", "remedies", "advice", "explain", "imported"),
            *("trial_json", "matrix", "ceiling_row", "naming", "serve_flags", "lookup_text", "merge", "diff"),
            *("schema_pages", "summary", "plan_table", "plan", "known_rows", "cells", "jobs", "placement"),
            *("nightly", "nightly_text", "openmetrics", "version_search"),
        ),
    ),
    (
        "effects",
        (
            *("host", "ownership", "devices", "gpus", "leases", "neighbours", "guard"),
            *("supervisor", "launch", "engine", "llm_child", "proof", "trial", "store"),
        ),
    ),
    ("policy", ("controller", "station", "probe", "doctor", "lookup", "frame", "api")),
    (
        "many",
        (
            *("carry", "drive", "fleet", "fleet_files", "fleet_night", "fleet_node", "node_engine"),
            *("report", "report_rows", "report_heat", "report_curves", "report_markdown"),
        ),
    ),
    ("edge", ("display", "cli_probe", "cli_results", "cli_machine", "cli_logs", "cli_report", "cli_fleet", "cli")),
)
HOMES = {
    "subprocess": {"launch", "supervisor"},
    "pynvml": {"gpus"},
    "filelock": {"store", "leases"},
    "ray": {"fleet", "fleet_node"},
    "click": {"cli", "cli_probe", "cli_results", "cli_machine", "cli_logs", "cli_report", "cli_fleet"},
    "rich": {"display", "cli_probe"},
    "pandas": {"frame", "report", "api"},
    "vllm": {"llm_child"},  # which only ever runs in the engine's interpreter
    "torch": set[str](),
}


def imports_of(module: str) -> Iterator[tuple[str, bool]]:
    """Every name that a module imports, and whether only the type checker sees it."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "prober":
            yield from ((f"prober.{alias.name}", id(node) in typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in typing_only


def test_every_module_has_a_layer() -> None:
    placed = [name for _, names in LAYERS for name in names]
    assert len(placed) == len(set(placed))
    assert set(MODULES) <= set(placed), set(MODULES) - set(placed)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_looks_up(module: str) -> None:
    level = {name: row for row, (_, names) in enumerate(LAYERS) for name in names}
    for name, is_typing_only in imports_of(module):
        package, _, other = name.partition(".")
        if package == "prober" and other in level and not is_typing_only:
            assert level[other] <= level[module], f"{module} ({LAYERS[level[module]][0]}) imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_what_touches_the_world_has_one_home(module: str) -> None:
    for name, is_typing_only in imports_of(module):
        package = name.partition(".")[0]
        assert is_typing_only or module in HOMES.get(package, {module}), f"{module} imports {package}"


def test_no_import_cycle() -> None:
    graph = {
        module: {name.split(".")[1] for name, is_typing in imports_of(module) if "prober." in name and not is_typing}
        for module in MODULES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        for other in sorted(graph.get(module, ())):
            if other not in done:
                visit(other, (*path, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("llm_child", "supervisor")])
def test_only_the_edge_prints(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("print", "click.echo")]
    assert not calls or module.startswith("cli"), f"{module} prints"

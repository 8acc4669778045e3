"""Who may import whom, and the one home of everything that touches the world."""

# ruff: noqa: SIM905 - a list of names reads better without quotes
from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "prober"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)
# From the bottom up: a module imports from its own folder, its own row or the rows before it, never from one after it.
# A folder stands in one row; the modules at the root have names of their own.
LAYERS = {
    "nouns": "records".split(),
    "engine": "engine".split(),  # facts about vLLM, which the pure folders use, too
    "pure": "redact logs advice search".split(),
    "effects": "host trial results".split(),
    "policy": "measure".split(),
    "many": "report fleet".split(),
    "door": "api cli".split(),
}
HOMES = {
    "subprocess": {"trial.process", "trial.supervisor"},
    "pynvml": {"host.nvml"},
    "filelock": {"results.store", "host.leases", "host.tempdir", "fleet.journal"},
    "ray": {"fleet.ray_cluster", "fleet.node"},
    "click": {module for module in MODULES if module.startswith("cli.")},
    "rich": {"cli.progress", "cli.probe"},
    "pandas": {"results.frame", "report.page", "api"},
    "vllm": {"trial.offline_vllm"},  # which only ever runs in the engine's interpreter
    "torch": set[str](),
}


def imports_of(module: str) -> Iterator[tuple[str, bool]]:
    """Every name that a module imports, and whether only the type checker sees it."""
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
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
            yield from ((f"{node.module}.{alias.name}", id(node) in typing_only) for alias in node.names)


def folder_of(module: str) -> str:
    return module.partition(".")[0]


def ours(module: str) -> set[str]:
    """The modules of the package that a module imports when it runs."""
    return {name.removeprefix("prober.") for name, is_typing_only in imports_of(module) if not is_typing_only} & {
        *MODULES
    }


def test_every_folder_has_a_layer() -> None:
    placed = [name for names in LAYERS.values() for name in names]
    assert sorted(placed) == sorted({folder_of(module) for module in MODULES})


@pytest.mark.parametrize("module", MODULES)
def test_no_module_looks_up(module: str) -> None:
    level = {name: row for row, names in enumerate(LAYERS.values()) for name in names}
    for other in ours(module):
        assert level[folder_of(other)] <= level[folder_of(module)], f"{module} imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_what_touches_the_world_has_one_home(module: str) -> None:
    for name, is_typing_only in imports_of(module):
        package = name.partition(".")[0]
        assert is_typing_only or module in HOMES.get(package, {module}), f"{module} imports {package}"


def test_no_circle_of_modules() -> None:
    refuse_circles({module: ours(module) for module in MODULES})


def test_no_circle_of_folders() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        graph[folder_of(module)] |= {folder_of(other) for other in ours(module)} - {folder_of(module)}
    refuse_circles(graph)


def refuse_circles(graph: Mapping[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for other in sorted(graph.get(name, ())):
            if other not in done:
                visit(other, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("trial.offline_vllm", "trial.supervisor")])
def test_only_the_edge_prints(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("print", "click.echo")]
    assert not calls or module.startswith("cli."), f"{module} prints"

"""Who may import whom, and the one home of everything that touches the world."""

# ruff: noqa: SIM905 - a list of names reads better without quotes
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "prober"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)
# From the bottom up: a module imports from its own row or the rows before it, never from one after it.
LAYERS = {
    "nouns": """
        records
        matrix.answers matrix.schema
        trials.prompts
    """.split(),
    "pure": """
        search observe flags axes margin predict checkpoint summary scrub
        fleet.plan_table fleet.plan fleet.known_rows fleet.cells fleet.jobs fleet.placement fleet.nightly
        fleet.nightly_text fleet.openmetrics fleet.version_search
        logs.patterns logs.rules logs.marks logs.figures logs.logtext logs.needles logs.wrapped logs.tracebacks
        logs.startup logs.verdict logs.estimates logs.remedies logs.causes logs.advice logs.explain logs.imported
        matrix.public_text matrix.trial_json matrix.table matrix.ceiling_row matrix.naming matrix.serve_flags
        matrix.lookup_text matrix.merge matrix.diff matrix.schema_pages
        trials.patience
    """.split(),
    "effects": """
        machine.host machine.ownership machine.devices machine.gpus machine.leases machine.neighbours machine.guard
        machine.private
        matrix.store
        trials.supervisor trials.launch trials.engine trials.llm_child trials.proof trials.trial
    """.split(),
    "policy": """
        controller station launches campaign doctor api
        matrix.lookup matrix.frame
    """.split(),
    "many": """
        fleet.carry fleet.drive fleet.cluster fleet.files fleet.night fleet.node fleet.node_engine
        report.page report.rows report.heat report.curves report.markdown
    """.split(),
    "edge": """
        display cli
        commands.probe commands.results commands.machine commands.logs commands.report commands.fleet
    """.split(),
}
HOMES = {
    "subprocess": {"trials.launch", "trials.supervisor"},
    "pynvml": {"machine.gpus"},
    "filelock": {"matrix.store", "machine.leases"},
    "ray": {"fleet.cluster", "fleet.node"},
    "click": {"cli", *(module for module in MODULES if module.startswith(("cli", "commands.")))},
    "rich": {"display", "commands.probe"},
    "pandas": {"matrix.frame", "report.page", "api"},
    "vllm": {"trials.llm_child"},  # which only ever runs in the engine's interpreter
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


def test_every_module_has_a_layer() -> None:
    placed = [name for names in LAYERS.values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(MODULES) <= set(placed), set(MODULES) - set(placed)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_looks_up(module: str) -> None:
    level = {name: row for row, names in enumerate(LAYERS.values()) for name in names}
    for name, is_typing_only in imports_of(module):
        package, _, other = name.partition(".")
        if package == "prober" and other in level and not is_typing_only:
            assert level[other] <= level[module], f"{module} ({[*LAYERS][level[module]]}) imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_what_touches_the_world_has_one_home(module: str) -> None:
    for name, is_typing_only in imports_of(module):
        package = name.partition(".")[0]
        assert is_typing_only or module in HOMES.get(package, {module}), f"{module} imports {package}"


def test_no_import_cycle() -> None:
    graph = {
        module: {name.removeprefix("prober.") for name, is_typing in imports_of(module) if not is_typing} & set(MODULES)
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


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("trials.llm_child", "trials.supervisor")])
def test_only_the_edge_prints(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("print", "click.echo")]
    assert not calls or module.startswith(("cli", "commands.")), f"{module} prints"

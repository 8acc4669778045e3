"""What several test files share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Scenario, make_engine, write_model

PROBER = Path(sys.executable).with_name("prober")
# Minutes together: left out of `make test-fast`.
SLOW = {
    *("test_check_gpu", "test_search_loop_faults", "test_docs", "test_faults", "test_fleet_cluster", "test_process"),
    *(
        "test_fleet_launchpads",
        "test_process_tree",
        "test_packaging",
        "test_probe",
        "test_probe_modes",
        "test_report_page",
    ),
    *("test_resume", "test_redact", "test_store_faults", "test_trial", "test_trial_gpu", "test_trial_secrets"),
}

Run = Callable[..., subprocess.CompletedProcess[str]]
Probe = Callable[..., tuple[subprocess.CompletedProcess[str], FakeEngine]]


@pytest.fixture
def run_prober(tmp_path: Path) -> Run:
    """Run the installed command in an empty folder."""
    import os

    def run(
        *words: str | Path, environment: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if name not in ("ENGINE_PYTHON", "PROBER_TRIAL")}
        return subprocess.run(
            [str(PROBER), *map(str, words)],
            env={**own, **(environment or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def fake_probe(tmp_path: Path, run_prober: Run) -> Probe:
    """Probe the fake engine as it plays ``scenario``: the command, its launches, and nothing of it left alive."""

    engines: dict[str, FakeEngine] = {}  # of one scenario one journal, so that a second run goes on in it

    def probe(
        scenario: Scenario, *words: str, vllm: Sequence[str] = (), limit: int = 131_072
    ) -> tuple[subprocess.CompletedProcess[str], FakeEngine]:
        if repr(scenario) not in engines:
            engines[repr(scenario)] = make_engine(tmp_path / "engine", scenario)
        engine = engines[repr(scenario)]
        model = tmp_path / "model"
        if not model.exists():
            write_model(model, limit)
        given = ["probe", model, "--python", sys.executable, *words, "--", *vllm]
        done = run_prober(*given, environment=engine.environment)
        assert engine.alive() == (), done.stderr
        return done, engine

    return probe


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)

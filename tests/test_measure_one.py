"""A probe and a node of a fleet measure in the same way: same limit, same keys, and each continues from the other."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Scenario, make_engine, write_model

import prober
from prober.engine.install import Engine
from prober.fleet.jobs import Cell
from prober.fleet.node import Search, search
from prober.fleet.plan import EngineSpec
from prober.fleet.protocol import End, Job, Known, Reply, Streamed
from prober.host import system
from prober.measure.devices import Devices
from prober.measure.measure import measure_one
from prober.measure.request import Request
from prober.measure.search_loop import LaunchResult
from prober.records import Ceiling, Combination, Figures, Machine, Outcome, Report, Stage, Status, Trial, Verdict
from prober.results.store import Store

MODEL = "acme/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HERE = Machine("NVIDIA L4", "cuda", "here", gpu_memory_mib=23034, vllm_version="0.28.0")
THERE = replace(HERE, machine="there", gpu_hash="other cards")
HELD = Devices(Engine(Path(sys.executable), "0.28.0", None, is_cpu_build=False), HERE)
CELL = Cell("key", Combination(MODEL), HERE.gpu, False, EngineSpec(python=sys.executable), "0.28.0")
CEILING = 3000


class Hub:
    """A Hub cache that the prober reads; `download` fills it as vLLM would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / f"models--{MODEL.replace('/', '--')}"

    def download(self, reference: str = "main", commit: str = COMMIT, **config: object) -> None:
        (self._folder / "refs").mkdir(parents=True, exist_ok=True)
        (self._folder / "refs" / reference).write_text(commit)
        write_model(self._folder / "snapshots" / commit, **config)  # type: ignore[arg-type]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return Hub(tmp_path / "hub")


class Truth:
    """A launcher with a known ceiling; a start without a length takes ``default``."""

    def __init__(
        self, ceiling: int = CEILING, default: int = 32_768, before: Callable[[], None] = lambda: None
    ) -> None:
        self.ceiling, self.default, self._before = ceiling, default, before
        self.launched: list[int | None] = []

    def __call__(self, combination: Combination, length: int | None, tag: str, report: Report) -> LaunchResult:
        self._before()
        self.launched.append(length)
        length = self.default if length is None else length
        if length <= self.ceiling:
            return LaunchResult(Verdict(Outcome.FITS, Stage.SERVE, figures=Figures(requested_max_model_len=length)))
        figures = Figures(requested_max_model_len=length, estimated_max_len=self.ceiling)
        return LaunchResult(Verdict(Outcome.KV_TOO_SMALL, Stage.KV_CACHE, figures=figures))


class Silent:
    def resumed(self, trials: object) -> None: ...
    def launching(self, step: object, launch: int, bracket: object) -> None: ...
    def running(self, stage: Stage, age_seconds: float) -> None: ...
    def finished(self, trial: Trial) -> None: ...


def probed(folder: Path, truth: Truth, combination: Combination = CELL.combination) -> Ceiling:
    request = Request([combination], Path(sys.executable), folder)
    return measure_one(request, combination, HELD, Store(folder), truth, Silent())


def searched(folder: Path, truth: Truth, cell: Cell = CELL, known: tuple[Known, ...] = ()) -> tuple[Reply, list[Trial]]:
    sent: list[Streamed] = []
    reply = Search(Job(cell, time.time() + 600, known), HELD, folder, sent.append).run(truth)
    return reply, [one.known.trial for one in sent]


def test_a_node_reads_the_limit_of_the_revision_that_the_plan_names(hub: Hub, tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope"}
    hub.download("long", "f" * 40, max_position_embeddings=8192, rope_scaling=scaling)
    cell = replace(CELL, combination=replace(CELL.combination, model_revision="long"))
    reply, trials = searched(tmp_path / "node", Truth(ceiling=100_000, default=4096), cell)
    assert reply.row is not None
    assert (reply.row.status, reply.row.max_model_len) == (Status.MODEL_LIMIT, 8192)
    assert [trial.length for trial in trials][-1] == 8192


def test_a_probe_and_a_node_share_the_key_of_a_hub_model(hub: Hub, tmp_path: Path) -> None:
    hub.download()
    ours = probed(tmp_path / "results", Truth()).trials
    _, theirs = searched(tmp_path / "node", Truth())
    assert {trial.combination_key for trial in ours} == {trial.combination_key for trial in theirs}
    assert {trial.model_revision for trial in (*ours, *theirs)} == {COMMIT}


def test_the_search_after_a_download_repeats_no_trial(hub: Hub, tmp_path: Path) -> None:
    first, second = Truth(before=hub.download), Truth()
    assert probed(tmp_path, first).max_model_len == CEILING
    assert first.launched == [None, CEILING, CEILING + 1]
    assert probed(tmp_path, second).max_model_len == CEILING
    assert second.launched == []


def test_another_commit_is_another_model(hub: Hub, tmp_path: Path) -> None:
    hub.download()
    probed(tmp_path, Truth())
    hub.download(commit="a" * 40)
    again = Truth()
    probed(tmp_path, again)
    assert again.launched


def test_a_node_without_the_model_is_guided_by_the_trials_of_one_that_has_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.download()
    there = Devices(HELD.engine, THERE)
    sent: list[Streamed] = []
    Search(Job(CELL, time.time() + 600), there, tmp_path / "a", sent.append).run(Truth())
    known = tuple(one.known for one in sent)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    truth = Truth(before=Hub(tmp_path / "empty").download)
    reply, _ = searched(tmp_path / "b", truth, known=known)
    assert reply.row is not None
    assert reply.row.max_model_len == CEILING
    assert sorted(length or 0 for length in truth.launched) == [CEILING, CEILING + 1]  # its edges, and no more


@pytest.fixture
def engine(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    hub.download()
    engine = make_engine(tmp_path / "engine", Scenario())
    for name, value in engine.environment.items():
        monkeypatch.setenv(name, value)
    return engine


def cpu_cell() -> Cell:
    return Cell("key", Combination(MODEL), system.cpu_name(), True, EngineSpec(python=sys.executable), None)


def test_a_fleet_continues_from_the_trials_of_a_probe(engine: FakeEngine, tmp_path: Path) -> None:
    results = tmp_path / "results"
    ceiling = prober.probe(MODEL, python=sys.executable, device="cpu", results=results)
    before = len(engine.launches())
    assert before == len(ceiling.trials)
    recorded = tuple(Store(results).trials())
    reply = search(Job(cpu_cell(), time.time() + 120, recorded=recorded), lambda _: None)
    assert reply.end is End.ANSWERED, reply.why
    assert reply.row is not None
    assert (reply.row.max_model_len, len(engine.launches())) == (ceiling.max_model_len, before)


def test_a_probe_continues_from_the_trials_of_a_fleet(engine: FakeEngine, tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    store.check_writable()
    reply = search(Job(cpu_cell(), time.time() + 120), lambda one: store.append(one.known.trial))
    assert reply.end is End.ANSWERED, reply.why
    assert reply.row is not None
    before = len(engine.launches())
    assert before == len(store.trials())
    ceiling = prober.probe(MODEL, python=sys.executable, device="cpu", results=store.folder)
    assert (ceiling.max_model_len, len(engine.launches())) == (reply.row.max_model_len, before)
    assert json.loads(store.trials_path.read_text().splitlines()[0])["model_revision"] == COMMIT

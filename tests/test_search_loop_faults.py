"""Whatever goes wrong, and in whatever order: the ceiling that a search reports is the true one, or it reports none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Fault, FaultKind, Scenario

from prober.measure.search_loop import LaunchResult, Task, measure
from prober.records import (
    Bracket,
    Combination,
    Figures,
    Machine,
    NotReady,
    Outcome,
    Report,
    Stage,
    Status,
    Trial,
    Verdict,
)
from prober.results.schema import Row
from prober.search.next_length import Try

MACHINE = Machine("GPU", "cuda", "m1")


class Memory:
    """A results folder without a disk: what `measure` asks of a Store."""

    def __init__(self) -> None:
        self.kept: list[Trial] = []

    def check_writable(self) -> None:
        pass

    def trials(self) -> list[Trial]:
        return list(self.kept)

    def rows(self) -> list[Row]:
        return []

    def append(self, trial: Trial) -> None:
        self.kept.append(trial)


class Silent:
    """Nobody watches."""

    def resumed(self, trials: Sequence[Trial]) -> None:
        pass

    def launching(self, step: Try, launch: int, bracket: Bracket) -> None:
        pass

    def running(self, stage: Stage, age_seconds: float) -> None:
        pass

    def finished(self, trial: Trial) -> None:
        pass


def skip(outcome: Outcome, *stages: Stage, rule: str | None = None) -> Callable[[random.Random], Verdict]:
    return lambda chance: Verdict(outcome, chance.choice(stages or tuple(Stage)), "fault", rule=rule)


# What a fault shows that says nothing about the length, whatever the length is.
SKIPS = (
    skip(Outcome.CRASH),
    skip(Outcome.TIMEOUT),
    skip(Outcome.DEVICE_BUSY, Stage.CONFIG, Stage.LOAD, Stage.PROFILE),
    skip(Outcome.HOST_OOM, rule="guard_shared"),
    skip(Outcome.HOST_OOM, rule="kernel_kill"),
    skip(Outcome.DEVICE_OOM, Stage.CONFIG, Stage.DOWNLOAD, Stage.COMPILE, Stage.READY),
    skip(Outcome.UNFINISHED),
    skip(Outcome.READY, Stage.READY),
    skip(Outcome.OVER_MODEL_LIMIT, Stage.CONFIG),  # and the message names no limit
    skip(Outcome.SEQUENCE_SLOTS, Stage.CAPTURE),
)


class Interrupted(Exception):
    """The prober was killed."""


@dataclass
class World:
    """A model on a machine: its limit, its true ceiling, what vLLM says about it, and what goes wrong how often."""

    chance: random.Random
    limit: int
    ceiling: int  # below the lowest length: nothing fits
    block: int
    fault_rate: float
    stubborn: frozenset[int]  # lengths at which every launch fails
    kill_rate: float
    launches: Counter[int] = field(default_factory=Counter)

    def launch(self, combination: Combination, length: int | None, tag: str, report: Report) -> LaunchResult:
        asked = self.limit if length is None else length
        self.launches[asked] += 1
        if self.chance.random() < self.kill_rate:
            raise Interrupted
        return LaunchResult(self.verdict(asked, length is None))

    def verdict(self, asked: int, is_default: bool) -> Verdict:
        if asked in self.stubborn or self.chance.random() < self.fault_rate:
            return self.chance.choice(SKIPS)(self.chance)
        figures = Figures(requested_max_model_len=asked, block_size=self.chance.choice((self.block, None)))
        if asked > self.limit:
            return Verdict(Outcome.OVER_MODEL_LIMIT, Stage.CONFIG, figures=Figures(model_limit=self.limit))
        if asked <= self.ceiling:
            blocks = self.chance.choice((None, self.ceiling // self.block, self.hint() // self.block))
            return Verdict(Outcome.FITS, Stage.SERVE, figures=_with(figures, gpu_blocks=blocks))
        refusals = [
            Verdict(Outcome.KV_TOO_SMALL, Stage.KV_CACHE, figures=_with(figures, estimated_max_len=self.hint())),
            Verdict(Outcome.NO_KV_MEMORY, Stage.KV_CACHE, figures=figures),
            Verdict(Outcome.UNSERVABLE, Stage.SERVE, figures=_with(figures, gpu_blocks=self.hint() // self.block)),
            Verdict(Outcome.HOST_OOM, Stage.PROFILE, rule="guard", figures=figures),
            Verdict(Outcome.DEVICE_OOM, self.chance.choice((Stage.PROFILE, Stage.CAPTURE, Stage.SERVE))),
        ]
        return self.chance.choice(refusals)

    def hint(self) -> int:
        """vLLM's estimate: right, near, or nonsense."""
        near, nonsense = self.ceiling + self.chance.randint(-40, 40), self.chance.randint(1, self.limit)
        return self.chance.choice((self.ceiling, self.ceiling, max(1, near), nonsense))


def _with(figures: Figures, **changes: int | None) -> Figures:
    return replace(figures, **changes)  # type: ignore[arg-type]  # counts of tokens and blocks


def make_world(chance: random.Random) -> World:
    limit = chance.choice((64, 2048, 4096, 32_768, 131_072, chance.randint(17, 200_000)))
    ceiling = chance.choice((limit, chance.randint(1, limit), chance.randint(1, limit), 15, 16))
    stubborn = {limit} if chance.random() < 0.1 else set()
    for length in (ceiling, ceiling + 1, ceiling - 1, chance.randint(16, limit)):
        if chance.random() < 0.08:
            stubborn.add(length)
    return World(
        chance=chance,
        limit=limit,
        ceiling=min(ceiling, limit),
        block=chance.choice((1, 16, 128)),
        fault_rate=chance.choice((0.0, 0.0, 0.1, 0.3, 0.6)),
        stubborn=frozenset(stubborn),
        kill_rate=chance.choice((0.0, 0.0, 0.1)),
    )


def search(world: World, low: int, high: int | None) -> Any:
    """Measure, going on after every kill."""
    store, task = Memory(), Task(Combination("m"), MACHINE, low=low, high=high)
    while True:
        try:
            return measure(task, store, world.launch, Silent()), store  # type: ignore[arg-type]  # a Store's shape
        except Interrupted:
            continue


@pytest.mark.parametrize("part", range(4))
def test_reported_ceiling_is_the_true_one_or_none(part: int) -> None:
    """10,000 searches; a failure names its seed."""
    seen: Counter[Status] = Counter()
    for seed in range(part * 2500, (part + 1) * 2500):
        chance = random.Random(seed)
        world = make_world(chance)
        low = chance.choice((16, 16, 2, chance.randint(2, 64)))
        high = chance.choice((None, None, chance.randint(low, 2 * world.limit)))
        ceiling, store = search(world, low, high)
        seen[ceiling.status] += 1
        why = f"seed {seed}: {ceiling.status} {ceiling.bracket} of {world}, low {low}, high {high}"
        best = min(world.ceiling, high or world.ceiling)
        if ceiling.max_model_len is not None:
            assert ceiling.max_model_len == best, why
        match ceiling.status:
            case Status.EXACT:
                assert ceiling.bracket == Bracket(world.ceiling, world.ceiling + 1), why
            case Status.MODEL_LIMIT:
                assert world.ceiling == world.limit, why
            case Status.AT_LEAST:
                assert high is not None, why
                assert world.ceiling >= high, why
            case Status.DOES_NOT_FIT:
                assert world.ceiling < low, why
            case _:
                assert ceiling.status is Status.INCONCLUSIVE, why  # the truth does not move, so nothing is unstable
                assert ceiling.max_model_len is None, why
                assert world.fault_rate or world.stubborn or best < low, why
        serves, refused = ceiling.bracket.serves, ceiling.bracket.refused
        assert serves is None or serves <= world.ceiling, why
        assert refused is None or refused > world.ceiling, why
        answers = (Outcome.FITS, Outcome.KV_TOO_SMALL)
        answered = [(t.length, t.is_default_length) for t in store.kept if t.verdict.outcome in answers]
        assert len(answered) == len(set(answered)), why
    assert seen[Status.EXACT] > 500, seen
    assert all(seen[status] > 20 for status in (Status.MODEL_LIMIT, Status.DOES_NOT_FIT, Status.INCONCLUSIVE)), seen


def test_a_truth_that_moves_is_never_one_number_above_what_is_refused() -> None:
    """Now and then a start at the same length goes the other way: what is reported was served, or nothing is."""
    for seed in range(1000):
        chance = random.Random(seed)
        world = make_world(chance)
        true = world.ceiling

        def launch(
            combination: Combination,
            length: int | None,
            tag: str,
            report: Report,
            world: World = world,
            chance: random.Random = chance,
            true: int = true,
        ) -> LaunchResult:
            world.ceiling = min(world.limit, max(1, true + chance.choice((0, 0, 0, -world.block, world.block))))
            return world.launch(combination, length, tag, report)

        world.kill_rate = 0.0
        store = Memory()
        ceiling = measure(Task(Combination("m"), MACHINE), store, launch, Silent())  # type: ignore[arg-type]
        if ceiling.max_model_len is not None:
            served = [t for t in store.kept if t.length == ceiling.max_model_len and t.verdict.outcome is Outcome.FITS]
            assert served, f"seed {seed}"
            assert abs(ceiling.max_model_len - true) <= world.block, f"seed {seed}: {ceiling.bracket} around {true}"


def test_a_machine_that_is_not_ready_ends_the_search_and_keeps_what_is_known() -> None:
    world = make_world(random.Random(1))
    world.limit, world.ceiling, world.fault_rate, world.kill_rate, world.stubborn = 4096, 500, 0.0, 0.0, frozenset()
    store, task = Memory(), Task(Combination("m"), MACHINE)
    calls = iter(range(100))

    def launch(combination: Combination, length: int | None, tag: str, report: Report) -> LaunchResult:
        if next(calls) == 2:
            raise NotReady("GPU 0 is busy")
        return world.launch(combination, length, tag, report)

    with pytest.raises(NotReady):
        measure(task, store, launch, Silent())  # type: ignore[arg-type]
    assert len(store.kept) == 2
    ceiling = measure(task, store, launch, Silent())  # type: ignore[arg-type]
    assert ceiling.max_model_len == 500
    assert ceiling.trials[:2] == tuple(store.kept[:2])


HUNG = Fault(FaultKind.HANG, "load")


@pytest.mark.parametrize(
    ("fault", "words", "evidence"),
    [
        (Fault(FaultKind.HANG, "load"), ("load=0.7",), "at stage load"),
        (Fault(FaultKind.HANG, "config"), ("config=0.7",), "at stage config"),
        (Fault(FaultKind.COMPLETION_HANGS, from_length=400), ("serve=0.7",), "at stage serve"),
    ],
)
def test_hang_is_retried_and_never_becomes_too_long(
    fake_probe: Any, tmp_path: Path, fault: Fault, words: tuple[str, ...], evidence: str
) -> None:
    done, engine = fake_probe(Scenario(faults=(fault,)), *(f"--stage-limit={word}" for word in words), limit=512)
    assert done.returncode == 1
    assert "inconclusive" in done.stdout + (tmp_path / "results" / "matrix.csv").read_text()
    assert evidence in done.stderr
    assert max(Counter(launch.length for launch in engine.launches()).values()) == 2
    assert "(timeout)" in done.stderr


def test_one_hang_costs_one_launch(fake_probe: Any) -> None:
    fault = Fault(FaultKind.HANG, "load", launches=(2,))
    done, engine = fake_probe(Scenario(faults=(fault,)), "--stage-limit", "load=0.7")
    assert done.returncode == 0
    assert "496  (a request of exactly that length was answered)" in done.stdout
    assert [launch.length for launch in engine.launches()] == [131_072, 496, 496, 497]

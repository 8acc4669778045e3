"""Searches on simulated engines, each against its exhaustive truth, beside plain bisection.

Every engine answers as vLLM does: a refusal carries an estimate worked out from the memory of that start, a start its
blocks. What differs is how the memory behaves.
"""

from __future__ import annotations

import bisect
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest

from prober.records import Bracket, Figures, Outcome, Stage, Status, Trial, Verdict, Verify
from prober.search.interpret import interpret
from prober.search.next_length import LOWEST, Done, Space, halvings, next_step

SEED = 20_261_201
CASES = 400  # of each kind


@dataclass
class Machine:
    """One simulated engine: blocks by length and launch, whether the null block is in the start-up check."""

    limit: int
    block: int
    blocks: Callable[[int, int], int]  # length, launch -> KV blocks of that start
    is_reserved: bool = True
    switches: tuple[int, ...] = ()
    tells_estimate: bool = True  # False: 0.7.0 to 0.9.0, where a refusal holds rounded GiB only
    checks: float = 1.0  # the share of the need that start-up looks at (0.14 to 0.18: one group of a hybrid)
    launches: int = 0

    def starts(self, length: int, launch: int = 0) -> bool:
        need = int(-(-length // self.block) * self.checks)
        return need <= self.blocks(length, launch) - self.is_reserved

    def serves(self, length: int, launch: int = 0) -> bool:
        return -(-max(length - 1, 1) // self.block) <= self.blocks(length, launch) - 1 and self.starts(length, launch)

    def truth(self) -> int:
        """The longest length that serves: of each regime the edge, halved to and then checked one by one."""
        ends = [0, *(end for end in self.switches if end < self.limit), self.limit]
        longest = 0
        for below, end in pairwise(ends):
            edge = below + bisect.bisect_left(range(below + 1, end + 1), True, key=lambda n: not self.serves(n))
            around = [n for n in range(max(edge - 300, below + 1), min(edge + 300, end) + 1) if self.serves(n)]
            longest = max(around, default=longest)
        return longest if longest >= LOWEST else 0

    def launch(self, asked: int | None) -> Trial:
        self.launches += 1
        length = self.limit if asked is None else asked
        blocks = self.blocks(length, self.launches)
        figures = Figures(requested_max_model_len=length, block_size=self.block)
        if not self.starts(length, self.launches):
            estimate = int((blocks - self.is_reserved) / self.checks) * self.block
            outcome = Outcome.KV_TOO_SMALL if estimate > 0 else Outcome.NO_KV_MEMORY
            figures = Figures(length, estimated_max_len=min(estimate, length))
            if not self.tells_estimate:
                needed, available = (round(tokens / 8192, 2) for tokens in (length, blocks * self.block))
                figures = Figures(length, needed_gib=needed, available_gib=available)
            verdict = Verdict(outcome, Stage.KV_CACHE, figures=figures)
        else:
            version = None if self.tells_estimate else "0.8.5"
            figures = Figures(
                requested_max_model_len=length, block_size=self.block, gpu_blocks=blocks, vllm_version=version
            )
            outcome = Outcome.FITS if self.serves(length, self.launches) else Outcome.UNSERVABLE
            verdict = Verdict(outcome, Stage.SERVE, figures=figures)
        return Trial(str(self.launches), "c", "s", length, asked is None, Verify.FULL, verdict, 1.0, "2026-01-01")


def search(machine: Machine) -> Done:
    trials: list[Trial] = []
    while True:
        seen = [o for trial in trials if (o := interpret(trial, Verify.FULL)) is not None]
        step = next_step(seen, Space(switches=machine.switches))
        if isinstance(step, Done):
            return step
        trials.append(machine.launch(step.length))
        assert len(trials) < 100


def plain(chance: random.Random) -> Machine:
    block = chance.choice([16, 32, 64, 128])
    limit = chance.choice([8192, 32_768, 131_072, 262_144])
    count = chance.randint(2, 2 * limit // block)
    return Machine(limit, block, lambda length, launch: count)


def unreserved(chance: random.Random) -> Machine:
    machine = plain(chance)
    machine.is_reserved = False
    return machine


def without_estimate(chance: random.Random) -> Machine:
    machine = unreserved(chance)
    machine.tells_estimate = False
    return machine


def follows_length(chance: random.Random) -> Machine:
    """Buffers that grow with the length asked for: the estimate at the limit is too low."""
    machine = plain(chance)
    most = machine.blocks(1, 1)
    share = chance.uniform(0.0, 0.05)
    machine.blocks = lambda length, launch: max(0, most - int(share * length / machine.block))
    return machine


def two_regimes(chance: random.Random) -> Machine:
    """V0: above 32,768 tokens chunked prefill leaves more memory."""
    above = chance.randint(1000, 6000)
    below = int(above * chance.uniform(0.5, 0.95))
    return Machine(131_072, 16, lambda length, launch: above if length > 32_768 else below, switches=(32_768,))


def group_check(chance: random.Random) -> Machine:
    """0.14 to 0.18: start-up looks at one group of a hybrid model only."""
    machine = plain(chance)
    machine.is_reserved, machine.checks = False, chance.choice([1 / 2, 1 / 3, 1 / 6])
    return machine


def unequal_stages(chance: random.Random) -> Machine:
    """Pipeline stages with other layers and other buffers: the poorest one binds, and not the same at each length."""
    machine = plain(chance)
    most = machine.blocks(1, 1)
    stages = [(int(most * chance.uniform(0.7, 1)), chance.uniform(0, 0.05)) for _ in range(chance.choice([2, 4]))]
    machine.blocks = lambda length, launch: max(
        0, min(count - int(share * length / machine.block) for count, share in stages)
    )
    return machine


STABLE = [plain, unreserved, without_estimate, follows_length, two_regimes, group_check, unequal_stages]


def test_stable_truth_is_found_exactly_and_cheaply() -> None:
    launches: list[int] = []
    for kind in STABLE:
        own = [checked(kind, f"{SEED}-{kind.__name__}-{case}") for case in range(CASES)]
        print(f"{kind.__name__}: seed {SEED}, {CASES} cases, launches {spread([ours for ours, _ in own])}")
        print(f"    plain bisection {spread([bisection for _, bisection in own])}")
        launches += [ours for ours, _ in own]
    assert len(launches) >= 2000
    assert statistics.median(launches) <= 3
    assert statistics.quantiles(launches, n=20)[-1] <= 5


def checked(kind: Callable[[random.Random], Machine], seed: str) -> tuple[int, int]:
    """Search one machine, compare with its truth; return our launches and plain bisection's."""
    machine = kind(random.Random(seed))
    truth, done = machine.truth(), search(machine)
    if truth == 0:
        assert done.status is Status.DOES_NOT_FIT, seed
    elif truth == machine.limit:
        assert (done.status, done.bracket.serves) == (Status.MODEL_LIMIT, truth), seed
    else:
        assert (done.status, done.bracket) == (Status.EXACT, Bracket(truth, truth + 1)), seed
    return machine.launches, 1 if truth == machine.limit else 1 + halvings(machine.limit - LOWEST + 1)


def spread(counts: list[int]) -> str:
    return f"median {statistics.median(counts):g}, 95 % {statistics.quantiles(counts, n=20)[-1]:g}, most {max(counts)}"


def jitter(chance: random.Random) -> tuple[Machine, int, int]:
    """Blocks that differ from start to start, by one or by up to 3 %."""
    machine = plain(chance)
    count = machine.blocks(1, 1)
    spread = chance.choice([1, max(1, int(0.03 * count))])
    moves = [chance.randint(-spread, spread) for _ in range(200)]
    machine.blocks = lambda length, launch: max(0, count + moves[launch % 200])
    return machine, (count - spread - 1) * machine.block, (count + spread) * machine.block


def test_jitter_ends_in_a_number_inside_the_spread_or_an_interval_that_meets_it() -> None:
    for case in range(CASES):
        seed = f"{SEED}-jitter-{case}"
        machine, least, most = jitter(random.Random(seed))
        done = search(machine)
        serves, refused = done.bracket.serves, done.bracket.refused
        assert serves is None or serves <= min(most, machine.limit), seed
        assert refused is None or refused >= max(least, LOWEST), seed
        if done.status is Status.EXACT:
            assert serves is not None
            assert min(least, machine.limit) <= serves <= most, seed


@pytest.mark.parametrize("share", [0.05, 0.15, 0.45])
def test_state_of_the_cache_changes_the_answer_not_its_truth(share: float) -> None:
    """A warm start has more memory than a cold one: each state is searched alone and each answer is its own truth."""
    for case in range(CASES // 4):
        chance = random.Random(f"{SEED}-{share}-{case}")
        cold = plain(chance)
        count = cold.blocks(1, 1)
        warm = Machine(cold.limit, cold.block, lambda length, launch, n=count: int(n * (1 + share)))  # type: ignore[misc]
        for machine in (cold, warm):
            truth, done = machine.truth(), search(machine)
            assert (done.bracket.serves or 0) == (truth if truth >= LOWEST else 0)


def double(machine: Machine) -> int:
    """The loop of tutorials: 4,096 and on, while a start succeeds."""
    length = 4096
    while length <= machine.limit and machine.launch(length).verdict.outcome in STARTED:
        length *= 2
    return length // 2 if length > 4096 else 0


def double_then_halve(machine: Machine) -> int:
    low = double(machine)
    high = min(max(2 * low, 4096), machine.limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if machine.launch(middle).verdict.outcome in STARTED else (low, middle)
    return low


def auto(machine: Machine) -> int:
    """What vLLM chooses from the memory of a start at the limit."""
    figures = machine.launch(None).verdict.figures
    return figures.estimated_max_len if figures.estimated_max_len is not None else machine.limit


STARTED = (Outcome.FITS, Outcome.UNSERVABLE)


def test_other_ways_take_more_launches_or_name_lengths_that_do_not_serve() -> None:
    """A thousand machines: launches, answers that serve, and answers below the truth, of each way."""
    launches: dict[str, list[int]] = {}
    bad: dict[str, int] = {}
    ways: dict[str, Callable[[Machine], int]] = {
        "double": double,
        "double then halve": double_then_halve,
        "auto": auto,
        "ours": lambda machine: search(machine).bracket.serves or 0,
    }
    for name, way in ways.items():
        bad[name] = short = 0
        for case in range(1000):
            kind = (plain, unreserved, follows_length, unequal_stages)[case % 4]
            machine = kind(random.Random(f"{SEED}-ways-{case}"))
            truth, answer = machine.truth(), way(machine)
            launches.setdefault(name, []).append(machine.launches)
            bad[name] += answer >= LOWEST and not machine.serves(answer)
            short += answer < truth
        print(f"{name}: launches {spread(launches[name])}; {bad[name]} do not serve, {short} could be longer")
    assert bad["ours"] == 0
    assert bad["double then halve"] > 0 < bad["auto"]
    assert statistics.median(launches["double then halve"]) >= 4 * statistics.median(launches["ours"])

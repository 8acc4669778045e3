"""The search against brute force: random truths, block sizes, reserved blocks, lying hints, skips."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prober.records import Bracket, Status
from prober.search.next_length import LOWEST, Answer, Done, Observation, Space, Try, halvings, next_step

Engine = Callable[[int | None], Observation]


def search(engine: Engine, space: Space, seen: list[Observation] | None = None) -> tuple[Done, list[Observation]]:
    observations = list(seen or [])
    for _ in range(400):
        step = next_step(observations, space)
        if isinstance(step, Done):
            return step, observations
        observations.append(engine(step.length))
    raise AssertionError("the search does not end")


def engine_with(
    ceiling: int, limit: int, hint: Callable[[int], tuple[int, ...]] = lambda _: (), block: int | None = None
) -> Engine:
    def start(length: int | None) -> Observation:
        n = limit if length is None else length
        if n > limit:
            return Observation(n, Answer.OVER_LIMIT, limit=limit)
        reading = Answer.SERVES if n <= ceiling else Answer.TOO_LONG
        return Observation(n, reading, hint(n), block, limit if length is None else None)

    return start


def recording(engine: Engine, asked: list[int | None]) -> Engine:
    def start(length: int | None) -> Observation:
        asked.append(length)
        return engine(length)

    return start


def plain_bisection(top: int, low: int = LOWEST) -> int:
    return 1 + halvings(top - low + 1)


def test_model_whose_limit_fits_takes_one_launch() -> None:
    done, seen = search(engine_with(10**9, 131_072), Space())
    assert (done.status, done.bracket, len(seen)) == (Status.MODEL_LIMIT, Bracket(131_072, None), 1)


def test_right_estimate_takes_three_launches() -> None:
    done, seen = search(engine_with(3968, 1_048_576, lambda n: (3968,), 128), Space())
    assert (done.status, done.bracket) == (Status.EXACT, Bracket(3968, 3969))
    assert [o.length for o in seen] == [1_048_576, 3968, 3969]


def test_right_known_row_takes_two_launches() -> None:
    done, seen = search(engine_with(3968, 1_048_576, lambda n: (3968,), 128), Space(limit=1_048_576, hints=(3968,)))
    assert done.bracket == Bracket(3968, 3969)
    assert [o.length for o in seen] == [3968, 3969]


def test_estimate_that_only_starts_costs_one_more() -> None:
    """vLLM 0.28: 4,096 is the estimate and starts, but the last block is never granted."""

    def start(length: int | None) -> Observation:
        n = length or 1_048_576
        hints = (4096,) if n > 4096 else (3968,)
        return Observation(n, Answer.SERVES if n <= 3968 else Answer.TOO_LONG, hints, 128, 1_048_576)

    done, seen = search(start, Space())
    assert (done.bracket, len(seen)) == (Bracket(3968, 3969), 4)


@pytest.mark.parametrize("drift", [-128, 128, 256, -512])
def test_drifting_estimate_stays_cheap(drift: int) -> None:
    """A start at the estimate profiles anew; its own figures are right."""

    def hint(n: int) -> tuple[int, ...]:
        return (65_536 + drift,) if n == 1_048_576 else (65_536,)

    done, seen = search(engine_with(65_536, 1_048_576, hint, 128), Space())
    assert done.bracket == Bracket(65_536, 65_537)
    assert len(seen) <= 5


def test_nothing_fits_is_said_after_two_launches() -> None:
    done, seen = search(engine_with(0, 131_072, lambda n: (0,)), Space())
    assert (done.status, [o.length for o in seen]) == (Status.DOES_NOT_FIT, [131_072, LOWEST])


def test_shortest_asked_for_that_does_not_fit_says_nothing_about_shorter_ones() -> None:
    done, _ = search(engine_with(1000, 131_072), Space(low=2048))
    assert (done.status, done.bracket) == (Status.INCONCLUSIVE, Bracket(None, 2048))


def test_served_upper_end_of_the_user_is_at_least() -> None:
    done, seen = search(engine_with(50_000, 131_072), Space(high=32_768))
    assert (done.status, done.bracket.serves, len(seen)) == (Status.AT_LEAST, 32_768, 1)


def test_longer_than_the_model_allows_is_not_memory() -> None:
    def start(length: int | None) -> Observation:
        assert length is not None
        if length > 8192:
            return Observation(length, Answer.OVER_LIMIT, limit=8192)
        return Observation(length, Answer.SERVES)

    done, seen = search(start, Space(high=100_000))
    assert (done.status, done.bracket) == (Status.MODEL_LIMIT, Bracket(8192, None))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("reading", "status"), [(Answer.WRONG, Status.BAD_CONFIG), (Answer.NO_LENGTH, Status.DOES_NOT_FIT)]
)
def test_hopeless_first_launch_ends_the_search(reading: Answer, status: Status) -> None:
    done, seen = search(lambda length: Observation(length, reading), Space())
    assert (done.status, len(seen), done.bracket) == (status, 1, Bracket())


def test_bad_configuration_after_an_answer_about_capacity_is_not_believed() -> None:
    answers = {None: Observation(8192, Answer.TOO_LONG, (1000,), limit=8192), 1000: Observation(1000, Answer.WRONG)}
    step = next_step([answers[None], answers[1000]], Space())
    assert isinstance(step, Try)


def test_launches_that_say_nothing_end_inconclusive_not_refused() -> None:
    done, seen = search(lambda length: Observation(length, Answer.UNKNOWN), Space())
    assert (done.status, done.bracket) == (Status.INCONCLUSIVE, Bracket(None, None))
    assert len(seen) <= 8


def test_top_that_cannot_be_tried_is_approached_from_below() -> None:
    truth = engine_with(20_000, 1_048_576, block=16)
    done, seen = search(lambda n: Observation(n, Answer.UNKNOWN) if n is None else truth(n), Space())
    assert (done.status, done.bracket) == (Status.EXACT, Bracket(20_000, 20_001))
    assert [o.length for o in seen][:5] == [None, None, 4096, 8192, 16_384]


def test_refusal_below_a_fit_is_retried_once_then_unstable() -> None:
    seen = [Observation(8192, Answer.TOO_LONG, limit=65_536), Observation(16_384, Answer.SERVES)]
    step = next_step(seen, Space())
    assert isinstance(step, Try)
    assert step.length == 8192
    for again in (Answer.TOO_LONG, Answer.SERVES):
        done = next_step([*seen, Observation(8192, again)], Space())
        assert isinstance(done, Done)
        assert (done.status, done.bracket) == (Status.UNSTABLE, Bracket(None, None))


def test_too_short_raises_the_lower_end() -> None:
    def start(length: int | None) -> Observation:
        n = length or 32_768
        if n < 2000:
            return Observation(n, Answer.TOO_SHORT)
        return Observation(n, Answer.SERVES if n <= 3000 else Answer.TOO_LONG, (0,), limit=32_768)

    done, _ = search(start, Space())
    assert (done.status, done.bracket) == (Status.EXACT, Bracket(3000, 3001))


def test_default_start_of_a_long_rope_model_is_not_its_limit() -> None:
    """Its configuration may only be known after the first launch, which began at the short length."""
    step = next_step([Observation(4096, Answer.SERVES, limit=4096)], Space(limit=131_072))
    assert isinstance(step, Try)
    assert step.length == 131_072


def test_failed_load_after_a_refusal_for_capacity_is_no_answer() -> None:
    """The weights had been loaded: the second failure had another cause."""
    step = next_step(
        [Observation(131_072, Answer.TOO_LONG, limit=131_072), Observation(60_000, Answer.NO_LENGTH)], Space()
    )
    assert isinstance(step, Try)
    assert step.length == 60_000


def test_longer_regime_is_tried_before_a_shorter_answer_stands() -> None:
    def start(length: int | None) -> Observation:
        n = length or 131_072
        is_served = n <= 20_000 or 32_769 <= n <= 40_000
        return Observation(n, Answer.SERVES if is_served else Answer.TOO_LONG, limit=131_072)

    for hints in ((), (20_000,)):
        done, _ = search(start, Space(hints=hints, switches=(32_768,)))
        assert (done.status, done.bracket) == (Status.EXACT, Bracket(40_000, 40_001))


@st.composite
def truths(draw: st.DrawFn) -> tuple[int, int, Space, Engine]:
    limit = draw(st.integers(LOWEST, 2**20))
    block = draw(st.sampled_from([1, 8, 16, 32, 128, 256, 784]))
    off_grid = draw(st.booleans())
    ceiling = draw(st.integers(0, limit + block))
    ceiling = ceiling if off_grid else ceiling // block * block
    shown = draw(st.sampled_from([None, block, 16, 128]))
    lies = draw(st.lists(st.integers(0, 2**21), max_size=6))
    offsets = draw(st.lists(st.integers(-3 * block, 3 * block), max_size=4))
    calls = iter(range(1000))

    def hint(_: int) -> tuple[int, ...]:
        k = next(calls)
        lie = (lies[k % len(lies)],) if lies else ()
        return (*lie, *(max(0, ceiling + offset) for offset in offsets[: k % 5]))

    known = draw(st.lists(st.integers(0, 2**20), max_size=3))
    space = Space(limit=draw(st.sampled_from([None, limit])), hints=tuple(known))
    return ceiling, limit, space, engine_with(ceiling, limit, hint, shown)


@settings(max_examples=2000, deadline=None)
@given(truths())
def test_any_monotone_truth_and_any_hints_stay_within_plain_bisection_plus_three(
    truth: tuple[int, int, Space, Engine],
) -> None:
    ceiling, limit, space, engine = truth
    asked: list[int | None] = []
    done, seen = search(recording(engine, asked), space)
    assert len(asked) == len(set(asked)), "a launch was repeated"
    assert len(seen) <= plain_bisection(limit) + 3
    if ceiling >= limit:
        assert (done.status, done.bracket.serves) == (Status.MODEL_LIMIT, limit)
    elif ceiling < LOWEST:
        assert done.status is Status.DOES_NOT_FIT
    else:
        assert (done.status, done.bracket) == (Status.EXACT, Bracket(ceiling, ceiling + 1))


@settings(max_examples=1000, deadline=None)
@given(truths(), st.lists(st.booleans(), min_size=40, max_size=40))
def test_launches_that_say_nothing_never_make_a_wrong_ceiling(
    truth: tuple[int, int, Space, Engine], flaky: list[bool]
) -> None:
    ceiling, limit, space, engine = truth
    skips = iter(flaky)
    done, _ = search(lambda n: Observation(n, Answer.UNKNOWN) if next(skips, False) else engine(n), space)
    if done.status is Status.EXACT:
        assert done.bracket == Bracket(ceiling, ceiling + 1)
    if done.bracket.serves is not None:
        assert done.bracket.serves <= ceiling
    if done.bracket.refused is not None:
        assert done.bracket.refused > ceiling
    assert done.status is not Status.DOES_NOT_FIT or ceiling < LOWEST
    assert done.status is not Status.MODEL_LIMIT or ceiling >= limit


@settings(max_examples=300, deadline=None)
@given(truths(), st.integers(0, 12))
def test_resuming_from_recorded_observations_repeats_nothing(truth: tuple[int, int, Space, Engine], kept: int) -> None:
    _, _, space, engine = truth
    done, seen = search(engine, space)
    asked: list[int | None] = []
    resumed, _ = search(recording(engine, asked), space, seen[:kept])
    assert resumed.bracket == done.bracket
    assert not {o.length for o in seen[:kept]} & set(asked)

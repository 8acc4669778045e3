"""Single steps of the search: what it makes of odd observations, and which length it asks for next."""

from __future__ import annotations

import pytest
from test_search import Engine, engine_with, search

from prober.records import AUTO, Bracket, Status
from prober.search.next_length import (
    Answer,
    Done,
    Observation,
    Space,
    Try,
    bracket,
    halvings,
    next_step,
)

LIMIT = 131_072
SERVES, TOO_LONG, TOO_SHORT, UNKNOWN = Answer.SERVES, Answer.TOO_LONG, Answer.TOO_SHORT, Answer.UNKNOWN


def refused(length: int | None = LIMIT, *hints: int, limit: int | None = None) -> Observation:
    return Observation(length, TOO_LONG, hints, limit=limit)


def served(length: int, *hints: int, block: int | None = None) -> Observation:
    return Observation(length, SERVES, hints, block)


def unknown(length: int | None) -> Observation:
    return Observation(length, UNKNOWN)


def step(space: Space, *seen: Observation) -> Try:
    found = next_step(seen, space)
    assert isinstance(found, Try), found
    return found


def end(space: Space, *seen: Observation) -> Done:
    found = next_step(seen, space)
    assert isinstance(found, Done), found
    return found


def silent_at(engine: Engine, *lengths: int | None, times: int = 99) -> Engine:
    """The engine, but a launch of these lengths tells nothing the first times."""
    left = dict.fromkeys(lengths, times)

    def start(length: int | None) -> Observation:
        if left.get(length, 0) <= 0:
            return engine(length)
        left[length] -= 1
        return unknown(length)

    return start


# Where to look


@pytest.mark.parametrize(("low", "high"), [(0, None), (-5, 10), (5, 4)])
def test_space_without_lengths_is_refused(low: int, high: int | None) -> None:
    with pytest.raises(ValueError, match="no length lies between"):
        Space(low, high)


@pytest.mark.parametrize("length", [1, 20])
def test_space_of_one_length_takes_one_launch(length: int) -> None:
    for ceiling, status in ((100, Status.AT_LEAST), (0, Status.INCONCLUSIVE if length > 16 else Status.DOES_NOT_FIT)):
        done, seen = search(engine_with(ceiling, LIMIT), Space(length, length))
        assert (done.status, [o.length for o in seen]) == (status, [length])


def test_users_upper_end_below_the_models_limit_is_not_that_limit() -> None:
    assert end(Space(limit=LIMIT, high=32_768), served(32_768)).status is Status.AT_LEAST


def test_nothing_below_sixteen_tokens_is_asked_for() -> None:
    done, seen = search(engine_with(0, LIMIT, lambda _: (0,)), Space())
    assert ([o.length for o in seen], done.why) == ([LIMIT, 16], "not even 16 tokens fit")


def test_shortest_asked_for_is_named_where_it_does_not_fit() -> None:
    assert "2,048, the shortest asked for" in end(Space(low=2048), refused(2048)).why


@pytest.mark.parametrize("hint", [0, 16])
def test_lengths_too_short_for_the_model_and_the_next_too_long_for_memory(hint: int) -> None:
    def start(length: int | None) -> Observation:
        n = 8192 if length is None else length
        return Observation(n, TOO_SHORT if n < 2000 else TOO_LONG, (hint,), limit=8192)

    done, seen = search(start, Space())
    assert (done.status, done.bracket) == (Status.DOES_NOT_FIT, Bracket(None, 2000))
    assert "below 2,000 are too short" in done.why
    asked = [o.length for o in seen]
    assert asked[:3] == [8192, 16, (16 + 8192) // 2], "the hint that hardly anything fits has been tried"
    assert len(set(asked)) == len(asked) <= 2 + halvings(8192)


def test_refusal_of_a_length_that_nobody_knows_is_not_asked_for_again() -> None:
    truth = engine_with(20_000, 1_048_576)
    done, seen = search(lambda n: refused(None) if n is None else truth(n), Space())
    assert done.bracket == Bracket(20_000, 20_001)
    assert [o.length for o in seen][:3] == [None, 4096, 8192]


def test_model_limit_is_not_asked_for_where_a_shorter_length_was_refused() -> None:
    assert step(Space(), refused(4096)).length == (15 + 4096) // 2


def test_lowest_limit_that_a_refusal_names_bounds_the_search() -> None:
    over = [Observation(n, Answer.OVER_LIMIT, limit=limit) for n, limit in ((LIMIT, 65_536), (65_536, 8192))]
    assert step(Space(limit=LIMIT), *over[:1]).length == 65_536
    assert step(Space(limit=LIMIT), *over).length == 8192
    assert step(Space(), *over, Observation(16_384, UNKNOWN, limit=16_384)).length == 8192


def test_bracket_so_far_is_what_served_and_what_was_refused() -> None:
    assert bracket([refused(LIMIT), served(1000), served(2000), unknown(3000)], Space()) == Bracket(2000, LIMIT)


# What could not be judged


@pytest.mark.parametrize(
    ("space", "asked", "where"),
    [
        (Space(), [None, None, 4096, 16], "16, 4,096, the model's limit"),
        (Space(low=8192), [None, None, 8192], "8,192, the model's limit"),
        (Space(high=17), [17, 17, 16], "16, 17"),
        (Space(limit=LIMIT), [LIMIT, LIMIT, 4096, 16], "16, 4,096, 131,072"),
    ],
)
def test_where_nothing_ever_answers_few_lengths_are_asked(space: Space, asked: list[int | None], where: str) -> None:
    """The first one twice, each other once; it ends also where no length is left to ask for."""
    done, seen = search(unknown, space)
    assert (done.status, done.bracket, [o.length for o in seen]) == (Status.INCONCLUSIVE, Bracket(), asked)
    assert done.why == f"could not tell at {where}"


def test_where_something_answered_three_lengths_are_asked_twice_each() -> None:
    done, seen = search(lambda n: refused(limit=LIMIT) if n is None else unknown(n), Space())
    assert (done.status, done.bracket) == (Status.INCONCLUSIVE, Bracket(None, LIMIT))
    lengths = [o.length for o in seen]
    assert lengths[0] == LIMIT
    assert lengths[1::2] == lengths[2::2]
    assert len(set(lengths[1:])) == 3


def test_lengths_that_answer_the_second_time_count_as_answered() -> None:
    truth = engine_with(20_000, LIMIT)
    done, _ = search(silent_at(truth, *range(LIMIT + 1), times=1), Space(limit=LIMIT))
    assert (done.status, done.bracket) == (Status.EXACT, Bracket(20_000, 20_001))


def test_around_a_length_that_cannot_be_tried_the_search_goes_on() -> None:
    """Down to one token on either side; then the length itself is what is not known."""
    middle = (15 + LIMIT) // 2
    done, seen = search(silent_at(engine_with(20_000, LIMIT), middle), Space(limit=LIMIT))
    assert (done.bracket, [o.length for o in seen][1:4]) == (Bracket(20_000, 20_001), [middle, middle, middle + 1])
    beside, seen = search(silent_at(engine_with(20_000, LIMIT), 20_000, 20_001), Space(limit=LIMIT, low=19_999))
    assert (beside.status, beside.bracket) == (Status.INCONCLUSIVE, Bracket(19_999, 20_002))
    assert beside.why == "could not tell at 20,000, 20,001"


def test_below_a_top_that_cannot_be_tried_lengths_double_then_grow_by_half() -> None:
    truth = engine_with(6500, 1_048_576)
    done, seen = search(silent_at(truth, 1_048_576, 8192), Space(limit=1_048_576))
    assert [o.length for o in seen][:6] == [1_048_576, 1_048_576, 4096, 8192, 8192, 6144]
    assert (done.status, done.bracket) == (Status.EXACT, Bracket(6500, 6501))


@pytest.mark.parametrize(
    ("space", "seen", "following"),
    [
        (Space(limit=8192), unknown(15), 8192),  # shorter than is asked for now
        (Space(limit=8192), unknown(8193), 8192),  # longer than the model allows, as is known by now
        (Space(limit=8192), unknown(None), 8192),  # the top, whose length is known by now
        (Space(limit=8192), unknown(16), 16),
        (Space(limit=8192), unknown(8192), 8192),
        (Space(), unknown(None), None),
        (Space(), unknown(4096), 4096),
    ],
)
def test_only_lengths_that_are_still_open_get_a_second_attempt(
    space: Space, seen: Observation, following: int | None
) -> None:
    found = step(space, seen)
    assert found.length == following
    assert found.why.startswith("again") == (seen.length == following)


def test_refusal_closes_what_could_not_be_judged_above_it() -> None:
    assert step(Space(), unknown(9000), refused(8192, limit=LIMIT)).length == (15 + 8192) // 2


# Answers that contradict each other


def test_unstable_interval_lies_around_what_contradicts() -> None:
    seen = [served(1000), served(2000), refused(8192), served(16_384), refused(32_001), refused(40_000), refused(8192)]
    assert end(Space(limit=LIMIT), *seen).bracket == Bracket(2000, 32_001)


@pytest.mark.parametrize("length", [1, 8192])
def test_one_length_with_two_answers_is_unstable(length: int) -> None:
    for first, last, interval in ((TOO_LONG, SERVES, Bracket()), (SERVES, TOO_LONG, Bracket(None, length))):
        done = end(Space(low=1, limit=LIMIT), Observation(length, first), Observation(length, last))
        assert (done.status, done.bracket) == (Status.UNSTABLE, interval)


def test_contradiction_is_settled_even_where_the_top_served() -> None:
    assert step(Space(limit=LIMIT), refused(8192), served(LIMIT)).length == 8192
    assert step(Space(limit=LIMIT, is_quick=True), refused(8192), served(9000)).length == 8192


def test_lowest_of_several_contradicted_refusals_is_named() -> None:
    seen = [refused(n) for n in (30_000, 8193, 20_000, 8193)]
    done = end(Space(limit=LIMIT), served(32_000), *seen)
    assert done.why.startswith("8,193 was refused")


def test_two_answers_for_a_length_that_nobody_knows_do_not_contradict() -> None:
    assert step(Space(), Observation(None, SERVES), refused(None)).length == 4096


@pytest.mark.parametrize("hopeless", [Answer.NO_LENGTH, Answer.WRONG])
@pytest.mark.parametrize("answer", [SERVES, TOO_LONG])
def test_no_length_can_is_no_answer_where_one_was_judged(hopeless: Answer, answer: Answer) -> None:
    judged = Observation(8192, answer)
    for seen in ([judged, Observation(9000, hopeless)], [Observation(8192, hopeless), judged]):
        assert isinstance(next_step(seen, Space(limit=LIMIT)), Try)


# Regimes: a longer length may fit again


V0 = Space(limit=LIMIT, switches=(32_768,))


@pytest.mark.parametrize("length", [20_000, 32_768])
def test_refusal_in_a_shorter_regime_sends_the_search_to_the_longer_one(length: int) -> None:
    assert step(V0, refused(length)).length == 32_769
    assert step(Space(limit=32_769, switches=(32_768,)), refused(length)).length == 32_769
    assert step(Space(switches=(32_768,)), refused(length)).length == 32_769, "whatever the top is"
    assert step(V0).length == LIMIT
    assert step(V0, refused(32_769)).length == (15 + 32_769) // 2


@pytest.mark.parametrize("limit", [32_768, 20_001])
def test_regime_beyond_the_top_is_not_tried(limit: int) -> None:
    length = step(Space(limit=limit, switches=(32_768,)), refused(20_000)).length
    assert length is not None
    assert length < 20_000


def test_what_a_shorter_regime_answered_says_nothing_of_the_longer_one() -> None:
    """Refused up to its end, or with two answers: the length that served is in another regime."""
    for odd in ([refused(32_768)], [refused(20_000), served(20_000)], [refused(32_768), served(32_768)]):
        done = end(V0, *odd, served(40_000), refused(40_001))
        assert (done.status, done.bracket) == (Status.EXACT, Bracket(40_000, 40_001))


def test_end_of_a_regime_belongs_to_it() -> None:
    found = step(V0, refused(20_000), served(32_768))
    assert (found.length, found.why) == (20_000, "again: it was refused, yet 32,768 served")


def test_of_several_regimes_the_longest_that_serves_counts() -> None:
    space = Space(limit=LIMIT, switches=(32_768, 65_536))
    assert [step(space, refused(20_000), *more).length for more in ([], [refused(32_769)])] == [32_769, 65_537]
    done = end(space, refused(20_000), refused(50_000), served(70_000), refused(70_001))
    assert done.bracket == Bracket(70_000, 70_001)


def test_shortest_length_of_all_is_in_the_first_regime() -> None:
    assert end(Space(low=1, limit=LIMIT), refused(1)).bracket == Bracket(None, 1)


# How lengths are chosen


def test_first_length_that_serves_ends_a_quick_search() -> None:
    quick = Space(is_quick=True)
    done, seen = search(engine_with(20_000, LIMIT, lambda _: (19_968,)), quick)
    assert (done.status, done.bracket) == (Status.AT_LEAST, Bracket(19_968, LIMIT))
    assert [o.length for o in seen] == [LIMIT, 19_968]
    whole, _ = search(engine_with(LIMIT, LIMIT), quick)
    assert whole.status is Status.MODEL_LIMIT


def test_vllm_chooses_the_first_length_of_a_quick_search_only() -> None:
    auto = Space(is_quick=True, has_auto=True)
    assert step(auto).length == AUTO < 1, "no length can be mistaken for it"
    assert step(Space(is_quick=True)).length is None
    assert step(Space(has_auto=True)).length is None
    assert step(Space(high=4096, is_quick=True, has_auto=True)).length == 4096
    assert step(auto, refused(None)).length == 4096
    assert step(auto, unknown(None)).length is None


def test_block_above_is_tried_where_the_expected_ceiling_was_too_low() -> None:
    """It and one token more served: the pool holds a block more than the log told."""
    seen = [refused(LIMIT, 3968, limit=LIMIT), served(3968, block=128), served(3969, block=128)]
    assert step(Space(), *seen).length == 4096
    assert step(Space(), *seen, served(4096, block=128)).length != 4224, "one block, not block after block"


def test_after_three_guesses_the_unknown_top_is_asked_for() -> None:
    _, seen = search(engine_with(LIMIT, LIMIT), Space(hints=(1000, 2000, 3000, 4000, 5000)))
    assert [o.length for o in seen] == [1000, 1001, 2000, LIMIT]
    near = Space(limit=LIMIT, hints=(100_000, 101_000, 102_000, 103_000))
    assert step(near, served(100_000), served(100_001), served(101_000)).length == 101_001, "the rest is short by now"


@pytest.mark.parametrize("ceiling", [1008, 1009, 1024])
def test_guesses_that_are_each_a_little_short_end_above_the_truth(ceiling: int) -> None:
    """A refusal tells the memory alone, a start its blocks: 983, then 1,008 to 1,024. From above few launches are left.

    Were the last guess that may miss one that serves, all the way to the top would remain to be halved.
    """

    def hint(length: int) -> tuple[int, ...]:
        return (983,) if length > 1025 else (1008, 1009, 1024)

    done, seen = search(engine_with(ceiling, LIMIT, hint, 16), Space())
    assert done.bracket == Bracket(ceiling, ceiling + 1)
    assert len(seen) <= 8, [o.length for o in seen]


def test_hint_that_nothing_fits_is_forgotten_once_something_served() -> None:
    assert step(Space(), refused(LIMIT, 0, limit=LIMIT)).length == 16
    assert step(Space(), refused(LIMIT, 0, limit=LIMIT), served(16)).length == (16 + LIMIT) // 2


def test_halving_keeps_to_the_block_grid_of_the_latest_start_that_told_it() -> None:
    seen = [served(1000, block=16), served(2000, block=128), refused(60_000)]
    length = step(Space(limit=LIMIT), *seen).length
    assert length == round((2000 + 60_000) / 2 / 128) * 128


def test_block_beside_one_that_cannot_be_tried_is_still_on_the_grid() -> None:
    seen = [served(2000, block=128), refused(60_000)]
    nearest = 242 * 128  # the nearest to the middle
    for length in (nearest, nearest - 128):
        assert step(Space(limit=LIMIT), *seen).length == length
        seen += [unknown(length)] * 2
    assert step(Space(limit=LIMIT), *seen).length == nearest + 128


@pytest.mark.parametrize(
    ("limit", "seen", "following"),
    [
        # 14 launches in all: halving alone needs 1 + 10 of them.
        (1039, [refused(1039), served(17), served(18, block=512)], 512),
        (1039, [refused(1039), served(17), served(18), served(19, block=512)], (19 + 1039) // 2),
        (1039, [refused(1039), refused(1024), served(17), served(512, block=512)], 513),
        (1039, [refused(1039), refused(1024), served(17), served(18), served(512, block=512)], (512 + 1024) // 2),
        (1039, [refused(1039), refused(770), served(17), served(18), served(512, block=512)], (512 + 770) // 2),
        (1039, [refused(1039), refused(769), served(17), served(18), served(512, block=512)], 513),
        # One token more to search is one launch more.
        (1040, [refused(1040), served(17), served(18), served(19, block=512)], 512),
        # The top is not known: it is at least as long as what was refused.
        (None, [refused(1039, 700)], 700),
        (None, [refused(1039, 700), served(17), served(600)], 700),
    ],
)
def test_grid_and_guesses_are_left_for_plain_halving_when_launches_run_short(
    limit: int | None, seen: list[Observation], following: int
) -> None:
    assert step(Space(limit=limit), *seen).length == following


@pytest.mark.parametrize(
    ("lo", "hi", "following"),
    [
        (3900, 3969, 3968),  # the grid's one length inside
        (3850, 3960, 3905),  # none inside: its middle
        (3968, 4096, 3969),  # whole blocks serve: one token more than what served closes it
        (3968, 4097, 4096),
        (3967, 3970, 3968),
        (3000, 3200, 3072),
    ],
)
def test_last_halvings_keep_to_whole_blocks(lo: int, hi: int, following: int) -> None:
    assert step(Space(limit=LIMIT), served(lo, block=128), refused(hi)).length == following


# What is still expected


def test_launches_still_expected_fall_to_one() -> None:
    top, guess = refused(LIMIT, 3968, limit=LIMIT), served(3968, block=128)
    assert [step(Space(), *seen).left for seen in ([], [top], [top, guess])] == [3, 2, 1]
    assert step(Space(limit=LIMIT)).left == 3
    assert step(Space(limit=LIMIT, hints=(3968,))).left == 2
    assert step(Space(limit=LIMIT, is_quick=True)).left == 1


def test_halving_expects_what_it_needs() -> None:
    assert step(Space(), refused(1039, limit=1039)).left == 10
    assert step(Space(), refused(1039, limit=1039), served(1035)).left == 2


@pytest.mark.parametrize(("gap", "trials"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (2**20, 20)])
def test_halvings_of_a_gap(gap: int, trials: int) -> None:
    assert halvings(gap) == trials

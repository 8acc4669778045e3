"""Narrow a bracket: from everything observed so far to the next length to try, or to the answer.

Pure: no process, no clock, no file. ``narrow`` keeps nothing between calls, so a search resumes by being handed the
recorded observations. A hint only chooses the next length; what a trial showed is all that moves the bracket.

For any monotone truth and any hints the launches that answered stay within plain bisection plus ``SPARE`` (plain: one
launch at the top, then halving): a guess is taken only while, should it miss, halving can still finish in that budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from prober.records import AUTO, Bracket, Status

SPARE = 3  # guesses that may miss, beyond plain bisection
LOWEST = 16  # tokens: the smallest block size vLLM has used by default; shorter "ceilings" are of no use to anybody
FIRST_FROM_BELOW = 4096  # where to begin when the top itself cannot be tried
ATTEMPTS = 2  # of one length, before it counts as one that cannot be tried (1 where nothing ever answers)
UNTRIABLE = 3  # lengths that cannot be tried, before we stop


class Answer(StrEnum):
    """What an observation says about lengths."""

    SERVES = "serves"
    TOO_LONG = "too_long"
    TOO_SHORT = "too_short"
    OVER_LIMIT = "over_limit"  # longer than the model allows: not memory
    NO_LENGTH = "no_length"  # memory: the model does not fit at any length
    WRONG = "wrong"  # configuration: no length can work
    UNKNOWN = "unknown"  # could not tell: never moves the bracket


@dataclass(frozen=True, slots=True)
class Observation:
    """One trial as the search reads it.

    ``length`` is None only where the model's own limit was asked for and never became known. ``hints`` are lengths
    that this trial suggests as the ceiling, best first; 0 suggests that nothing fits. ``limit`` is the model's own.
    """

    length: int | None
    reading: Answer
    hints: tuple[int, ...] = ()
    block_size: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """Where to look. ``low`` and ``high`` are the user's, ``limit`` the model's if known, ``hints`` from known rows.

    The truth is monotone within a regime; the ceiling is the largest over all of them (``switches``).
    """

    low: int = LOWEST
    high: int | None = None
    limit: int | None = None
    hints: tuple[int, ...] = ()
    switches: tuple[int, ...] = ()  # last lengths of a regime: one token more is another regime and may fit again
    is_quick: bool = False  # the first length that serves ends it
    has_auto: bool = False  # vLLM can choose a length itself

    def __post_init__(self) -> None:
        if self.low < 1 or (self.high is not None and self.high < self.low):
            raise ValueError(f"no length lies between {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Try:
    """Launch this length next; None: the model's own limit, whatever it is; AUTO: what vLLM itself chooses.

    ``left``: how many launches the search still expects to take, this one included.
    """

    length: int | None
    why: str
    left: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The search has ended."""

    status: Status
    bracket: Bracket
    why: str


def next_step(observations: Sequence[Observation], space: Space) -> Try | Done:
    """Say what to launch next, or what came out. Never proposes a length that is already answered, but to settle a
    contradiction (once)."""
    known = _Known(observations, space)
    step = known.verdict() or known.retry() or known.next() or known.given_up()
    return step if isinstance(step, Done) else replace(step, left=known.expected(step))


class _Known:
    """What the observations say together."""

    def __init__(self, observations: Sequence[Observation], space: Space) -> None:
        self.space = space
        self.hints = [*(o.hints for o in reversed(observations)), space.hints]
        self.figured = {hint for o in observations for hint in o.hints}  # by vLLM's own figures
        self.attempts = Counter(o.length for o in observations)
        self.answers = sum(o.reading is not Answer.UNKNOWN for o in observations)
        self.readings = _answers(observations)
        self.flipped = _flipped(observations)
        self.unknown = {length for length in self.attempts if length not in self.readings}
        self.untriable = {length for length in self.unknown if self.attempts[length] >= ATTEMPTS}
        if self.untriable and not self.answers:
            self.untriable = set(self.unknown)  # nothing answers here at all: another length is asked once
        if None in self.readings:  # answered, and nobody knows for which length: to ask again would tell no more
            self.untriable.add(None)
        self.served = self._lengths(Answer.SERVES)
        # What was refused in a shorter regime says nothing of the one in which something served.
        regime = max((end for end in space.switches if self.served and end < self.served[-1]), default=0)
        self.refused = [length for length in self._lengths(Answer.TOO_LONG) if length > regime]
        self.flipped = {length for length in self.flipped if length > regime}
        self.low = max([space.low, *(length + 1 for length in self._lengths(Answer.TOO_SHORT))])
        self.limit = _limit(observations, space)
        self.top = min((end for end in (self.limit, space.high) if end is not None), default=None)
        self.serves = self.served[-1] if self.served else None
        self.upper = self.refused[0] if self.refused else None
        self.block = next((o.block_size for o in reversed(observations) if o.block_size), None)
        # The open interval that still holds the ceiling's upper neighbour; an untried top counts as its inner end.
        self.lo = self.serves if self.serves is not None else self.low - 1
        self.hi = self.upper if self.upper is not None else (None if self.top is None else self.top + 1)

    def _lengths(self, reading: Answer) -> list[int]:
        return sorted(length for length, r in self.readings.items() if r is reading and length is not None)

    # What came out

    @property
    def bracket(self) -> Bracket:
        return Bracket(self.serves, self.upper)

    @property
    def contradicts(self) -> bool:
        return self.serves is not None and self.upper is not None and self.serves >= self.upper

    def verdict(self) -> Done | None:
        if self.flipped or (self.contradicts and self.attempts[self.upper] >= ATTEMPTS):
            return self._unstable()
        if self.contradicts or self._untried_regime() is not None:
            return None  # `retry` settles the one, `next` the other
        return self._stopped() or self._closed() or (self.given_up() if len(self.untriable) >= UNTRIABLE else None)

    def _stopped(self) -> Done | None:
        if Answer.NO_LENGTH in self.readings.values():
            return Done(Status.DOES_NOT_FIT, self.bracket, "the model itself does not fit on the device")
        if Answer.WRONG in self.readings.values():
            return Done(Status.BAD_CONFIG, Bracket(), "no length can work with this configuration")
        return None

    def _unstable(self) -> Done:
        refused = sorted({*self.refused, *self.flipped})
        below = [length for length in self.served if length < refused[0]]
        above = [length for length in refused if length > max(self.served, default=0)]
        interval = Bracket(max(below, default=None), min(above, default=None))
        return Done(Status.UNSTABLE, interval, f"{refused[0]:,} was refused, yet it or a longer length served")

    def _closed(self) -> Done | None:
        if self.serves is not None and self.upper == self.serves + 1:
            return Done(Status.EXACT, self.bracket, f"{self.serves:,} served and {self.upper:,} was refused")
        if self.serves is not None and self.top is not None and self.serves >= self.top:
            return self._served_the_top()
        if self.space.is_quick and self.serves in self.figured:
            why = f"{self.serves:,} served, and that vLLM's own figures allow no more was not put to the test"
            return Done(Status.AT_LEAST, self.bracket, why)
        if self.upper is not None and self.upper <= self.low:
            return self._nothing_fits()
        return None

    def _served_the_top(self) -> Done:
        if self.limit is not None and self.serves is not None and self.serves >= self.limit:
            return Done(Status.MODEL_LIMIT, self.bracket, f"nothing longer than {self.limit:,} is allowed")
        return Done(Status.AT_LEAST, self.bracket, f"{self.serves:,} was the longest asked for")

    def _nothing_fits(self) -> Done:
        if self.low > self.space.low:
            why = f"lengths below {self.low:,} are too short for this model, and {self.upper:,} does not fit"
        elif self.low > LOWEST:
            return Done(Status.INCONCLUSIVE, self.bracket, f"{self.upper:,}, the shortest asked for, does not fit")
        else:
            why = f"not even {self.upper:,} tokens fit"
        return Done(Status.DOES_NOT_FIT, self.bracket, why)

    def given_up(self) -> Done:
        lengths = ", ".join(f"{n:,}" if n is not None else "the model's limit" for n in sorted_lengths(self.untriable))
        return Done(Status.INCONCLUSIVE, self.bracket, f"could not tell at {lengths or 'any length'}")

    def _untried_regime(self) -> int | None:
        """The shortest length of a regime above what was refused: it may fit again."""
        starts = (end + 1 for end in self.space.switches if self.upper is not None and self.upper <= end)
        return next((n for n in starts if n not in self.attempts and n <= (self.top or n)), None)

    # What to try next

    def retry(self) -> Try | None:
        """A length that could not be judged, or a refusal that contradicts, gets one more attempt."""
        if self.contradicts:
            return Try(self.upper, f"again: it was refused, yet {self.serves:,} served")
        for length in sorted_lengths(self.unknown - self.untriable):
            is_open = self.top is None if length is None else self.lo < length < (self.hi or length + 1)
            if is_open:
                return Try(length, "again: the last attempt could not tell")
        return None

    def next(self) -> Try | None:
        if (start := self._untried_regime()) is not None:
            return Try(start, "the shortest of its regime, which may fit again")
        for length, why in self._candidates():
            if length is None or length == AUTO:
                return Try(length, why)
            if self.lo < length < (self.hi or length + 1) and length not in self.untriable:
                return Try(length, why)
        return None

    def _candidates(self) -> Iterator[tuple[int | None, str]]:
        """Lengths in the order of preference; those outside the open interval are passed over by `next`."""
        if self.space.is_quick and self.space.has_auto and not self.attempts and self.top is None:
            yield AUTO, "the length that vLLM itself chooses"
        for guess, why in self._guesses():
            if self._affordable(guess):
                yield guess, why
        if self.upper is None:
            yield from self._towards_the_top()
        if self.hi is not None:
            yield from self._halves(self.lo, self.hi)

    def _guesses(self) -> Iterator[tuple[int, str]]:
        """Lengths that are expected as the ceiling. One that is shorter than what is asked for means the lower end."""
        for hints in filter(None, map(self._inside, self.hints)):
            if self._left() == self._needed(self.lo) + 1:
                # The last guess that may miss: from above it closes the bracket, if the hints are near the truth.
                yield max(hints) + 1, f"one token more than the expected {max(hints):,}"
            for hint in hints:
                if hint == self.serves:
                    yield hint + 1, f"one token more than {hint:,}, which served"
                else:
                    yield hint, "the expected ceiling"
        if self.block and self.serves is not None and any(self.serves - 1 in hints for hints in self.hints):
            yield (self.lo // self.block + 1) * self.block, "one block more: the expected ceiling was too low"

    def _inside(self, hints: tuple[int, ...]) -> list[int]:
        """One observation's hints that are open, or served last; what is too short means "low" until that served."""
        least = self.space.low if self.serves is None else 0
        asked = [max(hint, least) for hint in hints]
        return [hint for hint in asked if self.lo <= hint and (self.hi is None or hint < self.hi)]

    def _towards_the_top(self) -> Iterator[tuple[int | None, str]]:
        top = self.top
        if top not in self.untriable:
            yield top, "the longest that may serve" if top is None else "the longest allowed"
        else:
            serves = self.serves or 0
            for length in (max(self.low, FIRST_FROM_BELOW, 2 * serves), serves * 3 // 2, self.low):
                yield length, "from below: the top cannot be tried"

    def _halves(self, lo: int, hi: int) -> Iterator[tuple[int, str]]:
        middle = (lo + hi) // 2
        if self.block:
            nearest = round(middle / self.block) * self.block
            for length in (nearest, nearest - self.block, nearest + self.block):
                if self._affordable(length):
                    yield length, "halving, on the block grid"
            if lo % self.block == 0 and self._affordable(lo + 1):
                yield lo + 1, f"one token more than {lo:,}, which served"
        yield middle, "halving"
        yield from ((length, "halving") for length in (middle + 1, middle - 1))

    # What it may cost

    def expected(self, step: Try) -> int:
        """Launches still expected with this one: 3 from the top, 2 from a guess, 1 for what closes the bracket."""
        if self.space.is_quick or (self.serves is not None and step.length == self.serves + 1):
            return 1
        if step.length == self.top:
            return 3
        if step.length in {guess for guess, _ in self._guesses()}:
            return 2
        return max(1, self._needed(self.lo))

    def _left(self) -> int:
        """Launches left of the budget. An unknown top is at least as long as what was refused."""
        longest = self.top or self.upper or self.space.low
        return 1 + halvings(longest - self.space.low + 1) + SPARE - self.answers

    def _needed(self, lo: int) -> int:
        """Launches that plain bisection still needs, at worst, once ``lo`` serves: the top first, if it is untried."""
        if self.upper is not None:
            return halvings(self.upper - lo)
        return 0 if self.top is None else 1 + halvings(self.top - lo)

    def _affordable(self, length: int) -> bool:
        if self.top is None and self.upper is None:
            return self.answers < SPARE
        return self._left() > max(halvings(length - self.lo), self._needed(length))


def _answers(observations: Sequence[Observation]) -> dict[int | None, Answer]:
    """The latest answer at each length. Once some length got an answer about capacity, "no length can" is no answer."""
    answers: dict[int | None, Answer] = {o.length: o.reading for o in observations if o.reading is not Answer.UNKNOWN}
    if not {Answer.SERVES, Answer.TOO_LONG} & set(answers.values()):
        return answers
    # The weights had been loaded, the configuration taken.
    disproved = (Answer.NO_LENGTH, Answer.WRONG)
    return {length: reading for length, reading in answers.items() if reading not in disproved}


def _limit(observations: Sequence[Observation], space: Space) -> int | None:
    """The model's own limit: as a refusal names it, as it is known, or as a start without a length showed it."""
    refused = [o.limit for o in observations if o.reading is Answer.OVER_LIMIT and o.limit is not None]
    shown = [o.limit for o in observations if o.limit is not None]
    known = shown if space.limit is None else [space.limit]
    return min([*refused, *known], default=None)


def bracket(observations: Sequence[Observation], space: Space) -> Bracket:
    """What the observations prove so far."""
    return _Known(observations, space).bracket


def _flipped(observations: Sequence[Observation]) -> set[int]:
    """Lengths that both served and were refused: the truth itself moves."""
    seen: dict[int, set[Answer]] = {}
    for o in observations:
        if o.length is not None and o.reading in (Answer.SERVES, Answer.TOO_LONG):
            seen.setdefault(o.length, set()).add(o.reading)
    return {length for length, readings in seen.items() if len(readings) > 1}


def halvings(gap: int) -> int:
    """Trials that plain bisection needs, at worst, to bring a gap of ``gap`` tokens down to one."""
    return (gap - 1).bit_length() if gap > 1 else 0


def sorted_lengths(lengths: Iterable[int | None]) -> list[int | None]:
    """Lengths in ascending order, the unknown top last."""
    return sorted(lengths, key=lambda length: (length is None, length or 0))

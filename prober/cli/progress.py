"""Progress of a running search on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from prober.measure.summary import describe, duration, shorten
from prober.records import AUTO, Bracket, Combination, Outcome, Stage, Trial, Verify
from prober.search.interpret import interpret, leaves_too_little
from prober.search.next_length import Answer, Try

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STAGE_WORDS = {
    Stage.CONFIG: "starting",
    Stage.DOWNLOAD: "downloading",
    Stage.LOAD: "loading",
    Stage.COMPILE: "compiling",
    Stage.PROFILE: "profiling",
    Stage.KV_CACHE: "sizing the KV cache",
    Stage.CAPTURE: "capturing graphs",
    Stage.READY: "ready",
    Stage.SERVE: "answering",
}
REMIND_SECONDS = 60.0  # plain output: repeat the stage this often


def tokens(length: int | None) -> str:
    if length == AUTO:
        return "vLLM's choice"
    return "the model's limit" if length is None else f"{length:,}"


def time_left(step: Try, took: Sequence[float]) -> str:
    """Estimate the remaining time from the launches so far; empty before the first."""
    if not took:
        return ""
    seconds = step.left * sum(took) / len(took)
    return f", about {duration(seconds)} left"


def bracket_words(bracket: Bracket) -> str:
    serves = "nothing yet" if bracket.serves is None else f"{bracket.serves:,}"
    refused = "nothing yet" if bracket.refused is None else f"{bracket.refused:,}"
    return f"serves: {serves} · refused: {refused}"


def result_words(trial: Trial, verify: Verify) -> str:
    observation = interpret(trial, verify)
    reading = observation.reading if observation else Answer.UNKNOWN
    mark = {Answer.SERVES: "serves", Answer.TOO_LONG: "too long", Answer.UNKNOWN: "could not tell"}.get(
        reading, str(reading).replace("_", " ")
    )
    detail = "" if trial.verdict.outcome is Outcome.FITS else f" ({trial.verdict.outcome})"
    if leaves_too_little(trial):
        detail = f" (serves, and leaves {trial.least_free_mib:,} MiB free)"
    return f"{mark}{detail}"


class PlainDisplay:
    """One line per event."""

    def __init__(self, combination: Combination, verify: Verify, write: Callable[[str], None]) -> None:
        self._verify, self._write = verify, write
        self._stage: Stage | None = None
        self._said_at = 0.0
        self._took: list[float] = []
        write(f"Probing {describe(combination)}")

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def resumed(self, trials: Sequence[Trial]) -> None:
        self._write(f"Going on from {len(trials)} recorded trials of this machine in this state (--fresh starts over):")
        for trial in trials:
            self._write(f"  {tokens(trial.length)}: {result_words(trial, self._verify)}, {trial.started_at}")

    def launching(self, step: Try, launch: int, bracket: Bracket) -> None:
        self._stage = None
        left = time_left(step, self._took)
        self._write(f"Launch {launch}: {tokens(step.length)}, {step.why} [{bracket_words(bracket)}]{left}")

    def running(self, stage: Stage, age_seconds: float) -> None:
        now = time.monotonic()
        if stage is not self._stage or now - self._said_at > REMIND_SECONDS:
            self._write(f"  {duration(age_seconds)}: {STAGE_WORDS[stage]}")
            self._stage, self._said_at = stage, now

    def finished(self, trial: Trial) -> None:
        self._took.append(trial.seconds)
        words = result_words(trial, self._verify)
        evidence = f": {shorten(trial.verdict.evidence)}" if trial.verdict.evidence else ""
        self._write(f"  {tokens(trial.length)} {words} after {duration(trial.seconds)}{evidence}")

    def say(self, line: str) -> None:
        self._write(line)


class LiveDisplay:
    """The trials so far, the bracket, the running trial's stage and age."""

    def __init__(self, combination: Combination, verify: Verify, console: Console) -> None:
        from rich.live import Live

        self._combination, self._verify = combination, verify
        self._trials: list[tuple[Trial, bool]] = []
        self._bracket = Bracket()
        self._running: tuple[Try, int] | None = None
        self._stage, self._age, self._note = Stage.CONFIG, 0.0, ""
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running, self._note = None, ""
        self._live.stop()

    def resumed(self, trials: Sequence[Trial]) -> None:
        self._trials = [(trial, True) for trial in trials]

    def launching(self, step: Try, launch: int, bracket: Bracket) -> None:
        self._running, self._bracket = (step, launch), bracket
        self._stage, self._age = Stage.CONFIG, 0.0

    def running(self, stage: Stage, age_seconds: float) -> None:
        self._stage, self._age, self._note = stage, age_seconds, ""

    def finished(self, trial: Trial) -> None:
        self._running = None
        self._trials.append((trial, False))

    def say(self, line: str) -> None:
        self._note = line

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("tokens", justify="right")
        for name in ("result", "took", "what vLLM said"):
            table.add_column(name)
        for trial, is_recorded in self._trials:
            took = "recorded" if is_recorded else duration(trial.seconds)
            style = "green" if trial.verdict.outcome is Outcome.FITS else ""
            said = Text(shorten(trial.verdict.evidence, 90), overflow="ellipsis", no_wrap=True)
            table.add_row(tokens(trial.length), Text(result_words(trial, self._verify), style=style), took, said)
        lines: list[RenderableType] = [Text(f"Probing {describe(self._combination)}", style="bold"), table]
        if self._running:
            step, launch = self._running
            now = f"launch {launch}: {tokens(step.length)} ({step.why}), {STAGE_WORDS[self._stage]}, "
            left = time_left(step, [trial.seconds for trial, _ in self._trials])
            lines.append(Text(f"{bracket_words(self._bracket)}{left}\n{now}{duration(self._age)}"))
        if self._note:
            lines.append(Text(self._note, style="yellow"))
        return Group(*lines)

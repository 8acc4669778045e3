"""Run one trial: start vLLM at one length, follow its log, send a request, stop it, and return the verdict."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prober.engine.install import Engine, LaunchCommand, offline, server
from prober.logs.classify import Reader, conclude
from prober.records import Combination, CompileState, Entrypoint, Figures, Outcome, Report, Stage, Verdict, Verify
from prober.trial.memory_guard import Guard
from prober.trial.process import Launch
from prober.trial.timeouts import Limits, Patience
from prober.trial.verify import EMPTY_ANSWER, OfflineProof, Proof, ServerProof

TICK_SECONDS = 0.2
STUCK_SECONDS = 10.0  # a request waits while nothing runs: its last block is never granted
EXPLAIN_SECONDS = 5.0  # after a failed request, for the cause to reach the log
READ_BYTES = 32 << 20  # of the log, per read
TOO_LARGE = re.compile(r"maximum context length|longer than the maximum|exceeds the capacity")
IGNORED = b"exceeds the capacity of block_manager"  # V0 warns, and answers without a token
TAIL_BYTES = 1 << 16
QUIET_STAGES = (Stage.READY, Stage.SERVE)  # our own requests fill the log: only the scheduler shows progress

# Only in records at ERROR level: logs of good starts contain harmless exceptions at WARNING.
EXCEPTION = re.compile(rb" ERROR [^\r\n]*?\] ((?:\w+\.)*[A-Z]\w*(?:Error|Exception): [^\r\n]{1,400})")
WRAPPER = re.compile(
    r"Engine core initialization|EngineDeadError|Engine process failed|WorkerProc|Worker failed|Cancelled"
)


@dataclass(frozen=True, slots=True)
class TrialContext:
    """What all trials of one search share. ``folder`` is a private directory of the search."""

    engine: Engine
    combination: Combination
    verify: Verify
    limits: Limits
    folder: Path
    environment: Mapping[str, str]  # added to the engine's: the leased devices and the search's own variables


def attempt(
    context: TrialContext, length: int | None, tag: str, report: Report, guard: Guard | None = None
) -> tuple[Verdict, int | None]:
    """Launch vLLM once; return the verdict and the exit status (None: the prober stopped it).

    ``length`` is in tokens, None for the model's own limit; ``guard`` defaults to one with the usual floors. Leaves the
    log at `log_path` and nothing else. Raises NotReady if a process of the trial cannot be killed.
    """
    guard = guard or Guard(context.folder)
    with _cache(context, tag) as cache:
        start, proof_of = _prepare(context, length, tag, cache)
        environment = {**start.environment, **context.environment}
        with (
            Launch(start.command, environment, log_path(context, tag), tag) as launch,
            contextlib.closing(proof_of(launch)) as proof,
        ):
            watch = _Watch(context, length, launch, proof, guard, tag, report)
            return watch.until_verdict(), launch.exit_status


def log_path(context: TrialContext, tag: str) -> Path:
    return context.folder / f"{tag}.log"


def _prepare(
    context: TrialContext, length: int | None, tag: str, cache: Path
) -> tuple[LaunchCommand, Callable[[Launch], Proof]]:
    if context.combination.entrypoint is Entrypoint.LLM:
        events = context.folder / f"{tag}.events"
        start = offline(context.engine, context.combination, length, context.verify, cache, events)
        return start, lambda _: OfflineProof(events)
    port, key = _free_port(), secrets.token_urlsafe(24)
    start = server(context.engine, context.combination, length, port, key, cache)
    return start, lambda launch: ServerProof(port, key, context.verify, lambda: launch.listens_on(port))


@contextlib.contextmanager
def _cache(context: TrialContext, tag: str) -> Iterator[Path]:
    """Yield an empty compile cache for each cold start, removed afterwards; otherwise one for the whole search.

    vLLM's model-class info is shared: it has no effect on memory and takes 8 s to compute on two cores.
    """
    shared = context.folder / "cache"
    (shared / "modelinfos").mkdir(parents=True, exist_ok=True)
    if context.combination.compile_state is not CompileState.COLD:
        yield shared
        return
    own = context.folder / f"{tag}.cache"
    own.mkdir()
    (own / "modelinfos").symlink_to(shared / "modelinfos")
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class _Watch:
    """Watches one running trial until it has a verdict."""

    def __init__(
        self,
        context: TrialContext,
        length: int | None,
        launch: Launch,
        proof: Proof,
        guard: Guard,
        tag: str,
        report: Report,
    ) -> None:
        self._length, self._launch, self._proof, self._guard = length, launch, proof, guard
        self._log, self._read_bytes = log_path(context, tag), 0
        self._verify, self._report = context.verify, report
        self._reader = Reader()
        self._began = time.monotonic()
        self._patience = Patience(context.limits, self._began)
        self._steps = 0
        self._rejected_at: float | None = None

    def until_verdict(self) -> Verdict:
        checks = (
            *(self._answered, self._refused, self._too_large, self._ended, self._rejected),
            *(self._stuck, self._endangered, self._hung),
        )
        while True:
            self._update()
            for check in checks:
                if (verdict := check()) is not None:
                    return verdict
            time.sleep(TICK_SECONDS)

    @property
    def stage(self) -> Stage:
        progress = self._proof.progress
        return Stage.SERVE if progress.is_asked else Stage.READY if progress.is_ready else self._reader.stage

    def _update(self) -> None:
        # Checked before the log is read, so that its last lines are not missed.
        self._has_ended = self._launch.has_ended
        has_output = self._read_log()
        self._proof.look()
        now, steps = time.monotonic(), self._proof.progress.steps
        has_progress = steps > self._steps or (has_output and self.stage not in QUIET_STAGES)
        self._patience.note(self.stage, has_progress, now)
        self._steps = steps
        self._report(self.stage, now - self._began)

    def _read_log(self) -> bool:
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(self._read_bytes)
            chunk = log.read(READ_BYTES)
            self._read_bytes += len(chunk)
            self._reader.feed(chunk)
            return bool(chunk)
        return False

    def _answered(self) -> Verdict | None:
        progress = self._proof.progress
        if not (progress.is_answered or (self._verify is Verify.NONE and progress.is_ready)):
            return None
        reported = progress.max_model_len
        if self._length is not None and reported is not None and reported < self._length:
            figures = replace(self._figures(), model_limit=reported)
            evidence = f"asked for {self._length} tokens, vLLM reports max_model_len {reported}"
            return Verdict(Outcome.OVER_MODEL_LIMIT, Stage.READY, evidence, figures=figures)
        evidence = "the server is ready" if self._verify is Verify.NONE else "the request was answered"
        return Verdict(Outcome.FITS, self.stage, evidence, figures=self._figures())

    def _refused(self) -> Verdict | None:
        return self._reader.verdict() if self._reader.is_decided else None

    def _ended(self) -> Verdict | None:
        if not self._has_ended:
            return None
        while self._read_log():
            pass
        found = self._with_cause(conclude(self._reader, self._launch.exit_status))
        why = self._proof.progress.rejection
        is_explained = why is None or found.rule != "exit_status"
        return found if is_explained else replace(found, stage=Stage.SERVE, evidence=str(why))

    def _too_large(self) -> Verdict | None:
        """The request was rejected for its size, or V0 logged that it ignored it for its size."""
        why = self._proof.progress.rejection
        if why is None or not (TOO_LARGE.search(why) or (why == EMPTY_ANSWER and IGNORED in self._tail())):
            return None
        return Verdict(Outcome.UNSERVABLE, Stage.SERVE, why, figures=self._figures())

    def _tail(self) -> bytes:
        with self._log.open("rb") as log:
            log.seek(max(0, self._read_bytes - TAIL_BYTES))
            return log.read()

    def _rejected(self) -> Verdict | None:
        """A request that failed for another reason is a crash; wait for the log to name the cause."""
        why = self._proof.progress.rejection
        if why is None:
            return None
        now = time.monotonic()
        self._rejected_at = self._rejected_at or now
        if now - self._rejected_at < EXPLAIN_SECONDS:
            return None
        return self._with_cause(Verdict(Outcome.CRASH, Stage.SERVE, why, figures=self._figures()))

    def _with_cause(self, found: Verdict) -> Verdict:
        """Replace the evidence of a crash by the log's last exception that is not a wrapper."""
        if found.outcome is not Outcome.CRASH or found.rule == "exit_status":
            return found
        exceptions = [name.decode(errors="replace") for name in EXCEPTION.findall(self._tail())]
        causes = [name for name in exceptions if not WRAPPER.search(name)]
        return replace(found, evidence=causes[-1]) if causes else found

    def _stuck(self) -> Verdict | None:
        since = self._proof.progress.stuck_since
        if since is None or time.monotonic() - since < STUCK_SECONDS:
            return None
        evidence = f"the request waited for {STUCK_SECONDS:.0f} s while nothing ran: its last block is never granted"
        return Verdict(Outcome.UNSERVABLE, Stage.SERVE, evidence, figures=self._figures())

    def _endangered(self) -> Verdict | None:
        danger = self._guard.danger(self._launch.processes)
        if danger is None:
            return None
        rule = "guard" if danger.is_ours else "guard_shared"
        return Verdict(Outcome.HOST_OOM, self.stage, danger.what, rule=rule, figures=self._figures())

    def _hung(self) -> Verdict | None:
        why = self._patience.exhausted(time.monotonic())
        return None if why is None else Verdict(Outcome.TIMEOUT, self.stage, why, figures=self._figures())

    def _figures(self) -> Figures:
        """Figures from the log, and the block counts that vLLM's API reports."""
        figures, progress = self._reader.figures, self._proof.progress
        return replace(
            figures,
            requested_max_model_len=progress.max_model_len or figures.requested_max_model_len,
            gpu_blocks=progress.num_gpu_blocks or figures.gpu_blocks,
            block_size=progress.block_size or figures.block_size,
        )

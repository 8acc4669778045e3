"""Launch the trials of one search: monitor the devices, check each verdict, and keep the scrubbed log."""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from prober.engine.install import arguments
from prober.host import idle, nvml
from prober.host.gpu import MIB
from prober.host.tempdir import private_folder
from prober.measure.devices import Devices, everything
from prober.measure.request import Request
from prober.measure.search_loop import Launcher, LaunchResult
from prober.records import Combination, CompileState, NotReady, Outcome, Report, Stage, Verdict, Verify
from prober.redact import Scrubber, secrets_in
from prober.results.from_ceiling import public_model
from prober.results.store import Store
from prober.results.text import public_text
from prober.trial.run import TrialContext, attempt, log_path

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between checks of the devices while a trial runs: other processes, and free memory
OF_MEMORY = (
    *(Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY, Outcome.DEVICE_OOM, Outcome.UNSERVABLE),
    Outcome.SEQUENCE_SLOTS,
)
# Of a start that fills the compile cache: how it may end with the cache filled, and what is as true without one.
COMPILED = (Outcome.FITS, Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY)
OF_CONFIGURATION = (Outcome.BAD_CONFIG, Outcome.OVER_MODEL_LIMIT, Outcome.TOO_SHORT, Outcome.SEQUENCE_SLOTS)


@contextmanager
def launcher(held: Devices, store: Store, request: Request) -> Iterator[Launcher]:
    """Yield a function that launches one trial on ``held``. Its private folder is removed when the search ends."""
    with private_folder(Path(tempfile.gettempdir())) as folder:
        yield _Launches(held, store, request, folder)


class _Launches:
    """Launches one trial after the other."""

    def __init__(self, held: Devices, store: Store, request: Request, folder: Path) -> None:
        self._devices, self._store, self._request, self._folder = held, store, request, folder
        self._environment = {**held.environment, **request.environment}
        self._was_busy = False
        self._warm: set[tuple[Combination, int | None]] = set()  # whose compiled code the cache holds

    def __call__(self, combination: Combination, length: int | None, tag: str, report: Report) -> LaunchResult:
        if self._was_busy:
            self._devices.let_pass()
        scrubber = Scrubber(os.environ, secrets_in(combination.other_flags))
        context = TrialContext(
            self._devices.engine,
            combination,
            self._request.verify,
            self._request.limits,
            self._folder,
            self._environment,
        )
        words = [str(context.engine.python), *arguments(combination, length)]
        log.info("trial %s: start vLLM (%s): %s", tag, combination.entrypoint, scrubber.text(shlex.join(words)))
        try:
            result = self._fill_cache(context, length, tag, report) or self._launch(context, length, tag, report)
        finally:
            _keep(scrubber, log_path(context, tag), self._store.log_path(tag))
        self._was_busy = result.verdict.outcome is Outcome.DEVICE_BUSY
        return replace(result, verdict=published(result.verdict, scrubber))

    def _launch(self, context: TrialContext, length: int | None, tag: str, report: Report) -> LaunchResult:
        self._devices.wait_until_idle()
        monitor, at_rest = DeviceMonitor(self._devices, report), self._devices.at_rest_mib()
        verdict, exit_status = attempt(context, length, tag, monitor.report)
        verdict = monitor.judge(verdict)
        leaked = self._devices.leaked_mib()
        return LaunchResult(unless_held(verdict, leaked), exit_status, leaked, monitor.least_free_mib, at_rest)

    def _fill_cache(self, context: TrialContext, length: int | None, tag: str, report: Report) -> LaunchResult | None:
        """Fill the compile cache with a start of its own where starts must be warm; None: the trial can run.

        vLLM keeps compiled code by length, too (ModelConfig.compute_hash, 0.32.0). That start measures
        memory with a cold cache, so its figures do not count. If it fails to fill the cache, its verdict becomes the
        trial's.
        """
        about = (context.combination, length)
        if context.combination.compile_state is not CompileState.WARM or about in self._warm:
            return None
        self._devices.say("a first start at this length, to fill the compile cache; it does not count")
        self._devices.wait_until_idle()
        verdict, exit_status = attempt(replace(context, verify=Verify.NONE), length, tag, report)
        self._devices.leaked_mib()
        if verdict.outcome in COMPILED:
            log_path(context, tag).unlink(missing_ok=True)
            self._warm.add(about)
            return None
        if verdict.outcome not in OF_CONFIGURATION:
            evidence = f"the compile cache could not be filled: {verdict.evidence}"
            verdict = replace(verdict, outcome=Outcome.CRASH, evidence=evidence, rule="cache_not_filled")
        return LaunchResult(verdict, exit_status)


def unless_held(verdict: Verdict, leaked_mib: int | None) -> Verdict:
    """Turn a refusal into ``device_busy`` where memory stays in use after it: it says nothing about the length."""
    if not leaked_mib or verdict.outcome not in OF_MEMORY:
        return verdict
    evidence = f"{leaked_mib} MiB stayed in use after it by no visible process; vLLM said: {verdict.evidence}"
    return replace(verdict, outcome=Outcome.DEVICE_BUSY, evidence=evidence, rule="memory_not_back")


class DeviceMonitor:
    """Watch the devices while a trial runs, for other processes and for the least free memory.

    With another process on a device, a refusal says nothing about the length. PyTorch keeps the memory it has
    allocated, so a check after the peak still sees it.
    """

    def __init__(self, held: Devices, report: Report) -> None:
        self._devices, self._report = held, report
        self._seen: str | None = None
        self._least_free_mib: int | None = None
        self._is_free_known = True
        self._next_look = time.monotonic()

    def report(self, stage: Stage, age_seconds: float) -> None:
        self._report(stage, age_seconds)
        if time.monotonic() >= self._next_look:
            self._look()

    def judge(self, verdict: Verdict) -> Verdict:
        self._look()
        if self._seen is None or verdict.outcome not in OF_MEMORY:
            return verdict
        evidence = f"while it ran, another process took memory on {self._seen}; vLLM said: {verdict.evidence}"
        return replace(verdict, outcome=Outcome.DEVICE_BUSY, evidence=evidence, rule="newcomer")

    def _look(self) -> None:
        if self._devices.chosen:
            now = everything()
            self._seen = self._seen or idle.newcomers(self._devices.baseline, now)
            self._note_free(now)
        self._next_look = time.monotonic() + LOOK_SECONDS

    def _note_free(self, now: nvml.Inventory) -> None:
        """The figure stays unknown after another process was seen or a device did not report its memory."""
        uuids = {gpu.uuid for gpu in self._devices.chosen}
        here = [(gpu.memory_total_bytes, gpu.memory_used_bytes) for gpu in now.gpus if gpu.uuid in uuids]
        free = [(total - used) // MIB for total, used in here if total is not None and used is not None]
        self._is_free_known &= len(free) == len(uuids) and self._seen is None
        earlier = [] if self._least_free_mib is None else [self._least_free_mib]
        self._least_free_mib = min([*free, *earlier], default=None)

    @property
    def least_free_mib(self) -> int | None:
        """Least free memory of one device in MiB; None: not reported, or other processes used the device."""
        return self._least_free_mib if self._is_free_known else None


def _keep(scrubber: Scrubber, log: Path, kept: Path) -> None:
    try:
        scrubber.move(log, kept)
    except OSError as error:
        kept.unlink(missing_ok=True)
        raise NotReady(f"The log {kept} cannot be written: {error.strerror}; earlier trials are intact.") from error


def published(verdict: Verdict, scrubber: Scrubber) -> Verdict:
    """Return the verdict without secrets and paths, ready to be stored and shared."""
    model = verdict.figures.model
    figures = replace(verdict.figures, model=None if model is None else public_model(model))
    return replace(verdict, evidence=public_text(scrubber.text(verdict.evidence)), figures=figures)

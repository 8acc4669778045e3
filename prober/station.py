"""Where trials run: the leased GPUs, idle before each trial and given back after it; or the CPU."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from prober.controller import Shown
from prober.machine import gpus, neighbours
from prober.machine.devices import MIB, Gpu, visible_setting
from prober.machine.leases import choose_and_lease
from prober.matrix.ceiling_row import public_model
from prober.matrix.public_text import public_text
from prober.matrix.store import Store
from prober.records import (
    Combination,
    CompileState,
    Machine,
    NotReady,
    Outcome,
    Report,
    Stage,
    Verdict,
    Verify,
)
from prober.scrub import Scrubber, secrets_in
from prober.trials.engine import Engine
from prober.trials.patience import Limits
from prober.trials.trial import Setting, attempt, log_path

IDLE_SECONDS = 600.0  # to wait for a neighbour, unless told otherwise
RETURN_SECONDS = 60.0  # to wait for a trial's own memory
LOOK_SECONDS = 0.5  # between looks at the devices while a trial runs: for neighbours, and for what is left free
OF_MEMORY = (
    *(Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY, Outcome.DEVICE_OOM, Outcome.UNSERVABLE),
    Outcome.SEQUENCE_SLOTS,
)
# Of a start that fills the compile cache: how it may end with the cache filled, and what is as true without one.
COMPILED = (Outcome.FITS, Outcome.KV_TOO_SMALL, Outcome.NO_KV_MEMORY)
OF_CONFIGURATION = (Outcome.BAD_CONFIG, Outcome.OVER_MODEL_LIMIT, Outcome.TOO_SHORT, Outcome.SEQUENCE_SLOTS)
PREFIX = "prober-trials-"
SETTLED_SECONDS = 60.0
LET_PASS_SECONDS = 60.0  # to wait for a busy host, before the next launch


@dataclass(slots=True)
class Station:
    """One machine's devices, held for one search."""

    engine: Engine
    machine: Machine
    chosen: tuple[Gpu, ...] = ()  # empty: the CPU
    say: Callable[[str], None] = lambda _: None  # whom we wait for
    idle_seconds: float = IDLE_SECONDS
    return_seconds: float = RETURN_SECONDS
    baseline: neighbours.Baseline = field(default_factory=neighbours.Baseline)

    @property
    def environment(self) -> Mapping[str, str]:
        return visible_setting(self.chosen) if self.chosen else {"CUDA_VISIBLE_DEVICES": ""}

    def wait_until_idle(self) -> None:
        """Return when every GPU is at its baseline. Raises NotReady, naming who holds it, when that takes too long."""
        if self.chosen:
            uuids = [gpu.uuid for gpu in self.chosen]
            earlier = self.baseline if self.baseline.used_bytes else None
            self.baseline = neighbours.wait_until_idle(
                _everything, uuids, earlier, limit_seconds=self.idle_seconds, report=self.say
            )

    def let_pass(self) -> None:
        """After a launch that met a busy host: nobody can be seen to leave it, so only time helps. GPUs are watched."""
        if not self.chosen:
            seconds = min(LET_PASS_SECONDS, self.idle_seconds)
            self.say(f"this machine's memory is in use by others: waiting {seconds:.0f} s")
            time.sleep(seconds)

    def at_rest_mib(self) -> int | None:
        """What is in use on the devices now, in MiB; None: not told, or they are not at rest. Waits for nobody."""
        uuids = {gpu.uuid for gpu in self.chosen}
        here = [gpu for gpu in _everything().gpus if gpu.uuid in uuids] if uuids else []
        used = [gpu.memory_used_bytes for gpu in here if gpu.is_idle and gpu.memory_used_bytes is not None]
        return sum(used) // MIB if used and len(used) == len(uuids) else None

    def leaked_mib(self) -> int | None:
        """Wait for the trial's memory to come back; return what did not, in MiB on all GPUs. None: the CPU."""
        if not self.chosen:
            return None
        left = neighbours.wait_for_return(
            _everything, self.baseline, limit_seconds=self.return_seconds, report=self.say
        )
        return sum(left.values()) // MIB if left else None


def _everything() -> gpus.Inventory:
    return gpus.inventory(None)


@contextmanager
def hold(
    engine: Engine, device: str, count: int, wanted: list[str] | None, say: Callable[[str], None], idle_seconds: float
) -> Iterator[Station]:
    """Lease ``count`` GPUs of one type, or take the CPU where ``device`` says so. Errors: see `devices.choose`."""
    here = gpus.inventory()
    if _is_cpu(engine, device, here):
        yield Station(engine, _machine(engine, "cpu", (), here), say=say, idle_seconds=idle_seconds)
        return
    with choose_and_lease(here, count, wanted) as lease:
        yield Station(engine, _machine(engine, "cuda", lease.gpus, here), tuple(lease.gpus), say, idle_seconds)


def why_never(engine: Engine, device: str, count: int, wanted: list[str] | None) -> str | None:
    """Say why this machine can never hold ``count`` GPUs; None: it can, if not now.

    Raises UsageError where only the wish is at fault: GPUs that are not there, or that the environment hides.
    """
    here = gpus.inventory()
    if _is_cpu(engine, device, here) or not here.gpus:
        return None
    if count > len(here.uuids):
        return f"{count} GPUs are needed, and this machine has {len(here.uuids)}"
    with suppress(NotReady):
        gpus.choose(here, count, wanted)
    return None


def machine_of(engine: Engine, device: str) -> Machine:
    """What would be measured on, without holding anything: the CPU, or the first GPU."""
    here = gpus.inventory()
    if _is_cpu(engine, device, here):
        return _machine(engine, "cpu", (), here)
    return _machine(engine, "cuda", here.gpus[:1], here)


def _is_cpu(engine: Engine, device: str, here: gpus.Inventory) -> bool:
    """A CUDA build without a GPU is no CPU engine: that machine is not ready, and choosing says why."""
    has_no_cuda = engine.is_cpu_build or engine.torch_version is None
    return (
        device == "cpu"
        or (device == "auto" and not here.gpus and has_no_cuda)
        or (device == "auto" and engine.is_cpu_build)
    )


def _machine(engine: Engine, device: Literal["cuda", "cpu"], chosen: Sequence[Gpu], here: gpus.Inventory) -> Machine:
    versions = {"vllm_version": engine.vllm_version, "torch_version": engine.torch_version}
    return gpus.machine(device, chosen, here, **versions)


@contextmanager
def launcher(
    station: Station, store: Store, verify: Verify, limits: Limits, settings: Mapping[str, str] | None = None
) -> Iterator[Callable[[Combination, int | None, str, Report], Shown]]:
    """Yield what launches one trial there and keeps its log, scrubbed. The private folder goes when the search ends.

    ``settings`` are added to the environment of every trial.
    """
    with private_folder(Path(tempfile.gettempdir())) as folder:
        was_busy = False
        warm: set[tuple[Combination, int | None]] = set()  # whose compiled code the cache holds

        def launch(combination: Combination, length: int | None, tag: str, report: Report) -> Shown:
            nonlocal was_busy
            if was_busy:
                station.let_pass()
            environment = {**station.environment, **(settings or {})}
            setting = Setting(station.engine, combination, verify, limits, folder, environment)
            scrubber = Scrubber(os.environ, secrets_in(combination.other_flags))
            if combination.compile_state is CompileState.WARM and (combination, length) not in warm:
                hindered = _fill_cache(station, setting, length, tag, report)
                if hindered is not None:
                    _keep(scrubber, log_path(setting, tag), store.log_path(tag))
                    return Shown(published(hindered, scrubber))
                warm.add((combination, length))
            station.wait_until_idle()
            lookout = Lookout(station, report)
            at_rest = station.at_rest_mib()
            try:
                verdict, exit_status = attempt(setting, length, tag, lookout.report)
                verdict = lookout.judge(verdict)
            finally:
                _keep(scrubber, log_path(setting, tag), store.log_path(tag))
            leaked = station.leaked_mib()
            verdict = published(unless_held(verdict, leaked), scrubber)
            was_busy = verdict.outcome is Outcome.DEVICE_BUSY
            return Shown(verdict, exit_status, leaked, lookout.least_free_mib, at_rest)

        yield launch


def _fill_cache(station: Station, setting: Setting, length: int | None, tag: str, report: Report) -> Verdict | None:
    """Start once for the cache alone: vLLM keeps compiled code by length, too (ModelConfig.compute_hash, 0.32.0).

    What this start shows of memory is of a cold cache and does not count. None: the cache is filled. Else the verdict
    that stands for the trial, for without a filled cache it would be a cold one; the log is the trial's.
    """
    station.say("a first start at this length, to fill the compile cache; it does not count")
    station.wait_until_idle()
    verdict, _ = attempt(replace(setting, verify=Verify.NONE), length, tag, report)
    station.leaked_mib()
    if verdict.outcome in COMPILED:
        log_path(setting, tag).unlink(missing_ok=True)
        return None
    if verdict.outcome in OF_CONFIGURATION:
        return verdict
    evidence = f"the compile cache could not be filled: {verdict.evidence}"
    return replace(verdict, outcome=Outcome.CRASH, evidence=evidence, rule="cache_not_filled")


def unless_held(verdict: Verdict, leaked_mib: int | None) -> Verdict:
    """A refusal after which memory stays taken, by whomever, says nothing about the length."""
    if not leaked_mib or verdict.outcome not in OF_MEMORY:
        return verdict
    evidence = f"{leaked_mib} MiB stayed taken after it by nobody that is seen; vLLM said: {verdict.evidence}"
    return replace(verdict, outcome=Outcome.DEVICE_BUSY, evidence=evidence, rule="memory_not_back")


class Lookout:
    """Watches the devices while a trial runs: for neighbours (with one there, a refusal says nothing about the length)
    and for the least memory that is left free. PyTorch keeps what it has taken: a look after the peak still shows it.
    """

    def __init__(self, station: Station, report: Report) -> None:
        self._station, self._report = station, report
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
        evidence = f"while it ran, memory was taken on {self._seen}; vLLM said: {verdict.evidence}"
        return replace(verdict, outcome=Outcome.DEVICE_BUSY, evidence=evidence, rule="newcomer")

    def _look(self) -> None:
        if self._station.chosen:
            now = _everything()
            self._seen = self._seen or neighbours.newcomers(self._station.baseline, now)
            self._note_free(now)
        self._next_look = time.monotonic() + LOOK_SECONDS

    def _note_free(self, now: gpus.Inventory) -> None:
        """What a neighbour holds, or a device that tells nothing, leaves it unknown for good."""
        uuids = {gpu.uuid for gpu in self._station.chosen}
        here = [(gpu.memory_total_bytes, gpu.memory_used_bytes) for gpu in now.gpus if gpu.uuid in uuids]
        free = [(total - used) // MIB for total, used in here if total is not None and used is not None]
        self._is_free_known &= len(free) == len(uuids) and self._seen is None
        earlier = [] if self._least_free_mib is None else [self._least_free_mib]
        self._least_free_mib = min([*free, *earlier], default=None)

    @property
    def least_free_mib(self) -> int | None:
        """The least that was free on one device; None: not told, or not only ours to say."""
        return self._least_free_mib if self._is_free_known else None


def _keep(scrubber: Scrubber, log: Path, kept: Path) -> None:
    try:
        scrubber.move(log, kept)
    except OSError as error:
        kept.unlink(missing_ok=True)
        raise NotReady(f"The log {kept} cannot be written: {error.strerror}; earlier trials are intact.") from error


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder that only we can read, gone afterwards; those that killed probers have left go, too.

    A lock says that its prober lives: it holds across containers that share the parent.
    """
    remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_left_over(parent: Path) -> None:
    """Remove our own private folders whose prober is dead. A new one may not be locked yet: it is left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if is_ours and time.time() - found.st_mtime > SETTLED_SECONDS:
                handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(handle)


def published(verdict: Verdict, scrubber: Scrubber) -> Verdict:
    """The verdict as it may be kept and shared: no secret, no path."""
    model = verdict.figures.model
    figures = replace(verdict.figures, model=None if model is None else public_model(model))
    return replace(verdict, evidence=public_text(scrubber.text(verdict.evidence)), figures=figures)

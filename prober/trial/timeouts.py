"""Time limits without progress, by stage. A hang is a ``timeout`` at its stage, never a refused length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prober.records import Stage

# Seconds without a new log line or stage. Loading reads from slow disks; compiling is silent for a long time.
IDLE_SECONDS: Mapping[Stage, float] = {
    Stage.CONFIG: 300,
    Stage.DOWNLOAD: 900,
    Stage.LOAD: 900,
    Stage.COMPILE: 1200,
    Stage.PROFILE: 600,
    Stage.KV_CACHE: 600,
    Stage.CAPTURE: 900,
    Stage.READY: 120,
    Stage.SERVE: 600,
}
# A process that waits for a dead one keeps logging "still waiting", so a stage as a whole is limited, too.
STAGE_TO_IDLE = 6


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without progress that each stage may take; defaults to `IDLE_SECONDS`."""

    idle_seconds: Mapping[Stage, float] = field(default_factory=dict)

    def idle(self, stage: Stage) -> float:
        return self.idle_seconds.get(stage, IDLE_SECONDS[stage])

    def whole(self, stage: Stage) -> float:
        return STAGE_TO_IDLE * self.idle(stage)


class Patience:
    """Tracks progress against the limits. Times are monotonic seconds."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self.stage = Stage.CONFIG
        self._stage_since = self._progress_at = now

    def note(self, stage: Stage, has_output: bool, now: float) -> None:
        if stage is not self.stage:
            self.stage, self._stage_since, self._progress_at = stage, now, now
        elif has_output:
            self._progress_at = now

    def exhausted(self, now: float) -> str | None:
        """Return which limit is exceeded, or None."""
        idle, whole = now - self._progress_at, now - self._stage_since
        if idle > self._limits.idle(self.stage):
            return f"no progress for {idle:.0f} s at stage {self.stage}"
        if whole > self._limits.whole(self.stage):
            return f"stage {self.stage} did not end within {whole:.0f} s"
        return None

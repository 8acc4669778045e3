"""A stage without progress runs out of time; progress and a new stage begin it anew."""

from __future__ import annotations

import pytest

from prober.records import Stage
from prober.trial.timeouts import IDLE_SECONDS, STAGE_TO_IDLE, Limits, Patience


def patience(**idle: float) -> Patience:
    return Patience(Limits({Stage(name): seconds for name, seconds in idle.items()}), now=100.0)


def test_every_stage_has_a_limit_of_its_own() -> None:
    assert set(IDLE_SECONDS) == set(Stage)
    assert Limits({Stage.LOAD: 5}).idle(Stage.LOAD) == 5
    assert Limits({Stage.LOAD: 5}).idle(Stage.SERVE) == IDLE_SECONDS[Stage.SERVE]


def test_silence_runs_out_and_is_named_with_its_stage() -> None:
    wait = patience(config=10)
    assert wait.exhausted(110.0) is None
    assert wait.exhausted(110.1) == "no progress for 10 s at stage config"


def test_output_is_progress_until_the_stage_as_a_whole_takes_too_long() -> None:
    wait = patience(load=10)
    wait.note(Stage.LOAD, True, 100.0)
    for second in range(101, 100 + 10 * STAGE_TO_IDLE):
        wait.note(Stage.LOAD, True, float(second))
        assert wait.exhausted(float(second)) is None
    wait.note(Stage.LOAD, True, 161.0)
    assert wait.exhausted(161.0) == "stage load did not end within 61 s"


@pytest.mark.parametrize("has_output", [True, False])
def test_a_new_stage_begins_anew(has_output: bool) -> None:
    wait = patience(config=10, load=10)
    wait.note(Stage.LOAD, has_output, 109.0)
    assert wait.exhausted(118.0) is None
    assert wait.exhausted(120.0) == "no progress for 11 s at stage load"

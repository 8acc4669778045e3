"""Waiting for neighbours and for the trial's own memory, with scripted readings and a clock that does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from prober.host.gpu import MIB, Gpu, GpuProcess, Inventory
from prober.host.idle import Baseline, describe, leak, wait_for_return, wait_until_idle
from prober.host.processes import Owner
from prober.records import NotReady

GIB = 1024 * MIB
A, B = "GPU-aa", "GPU-bb"
NEIGHBOUR = GpuProcess(4321, 7 * GIB, Owner.OTHER, "train.py")


def gpu(used: int | None, *processes: GpuProcess, uuid: str = A, unified: bool = False) -> Gpu:
    index = [A, B].index(uuid)
    return Gpu(index, uuid, "NVIDIA L4", 24 * GIB, used, 300 * MIB, processes=processes, is_unified_memory=unified)


@dataclass
class Script:
    """Readings in order, the last one repeated; the clock moves only by sleeping."""

    readings: Sequence[Inventory]
    now: float = 0.0
    count: int = 0
    said: list[str] = field(default_factory=list)

    def read(self) -> Inventory:
        self.count += 1
        return self.readings[min(self.count, len(self.readings)) - 1]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def idle(self, *uuids: str, baseline: Baseline | None = None, limit: float = 60) -> Baseline:
        return wait_until_idle(
            self.read,
            uuids or (A,),
            baseline,
            limit_seconds=limit,
            report=self.said.append,
            clock=self.clock,
            sleep=self.sleep,
        )

    def returned(self, before: Baseline, limit: float = 30) -> dict[str, int]:
        return wait_for_return(
            self.read, before, limit_seconds=limit, report=self.said.append, clock=self.clock, sleep=self.sleep
        )


def script(*gpus: Gpu) -> Script:
    return Script([Inventory((one,)) for one in gpus])


def test_an_idle_gpu_is_ready_at_once_and_its_figure_is_the_baseline() -> None:
    wait = script(gpu(20 * MIB))
    assert wait.idle() == Baseline({A: 20 * MIB}, {A: 0})
    assert wait.now <= 1
    assert wait.said == []


def test_a_neighbour_is_waited_for_and_named_once_though_its_memory_changes() -> None:
    wait = script(*(gpu(used * GIB, NEIGHBOUR) for used in (7, 8, 9)), gpu(20 * MIB))
    assert wait.idle().used_bytes == {A: 20 * MIB}
    assert wait.said == ["waiting for GPU 0: pid 4321 (train.py, 7.0 GiB)"]


def test_another_neighbour_is_named_when_it_comes() -> None:
    wait = script(gpu(7 * GIB, NEIGHBOUR), gpu(2 * GIB, GpuProcess(99, 2 * GIB, Owner.HIDDEN)), gpu(0))
    wait.idle()
    assert len(wait.said) == 2
    assert "pid 99 (2.0 GiB, not visible from here" in wait.said[1]


def test_a_neighbour_that_stays_ends_the_wait_with_its_pid_and_the_command_to_look_at_it() -> None:
    wait = script(gpu(7 * GIB, NEIGHBOUR))
    with pytest.raises(NotReady, match=r"waited 20 s for GPU 0: pid 4321 \(train.py.*`ps -fp 4321`") as refusal:
        wait.idle(limit=20)
    assert refusal.value.exit_code == 3
    assert 20 <= wait.now < 21


def test_every_gpu_of_the_set_must_be_at_rest_and_others_do_not_matter() -> None:
    busy_b = Inventory((gpu(0), gpu(7 * GIB, NEIGHBOUR, uuid=B)))
    assert Script([busy_b]).idle(A).used_bytes == {A: 0}
    with pytest.raises(NotReady, match="GPU 1: pid 4321"):
        Script([busy_b]).idle(A, B, limit=5)


def test_memory_without_a_process_is_said_as_such() -> None:
    with pytest.raises(NotReady, match=r"2\.0 GiB held by no process that can be seen here \(a zombie context"):
        script(gpu(2 * GIB)).idle(limit=5)
    unknown = Gpu(0, A, "NVIDIA L4", 24 * GIB, 2 * GIB, 300 * MIB, processes=None)
    with pytest.raises(NotReady, match="the driver does not say by whom"):
        script(unknown).idle(limit=5)


def test_a_left_over_of_ours_is_said_with_the_flag_that_ends_it() -> None:
    left = GpuProcess(77, None, Owner.OURS_LEFT_OVER, "python")
    with pytest.raises(NotReady, match=r"pid 77 \(python, left over from an earlier trial of ours, --kill-stale"):
        script(gpu(0, left)).idle(limit=5)
    with pytest.raises(NotReady, match="--kill-stale"):
        script(gpu(0, left)).idle(baseline=Baseline({A: 0}), limit=5)


def test_a_figure_that_still_falls_is_not_the_baseline() -> None:
    wait = script(*(gpu(mib * MIB) for mib in (480, 380, 280, 180, 80, 20, 20)))
    assert wait.idle().used_bytes[A] <= 80 * MIB


def test_with_a_baseline_a_small_newcomer_is_noticed() -> None:
    baseline = Baseline({A: 20 * MIB})
    assert script(gpu(60 * MIB)).idle(baseline=baseline).used_bytes == {A: 20 * MIB}
    with pytest.raises(NotReady):
        script(gpu(200 * MIB)).idle(baseline=baseline, limit=5)


def test_small_leaks_do_not_add_up_in_the_baseline() -> None:
    baseline = Baseline({A: 20 * MIB})
    for used in (60, 80):
        baseline = script(gpu(used * MIB)).idle(baseline=baseline)
    with pytest.raises(NotReady):
        script(gpu(120 * MIB)).idle(baseline=baseline, limit=5)


def test_a_baseline_falls_when_a_neighbour_leaves() -> None:
    baseline = Baseline({A: 400 * MIB})
    assert script(gpu(20 * MIB)).idle(baseline=baseline).used_bytes == {A: 20 * MIB}


def test_a_driver_that_hesitates_is_asked_again_and_a_lost_gpu_ends_the_wait() -> None:
    hesitates = Script([Inventory(problem="no answer"), Inventory((gpu(0),))])
    assert hesitates.idle().used_bytes == {A: 0}
    with pytest.raises(NotReady, match=r"GPU-aa, which the driver does not list .GPU 0 does not answer"):
        Script([Inventory(problem="GPU 0 does not answer")]).idle(limit=5)


def test_where_nobody_tells_the_memory_only_processes_count() -> None:
    assert script(gpu(None)).idle() == Baseline({}, {A: 0})
    with pytest.raises(NotReady):
        script(gpu(None, NEIGHBOUR)).idle(limit=5)


def test_on_unified_memory_the_hosts_movements_do_not_disturb() -> None:
    wait = script(gpu(30 * GIB, unified=True))
    baseline = wait.idle()
    assert script(gpu(30 * GIB + 700 * MIB, unified=True)).idle(baseline=baseline).used_bytes == {A: 30 * GIB}
    with pytest.raises(NotReady):
        script(gpu(40 * GIB, unified=True)).idle(baseline=baseline, limit=5)


def test_memory_that_returns_late_is_waited_for_and_no_leak() -> None:
    wait = script(gpu(9 * GIB), gpu(4 * GIB), gpu(30 * MIB))
    assert wait.returned(Baseline({A: 20 * MIB})) == {A: 0}
    assert wait.said == ["waiting for the trial's GPU memory to return: 9.0 GiB on GPU-aa"]


def test_a_gpu_that_does_not_answer_at_once_is_asked_again() -> None:
    wait = Script([Inventory(), Inventory((gpu(9 * GIB),)), Inventory((gpu(0),))])
    assert wait.returned(Baseline({A: 0})) == {A: 0}


def test_memory_that_does_not_return_is_the_leak() -> None:
    wait = script(gpu(2 * GIB))
    assert wait.returned(Baseline({A: 0}), limit=10) == {A: 2 * GIB}
    assert 10 <= wait.now < 11


def test_what_a_newcomer_takes_is_not_our_leak_but_what_is_just_ending_is() -> None:
    before = Baseline({A: 0}, {A: 0})
    assert leak(before, Inventory((gpu(7 * GIB, NEIGHBOUR),))) == {A: 0}
    assert leak(before, Inventory((gpu(9 * GIB, NEIGHBOUR),))) == {A: 2 * GIB}
    ending = GpuProcess(5, 7 * GIB, Owner.HIDDEN)
    assert leak(before, Inventory((gpu(7 * GIB, ending),))) == {A: 7 * GIB}


def test_a_leak_is_unknown_where_the_driver_does_not_tell() -> None:
    assert leak(Baseline({A: 0, B: 0}), Inventory((gpu(None),))) == {}
    assert script(gpu(None)).returned(Baseline({A: 0}), limit=5) == {}
    assert script(gpu(None)).returned(Baseline({}), limit=5) == {}


def test_what_holds_a_gpu_is_described() -> None:
    assert describe(gpu(20 * MIB)) == "nothing"
    ours = GpuProcess(8, 3 * GIB, Owner.OURS, "VLLM::Worker")
    assert describe(gpu(3 * GIB, ours)) == "pid 8 (VLLM::Worker, 3.0 GiB, a running trial of ours)"
    assert describe(gpu(10 * GIB, NEIGHBOUR)).endswith(
        "3.0 GiB held by no process that can be seen here (a zombie context, or another container)"
    )

"""Which GPUs CUDA_VISIBLE_DEVICES shows, and which ones a probe takes."""

from __future__ import annotations

import pytest

from prober.host.gpu import MIB, Gpu, GpuProcess, Inventory, choose, visible_gpus, visible_setting
from prober.host.processes import Owner
from prober.records import NotReady, UsageError

GIB = 1024 * MIB


def gpu(index: int, name: str = "NVIDIA L4", used: int = 0, total: int = 24 * GIB, uuid: str = "") -> Gpu:
    return Gpu(index, uuid or f"GPU-{index}{index}ab-00", name, total, used, 300 * MIB, processes=())


def busy(index: int, used: int = 5 * GIB) -> Gpu:
    process = GpuProcess(4321, used, Owner.OTHER, "python")
    return Gpu(index, f"GPU-{index}{index}ab-00", "NVIDIA L4", 24 * GIB, used, 300 * MIB, processes=(process,))


def mig(index: int, number: int) -> Gpu:
    name = "NVIDIA A100 MIG 1g.5gb"
    return Gpu(index, f"MIG-{number}0c-1", name, 5 * GIB, 0, 0, mig=True, parent_uuid="GPU-7", processes=())


def machine_of(*gpus: Gpu) -> Inventory:
    return Inventory(gpus, uuids=tuple(one.parent_uuid or one.uuid for one in gpus))


def indices(gpus: tuple[Gpu, ...]) -> list[int]:
    return [one.index for one in gpus]


FOUR = (gpu(0), gpu(1), gpu(2), gpu(3))


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("1,9,2", [1]),
        ("-1", []),
        ("0,-1,2", [0]),
        ("", []),
        ("NoDevFiles", []),
        ("1gpu,2x", [1, 2]),
        ("0,0", []),
        ("0,1,0", []),
        ("GPU-11ab-00,GPU-33", [1, 3]),
        ("GPU-", []),
        ("GPU-11,0", [1]),
        ("0,GPU-11", [0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(setting: str | None, shown: list[int]) -> None:
    assert indices(visible_gpus(FOUR, setting)[0]) == shown


def test_what_is_hidden_by_mistake_is_said() -> None:
    assert visible_gpus(FOUR, "2,0")[1] is None
    assert "'9'" in (visible_gpus(FOUR, "1,9,2")[1] or "")
    assert "twice" in (visible_gpus(FOUR, "0,0")[1] or "")
    assert "empty" in (visible_gpus(FOUR, "")[1] or "")


def test_a_mig_device_is_shown_by_its_name_and_the_number_of_its_gpu_means_the_first() -> None:
    gpus = (gpu(0), mig(1, 3), mig(1, 4))
    assert [one.uuid for one in visible_gpus(gpus, "MIG-40c-1")[0]] == ["MIG-40c-1"]
    assert [one.uuid for one in visible_gpus(gpus, "1")[0]] == ["MIG-30c-1"]


def test_a_trial_sees_whole_gpus_by_number_and_mig_devices_by_name() -> None:
    assert visible_setting((gpu(2), gpu(3))) == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_setting((mig(1, 4),))["CUDA_VISIBLE_DEVICES"] == "MIG-40c-1"


def test_idle_gpus_are_taken_before_busy_ones() -> None:
    here = machine_of(gpu(0), busy(1), gpu(2), gpu(3))
    assert indices(choose(here, 1)) == [0]
    assert indices(choose(here, 3)) == [0, 2, 3]


def test_a_busy_gpu_is_taken_where_no_idle_one_is_left_so_that_the_caller_can_wait_for_it() -> None:
    assert indices(choose(machine_of(busy(0, 9 * GIB), busy(1, 2 * GIB)), 1)) == [1]


def test_all_gpus_are_of_one_type() -> None:
    mixed = machine_of(gpu(0), gpu(1, "NVIDIA A100"), gpu(2), gpu(3, "NVIDIA A100", total=80 * GIB))
    assert indices(choose(mixed, 2)) == [0, 2]
    with pytest.raises(UsageError, match=r"of one type.* 2 × NVIDIA L4"):
        choose(mixed, 3)
    with pytest.raises(UsageError, match="of one type"):
        choose(mixed, 2, ["0", "1"])
    with pytest.raises(UsageError, match="of one type"):
        choose(mixed, 2, ["1", "3"])  # one name, two memory sizes


def test_the_type_with_enough_idle_gpus_is_taken() -> None:
    mixed = machine_of(busy(0), busy(1), gpu(2, "NVIDIA A100"), gpu(3, "NVIDIA A100"))
    assert indices(choose(mixed, 2)) == [2, 3]


def test_the_wish_is_respected_also_when_another_gpu_is_idle() -> None:
    assert indices(choose(machine_of(gpu(0), busy(1)), 1, ["1"])) == [1]
    assert indices(choose(machine_of(*FOUR), 2, ["3", "GPU-11"])) == [3, 1]


def test_a_machine_that_is_too_small_is_said_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"^this machine has 1 GPU, --tp 4 needs 4$"):
        choose(machine_of(gpu(0)), 4)
    with pytest.raises(UsageError, match=r"^CUDA_VISIBLE_DEVICES shows 1 of this machine's 4 GPUs, --tp 2 needs 2$"):
        choose(Inventory((gpu(0),), uuids=("a", "b", "c", "d")), 2)
    with pytest.raises(UsageError, match=r"^--gpus names 1 GPU, --tp 2 needs 2$"):
        choose(machine_of(*FOUR), 2, ["1"])


@pytest.mark.parametrize(("wish", "what"), [("9", "no GPU"), ("GPU-9", "no GPU"), ("GPU-", "no GPU"), ("1", "several")])
def test_a_wish_must_name_exactly_one_gpu(wish: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        choose(machine_of(gpu(0), mig(1, 3), mig(1, 4)), 1, [wish])


def test_naming_a_gpu_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        choose(machine_of(*FOUR), 2, ["1", "1"])


def test_mig_devices_are_never_joined() -> None:
    split = machine_of(mig(0, 3), mig(0, 4))
    assert [one.uuid for one in choose(split, 1)] == ["MIG-30c-1"]
    with pytest.raises(UsageError, match="MIG"):
        choose(split, 2)


def test_leased_gpus_are_left_alone() -> None:
    here = machine_of(gpu(0), busy(1))
    assert indices(choose(here, 1, taken={here.gpus[0].uuid})) == [1]
    with pytest.raises(NotReady, match="GPU 0 is leased"):
        choose(here, 2, taken={here.gpus[0].uuid})


def test_without_gpus_the_reason_is_passed_on() -> None:
    with pytest.raises(NotReady, match="driver is not loaded"):
        choose(Inventory(problem="the NVIDIA driver is not loaded"), 1)


def test_a_desktop_does_not_make_a_gpu_busy_and_a_zombie_context_does() -> None:
    desktop = GpuProcess(900, 700 * MIB, Owner.OTHER, "Xorg", is_graphics=True)
    assert Gpu(0, "u", "n", 24 * GIB, 750 * MIB, 300 * MIB, processes=(desktop,)).is_idle
    assert not Gpu(0, "u", "n", 24 * GIB, 2 * GIB, 300 * MIB, processes=()).is_idle
    assert not Gpu(0, "u", "n", 24 * GIB, 2 * GIB, 300 * MIB, processes=None).is_idle
    assert Gpu(0, "u", "n", 24 * GIB, None, None, processes=None).is_idle
    assert Gpu(0, "u", "n", 120 * GIB, 60 * GIB, None, processes=(), is_unified_memory=True).is_idle
    assert Gpu(0, "u", "n", 24 * GIB, 2 * GIB, 0, processes=(), is_under_windows=True).is_idle

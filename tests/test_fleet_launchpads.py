"""What starts a night: cron, systemd, Slurm, Kubernetes, a container, a CI job; tested without having them."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Scenario, make_engine, write_model
from fleet_cluster import DRIVER

from prober.fleet.plan import read_plan

PADS = Path(__file__).parents[1] / "scripts" / "fleet"
SCRIPTS = ("nightly.sh", "two_versions.sh", "slurm.sbatch")


def a_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/usr/bin/env bash\n" + textwrap.dedent(text))
    path.chmod(0o755)


def run(folder: Path, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PATH": path, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_shell(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(PADS / name)], check=False).returncode == 0
    assert os.access(PADS / name, os.X_OK)


def test_the_example_plan_is_a_plan() -> None:
    plan = read_plan((PADS / "plan.toml").read_text())
    assert len(plan.models) == 2
    assert len(plan.engines) == 2


@pytest.mark.parametrize(("code", "woken"), [(0, False), (1, True), (3, False), (4, False)])
def test_a_night_passes_the_exit_code_on_and_wakes_somebody_only_for_a_regression(
    tmp_path: Path, code: int, woken: bool
) -> None:
    told = tmp_path / "arguments"
    a_program(
        tmp_path / "bin",
        "prober",
        f"""
        echo "$@" >{told}
        mkdir -p res/fleet
        echo "prober_x 1" >res/fleet/ceilings.prom
        echo "# summary"
        exit {code}
        """,
    )
    a_program(tmp_path / "bin", "wake", f"cat >{tmp_path / 'woken'}")
    (tmp_path / "collected").mkdir()
    done = run(tmp_path, PADS / "nightly.sh", "plan.toml", "res", NOTIFY="wake", TEXTFILE_DIR="collected")
    assert done.returncode == code, done.stderr
    assert told.read_text().split() == ["fleet", "plan.toml", "--results", "res", "--address", "auto"]
    assert (tmp_path / "woken").exists() is woken
    assert (tmp_path / "res.last.md").read_text() == "# summary\n"
    assert (tmp_path / "collected" / "prober.prom").read_text() == "prober_x 1\n"


def a_slurm(folder: Path, prober: str) -> None:
    """`srun` runs what it is given, with its node in the journal; `ray start --block` stays until it is ended."""
    a_program(folder / "bin", "scontrol", "printf 'n1\\nn2\\nn3\\n'")
    a_program(folder / "bin", "sleep", '[ "$1" = 15 ] && set -- 0.3; exec /bin/sleep "$@"')
    a_program(
        folder / "bin",
        "srun",
        'where=; while [[ $1 == --* ]]; do where="$where $1"; shift; done; echo "$where :: $*" >>journal; exec "$@"',
    )
    a_program(folder / "bin", "ray", "exec /bin/sleep 60")
    a_program(folder / "bin", "prober", prober)


def submitted(folder: Path) -> subprocess.CompletedProcess[str]:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    return run(folder, PADS / "slurm.sbatch", "plan.toml", "res", **slurm)


@pytest.mark.parametrize("code", [0, 1, 4])
def test_slurm_starts_ray_on_its_nodes_and_passes_the_exit_code_on(tmp_path: Path, code: int) -> None:
    a_slurm(tmp_path, f"exit {code}")
    done = submitted(tmp_path)
    assert done.returncode == code, done.stderr
    head, others, driver = (tmp_path / "journal").read_text().splitlines()
    assert "--nodelist=n1" in head
    assert "ray start --head --block --port=20007" in head
    assert "--nodes=2 --ntasks=2 --exclude=n1" in others
    assert "ray start --block --address=n1:20007" in others
    assert driver.endswith("prober fleet plan.toml --results res --address n1:20007")


def test_slurms_warning_reaches_the_driver_and_its_answer_is_waited_for(tmp_path: Path) -> None:
    a_slurm(tmp_path, "")
    a_program(
        tmp_path / "bin",
        "prober",
        """
        trap 'echo ended >ended; exit 143' TERM
        kill -TERM $PPID
        for n in $(seq 50); do /bin/sleep 0.1; done
        exit 9
        """,
    )
    done = submitted(tmp_path)
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "ended").read_text() == "ended\n"


def test_units_say_what_systemd_understands() -> None:
    if shutil.which("systemd-analyze") is not None:
        for name in ("prober-fleet.service", "prober-fleet.timer"):
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", str(PADS / name)], capture_output=True, text=True, check=False
            )
            ours = [
                line for line in done.stderr.splitlines() if "prober-fleet" in line and "not executable" not in line
            ]
            assert not [line for line in ours if "Failed to create" not in line and "No such file" not in line], ours
    timer = configparser.ConfigParser(strict=False)
    timer.read(PADS / "prober-fleet.timer")
    assert timer["Timer"]["OnCalendar"] == "*-*-* 01:07:00"


def test_crontab_has_a_time_and_a_lock() -> None:
    (line,) = [line for line in (PADS / "crontab").read_text().splitlines() if not line.startswith("#")]
    assert re.match(r"7 1 \* \* \*  flock -n \S+ \S+/scripts/fleet/nightly\.sh \S+ \S+$", line)


def yaml_of(text: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with Ray")
    return list(yaml.safe_load_all(text))


# KubeRay's ray.io/v1: the fields of a RayJob's spec and of its cluster's that are used, with their types.
RAY_JOB = {
    "entrypoint": str,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "rayClusterSpec": dict,
}
WORKER_GROUP = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "rayStartParams": dict,
    "template": dict,
}


def test_kubernetes_creates_a_ray_job_every_night() -> None:
    documents = yaml_of((PADS / "kubernetes.yaml").read_text())
    by_kind = {document["kind"]: document for document in documents}
    cron = by_kind["CronJob"]["spec"]
    assert (cron["concurrencyPolicy"], cron["jobTemplate"]["spec"]["backoffLimit"]) == ("Forbid", 0)
    (job,) = yaml_of(by_kind["ConfigMap"]["data"]["rayjob.yaml"])
    assert (job["apiVersion"], job["kind"], "generateName" in job["metadata"]) == ("ray.io/v1", "RayJob", True)
    assert {name: type(value) for name, value in job["spec"].items()} == RAY_JOB
    assert job["spec"]["backoffLimit"] == 0
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) == {"headGroupSpec", "workerGroupSpecs"}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        assert {name: type(value) for name, value in group.items()} == WORKER_GROUP
    for group in [head, *cluster["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    rules = by_kind["Role"]["rules"]
    assert rules == [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create"]}]


def test_ci_job_shows_the_summary_and_fails_only_for_a_regression(tmp_path: Path) -> None:
    (workflow,) = yaml_of((PADS / "ci-nightly.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "gpu-head"]
    (script,) = [step["run"] for step in job["steps"] if "run" in step]
    for code, expected in ((0, 0), (1, 1), (3, 3), (4, 0)):
        a_program(
            tmp_path / "bin", "prober", f"mkdir -p results/fleet; echo '# night' >results/fleet/summary.md; exit {code}"
        )
        done = run(tmp_path, "bash", "-e", "-o", "pipefail", "-c", script, GITHUB_STEP_SUMMARY=str(tmp_path / "page"))
        assert done.returncode == expected, (code, done.stderr)
    assert (tmp_path / "page").read_text() == "# night\n" * 4


def test_container_keeps_the_prober_and_vllm_apart() -> None:
    text = (PADS / "Dockerfile").read_text()
    assert "RAY_USAGE_STATS_ENABLED=0" in text
    assert re.search(r'uv venv --seed /opt/vllm-\$\{VLLM\} .*"vllm==\$\{VLLM\}"', text)
    assert '"/opt/prober/source[fleet]"' in text


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `fleet` is not installed")
def test_two_versions_on_one_machine_are_shown_side_by_side(tmp_path: Path) -> None:
    """The true command and a Ray of this machine alone, on the fake engine as two interpreters."""
    pythons = []
    for version in ("0.28.0", "0.32.0"):
        scenario = Scenario(version=version, kv_blocks=32, block_size=128, bytes_per_token=2048, on_cpu=True)
        engine = make_engine(tmp_path / version, scenario)
        exports = "".join(f"export {name}='{value}'\n" for name, value in engine.environment.items())
        a_program(tmp_path / "pythons", version, f'{exports}exec {sys.executable} "$@"\n')
        pythons.append(tmp_path / "pythons" / version)
    a_program(tmp_path / "bin", "prober", f"exec {sys.executable} -c '{DRIVER}' \"$@\"")
    done = run(tmp_path, PADS / "two_versions.sh", write_model(tmp_path / "tiny"), "res", *pythons)
    assert done.returncode == 0, done.stderr
    assert "vLLM 0.28.0 -> 0.32.0: serves 3,969 -> 3,968; 0.28.0 starts at " in done.stdout

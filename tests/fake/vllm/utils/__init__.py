"""Where older versions keep the parser; newer ones have only ``vllm.utils.argparse_utils`` (0.11.1 on)."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Answer for the parser in the versions that had it here."""
    from vllm.launch_record import scenario

    if name == "FlexibleArgumentParser" and scenario().release < (0, 12, 0):
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return FlexibleArgumentParser
    raise AttributeError(f"module 'vllm.utils' has no attribute {name!r}")

"""vLLM's own argument parser; the fake needs nothing of its flexibility but underscores."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len`` for ``--max-model-len``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]  # argparse overloads it
        """Parse, with underscores in the names of flags read as hyphens."""
        import sys

        given = list(sys.argv[1:] if args is None else args)
        spelled = []
        for word in given:
            name, equals, value = word.partition("=")
            spelled.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
        return super().parse_known_args(spelled, namespace)

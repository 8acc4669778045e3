"""Token ids for verification requests. Standard library only: the offline script loads this file by path."""

from __future__ import annotations

import random

# Within every vocabulary that vLLM serves, after the special tokens that most models put first.
FIRST_ID, LAST_ID = 100, 900


def token_ids(count: int) -> list[int]:
    """Return ``count`` ordinary ids, deterministic per count, varied so that no cached prefix shortens the work."""
    chance = random.Random(count)  # noqa: S311  # repeatable, not secret
    return [chance.randint(FIRST_ID, LAST_ID) for _ in range(count)]

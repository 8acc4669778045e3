"""The token ids that a proof sends. Standard library only: the offline child reads this file by its path."""

from __future__ import annotations

import random

# Inside every vocabulary that vLLM serves, past the special tokens that most models keep first.
FIRST_ID, LAST_ID = 100, 900


def token_ids(count: int) -> list[int]:
    """``count`` ordinary ids, the same for the same count, varied so that no cached prefix shortens the work."""
    chance = random.Random(count)  # noqa: S311  # repeatable, not secret
    return [chance.randint(FIRST_ID, LAST_ID) for _ in range(count)]

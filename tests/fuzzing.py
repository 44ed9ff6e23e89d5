"""How many examples the fuzz tests try: the same few each time, or many new ones.

A plain run tries the same examples every time. ``pytest -m slow`` tries FUZZ_FACTOR
times as many, other ones each time, and prints how to repeat one that fails.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

FUZZ_FACTOR = int(os.environ.get("FUZZ_FACTOR", "20"))


def fixed(number: int) -> settings:
    """``number`` examples, the same each time."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
        # A failing example is small already; shrinking takes minutes.
        phases=(Phase.explicit, Phase.generate),
    )


def many(number: int) -> settings:
    """FUZZ_FACTOR times ``number`` examples, new ones each time."""
    return settings(
        fixed(number * FUZZ_FACTOR), derandomize=False, database=None, print_blob=True
    )

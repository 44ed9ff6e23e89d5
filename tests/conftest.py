"""How many processes run the tests, and whose asserts say what they compared.

Files stay whole: their fixtures are shared.
"""

from __future__ import annotations

import os

import pytest

# Beside the test files, which pytest takes by itself.
pytest.register_assert_rewrite("sglang_cases", "tolerances")

# Most tests compile on one core; some start processes of their own.
_MOST_WORKERS = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """0, this process alone, under torchrun: there, every rank runs every test."""
    cores = len(os.sched_getaffinity(0))
    return 0 if "LOCAL_RANK" in os.environ or cores < 2 else min(cores, _MOST_WORKERS)

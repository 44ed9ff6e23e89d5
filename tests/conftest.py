"""How many processes run the tests, what they needn't each find out for themselves, and
whose asserts say what they compared.

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


def pytest_configure(config: pytest.Config) -> None:
    """Ask once which vector instructions the compiler knows.

    Inductor compiles a program for each in every new cache folder, which takes seconds;
    many tests start processes with a folder of their own.
    """
    is_worker = hasattr(config, "workerinput") or "LOCAL_RANK" in os.environ
    # Asking looks for a GPU, and tests on one set what is read before the first look.
    on_gpu = config.option.markexpr == "gpu"
    if not (is_worker or on_gpu) and _knows_what_the_cpu_has():
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def _knows_what_the_cpu_has() -> bool:
    from torch._inductor import config as inductor_config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    found = []
    for trusted in (None, True):
        with inductor_config.patch({"cpp.vec_isa_ok": trusted}):
            valid_vec_isa_list.cache_clear()
            found.append([str(isa) for isa in valid_vec_isa_list()])
    valid_vec_isa_list.cache_clear()
    return found[0] == found[1]

"""Runs a function on N real gloo processes, with a deadline that nothing outlives."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
    per_rank_env: Callable[[int], dict[str, str]] | None = None,
    dying: frozenset[int] = frozenset(),
) -> list[Any]:
    """``[fn(rank, num_ranks, *args) for rank in ranks]``, each in its own process.

    fn and args must pickle. dying: ranks that fn ends; their result is None, and on the
    others fn must destroy the process group itself. Raises AssertionError with the
    traceback of the first rank that failed, or when the deadline passes.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(num_ranks):
            variables = {**(env or {}), **(per_rank_env(rank) if per_rank_env else {})}
            processes.append(
                context.Process(
                    target=_worker,
                    args=(fn, rank, num_ranks, folder, args, results, variables),
                    daemon=True,
                )
            )
        # Ranks are as many as there are cores already; read when torch is imported.
        with mock.patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": "1"}):
            for process in processes:
                process.start()
        try:
            return _collect(processes, results, num_ranks, timeout_s, dying)
        finally:
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(
    processes: list[Any],
    results: Any,
    num_ranks: int,
    timeout_s: float,
    dying: frozenset[int],
) -> list[Any]:
    found: dict[int, Any] = dict.fromkeys(dying)
    deadline = time.monotonic() + timeout_s
    while len(found) < num_ranks:
        try:
            rank, value, error = results.get(timeout=0.5)
        except queue.Empty:
            assert time.monotonic() < deadline, f"ranks {sorted(found)} ended, no other"
            living = [p for rank, p in enumerate(processes) if rank not in dying]
            dead = [p.exitcode for p in living if p.exitcode not in (None, 0)]
            assert not dead or not results.empty(), f"a rank died with {dead}"
            continue
        assert error is None, f"rank {rank} failed:\n{error}"
        found[rank] = value
    return [found[rank] for rank in range(num_ranks)]


def _worker(
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    folder: str,
    args: tuple[Any, ...],
    results: Any,
    variables: dict[str, str],
) -> None:
    os.environ.update(variables)
    try:
        import torch

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        value = fn(rank, num_ranks, *args)
        if dist.is_initialized():
            # gloo aborts a rank whose peers are gone while it still tears down.
            dist.barrier()
            dist.destroy_process_group()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(0)

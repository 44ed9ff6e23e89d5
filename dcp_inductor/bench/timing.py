"""Timing that all benchmarks share: CUDA graphs of many calls, variants interleaved.

What is timed and what the figures mean is each benchmark's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

CALLS = 60
Call = Callable[[], Any]


def start() -> tuple[int, int]:
    """(rank, ranks) under torchrun, one GPU each, NCCL."""
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group(
        "nccl",
        timeout=timedelta(seconds=120),
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    return dist.get_rank(), dist.get_world_size()


def world() -> ProcessGroup:
    """The default group, once ``start`` has made it."""
    group: ProcessGroup | None = dist.group.WORLD
    assert group is not None, "start() was called"
    return group


def stop() -> None:
    """Leave together."""
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def graph_of(call: Call, calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``calls`` calls, after warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def interleaved_us(
    graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 30, calls: int = CALLS
) -> dict[str, float]:
    """Microseconds a call: the median over rounds, the largest over ranks.

    Each round replays every graph once, so that clocks and neighbours weigh on all of
    them alike. Ranks meet before each replay.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    meet = torch.zeros(1, device="cuda")
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for _ in range(rounds):
        for name, graph in graphs.items():
            dist.all_reduce(meet)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    medians = torch.tensor(
        [statistics.median(values) for values in times.values()], device="cuda"
    )
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def machine() -> dict[str, str]:
    """What a figure must be read with."""
    import triton

    return {
        "card": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }

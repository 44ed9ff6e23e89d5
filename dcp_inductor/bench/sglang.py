"""sglang's own ``dcp_a2a_lse_reduce``, unmodified, every way to run it.

    eager      sglang's pack, all-to-all and combine
    compiled   the same function, torch.compile as sglang's decode runner calls it
    pass       the same, with the pass

Its group and its way to capture are sglang's too. Needs sglang's sources on the path
(0.5.23 was tried), not its compiled extensions. Which shapes, and what is measured of
the three, is the caller's.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.report import GraphReport
from dcp_inductor.runtime.groups import alias_group

# sglang's default for SGLANG_TORCH_COMPILE_MODE, and what set_torch_compile_config
# turns on beside it.
_MODE = "max-autotune-no-cudagraphs"
_WARM_UPS = 2
Call = Callable[[], Any]


def dcp_group(backend: str = "nccl") -> Any:
    """sglang's GroupCoordinator over all ranks, under its name in a server, "dcp:0".

    torch.distributed is initialised, a GPU a rank is current. NCCL calls go through
    sglang's own communicator (pynccl) in a capture and through torch's outside, as in
    a server. The name is made known to dcp_inductor. Called once, by all ranks.
    """
    stand_in_for_notebooks()
    from sglang.srt.distributed import parallel_state

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = parallel_state.init_model_parallel_group(
        [[*range(num_ranks)]],
        dist.get_node_local_rank(fallback_rank=rank),
        backend,
        use_pynccl=backend == "nccl",
        use_custom_allreduce=False,
        use_mscclpp=False,
        use_torch_symm_mem_allreduce=False,
        group_name="dcp",
    )
    alias_group(group.unique_name, group.device_group.group_name)
    return group


def stand_in_for_notebooks() -> None:
    """One module of sglang's imports IPython, for notebooks only."""
    if importlib.util.find_spec("IPython") is None:
        for name in ("IPython", "IPython.display"):
            sys.modules.setdefault(name, types.ModuleType(name))
        display: Any = sys.modules["IPython.display"]
        display.HTML = display.display = None


def sglang_variants(
    o: Tensor,
    lse: Tensor,
    group: Any,
    *,
    base_e: bool = False,
    listener: Callable[[GraphReport], None] | None = None,
) -> dict[str, Call]:
    """The three ways to reduce this rank's partials, by name; each returns
    ``[B, H/N, D]``.

    o: ``[B, H, D]``; lse: ``[B, H]`` fp32. group: of dcp_group(). listener: told of
    each graph that the pass has looked at. The compiled ones compile at their first
    call; for a capture, ``dcp_inductor.reserve(group.unique_name, ...)`` comes before.
    """
    from sglang.srt.layers.dcp import comm

    def reduce(o: Tensor, lse: Tensor) -> Tensor:
        return comm.dcp_a2a_lse_reduce(o, lse, group, is_lse_base_on_e=base_e)

    fusion_pass = DcpFusionPass(Config(), listener)
    compiled = _compiled(reduce, {})
    fused = _compiled(reduce, {"post_grad_custom_pre_pass": fusion_pass})
    return {
        "eager": lambda: reduce(o, lse),
        "compiled": lambda: compiled(o, lse),
        "pass": lambda: fused(o, lse),
    }


def _compiled(fn: Callable[..., Tensor], options: dict[str, Any]) -> Any:
    """As patch_model compiles; its mode is spelled out, since options exclude one."""
    mode = torch._inductor.list_mode_options(_MODE)
    return torch.compile(
        fn,
        fullgraph=True,
        dynamic=False,
        options={**mode, "coordinate_descent_tuning": True, **options},
    )


@contextmanager
def capture_session(group: Any) -> Iterator[torch.cuda.Stream]:
    """sglang's capture context; gives its one capture stream, current within it."""
    from sglang.srt.model_executor.runner_utils import pool

    stream = pool.get_or_create_global_graph_capture_stream()
    with group.graph_capture(stream=stream):
        yield stream


def capture(call: Call, stream: torch.cuda.Stream, calls: int = 1) -> Captured:
    """A CUDA graph of ``calls`` calls and the result of the last one, made as sglang's
    full_cuda_graph_backend does: two warm-ups and the capture, all on ``stream``."""
    for _ in range(_WARM_UPS):
        torch.cuda.synchronize()
        dist.barrier()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            result = call()
    return graph, result


Captured = tuple[torch.cuda.CUDAGraph, Tensor]

"""Eager decode in sglang, opt-in: a hook on its exchange that calls the op directly.

For servers, or batches, that sglang doesn't compile. Written for SGLang 0.5.23. When
it may is decided by sglang.py, for all ranks alike.

NOTE [hook and pass]
Where Dynamo traces, the hook is the original function and nothing else: the graph is
the one without a hook, and the pass proves and rewrites it. So each call goes one way.
Which way an eager call goes depends on what is the same on all ranks: the plan, the
arguments' shapes and dtypes. One rank in the op and another in sglang's exchange would
wait for each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcp_inductor.integrations.sglang_plan import Plan
from dcp_inductor.logs import integrations as log

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.layers.dcp.comm"
_FUNCTION = "dcp_a2a_lse_reduce"
_PARAMETERS = (
    "cp_attn_out",
    "cp_attn_lse",
    "cp_group",
    "is_lse_base_on_e",
    "cuda_graph_buffers",
    "comm_backend",
)

_serving: Plan | None = None


def serve(plan: Plan | None) -> None:
    """From now on, send eager exchanges of ``plan`` to the op; None: send none."""
    global _serving
    _serving = plan


@functools.cache
def hook() -> None:
    """Put the hook around sglang's function, which is imported; once a process."""
    from sglang.srt.layers.dcp import comm
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found = tuple(inspect.signature(comm.dcp_a2a_lse_reduce).parameters)
    if found != _PARAMETERS:
        log.warning(
            "dcp_inductor: eager decode stays unfused: sglang's %s takes (%s) here, "
            "and (%s) is known",
            _FUNCTION,
            ", ".join(found),
            ", ".join(_PARAMETERS),
        )
        return
    HookRegistry.register(f"{MODULE}.{_FUNCTION}", around, HookType.AROUND)
    HookRegistry.apply_hooks()


def around(
    original: Callable[..., Tensor],
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    cuda_graph_buffers: dict[str, Tensor] | None = None,
    comm_backend: str = "a2a",
) -> Tensor:
    """sglang's dcp_a2a_lse_reduce: ``[B, H, D]`` and ``[B, H]`` to ``[B, H/N, D]``.

    Buffers of the caller are written by the original, and can be read afterwards; so
    with them it is called.
    """
    import torch

    if (
        torch.compiler.is_compiling()
        or _serving is None
        or cuda_graph_buffers is not None
        or comm_backend != "a2a"
        or cp_group.unique_name != _serving.host_group
        or not _fits(_serving, cp_attn_out, cp_attn_lse)
    ):
        return original(
            cp_attn_out,
            cp_attn_lse,
            cp_group,
            is_lse_base_on_e,
            cuda_graph_buffers,
            comm_backend,
        )
    return torch.ops.dcp_inductor.a2a_lse_reduce(
        cp_attn_out,
        cp_attn_lse,
        _serving.host_group,
        _serving.num_ranks,
        "basee" if is_lse_base_on_e else "base2",
    )


def _fits(plan: Plan, partial_o: Tensor, partial_lse: Tensor) -> bool:
    """True for what was reserved. A wider batch (a prefill) keeps sglang's exchange,
    which moves much data in one piece."""
    num_tokens, *rest = partial_o.shape
    return (
        rest == [plan.num_heads, plan.head_dim]
        and 0 < num_tokens <= plan.max_tokens
        and partial_o.dtype == plan.dtype
        and partial_lse.shape == partial_o.shape[:2]
        and partial_lse.dtype.itemsize == 4
        and partial_lse.dtype.is_floating_point
    )

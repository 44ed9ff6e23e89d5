"""Eager decode in sglang, opt-in: a hook on its exchange that calls the op directly.

For servers, or batches, that sglang doesn't compile. Written for SGLang 0.5.23. When
it may is decided by sglang.py, for all ranks alike.

NOTE [hook and pass]
Where Dynamo traces, the hook is the original function and nothing else: the graph is
the one without a hook, and the pass proves and rewrites it. So each call goes one way.
Which way an eager call goes depends on what is the same on all ranks: the plans, the
arguments' shapes and dtypes. One rank in the op and another in sglang's exchange would
wait for each other. So a rank whose hook isn't in place says so in the vote of the
start, and no rank serves by it then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcp_inductor.integrations import sglang_hooks
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

# By what tells their calls apart: group, heads, head dim, dtype. A draft model's
# exchanges can be others than its target's.
_serving: dict[tuple[Any, ...], Plan] = {}


def serve(plan: Plan) -> None:
    """From now on, send eager exchanges of ``plan`` to the op, as wide as the widest
    plan of their kind."""
    key = (plan.host_group, plan.num_heads, plan.head_dim, plan.dtype)
    known = _serving.get(key)
    if known is None or known.max_tokens < plan.max_tokens:
        _serving[key] = plan


def stop() -> None:
    """Send no eager exchange to the op any more."""
    _serving.clear()


def objection() -> str | None:
    """Why eager exchanges can't be served here, or None where they can."""
    import dcp_inductor.op  # noqa: F401  registers the op

    return sglang_hooks.unbound(MODULE, _FUNCTION, around)


@functools.cache
def hook() -> None:
    """Put the hook around sglang's function, which is imported; once a process."""
    from sglang.srt.layers.dcp import comm
    from sglang.srt.plugins.hook_registry import HookType

    found = tuple(inspect.signature(comm.dcp_a2a_lse_reduce).parameters)
    if found != _PARAMETERS:
        log.warning(
            "dcp_inductor: no hook for eager decode: sglang's %s takes (%s) here, and "
            "(%s) is known",
            _FUNCTION,
            ", ".join(found),
            ", ".join(_PARAMETERS),
        )
        return
    sglang_hooks.bind(f"{MODULE}.{_FUNCTION}", around, HookType.AROUND)


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

    plan: Plan | None = None
    if (
        not torch.compiler.is_compiling()
        and cuda_graph_buffers is None
        and comm_backend == "a2a"
    ):
        plan = _plan_of(cp_attn_out, cp_attn_lse, cp_group)
    if plan is None:
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
        plan.host_group,
        plan.num_ranks,
        "basee" if is_lse_base_on_e else "base2",
    )


def _plan_of(partial_o: Tensor, partial_lse: Tensor, group: Any) -> Plan | None:
    """What was reserved for a call, if it fits. A wider batch (a prefill) keeps
    sglang's exchange, which moves much data in one piece."""
    if partial_o.dim() != 3:
        return None
    num_tokens, num_heads, head_dim = partial_o.shape
    plan = _serving.get((group.unique_name, num_heads, head_dim, partial_o.dtype))
    fits = (
        plan is not None
        and 0 < num_tokens <= plan.max_tokens
        and partial_lse.shape == partial_o.shape[:2]
        and partial_lse.dtype.itemsize == 4
        and partial_lse.dtype.is_floating_point
    )
    return plan if fits else None

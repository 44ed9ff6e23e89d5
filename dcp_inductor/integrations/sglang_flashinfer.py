"""sglang's ``fi_a2a``: FlashInfer's exchange, made visible to the compiler.

FlashInfer's ``decode_cp_a2a_alltoall`` is Python that Dynamo can't trace, so a graph
breaks in the middle of the exchange. Where Dynamo traces, it is replaced here by one
opaque op that calls the same function at run time; the pass sees the op (a row of
exchange.py) and fuses the whole. Eager calls stay FlashInfer's.
Written for SGLang 0.5.23 and FlashInfer 0.7.4; not run on a card that has its kernel.

NOTE [what the op hides]
The op holds neither FlashInfer's workspace nor the rank: those are found at run time
where sglang keeps them, so a compiled graph serves all ranks. It is marked as having a
side effect, since a rank that drops a call leaves its peers waiting.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_FUNCTION = "decode_cp_a2a_alltoall"
_PARAMETERS = ("partial_o", "softmax_stats", "workspace", "cp_rank", "cp_size")
_OP = "fi_all_to_all"

_group_name: str | None = None
# FlashInfer's own function while another stands in its place. Not a cached function:
# Dynamo looks through those.
_shadowed: Callable[..., tuple[Tensor, Tensor]] | None = None


def check() -> None:
    """Raise, with the reason, unless ``show`` would work."""
    from flashinfer.comm import dcp_alltoall

    function = _shadowed or getattr(dcp_alltoall, _FUNCTION)
    found = tuple(inspect.signature(function).parameters)
    if found[: len(_PARAMETERS)] != _PARAMETERS:
        raise RuntimeError(
            f"FlashInfer's {_FUNCTION} takes ({', '.join(found)}) here, and "
            f"({', '.join(_PARAMETERS)}, ..) is known"
        )
    _register()


def show(group_name: str) -> None:
    """Let graphs hold FlashInfer's exchange as an op over ``group_name``."""
    global _group_name, _shadowed
    from flashinfer.comm import dcp_alltoall

    check()
    _group_name = group_name
    if _shadowed is None:
        _shadowed = getattr(dcp_alltoall, _FUNCTION)
        setattr(dcp_alltoall, _FUNCTION, visible)


def hide() -> None:
    """Undo ``show``; a process in which nothing is shown is left alone."""
    global _shadowed
    if _shadowed is not None:
        from flashinfer.comm import dcp_alltoall

        setattr(dcp_alltoall, _FUNCTION, _shadowed)
        _shadowed = None


def visible(
    partial_o: Tensor,
    softmax_stats: Tensor,
    workspace: Tensor,
    cp_rank: int,
    cp_size: int,
    *further: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """In FlashInfer's function's place: ``[..., N, D]`` and ``[..., N, S]`` to the
    same shapes, where peer p's slice r has become rank r's slice p."""
    import torch

    if torch.compiler.is_compiling() and not further and not options:
        return torch.ops.dcp_inductor.fi_all_to_all(
            partial_o, softmax_stats, cp_size, _group_name
        )
    assert _shadowed is not None, "show() has put it there"
    return _shadowed(
        partial_o, softmax_stats, workspace, cp_rank, cp_size, *further, **options
    )


def _run(
    partial_o: Tensor, softmax_stats: Tensor, cp_size: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """What the op does at run time, in a graph that the pass left as it is."""
    from flashinfer.comm import dcp_alltoall
    from sglang.srt.layers.dcp import comm

    state: Any = comm._FI_A2A_STATE
    assert state is not None, "sglang makes the workspace before it warms up"
    function = _shadowed or getattr(dcp_alltoall, _FUNCTION)
    return function(
        partial_o, softmax_stats, state["workspace"], state["cp_rank"], cp_size
    )


def _fake(
    partial_o: Tensor, softmax_stats: Tensor, cp_size: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """As FlashInfer allocates: contiguous, in the shapes and dtypes of the inputs."""
    return (
        partial_o.new_empty(partial_o.shape),
        softmax_stats.new_empty(softmax_stats.shape),
    )


@functools.cache
def _register() -> Any:
    """Define the op, once a process; returns its library, which keeps it alive."""
    import torch
    from torch.fx.node import has_side_effect

    library = torch.library.Library("dcp_inductor", "FRAGMENT")
    library.define(
        f"{_OP}(Tensor partial_o, Tensor softmax_stats, int cp_size, str group_name)"
        " -> (Tensor, Tensor)",
        tags=(
            torch.Tag.needs_fixed_stride_order,
            torch.Tag.nondeterministic_seeded,  # NOTE [program order] of op.py
        ),
    )
    library.impl(_OP, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcp_inductor::{_OP}", _fake, lib=library)
    has_side_effect(torch.ops.dcp_inductor.fi_all_to_all.default)
    return library

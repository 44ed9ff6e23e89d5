"""The op: schema, fake, side effect and dispatch. The only bridge of the two sides.

What the exchange means is merge.py; what runs it is runtime/; who puts it into graphs
is compiler/. Importing this module registers the ops and touches no device.

NOTE [one functional op]
- The schema is functional: no workspace argument, no mutated argument. The workspace
  is found at run time from the group's name, so a compiled artifact holds nothing of
  one rank, and functionalization, alias analysis and graph caches see a plain op.
- The result is fresh memory, never a view of a workspace: Inductor writes in place
  into what a call returns.
- The op is marked as having a side effect: a rank that drops or merges a call whose
  result it doesn't use leaves its peers waiting.
- ``*_lane`` are what the Inductor lowering emits (compiler/lowering.py): the same op,
  bound to one workspace lane, with its site in the graph. The one with LSE gives a
  list, which is what Inductor's collective node takes for several outputs.

NOTE [program order]
Inductor moves calls towards their readers before any custom pass runs. It leaves its
own collectives in place by their waits, and ops that draw from a random generator by
their tag. A call of the op in a traced program has no wait, so it carries that tag: its
peers count on its order as the next draw counts on the generator's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx.node import has_side_effect

from dcp_inductor.errors import BadInput, UnknownGroup
from dcp_inductor.merge import LseMode, check_lse_mode, merge
from dcp_inductor.runtime import rollcall, workspace
from dcp_inductor.runtime.call import ExchangeCall, check_partials
from dcp_inductor.runtime.caller import find_caller
from dcp_inductor.runtime.groups import group_name_of, known_groups, resolve_group

_ARGS = (
    "Tensor partial_o, Tensor partial_lse, str group_name, int cp_size, str lse_mode"
)
# NOTE [program order]
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.nondeterministic_seeded)
_LIBRARY = torch.library.Library("dcp_inductor", "DEF")


def a2a_lse_reduce(
    partial_o: Tensor,
    partial_lse: Tensor,
    group: ProcessGroup | str | None = None,
    *,
    lse_mode: LseMode,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exchange head slices of N partial attentions and merge them by their LSE.

    Every rank of ``group`` calls this with its own partials over all H heads and gets
    its H/N heads of the attention over the whole sequence: head h goes to rank
    ``h // (H/N)``.

    Args:
        partial_o: ``[B, H, D]``, fp32, fp16, bf16 or fp8, any strides; unnormalised
            partials aren't taken: each is a softmax-weighted mean over its shard.
        partial_lse: ``[B, H]`` or ``[B, H, 1]`` fp32, any strides.
        group: the process group, its name, or None for the default group. Its ranks
            hold the shards of one KV cache.
        lse_mode: the base of the LSE, "base2" or "basee". There is no default: the
            wrong base gives plausible, wrong numbers.
        return_lse: also return the merged LSE.

    Returns:
        ``out [B, H/N, D]`` in the dtype of partial_o, contiguous, in memory of its
        own; with ``return_lse`` also the merged LSE ``[B, H/N]`` fp32, same base.

    Raises:
        BadInput: shapes, dtypes, devices or lse_mode that don't fit.
        UnknownGroup: no such group, or torch.distributed isn't initialised.
        NotReserved: first call of a group inside a CUDA graph capture.

    B must be the same on every rank. B = 0 communicates nothing. The merge rule is
    NOTE [merge rule] of merge.py.
    """
    args = (partial_o, partial_lse, *_name_and_size(group), lse_mode)
    if return_lse:
        return torch.ops.dcp_inductor.a2a_lse_reduce_with_lse(*args)
    return torch.ops.dcp_inductor.a2a_lse_reduce(*args)


@torch.compiler.assume_constant_result
def _name_and_size(group: ProcessGroup | str | None) -> tuple[str, int]:
    """What stands for a group in a graph. A compiled call that finds a group of another
    size under the name raises BadInput.

    Dynamo runs this while it traces, where an error would be its own: a group that
    isn't known is the op's to refuse.
    """
    try:
        name = group_name_of(group)
        return name, resolve_group(name).size()
    except UnknownGroup:
        return group if isinstance(group, str) else "", 1


def rank_in_group(group_name: str) -> int | None:
    """This process's rank in a group, or None where it knows no group of that name."""
    try:
        return resolve_group(group_name).rank()
    except UnknownGroup:
        return None


def ranks_in_groups() -> tuple[tuple[str, int | None], ...]:
    """This process's rank in each group that it knows, by each name of the group."""
    return tuple((name, rank_in_group(name)) for name in known_groups())


def _run(
    partial_o: Tensor,
    partial_lse: Tensor,
    group_name: str,
    cp_size: int,
    lse_mode: str,
    with_lse: bool,
    lane: int = 0,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    group = resolve_group(group_name)
    known = workspace.known_of(group_name, group)
    signature = (
        partial_o.shape,
        partial_o.dtype,
        partial_o.device,
        partial_lse.shape,
        partial_lse.dtype,
        partial_lse.device,
        cp_size,
        lse_mode,
    )
    kind = known.accepted.get(signature)
    if kind is None:
        _check(partial_o, partial_lse, group, group_name, cp_size, lse_mode)
        _, num_heads, head_dim = partial_o.shape
        kind = num_heads, head_dim, partial_o.dtype, partial_o.device
        known.accepted[signature] = kind
    if partial_lse.dim() == 3:
        partial_lse = partial_lse.squeeze(-1)
    if cp_size == 1 or partial_o.shape[0] == 0:
        rollcall.count(group)
        return _without_peers(partial_o, partial_lse, cp_size, lse_mode)
    caller, owner = find_caller()
    return workspace.run(
        ExchangeCall(
            partial_o,
            partial_lse,
            group,
            group_name,
            cast(LseMode, lse_mode),
            with_lse,
            lane,
            site,
            caller,
        ),
        known,
        kind,
        owner,
    )


def _check(
    partial_o: Tensor,
    partial_lse: Tensor,
    group: ProcessGroup,
    group_name: str,
    cp_size: int,
    lse_mode: str,
) -> None:
    check_lse_mode(lse_mode)
    if group.size() != cp_size:
        raise BadInput(
            f"The call is for {cp_size} ranks, but group {group_name!r} has "
            f"{group.size()}. A graph compiled for one group size can't run on "
            "another: call torch._dynamo.reset() and compile it again."
        )
    check_partials(partial_o, partial_lse, cp_size)
    _check_device(partial_o, group, group_name)


def _without_peers(
    partial_o: Tensor, partial_lse: Tensor, cp_size: int, lse_mode: str
) -> tuple[Tensor, Tensor]:
    """World size 1 merges one partial; B = 0 has nothing to merge."""
    heads = partial_o.shape[1] // cp_size
    return merge(
        partial_o[None, :, :heads],
        partial_lse[None, :, :heads],
        lse_mode=cast(LseMode, lse_mode),
    )


def _check_device(partial_o: Tensor, group: ProcessGroup, group_name: str) -> None:
    types = {device.type for device in group._device_types}
    if partial_o.device.type not in types:
        raise BadInput(
            f"partial_o is on {partial_o.device}, but group {group_name!r} "
            f"communicates on {sorted(types)} only. Move the partials to such a "
            "device, or pass a group with a backend for theirs."
        )


def reduce(
    partial_o: Tensor,
    partial_lse: Tensor,
    group_name: str,
    cp_size: int,
    lse_mode: str,
    lane: int = 0,
    site: int = 0,
) -> Tensor:
    """What the ops without LSE run, on checked or unchecked input alike."""
    args = (partial_o, partial_lse, group_name, cp_size, lse_mode)
    return _run(*args, False, lane, site)[0]


def reduce_with_lse(
    partial_o: Tensor,
    partial_lse: Tensor,
    group_name: str,
    cp_size: int,
    lse_mode: str,
    lane: int = 0,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    """What the ops with LSE run."""
    args = (partial_o, partial_lse, group_name, cp_size, lse_mode)
    return _run(*args, True, lane, site)


def _fake(
    partial_o: Tensor,
    partial_lse: Tensor,
    group_name: str,
    cp_size: int,
    lse_mode: str,
    lane: int = 0,
    site: int = 0,
) -> Tensor:
    return _fake_with_lse(partial_o, partial_lse, group_name, cp_size, lse_mode)[0]


def _fake_with_lse(
    partial_o: Tensor,
    partial_lse: Tensor,
    group_name: str,
    cp_size: int,
    lse_mode: str,
    lane: int = 0,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    check_lse_mode(lse_mode)
    check_partials(partial_o, partial_lse, cp_size)
    num_tokens, num_heads, head_dim = partial_o.shape
    out = partial_o.new_empty((num_tokens, num_heads // cp_size, head_dim))
    lse = partial_lse.new_empty((num_tokens, num_heads // cp_size))
    return out, lse


def _listed(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda *args: [*function(*args)]


def list_with_lse(*args: Any) -> list[Tensor]:
    """reduce_with_lse as a list: NOTE [one functional op]."""
    return [*reduce_with_lse(*args)]


# name: further arguments, result, implementation, fake
_OPS: dict[str, tuple[str, str, Callable[..., Any], Callable[..., Any]]] = {
    "a2a_lse_reduce": ("", "Tensor", reduce, _fake),
    "a2a_lse_reduce_with_lse": (
        "",
        "(Tensor, Tensor)",
        reduce_with_lse,
        _fake_with_lse,
    ),
    "a2a_lse_reduce_lane": (", int lane, int site", "Tensor", reduce, _fake),
    "a2a_lse_reduce_with_lse_lane": (
        ", int lane, int site",
        "Tensor[]",
        list_with_lse,
        _listed(_fake_with_lse),
    ),
}


# What Inductor's generated Python calls in place of an op.
DIRECT: dict[str, Callable[..., Any]] = {
    "dcp_inductor.a2a_lse_reduce_lane.default": reduce,
    "dcp_inductor.a2a_lse_reduce_with_lse_lane.default": list_with_lse,
}


def _register() -> None:
    for name, (further, result, implementation, fake) in _OPS.items():
        _LIBRARY.define(
            f"{name}({_ARGS}{further}) -> {result}",
            tags=_TAGS,
        )
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dcp_inductor::{name}", fake, lib=_LIBRARY)
        has_side_effect(getattr(torch.ops.dcp_inductor, name).default)


_register()

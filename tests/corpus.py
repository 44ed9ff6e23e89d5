"""Spellings of DCP's exchange that must fuse, as data: one Entry a spelling.

A spelling is a row of choices, each a name in one of the tables below. How it is
compiled and judged is harness.py's.

    partials -> split by head -> PACKS (and the wire) -> MERGES (and a guard) -> THEN

Axes: N ranks, B tokens, q tokens a sequence, H heads, h = H/N, D head dim. ``rows``
are the axes of a payload but N and D: [B, h], [h, B] or [B, q, h].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from dcp_inductor.merge import LseMode, a2a_lse_reduce_reference

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Entry:
    """One spelling.

    group: a key of harness.fake_world(); "" means the one of num_ranks. partials: how
    the graph gets them, a key of PARTIALS. spelled: how a weight is computed from an
    LSE, a key of POWERS.
    """

    name: str
    num_ranks: int = 2
    num_tokens: int = 3
    num_heads: int = 4
    head_dim: int = 16
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhd"
    lse_layout: str = "as o"
    partials: str = "inputs"
    pack: str = "bytes tail"
    wire: str = "functional"
    merge: str = "max"
    spelled: str = "exp2"
    guard: str = "none"
    then: str = "returned"
    with_lse: str = ""
    group: str = ""
    dynamic: bool = False

    @property
    def lse_mode(self) -> LseMode:
        return POWERS[self.spelled].lse_mode

    @property
    def group_key(self) -> str:
        return self.group or str(self.num_ranks)

    def __str__(self) -> str:
        return self.name


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """Where B, q, H and D lie.

    made: from [B, H, D] to the graph's tensor; works for merged results too.
    split: from the graph's tensor [.., D] to [N, *rows, D].
    """

    made: Callable[[Tensor], Tensor]
    split: Callable[[Tensor, int, int], Tensor]


def _split_bhd(x: Tensor, n: int, width: int) -> Tensor:
    b, heads = x.shape[0], x.shape[-2]
    return x.reshape(b, n, heads // n, width).transpose(0, 1)


def _split_b1hd(x: Tensor, n: int, width: int) -> Tensor:
    b, _, heads, _ = x.shape
    return x.reshape(b, 1, n, heads // n, width).permute(2, 0, 1, 3, 4)


def _split_hbd(x: Tensor, n: int, width: int) -> Tensor:
    heads, b, _ = x.shape
    return x.reshape(n, heads // n, b, width)


def _split_bqhd(x: Tensor, n: int, width: int) -> Tensor:
    b, q, heads, _ = x.shape
    return x.reshape(b, q, n, heads // n, width).permute(2, 0, 1, 3, 4)


def _split_flat(x: Tensor, n: int, width: int) -> Tensor:
    return x.reshape(x.shape[0], n, -1, width).transpose(0, 1)


NUM_QUERIES = 2

LAYOUTS: dict[str, Layout] = {
    "bhd": Layout(lambda x: x, _split_bhd),
    "b1hd": Layout(lambda x: x.unsqueeze(1), _split_b1hd),
    "hbd": Layout(lambda x: x.transpose(0, 1), _split_hbd),
    "bqhd": Layout(lambda x: x.unflatten(0, (-1, NUM_QUERIES)), _split_bqhd),
    "b(hd)": Layout(lambda x: x.flatten(1), _split_flat),
}

# From the [B, H, 1] LSE to the graph's, and back inside the graph to [*rows, 1].
LSE_LAYOUTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "as o": (lambda x: x.squeeze(-1), lambda x: x.unsqueeze(-1)),
    "trailing 1": (lambda x: x, lambda x: x),
    "transposed": (
        lambda x: x.squeeze(-1).transpose(0, 1).contiguous(),
        lambda x: x.transpose(0, 1).unsqueeze(-1),
    ),
}

# ---------------------------------------------------------------- partials


@dataclass(frozen=True)
class Partials:
    """How partials reach the exchange.

    shared: changes [B, H, ..] before it is laid out. laid: the strides of the graph's
    input. computed: what the graph does to both before the exchange. split: the same,
    element by element, when they are split by rank.
    """

    shared: Callable[[Tensor], Tensor] = lambda x: x
    laid: Callable[[Tensor], Tensor] = lambda x: x.contiguous()
    computed: Callable[[Tensor, Tensor], Any] = lambda o, lse: (o, lse)
    split: Callable[[Tensor, Tensor], Any] = lambda o, lse: (o, lse)


def _halved(o: Tensor) -> Tensor:
    return (o.float() * 0.5).to(o.dtype)


def _cleaned(lse: Tensor) -> Tensor:
    return torch.where(torch.isnan(lse), -torch.inf, lse)


def _pitched(x: Tensor) -> Tensor:
    """Rows inside a wider buffer, head-major, as a paged kernel writes them."""
    if x.dim() < 3:
        return x
    wide = x.new_zeros((x.shape[1], x.shape[0] + 5, *x.shape[2:]))
    rows = wide[:, : x.shape[0]].transpose(0, 1)
    return rows.copy_(x)


PARTIALS: dict[str, Partials] = {
    "inputs": Partials(),
    "computed": Partials(computed=lambda o, lse: (_halved(o), lse + 1.0)),
    "LSE computed when split": Partials(split=lambda o, lse: (o, _cleaned(lse))),
    "o computed when split": Partials(split=lambda o, lse: (_halved(o), lse)),
    "computed when split": Partials(split=lambda o, lse: (_halved(o), lse + 1.0)),
    "pitched": Partials(laid=_pitched),
    # All heads of a token read one row: stride 0.
    "expanded": Partials(shared=lambda x: x[:, :1].expand(x.shape), laid=lambda x: x),
    "transposed": Partials(
        laid=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
    ),
}

# ---------------------------------------------------------------- wires

Wire = Callable[[Tensor, Any], Tensor]


def _functional(sent: Tensor, group: Any) -> Tensor:
    return funcol.all_to_all_single(sent, None, None, group)


def _with_splits(sent: Tensor, group: Any) -> Tensor:
    n = group.size()
    splits = [sent.shape[0] // n] * n
    return funcol.all_to_all_single(sent, splits, splits, group)


def _in_place(sent: Tensor, group: Any) -> Tensor:
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _flat(sent: Tensor, group: Any) -> Tensor:
    """Ranks and the next axis as one, as a list of tokens per peer is sent."""
    received = torch.empty_like(sent.flatten(0, 1))
    dist.all_to_all_single(received, sent.flatten(0, 1).contiguous(), group=group)
    return received.view(sent.shape)


def _by_name(sent: Tensor, group: Any) -> Tensor:
    """The op itself, as a host's wrapper calls it."""
    op = torch.ops._c10d_functional
    n = group.size()
    splits = [sent.shape[0] // n] * n
    name = group.group_name
    return op.wait_tensor(op.all_to_all_single(sent.contiguous(), splits, splits, name))


def _autograd(sent: Tensor, group: Any) -> Tensor:
    return funcol.all_to_all_single_autograd(sent, None, None, group)


WIRES: dict[str, Wire] = {
    "by name": _by_name,
    "autograd": _autograd,
    "functional": _functional,
    "splits": _with_splits,
    "in place": _in_place,
    "flat": _flat,
}

# ---------------------------------------------------------------- packs

# (payload [N, *rows, D], LSE [N, *rows], wire, group) -> both, received
Pack = Callable[[Tensor, Tensor, Wire, Any], tuple[Tensor, Tensor]]


def _bytes_tail(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    o, lse = o.contiguous(), lse.unsqueeze(-1).contiguous()
    received = wire(torch.cat([o.view(torch.uint8), lse.view(torch.uint8)], -1), group)
    width = o.shape[-1] * o.element_size()
    return (
        received[..., :width].contiguous().view(o.dtype),
        received[..., width:].contiguous().view(torch.float32).squeeze(-1),
    )


def _bytes_head(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    o, lse = o.contiguous(), lse.unsqueeze(-1).contiguous()
    received = wire(torch.cat([lse.view(torch.uint8), o.view(torch.uint8)], -1), group)
    return (
        received[..., 4:].contiguous().view(o.dtype),
        received[..., :4].contiguous().view(torch.float32).squeeze(-1),
    )


def _words_tail(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    """The LSE's bits as elements of the payload's dtype: two of bf16."""
    words = lse.unsqueeze(-1).contiguous().view(o.dtype)
    received = wire(torch.cat([o, words], -1), group)
    o_part, lse_part = received.split([o.shape[-1], words.shape[-1]], -1)
    return o_part, lse_part.contiguous().view(torch.float32).squeeze(-1)


def _fp32_tail(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    received = wire(torch.cat([o.float(), lse.unsqueeze(-1)], -1), group)
    return received[..., :-1], received[..., -1]


def _buffer(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    sent = o.new_empty((*o.shape[:-1], o.shape[-1] + 1), dtype=torch.float32)
    sent[..., :-1] = o
    sent[..., -1] = lse
    received = wire(sent, group)
    return received[..., :-1], received[..., -1]


def _byte_buffer(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    """An empty buffer of bytes, filled through views of the two dtypes."""
    width = o.shape[-1] * o.element_size()
    sent = o.new_empty((*o.shape[:-1], width + 4), dtype=torch.uint8)
    sent[..., :width] = o.contiguous().view(torch.uint8)
    sent[..., width:] = lse.unsqueeze(-1).contiguous().view(torch.uint8)
    received = wire(sent, group)
    return (
        received[..., :width].contiguous().view(o.dtype),
        received[..., width:].contiguous().view(torch.float32)[..., 0],
    )


def _sections(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    """To each peer all payload first, then all LSEs."""
    n = o.shape[0]
    o_bytes = o.contiguous().view(torch.uint8).reshape(n, -1)
    lse_bytes = lse.contiguous().view(torch.uint8).reshape(n, -1)
    received = wire(torch.cat([o_bytes, lse_bytes], 1), group)
    width = o_bytes.shape[1]
    return (
        received[:, :width].contiguous().view(o.dtype).view(o.shape),
        received[:, width:].contiguous().view(torch.float32).view(lse.shape),
    )


def _two(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    return wire(o.contiguous(), group), wire(lse.contiguous(), group)


def _two_lse_first(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    received_lse = wire(lse.contiguous(), group)
    return wire(o.contiguous(), group), received_lse


def _two_wide(o: Tensor, lse: Tensor, wire: Wire, group: Any) -> Any:
    return wire(o.float().contiguous(), group), wire(lse.contiguous(), group)


PACKS: dict[str, Pack] = {
    "bytes tail": _bytes_tail,
    "bytes head": _bytes_head,
    "words tail": _words_tail,
    "fp32 tail": _fp32_tail,
    "buffer": _buffer,
    "byte buffer": _byte_buffer,
    "sections": _sections,
    "two": _two,
    "two, LSE first": _two_lse_first,
    "two, wide": _two_wide,
}

# ---------------------------------------------------------------- merges


@dataclass(frozen=True)
class Power:
    """base ** x as the graph spells it, and scale: log(base), for ops in base e."""

    lse_mode: LseMode
    power: Callable[[Tensor], Tensor]
    log: Callable[[Tensor], Tensor]
    scale: float


POWERS: dict[str, Power] = {
    "exp2": Power("base2", torch.exp2, torch.log2, LN2),
    "exp": Power("basee", torch.exp, torch.log, 1.0),
    "exp2 of log2(e)": Power(
        "basee", lambda x: torch.exp2(x * LOG2E), lambda x: torch.log2(x) / LOG2E, 1.0
    ),
    "exp2 of a tensor": Power(
        "basee",
        lambda x: torch.exp2(x * torch.tensor([1.0, LOG2E])[1]),
        lambda x: torch.log2(x) / LOG2E,
        1.0,
    ),
    "exp of ln(2)": Power(
        "base2", lambda x: torch.exp(x * LN2), lambda x: torch.log(x) / LN2, LN2
    ),
    "pow": Power("base2", lambda x: torch.pow(2.0, x), torch.log2, LN2),
}

# (payload fp32 [N, *rows, D], LSE [N, *rows], power, guard) -> ([*rows, D], [*rows])
Merge = Callable[[Tensor, Tensor, Power, str], tuple[Tensor, Tensor]]


def finite_max(top: Tensor) -> Tensor:
    return torch.where(top == -torch.inf, torch.zeros_like(top), top)


# What stands between an LSE and a weight: (LSE, its max, power) -> weight
GUARDS: dict[str, Callable[[Tensor, Tensor, Power], Tensor]] = {
    "none": lambda lse, top, p: p.power(lse - top),
    "where": lambda lse, top, p: p.power(lse - finite_max(top)),
    "nan_to_num": lambda lse, top, p: torch.nan_to_num(p.power(lse - top), nan=0.0),
    "masked": lambda lse, top, p: p.power(lse - top).masked_fill(
        lse == -torch.inf, 0.0
    ),
    "isfinite": lambda lse, top, p: torch.where(
        torch.isfinite(lse), p.power(lse - top), 0.0
    ),
}


def _max_merge(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    top = lse.amax(0, keepdim=True)
    weight = GUARDS[guard](lse, top, p)
    total = weight.sum(0)
    if guard != "none":
        total = total.clamp(min=1.0)
    out = (weight.unsqueeze(-1) * o).sum(0) / total.unsqueeze(-1)
    return out, top.squeeze(0) + p.log(weight.sum(0))


def _max_where_total(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    """Weights normalised first; a total of 0 is divided as 1; payload selected."""
    top = lse.max(dim=0).values
    weight = GUARDS[guard](lse, top, p)
    total = weight.sum(0)
    weight = weight / torch.where(total == 0, torch.ones_like(total), total)
    kept = torch.where(weight.unsqueeze(-1) > 0, o, torch.zeros_like(o))
    return (weight.unsqueeze(-1) * kept).sum(0), top + p.log(total)


def _max_tiny_total(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    """The denominator kept from 0 by a tiny number; all shards empty as NaN, then 0."""
    top = lse.amax(0)
    weight = GUARDS[guard](lse, top, p)
    total = weight.sum(0)
    out = (weight.unsqueeze(-1) * o).sum(0) / total.clamp(min=1e-20).unsqueeze(-1)
    return torch.nan_to_num(out, nan=0.0), top + p.log(total)


def _logsumexp(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    merged = torch.logsumexp(lse * p.scale, 0) / p.scale
    return (p.power(lse - merged).unsqueeze(-1) * o).sum(0), merged


def _softmax(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    weight = torch.softmax(lse * p.scale, 0)
    merged = torch.logsumexp(lse * p.scale, 0) / p.scale
    return (weight.unsqueeze(-1) * o).sum(0), merged


def _einsum(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    top = lse.amax(0)
    weight = GUARDS[guard](lse, top, p)
    total = weight.sum(0)
    out = torch.einsum("n...,n...d->...d", weight / total, o)
    return out, top + p.log(total)


def _bmm(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    n, d = o.shape[0], o.shape[-1]
    top = lse.amax(0)
    weight = GUARDS[guard](lse, top, p)
    total = weight.sum(0)
    weight = (weight / total).reshape(n, 1, -1).permute(2, 1, 0)
    out = torch.bmm(weight, o.reshape(n, -1, d).transpose(0, 1))
    return out.reshape(o.shape[1:]), top + p.log(total)


def _running(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    """One rank after another, as ring attention does."""
    out, merged = o[0], lse[0]
    for rank in range(1, o.shape[0]):
        both = torch.logaddexp(merged * p.scale, lse[rank] * p.scale) / p.scale
        out = out * p.power(merged - both).unsqueeze(-1)
        out = out + o[rank] * p.power(lse[rank] - both).unsqueeze(-1)
        merged = both
    return out, merged


def _online(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    """One rank after another, unnormalised, divided at the end."""
    top, total, out = lse[0], torch.ones_like(lse[0]), o[0]
    for rank in range(1, o.shape[0]):
        new = torch.maximum(top, lse[rank])
        old, more = p.power(top - new), p.power(lse[rank] - new)
        out = out * old.unsqueeze(-1) + o[rank] * more.unsqueeze(-1)
        total, top = total * old + more, new
    return out / total.unsqueeze(-1), top + p.log(total)


def _sigmoid(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    difference = (lse[0] - lse[1]) * p.scale
    out = o[0] * torch.sigmoid(difference).unsqueeze(-1)
    out = out + o[1] * torch.sigmoid(-difference).unsqueeze(-1)
    return out, torch.logaddexp(lse[0] * p.scale, lse[1] * p.scale) / p.scale


def _no_max(o: Tensor, lse: Tensor, p: Power, guard: str) -> Any:
    """Overflows at large LSEs, where it then means nothing; right elsewhere."""
    weight = p.power(lse)
    out = (weight.unsqueeze(-1) * o).sum(0) / weight.sum(0).unsqueeze(-1)
    return out, p.log(weight.sum(0))


MERGES: dict[str, Merge] = {
    "max": _max_merge,
    "max, where total": _max_where_total,
    "max, tiny total": _max_tiny_total,
    "logsumexp": _logsumexp,
    "softmax": _softmax,
    "einsum": _einsum,
    "bmm": _bmm,
    "running": _running,
    "online": _online,
    "sigmoid": _sigmoid,
    "no max": _no_max,
}

# ---------------------------------------------------------------- afterwards

# What reads the merged result.
THEN: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda out: out,
    "reshape": lambda out: out.reshape(out.shape[0], -1),
    "transpose": lambda out: out.transpose(0, 1),
    "matmul": lambda out: (
        out.reshape(out.shape[0], -1) @ out.new_ones((out.shape[1] * out.shape[2], 3))
    ),
    "twice": lambda out: (out, out.transpose(0, 1)),
    "relu": lambda out: torch.relu(out) + 1,
}
# What reads the merged LSE; "" means nobody.
LSE_THEN: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda lse: lse,
    "scaled": lambda lse: lse * LN2 + 1.0,
}


def exchange(entry: Entry, group: Any) -> Callable[..., Any]:
    """The function to compile: (o, lse) in the entry's layouts -> what it returns."""
    layout, power = LAYOUTS[entry.layout], POWERS[entry.spelled]
    n = entry.num_ranks

    def fn(o: Tensor, lse: Tensor) -> Any:
        o, lse = PARTIALS[entry.partials].computed(o, lse)
        lse = LSE_LAYOUTS[entry.lse_layout][1](lse)
        send_o = layout.split(o, n, entry.head_dim)
        send_lse = layout.split(lse, n, 1).squeeze(-1)
        sent = PARTIALS[entry.partials].split(send_o, send_lse)
        received = PACKS[entry.pack](*sent, WIRES[entry.wire], group)
        merged, merged_lse = MERGES[entry.merge](
            received[0].float(), received[1], power, entry.guard
        )
        out = THEN[entry.then](merged.to(o.dtype))
        if entry.with_lse:
            return out, LSE_THEN[entry.with_lse](merged_lse)
        return out

    return fn


def arguments(entry: Entry, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """One rank's arguments from its partials [B, H, D] and [B, H]."""
    layout, partials = LAYOUTS[entry.layout], PARTIALS[entry.partials]
    o, made_lse = partials.shared(o.to(entry.dtype)), partials.shared(lse).unsqueeze(-1)
    if entry.layout != "b(hd)" and entry.lse_layout != "transposed":
        made_lse = layout.made(made_lse)
    made_lse = LSE_LAYOUTS[entry.lse_layout][0](made_lse)
    return partials.laid(layout.made(o)), partials.laid(made_lse)


def expected(entry: Entry, partials: list[tuple[Tensor, Tensor]], rank: int) -> Any:
    """What ``rank`` must return: merge.py on the partials that the graph computes."""
    partials = [_partials_in_graph(entry, *pair) for pair in partials]
    out, lse = a2a_lse_reduce_reference(
        torch.stack([o for o, _ in partials]),
        torch.stack([lse for _, lse in partials]),
        rank=rank,
        lse_mode=entry.lse_mode,
    )
    rows = LAYOUTS["bhd" if entry.layout == "b(hd)" else entry.layout]
    made = THEN[entry.then](rows.made(out))
    if not entry.with_lse:
        return made
    return made, LSE_THEN[entry.with_lse](rows.made(lse.unsqueeze(-1)).squeeze(-1))


def _partials_in_graph(entry: Entry, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    partials = PARTIALS[entry.partials]
    shared = partials.shared(o.to(entry.dtype)), partials.shared(lse)
    return partials.split(*partials.computed(*shared))


# ---------------------------------------------------------------- entries

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP32 = torch.float32


def _alone() -> list[Entry]:
    """Each choice of each table by itself, beside the plainest of all others."""
    base = Entry("")
    two = replace(base, pack="two", spelled="exp")
    fp32 = replace(base, dtype=_FP32)
    return [
        *(replace(base, name=f"pack: {x}", pack=x) for x in PACKS),
        *(
            replace(fp32, name=f"pack: {x}, fp32", pack=x)
            for x in ("bytes head", "words tail", "buffer", "two")
        ),
        *(
            replace(base, name=f"wire: {x}, packed", wire=x)
            for x in WIRES
            if x != "functional"
        ),
        *(replace(two, name=f"wire: {x}, two", wire=x) for x in ("in place", "flat")),
        *(replace(base, name=f"layout: {x}", layout=x, num_tokens=6) for x in LAYOUTS),
        *(
            replace(two, name=f"layout: {x}, two", layout=x, num_tokens=6)
            for x in LAYOUTS
        ),
        *(replace(base, name=f"LSE: {x}", lse_layout=x) for x in LSE_LAYOUTS),
        *(replace(two, name=f"LSE: {x}, two", lse_layout=x) for x in LSE_LAYOUTS),
        *(replace(two, name=f"merge: {x}, exp", merge=x) for x in MERGES),
        *(
            replace(two, name=f"merge: {x}, exp2", merge=x, spelled="exp2")
            for x in ("logsumexp", "softmax", "running", "online")
        ),
        *(replace(base, name=f"spelled: {x}", spelled=x) for x in POWERS),
        *(
            replace(base, name=f"guard: {x}, {merge}", guard=x, merge=merge)
            for x in GUARDS
            for merge in ("max", "max, where total")
        ),
        *(replace(base, name=f"dtype: {x}", dtype=x) for x in (torch.float16, *FP8)),
        *(replace(base, name=f"partials: {x}", partials=x) for x in PARTIALS),
        *(
            replace(two, name=f"partials: {x}, two", partials=x)
            for x in ("pitched", "transposed")
        ),
        *(replace(base, name=f"then: {x}", then=x) for x in THEN),
        *(
            replace(base, name=f"LSE returned, {x}", with_lse="returned", spelled=x)
            for x in POWERS
        ),
        replace(base, name="LSE scaled", with_lse="scaled", spelled="exp of ln(2)"),
    ]


def _sizes() -> list[Entry]:
    base = Entry("", pack="two", spelled="exp", dtype=_FP32)
    packed = Entry("", num_heads=8)
    return [
        *(
            replace(packed, name=f"{n} ranks", num_ranks=n, num_heads=h)
            for n, h in ((3, 6), (4, 8), (8, 16))
        ),
        *(
            replace(base, name=f"{n} ranks, one head each", num_ranks=n, num_heads=n)
            for n in (2, 3, 4, 8)
        ),
        replace(packed, name="one head each, packed", num_ranks=8),
        replace(
            base, name="B = H, transposed LSE", num_tokens=4, lse_layout="transposed"
        ),
        replace(
            packed,
            name="B = H, transposed LSE, packed",
            num_tokens=8,
            lse_layout="transposed",
        ),
        replace(base, name="D = 1", head_dim=1),
        replace(base, name="D = 1, packed", head_dim=1, pack="fp32 tail"),
        replace(
            base,
            name="D = 1, one head each",
            head_dim=1,
            num_ranks=4,
            pack="words tail",
        ),
        replace(packed, name="D = 96", head_dim=96),
        replace(packed, name="B = 1", num_tokens=1),
        replace(base, name="B = 1, two", num_tokens=1),
        replace(base, name="B = 1, one head each", num_tokens=1, num_heads=2),
        replace(packed, name="B = N", num_tokens=2),
        replace(packed, name="B = 130", num_tokens=130),
        replace(base, name="many rows", num_ranks=4, num_tokens=64, num_heads=64),
        replace(
            packed,
            name="many rows, packed",
            num_ranks=4,
            num_tokens=64,
            num_heads=32,
            guard="where",
        ),
        replace(packed, name="sub-group", group="other 2"),
        replace(base, name="sub-group of 4", group="other 4", num_ranks=4),
    ]


def _mixed() -> list[Entry]:
    """Choices that come together in hosts, or that are awkward together."""
    half = torch.float16
    return [
        Entry(
            "online, LSE used",
            merge="online",
            spelled="exp",
            with_lse="returned",
            num_ranks=4,
            num_heads=4,
            pack="two",
        ),
        Entry(
            "running, LSE used",
            merge="running",
            spelled="exp",
            with_lse="returned",
            num_ranks=4,
            num_heads=8,
            pack="two",
        ),
        Entry(
            "sigmoid, LSE used",
            merge="sigmoid",
            spelled="exp2",
            with_lse="scaled",
            pack="buffer",
        ),
        Entry(
            "head-major, bytes head, LSE used",
            layout="hbd",
            pack="bytes head",
            with_lse="returned",
            guard="where",
        ),
        Entry(
            "head-major, two, transposed",
            layout="hbd",
            pack="two, LSE first",
            then="transpose",
            wire="in place",
            spelled="exp",
            merge="logsumexp",
            with_lse="scaled",
        ),
        Entry(
            "several tokens, buffer, running",
            layout="bqhd",
            pack="buffer",
            num_tokens=4,
            merge="running",
            spelled="exp",
            dtype=half,
        ),
        Entry(
            "several tokens, sections, 4 ranks",
            layout="bqhd",
            pack="sections",
            num_tokens=6,
            num_ranks=4,
            num_heads=8,
            with_lse="returned",
        ),
        Entry(
            "flat, words, reshaped",
            layout="b(hd)",
            pack="words tail",
            then="reshape",
            guard="nan_to_num",
            num_ranks=4,
            num_heads=8,
        ),
        Entry(
            "[B, 1, H, D], two, trailing 1",
            layout="b1hd",
            pack="two",
            lse_layout="trailing 1",
            spelled="exp",
            merge="softmax",
        ),
        Entry(
            "computed, byte buffer, in place",
            partials="computed",
            pack="byte buffer",
            wire="in place",
            then="matmul",
            guard="masked",
        ),
        Entry(
            "pitched, two, wide, LSE",
            partials="pitched",
            pack="two, wide",
            with_lse="returned",
            spelled="exp2 of log2(e)",
            then="twice",
        ),
        Entry(
            "expanded, fp32 tail, transposed LSE",
            partials="expanded",
            pack="fp32 tail",
            lse_layout="transposed",
            spelled="exp of ln(2)",
        ),
        Entry(
            "8 ranks, running, fp16",
            num_ranks=8,
            num_heads=16,
            merge="running",
            spelled="exp",
            dtype=half,
            pack="two",
        ),
        Entry(
            "8 ranks, online, one head each",
            num_ranks=8,
            num_heads=8,
            merge="online",
            pack="sections",
        ),
        Entry(
            "3 ranks, bmm, D = 96",
            num_ranks=3,
            num_heads=6,
            head_dim=96,
            merge="bmm",
            wire="flat",
        ),
        Entry(
            "fp8, two, LSE used",
            dtype=FP8[0],
            pack="two, LSE first",
            with_lse="returned",
        ),
        Entry("fp8 e5m2, buffer", dtype=FP8[1], pack="buffer", guard="isfinite"),
    ]


def _dynamic() -> list[Entry]:
    return [
        replace(entry, name=f"dynamic: {entry.name}", dynamic=True)
        for entry in (
            Entry("bytes tail", num_tokens=4),
            Entry(
                "bytes head, LSE", pack="bytes head", with_lse="returned", num_tokens=4
            ),
            Entry("two", pack="two", spelled="exp", num_tokens=4),
            Entry(
                "two, in place, LSE",
                pack="two",
                wire="in place",
                num_tokens=4,
                with_lse="returned",
            ),
            Entry("head-major", layout="hbd", num_tokens=4),
            Entry(
                "head-major, two, LSE",
                layout="hbd",
                pack="two",
                num_tokens=4,
                with_lse="returned",
            ),
            Entry("several tokens", layout="bqhd", num_tokens=8, pack="two"),
            Entry("flat", layout="b(hd)", num_tokens=4, num_ranks=4, num_heads=8),
            Entry("sections", pack="sections", num_tokens=4),
            Entry("transposed LSE", lse_layout="transposed", num_tokens=4),
            Entry(
                "B = H, transposed LSE",
                lse_layout="transposed",
                num_tokens=4,
                pack="two",
            ),
            Entry("buffer", pack="buffer", num_tokens=4),
            Entry("softmax", merge="softmax", num_tokens=4, pack="two"),
            Entry("words", pack="words tail", num_tokens=4),
            Entry("where total", merge="max, where total", num_tokens=4),
            Entry("[B, 1, H, D]", layout="b1hd", num_tokens=4),
            Entry("one head each", num_ranks=4, num_tokens=6, dtype=_FP32, pack="two"),
            Entry("computed, matmul", partials="computed", num_tokens=4, then="matmul"),
        )
    ]


def entries() -> list[Entry]:
    """The corpus. Names are unique."""
    return [*_alone(), *_sizes(), *_mixed(), *_dynamic()]


# ---------------------------------------------------------------- several exchanges


@dataclass(frozen=True)
class Several:
    """Exchanges of one graph that hang together; all become ops.

    make: from harness.fake_world()'s groups to a function of (o, lse).
    """

    name: str
    num_ops: int
    make: Callable[[dict[str, Any]], Callable[..., Any]]
    num_heads: int = 4
    head_major: bool = False

    def __str__(self) -> str:
        return self.name


def _two_and_merge(o: Tensor, lse: Tensor, group: Any, spelled: str = "exp") -> Any:
    """[B, H, D] in two exchanges: the merged result and LSE."""
    n = group.size()
    received = _two(
        _split_bhd(o, n, o.shape[-1]),
        _split_bhd(lse.unsqueeze(-1), n, 1).squeeze(-1),
        _functional,
        group,
    )
    return _max_merge(*received, POWERS[spelled], "none")


def _layers(groups: dict[str, Any]) -> Callable[..., Any]:
    """Three layers, packed, each fed by the one before."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        layer = exchange(replace(Entry(""), head_dim=o.shape[-1]), groups["2"])
        for number in range(3):
            out = layer(o * (number + 1), lse + number)
            o = o + torch.cat([out, out], 1)
        return o

    return fn


def _no_arithmetic(groups: dict[str, Any]) -> Callable[..., Any]:
    """The first merge's results are the second's partials."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        for _ in range(2):
            o, lse = _two_and_merge(o, lse, groups["2"])
        return o, lse

    return fn


def _sent_as_merged(groups: dict[str, Any]) -> Callable[..., Any]:
    """Head-major: what the first merge made is what the second exchange sends."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        for _ in range(2):
            sent = o.unflatten(0, (2, -1)), lse.unflatten(0, (2, -1))
            received = _two(*sent, _functional, groups["2"])
            o, lse = _max_merge(*received, POWERS["exp"], "none")
        return o, lse

    return fn


def _repeated(groups: dict[str, Any]) -> Callable[..., Any]:
    """The second layer's partials are the first's results, twice."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        for _ in range(2):
            out, merged = _two_and_merge(o, lse, groups["2"])
            o, lse = torch.cat([out, out], 1), torch.cat([merged, merged], 1)
        return o

    return fn


def _hierarchical(groups: dict[str, Any]) -> Callable[..., Any]:
    """Merged over one group, then over another: LSE in base 2 between them."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        o, lse = _two_and_merge(o, lse, groups["2"], "exp2")
        return _two_and_merge(o, lse, groups["other 2"], "exp2")

    return fn


def _crossed(groups: dict[str, Any]) -> Callable[..., Any]:
    """Two layers' four exchanges: all sent, then all merged; bases differ."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        group = groups["2"]
        first = _split_bhd(o, 2, o.shape[-1]), _split_bhd(lse[..., None], 2, 1)[..., 0]
        second = tuple(x.flip(1) * 2 for x in first)
        o1, o2 = (_functional(x[0].contiguous(), group) for x in (first, second))
        l2, l1 = (_functional(x[1].contiguous(), group) for x in (second, first))
        out2 = _max_merge(o2, l2, POWERS["exp2"], "where")[0]
        return _softmax(o1, l1, POWERS["exp"], "none")[0] + out2

    return fn


def _input_updated_later(groups: dict[str, Any]) -> Callable[..., Any]:
    """The partials' buffers are written again after the merge, as engines do."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        out, _ = _two_and_merge(o, lse, groups["2"])
        o.mul_(0.0)
        lse.fill_(-torch.inf)
        return out

    return fn


def _input_updated_before(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        o.mul_(2.0)
        lse.add_(1.0)
        return _two_and_merge(o, lse, groups["2"])[0]

    return fn


SEVERAL = [
    Several("three layers", 3, _layers),
    Several("no arithmetic between", 2, _no_arithmetic),
    Several("sent as merged, head-major", 2, _sent_as_merged, head_major=True),
    Several("results repeated", 2, _repeated),
    Several("hierarchical", 2, _hierarchical),
    Several("crossed", 2, _crossed),
    Several("inputs updated later", 1, _input_updated_later),
    Several("inputs updated before", 1, _input_updated_before),
]

"""The exchange kernel: push slices to the peers, poll for theirs, merge, all in one.

Launching and loading it stay with exchange.py, memory accesses with words.py. Axes,
buffer layout and NOTE [sentinel word] are in the package's __init__. Tiles are
``[cp_pad, block]``: sources (or targets) by vectors of one row, both rounded up.

NOTE [two phases]
Row r's k-th use is epoch k on every rank, for all ranks run the same calls in the same
order, and each call of B tokens uses rows 0 .. B*h - 1. Epochs lie in local device
memory, one a row, and advance by 1 at the end of a use; so batches of any width, graph
replays and eager calls may follow one another. Epoch e uses phase e & 1.
Why a push never overwrites what wasn't read, nor is wiped by a late clear: rank s
writes row r, phase p, at rank d for epoch e + 2 only after s's kernel of epoch e + 1
has ended (one slot, one ordered stream). That kernel polled d's push of e + 1. d pushed
it after d's kernel of epoch e had ended, and that kernel had read and cleared phase p.
Kernel boundaries order memory on both sides. Whatever starts a kernel before the one
ahead of it has ended (programmatic dependent launch) breaks this: launch without it.
Row r and another row share nothing, so the widths of the calls in between don't matter.

NOTE [no residency]
A program pushes all its rows before it polls any, and waits only for the same rows of
the peers, which the program of the same index pushes there. So a rank makes progress
whenever its peers have their programs on the device; ``max_programs`` is how many fit
at once beside whatever else runs there, and wider batches stride over the grid.

NOTE [one owner]
All accesses of one (source, vector) element are by one thread, once. Inline assembly
runs once for every thread that holds an element, so no element may have two holders:
a second holder could read a stale word, or poll one that the first has cleared. The
tile ``[cp_pad, block]`` has block >= 32 * num_warps, both powers of two, and no layout
of the compiler replicates such a tile. The loop ends on a reduction over the tile, so
all threads leave it together, after every thread's last read: clears can't come early.
With that layout axis 0 (the sources) lies in one thread's registers, and sums over it
are plain additions in a fixed order, whatever order the messages came in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_inductor.runtime.kernels import HEADER_SENTINEL, TIMEOUT, WRONG_TAG
from dcp_inductor.runtime.kernels.words import (
    INTERPRETED,
    as_pointer,
    clock,
    element,
    element_bits,
    load_pair,
    load_vector,
    store_pair,
    store_vector,
)

# Triton reads annotations: of a device function's parameters only constants have one.
# mypy: allow-untyped-defs, allow-incomplete-defs

# Verdicts of a poll. The values order them: the largest of all elements counts.
_WELL = tl.constexpr(0)
_WRONG_TAG = tl.constexpr(WRONG_TAG)
_WAITING = tl.constexpr(2)
_GAVE_UP = tl.constexpr(TIMEOUT)

_HEADER = tl.constexpr(HEADER_SENTINEL)
_POLLS_PER_CHECK = tl.constexpr(1 if INTERPRETED else 4096)


@triton.jit
def _sendable(word, SENTINEL: tl.constexpr):
    """The word itself, or the equal one of positive zeros: NOTE [sentinel word]."""
    return tl.where(word == SENTINEL, 0, word)


@triton.jit
def _message(epoch, source, row, slot_rows, CP: tl.constexpr):
    """Index in any rank's buffer of the message of ``row`` from ``source``."""
    phase = (epoch & 1).to(tl.int64)
    return (phase * CP + source) * slot_rows + row


@triton.jit
def _addresses(table, peer, vec, mask):
    """The ranks' buffer addresses ``[cp_pad, block]`` from ``table``, one a rank."""
    low, high = load_pair(table + peer * 8 + vec * 0, mask)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _push(
    source,
    source_lse,
    target,
    target_header,
    tag,
    sends,
    leads,
    SENTINEL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Send one row to every peer; ``leads`` marks the element that sends its header."""
    a, b, c, d = load_vector(source, sends, WIDE)
    lse, _, _, _ = load_vector(source_lse, leads, False)
    a = _sendable(a, SENTINEL)
    b = _sendable(b, SENTINEL)
    c = _sendable(c, SENTINEL)
    d = _sendable(d, SENTINEL)
    store_vector(target, a, b, c, d, sends, WIDE)
    lse = _sendable(lse, _HEADER)
    store_pair(target_header, lse, lse * 0 + tag, leads)


@triton.jit
def _await(
    payload,
    header,
    reads,
    remote,
    tag,
    status,
    spin_limit,
    SENTINEL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Poll until every message is here: words, LSE bits, verdict, verdict by element.

    The verdict is one reduction, the same in every thread; it is never _WAITING.
    """
    a = tl.zeros(payload.shape, tl.int32)
    b, c, d, lse, fault = a, a, a, a, a
    polls = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int64)
    quits = tl.full([], 0, tl.int32)
    verdict = tl.full([], _WAITING, tl.int32)
    while verdict == _WAITING:
        a, b, c, d = load_vector(payload, reads, WIDE)
        lse, seen = load_pair(header, remote)
        absent = (a == SENTINEL) | (b == SENTINEL) | (c == SENTINEL) | (d == SENTINEL)
        absent = remote & (absent | (lse == _HEADER) | (seen == _HEADER))
        wrong = tl.where(remote & (seen != tag), _WRONG_TAG, _WELL)
        polls += 1
        if polls % _POLLS_PER_CHECK == 0:
            now = clock(polls)
            start = tl.where(start == 0, now, start)
            spoilt = tl.load(as_pointer(status), volatile=True) != _WELL
            quits = ((now - start > spin_limit) | spoilt).to(tl.int32)
        fault = tl.where(absent, tl.where(quits != 0, _GAVE_UP, _WAITING), wrong)
        verdict = tl.max(tl.max(fault, 0), 0)
    return a, b, c, d, lse, verdict, fault


@triton.jit
def _weights(lse, exists, to_log2):
    """Weight of every source, their sum and the merged LSE: NOTE [merge rule].

    A GPU's exp2 takes weights below 2 ** -126 for 0.
    """
    empty = (lse != lse) | (lse == float("inf")) | (exists == 0)
    lse = tl.where(empty, float("-inf"), lse)
    top = tl.max(lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((lse - shift[None, :]) * to_log2)
    total = tl.sum(weight, 0)
    return weight, total, shift + tl.log2(total) / to_log2


@triton.jit
def _merge_word(word, weight, total, verdict, DTYPE: tl.constexpr):
    """The merged word ``[block]`` of the sources' words ``[cp_pad, block]``."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    merged = tl.zeros(total.shape, tl.int32)
    for index in tl.static_range(32 // BITS):
        value = tl.where(weight > 0, element(word, index, DTYPE), 0.0)
        value = tl.sum(weight * value, 0) / total
        value = tl.where(verdict == _WELL, value, float("nan"))
        merged |= element_bits(value, DTYPE) << (BITS * index)
    return merged


@triton.jit
def _record(status, verdict, row, fault, peer, epoch):
    """Leave (kind, row, source, epoch) unless a failure is there: 16 bytes at once."""
    source = tl.max(tl.max(tl.where(fault == verdict, peer, -1), 0), 0)
    word = tl.arange(0, 4)
    record = tl.where(word == 0, verdict, tl.where(word == 1, row, epoch))
    record = tl.where(word == 2, source, record)
    is_first = tl.load(as_pointer(status), volatile=True) == _WELL
    tl.store(as_pointer(status) + word, record, is_first)


@triton.jit
def _fold(
    a,
    b,
    c,
    d,
    lse,
    verdict,
    exists,
    to_log2,
    out,
    out_lse,
    row,
    vec,
    VECTORS: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Merge one row of all sources and store it, NaN unless all is well."""
    weight, total, merged_lse = _weights(lse, exists, to_log2)
    total = tl.where(total > 0, total, 1.0)
    a = _merge_word(a, weight, total, verdict, DTYPE)
    b = _merge_word(b, weight, total, verdict, DTYPE)
    c = _merge_word(c, weight, total, verdict, DTYPE)
    d = _merge_word(d, weight, total, verdict, DTYPE)
    store_vector(
        out + vec * VECTOR_BYTES, a, b, c, d, vec < VECTORS, VECTOR_BYTES == 16
    )
    if out_lse != 0:
        merged_lse = tl.where(verdict == _WELL, merged_lse, float("nan"))
        bits = merged_lse.to(tl.int32, bitcast=True)
        tl.store(as_pointer(out_lse) + row + vec * 0, bits, vec == 0)


@triton.jit
def exchange_kernel(
    partial_o: tl.int64,
    partial_lse: tl.int64,
    out: tl.int64,
    out_lse: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    rows: tl.int32,
    heads: tl.int32,
    peers: tl.int64,
    epochs: tl.int64,
    status: tl.int64,
    slot_rows: tl.int32,
    headers: tl.int64,
    rank: tl.int32,
    tag: tl.int32,
    spin_limit: tl.int64,
    to_log2: tl.float32,
    CP: tl.constexpr,
    CP_PAD: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    SENTINEL: tl.constexpr,
):
    """Exchange and merge ``rows`` rows. Pointers are addresses, strides are bytes."""
    WIDE: tl.constexpr = VECTOR_BYTES == 16
    ROW_BYTES: tl.constexpr = VECTORS * VECTOR_BYTES
    peer = tl.arange(0, CP_PAD)[:, None]
    vec = tl.arange(0, BLOCK)[None, :]
    reads = (peer < CP) & (vec < VECTORS)
    remote = reads & (peer != rank)
    leads = remote & (vec == 0)

    base = _addresses(peers, peer, vec, remote)
    row = tl.program_id(0)
    while row < rows:
        token = (row // heads).to(tl.int64)
        head = peer * heads + row % heads
        epoch = tl.load(as_pointer(epochs) + row)
        message = _message(epoch, rank, row, slot_rows, CP)
        _push(
            partial_o + token * o_token + head * o_head + vec * VECTOR_BYTES,
            partial_lse + token * lse_token + head * lse_head + vec * 0,
            base + message * ROW_BYTES + vec * VECTOR_BYTES,
            base + headers + message * 8,
            tag,
            remote,
            leads,
            SENTINEL,
            WIDE,
        )
        row += tl.num_programs(0)

    buffer = tl.load((peers + rank * 8).to(tl.pointer_type(tl.int64)))
    row = tl.program_id(0)
    while row < rows:
        token = (row // heads).to(tl.int64)
        head = rank * heads + row % heads
        epoch = tl.load(as_pointer(epochs) + row)
        message = _message(epoch, peer, row, slot_rows, CP)
        own = partial_o + token * o_token + head * o_head + vec * VECTOR_BYTES
        own_lse = tl.load(as_pointer(partial_lse + token * lse_token + head * lse_head))
        slot = buffer + message * ROW_BYTES + vec * VECTOR_BYTES
        header = buffer + headers + message * 8 + vec * 0
        a, b, c, d, lse, verdict, fault = _await(
            tl.where(peer == rank, own, slot),
            header,
            reads,
            remote,
            tag,
            status,
            spin_limit,
            SENTINEL,
            WIDE,
        )
        empty = tl.full(a.shape, SENTINEL, tl.int32)
        store_vector(slot, empty, empty, empty, empty, remote, WIDE)
        empty = tl.full(a.shape, _HEADER, tl.int32)
        store_pair(header, empty, empty, leads)
        _fold(
            a,
            b,
            c,
            d,
            tl.where(peer == rank, own_lse, lse).to(tl.float32, bitcast=True),
            verdict,
            peer < CP,
            to_log2,
            out + row.to(tl.int64) * ROW_BYTES,
            out_lse,
            row,
            tl.arange(0, BLOCK),
            VECTORS,
            VECTOR_BYTES,
            DTYPE,
        )
        tl.store(as_pointer(epochs) + row, epoch + 1)
        if verdict != _WELL:
            _record(status, verdict, row, fault, peer, epoch)
        row += tl.num_programs(0)

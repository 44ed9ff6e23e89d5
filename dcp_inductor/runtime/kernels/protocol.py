"""The exchange kernel: push slices to the peers, await theirs, merge, all in one.

Launching and loading it stay with exchange.py, memory accesses with words.py. Axes,
buffer layout and NOTE [sentinel word] are in the package's __init__. Tiles are
``[others_pad, block]``: the other ranks by vectors of one row, both rounded up, or
``[1, block]``, this rank's.

NOTE [two phases]
Row r's k-th use is epoch k on every rank, for all ranks run the same calls in the same
order, and each call of B tokens uses rows 0 .. B*h - 1. Epochs lie in local device
memory, one a row, and advance by 1 at the end of a use; so batches of any width, graph
replays and eager calls may follow one another. Epoch e uses phase e & 1.
Why a push never overwrites what wasn't read, nor is wiped by a late clear: rank s
writes row r, phase p, at rank d for epoch e + 2 only after s's kernel of epoch e + 1
has ended (one slot, one ordered stream). That kernel awaited d's push of e + 1. d
pushed it after d's kernel of epoch e had ended, and that kernel had read and cleared
phase p. Kernel boundaries order memory on both sides. Row r and another row share
nothing, so the widths of the calls in between don't matter.

NOTE [early launch]
From compute capability 9.0 on the kernel is launched as a programmatic dependent: its
programs may be placed, and find the peers' addresses, while the kernel ahead still
runs. Before the first epoch is read they wait until that kernel has ended and its
memory is visible, which is the kernel boundary of NOTE [two phases]; every other kernel
on the stream must keep that rule too, or two exchanges around it may run at once. They
let the kernel behind be placed when they wait for no peer any more: a program that held
a place before, ours or anybody's, could keep out one that a peer waits for.

NOTE [one row ahead]
A program pushes its next row before it awaits the present one. It waits only for the
same row of the peers. Programs of all ranks take rows in one order, so a rank's push of
a row never waits for a later row of a peer, and a wait for the first unfinished row
ends: ranks make progress whenever all their programs are placed. ``max_programs`` is
how many surely are when every slot of the reservation is in use at once.

NOTE [one owner]
A vector of a source is read, cleared and merged by one thread; a header is read by all
and cleared by one, behind the barrier that ends the wait. Inline assembly runs once for
every thread that holds an element, so no element may have two holders: a second holder
could read a stale word, or wait for one that the first has cleared. The tile has block
== 32 * num_warps, both powers of two, and no layout of the compiler replicates such a
tile. Axis 0 (the other ranks) lies in one thread's registers, and sums over it are
plain additions in a fixed order, whatever order the messages came in.

NOTE [read once]
Triton 3.6 copies inline assembly, pure or not, to where a result is needed in another
layout: the wait ran up to seven times, each copy by itself, and merged what a peer was
about to overwrite. It doesn't copy out of a while loop, so the wait is in one that runs
once; LLVM removes the loop. exchange.py counts the waits in the compiled text.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dcp_inductor.runtime.kernels import HEADER_SENTINEL
from dcp_inductor.runtime.kernels.words import (
    as_pointer,
    await_messages,
    distance,
    element,
    element_bits,
    load_pair,
    load_vector,
    reciprocal,
    store_pair,
    store_vector,
    word_of_pair,
)

# Triton reads annotations: of a device function's parameters only constants have one.
# mypy: allow-untyped-defs, allow-incomplete-defs

_HEADER = tl.constexpr(HEADER_SENTINEL)


@triton.jit
def _sendable(word, SENTINEL: tl.constexpr):
    """The word itself, or the equal one of positive zeros: NOTE [sentinel word]."""
    return tl.where(word == SENTINEL, 0, word)


@triton.jit
def _message(epoch, source, row, slot_rows, CP: tl.constexpr):
    """Index in any rank's buffer of the message of ``row`` from ``source``."""
    return ((epoch & 1) * CP + source) * slot_rows + row


@triton.jit
def _addresses(table, peer, vec, mask):
    """Buffer addresses ``[others_pad, block]`` of the peers, from ``table``."""
    low, high = load_pair(table + peer * 8 + vec * 0, mask)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _push(
    source,
    source_lse,
    target,
    target_header,
    tag,
    moves,
    leads,
    SENTINEL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Send one row to every peer; ``leads`` marks the element that sends its header."""
    a, b, c, d = load_vector(source, moves, WIDE)
    lse, _, _, _ = load_vector(source_lse, leads, False)
    a = _sendable(a, SENTINEL)
    b = _sendable(b, SENTINEL)
    c = _sendable(c, SENTINEL)
    d = _sendable(d, SENTINEL)
    store_vector(target, a, b, c, d, moves, WIDE)
    lse = _sendable(lse, _HEADER)
    store_pair(target_header, lse, lse * 0 + tag, leads)


@triton.jit
def _await(
    own,
    payload,
    header,
    inside,
    moves,
    tag,
    status,
    spin_limit,
    SENTINEL: tl.constexpr,
    WIDE: tl.constexpr,
    WAIT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    PACK: tl.constexpr,
):
    """This rank's words of a row, and await_messages' results for the others'."""
    own_a = tl.zeros(own.shape, tl.int32)
    own_b, own_c, own_d = own_a, own_a, own_a
    a = tl.zeros(payload.shape, tl.int32)
    b, c, d, lse, fault, failed = a, a, a, a, a, a
    read = tl.full([], 0, tl.int32)
    while read == 0:  # Once: NOTE [read once].
        own_a, own_b, own_c, own_d = load_vector(own, inside, WIDE)
        a, b, c, d, lse, fault, failed = await_messages(
            payload,
            header,
            moves,
            tag,
            status,
            spin_limit,
            SENTINEL,
            WIDE,
            WAIT,
            CONSTRAINTS,
            PACK,
        )
        read += 1
    return own_a, own_b, own_c, own_d, a, b, c, d, lse, fault, failed


@triton.jit
def _clear(payload, header, moves, leads, SENTINEL: tl.constexpr, WIDE: tl.constexpr):
    """Empty the places of a row that was read, for the epoch after the next."""
    empty = tl.full(moves.shape, SENTINEL, tl.int32)
    store_vector(payload, empty, empty, empty, empty, moves, WIDE)
    empty = tl.full(moves.shape, _HEADER, tl.int32)
    store_pair(header, empty, empty, leads)


@triton.jit
def _store_lse(address, total, shift, failed, to_log2, mask):
    """Store the merged LSE of a row, NaN if it failed."""
    merged = shift + tl.log2(total) / to_log2
    merged = tl.where(failed, float("nan"), merged).to(tl.int32, bitcast=True)
    store_vector(address, merged, merged, merged, merged, mask, False)


@triton.jit
def _present(lse):
    """NaN and +inf count as empty shards: NOTE [merge rule] of merge.py."""
    empty = (lse != lse) | (lse == float("inf"))
    return tl.where(empty, float("-inf"), lse)


@triton.jit
def _weights(own_lse, lse, to_log2):
    """Weight of this rank and of the others, their sum, and the LSE of weight 1.

    ``[1, block]``, of the others ``[others_pad, block]``. A GPU's exp2 takes weights
    below 2 ** -126 for 0.
    """
    top = tl.maximum(tl.max(lse, 0, keep_dims=True), own_lse)
    shift = tl.where(top == float("-inf"), 0.0, top)
    own_weight = tl.exp2((own_lse - shift) * to_log2)
    weight = tl.exp2((lse - shift) * to_log2)
    total = tl.sum(weight, 0, keep_dims=True) + own_weight
    return own_weight, weight, total, shift


@triton.jit
def _record(status, fault, row, peer, epoch):
    """Leave (kind, row, source, epoch) of a fault, unless a failure is there.

    16 bytes at once; of several faults at the same time one is kept.
    """
    address = status + fault.to(tl.int64) * 0
    known, _, _, _ = load_vector(address, fault != 0, False)
    first = (fault != 0) & (known == 0)
    nothing = fault * 0
    store_vector(
        address, fault, nothing + row, nothing + peer, nothing + epoch, first, True
    )


@triton.jit
def _merged(own, word, own_share, share, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """Element ``INDEX`` of the merged word ``[1, block]`` as fp32."""
    others = tl.sum(element(word, INDEX, DTYPE) * share, 0, keep_dims=True)
    return element(own, INDEX, DTYPE) * own_share + others


@triton.jit
def _merge_word(own, word, own_share, share, DTYPE: tl.constexpr):
    """The merged word ``[1, block]`` of this rank's word and the others'.

    A share is a weight over their sum; of share 0 a word is selected out.
    """
    own = tl.where(own_share == 0, 0, own)
    word = tl.where(share == 0, 0, word)
    if DTYPE.primitive_bitwidth == 16:
        low = _merged(own, word, own_share, share, 0, DTYPE)
        high = _merged(own, word, own_share, share, 1, DTYPE)
        merged = word_of_pair(low, high, DTYPE)
    else:
        merged = tl.zeros(own.shape, tl.int32)
        for index in tl.static_range(32 // DTYPE.primitive_bitwidth):
            value = _merged(own, word, own_share, share, index, DTYPE)
            merged |= element_bits(value, DTYPE) << (DTYPE.primitive_bitwidth * index)
    return merged


@triton.jit(do_not_specialize=range(19))  # All but the constants: NOTE [one variant].
def exchange_kernel(
    partial_o: tl.int64,
    partial_lse: tl.int64,
    out: tl.int64,
    out_lse: tl.int64,
    o_token: tl.int32,
    o_head: tl.int32,
    lse_token: tl.int32,
    lse_head: tl.int32,
    tokens: tl.int32,
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
    OTHERS_PAD: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    SENTINEL: tl.constexpr,
    WAIT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    PACK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Exchange and merge ``tokens * heads`` rows. Pointers are addresses, strides are
    bytes.

    Program ``(x, y)`` of a grid ``(X, Y)`` takes heads x, x + X, ... of tokens y,
    y + Y, ...: NOTE [one row ahead]. DEPENDENT: NOTE [early launch].
    """
    WIDE: tl.constexpr = VECTOR_BYTES == 16
    ROW_BYTES: tl.constexpr = VECTORS * VECTOR_BYTES
    other = tl.arange(0, OTHERS_PAD)[:, None]
    peer = rank + 1 + other
    peer = tl.where(peer < CP, peer, peer - CP)
    vec = tl.arange(0, BLOCK)[None, :]
    inside = vec < VECTORS
    moves = (other < CP - 1) & inside
    leads = moves & (vec == 0)
    place = vec.to(tl.int64) * VECTOR_BYTES
    places = place + other.to(tl.int64) * 0
    theirs = _addresses(peers, peer, vec, moves)
    mine = tl.load((peers + rank * 8).to(tl.pointer_type(tl.int64)))
    if DEPENDENT:
        gdc_wait()

    token, head = tl.program_id(1), tl.program_id(0)
    # Not token and head: Triton loses a name that enters a loop as another's value.
    sent_token = tl.full([], 0, tl.int32)
    sent_head = tl.full([], 0, tl.int32)
    sent_epoch = tl.full([], 0, tl.int32)
    sent = tl.full([], False, tl.int1)
    while sent | (token < tokens):
        epoch = sent_epoch
        if token < tokens:
            row = token * heads + head
            epoch = tl.load(as_pointer(epochs) + row, volatile=True)
            at_peer = peer * heads + head
            message = _message(epoch, rank, row, slot_rows, CP)
            _push(
                partial_o
                + distance(token, o_token)
                + distance(at_peer, o_head)
                + places,
                partial_lse
                + distance(token, lse_token)
                + distance(at_peer, lse_head)
                + places * 0,
                theirs + distance(message, ROW_BYTES) + place,
                theirs + headers + distance(message, 8),
                tag,
                moves,
                leads,
                SENTINEL,
                WIDE,
            )
        if sent:
            row = sent_token * heads + sent_head
            at_rank = rank * heads + sent_head
            own = partial_o + distance(sent_token, o_token) + distance(at_rank, o_head)
            own_lse = distance(sent_token, lse_token) + distance(at_rank, lse_head)
            own_lse = tl.load(as_pointer(partial_lse + own_lse), volatile=True)
            message = _message(sent_epoch, peer, row, slot_rows, CP)
            payload = mine + distance(message, ROW_BYTES) + places
            header = mine + headers + distance(message, 8) + places * 0
            own_a, own_b, own_c, own_d, a, b, c, d, lse, fault, failed = _await(
                own + place,
                payload,
                header,
                inside,
                moves,
                tag,
                status,
                spin_limit,
                SENTINEL,
                WIDE,
                WAIT,
                CONSTRAINTS,
                PACK,
            )
            if DEPENDENT:  # noqa: SIM102  (a condition of the compiler, and of a run)
                if token >= tokens:
                    gdc_launch_dependents()
            failed = tl.max(failed, 0, keep_dims=True) != 0
            own_lse = _present(own_lse.to(tl.float32, bitcast=True))
            own_lse = tl.zeros(place.shape, tl.float32) + own_lse
            lse = _present(lse.to(tl.float32, bitcast=True))
            lse = tl.where(moves, lse, float("-inf"))
            own_weight, weight, total, shift = _weights(own_lse, lse, to_log2)
            scale = reciprocal(tl.maximum(total, 1.0))
            scale = tl.where(failed, float("nan"), scale)
            own_share, share = own_weight * scale, weight * scale
            store_vector(
                out + distance(row, ROW_BYTES) + place,
                _merge_word(own_a, a, own_share, share, DTYPE),
                _merge_word(own_b, b, own_share, share, DTYPE),
                _merge_word(own_c, c, own_share, share, DTYPE),
                _merge_word(own_d, d, own_share, share, DTYPE),
                inside,
                WIDE,
            )
            _clear(payload, header, moves, leads, SENTINEL, WIDE)
            if out_lse != 0:
                address = out_lse + distance(row, 4) + place * 0
                _store_lse(address, total, shift, failed, to_log2, vec == 0)
            tl.store(as_pointer(epochs) + row, sent_epoch + 1)
            _record(status, fault, row, peer, sent_epoch)
        sent = token < tokens
        sent_token, sent_head, sent_epoch = token, head, epoch
        head += tl.num_programs(0)
        token = tl.where(head < heads, token, token + tl.num_programs(1))
        head = tl.where(head < heads, head, tl.program_id(0))

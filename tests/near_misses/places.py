"""Payloads and LSEs that belong to different heads, tokens, columns or ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from near_misses.reasons import NOT_A_MERGE, PERMUTED
from near_misses.twist import NearMiss, Twist, on_payload, one_slice


def _swapped_chunks(x: Tensor, first: int, second: int) -> Tensor:
    """What goes to (or came from) two ranks, exchanged."""
    order = [*range(x.shape[0])]
    order[first], order[second] = order[second], order[first]
    return torch.stack([x[place] for place in order])


def _interleaved(x: Tensor) -> Tensor:
    """[N, B, h, ..]: chunk p holds the heads p, p + N, .."""
    n, _, h = x.shape[:3]
    heads = x.transpose(0, 1).flatten(1, 2)
    return heads.unflatten(1, (h, n)).movedim(2, 0)


PLACES = [
    NearMiss(
        "heads interleaved",
        "interleaved",
        Twist(sent=lambda o, lse: tuple(_interleaved(x) for x in (o, lse))),
    ),
    NearMiss(
        "tokens of LSE rolled",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o, lse.roll(1, 1))),
    ),
    NearMiss(
        "heads of LSE reversed",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o, lse.flip(2))),
    ),
    NearMiss(
        "LSE of one rank rolled by 7 tokens",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o, lse.roll(7, 1))),
        num_tokens=14,
        num_heads=16,
    ),
    NearMiss(
        "LSE of the other half of the batch",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o, lse.roll(14, 1))),
        num_tokens=28,
        num_heads=8,
    ),
    NearMiss(
        "LSE rolled by 56 tokens",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o, lse.roll(56, 1))),
        num_tokens=112,
        num_heads=2,
    ),
    NearMiss(
        "LSE received from the next rank",
        PERMUTED,
        Twist(received=lambda o, lse: (o, lse.roll(1, 0))),
    ),
    NearMiss(
        "LSE received from the next of 4",
        PERMUTED,
        Twist(received=lambda o, lse: (o, lse.roll(1, 0))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE of two sources swapped",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o, _swapped_chunks(lse, 1, 2))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE of two receivers swapped, 4 ranks",
        NOT_A_MERGE,
        Twist(sent=lambda o, lse: (o, _swapped_chunks(lse, 1, 2))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE of two receivers swapped, 8 ranks",
        NOT_A_MERGE,
        Twist(sent=lambda o, lse: (o, _swapped_chunks(lse, 1, 2))),
        num_ranks=8,
    ),
    NearMiss(
        "LSE of receivers 5 and 6 swapped",
        NOT_A_MERGE,
        Twist(sent=lambda o, lse: (o, _swapped_chunks(lse, 5, 6))),
        num_ranks=8,
    ),
    NearMiss(
        "payload of receivers 5 and 6 swapped",
        PERMUTED,
        Twist(sent=lambda o, lse: (_swapped_chunks(o, 5, 6), lse)),
        num_ranks=8,
    ),
    NearMiss(
        "swapped halves of D",
        PERMUTED,
        Twist(received=lambda o, lse: (o.roll(8, -1), lse)),
    ),
    NearMiss(
        "D permuted on one source",
        NOT_A_MERGE,
        on_payload(lambda o: one_slice(o, lambda x: x.flip(-1), 1)),
    ),
    NearMiss(
        "heads of one source reversed",
        NOT_A_MERGE,
        on_payload(lambda o: one_slice(o, lambda x: x.flip(1), 1)),
    ),
    NearMiss(
        "tokens of one source rolled",
        NOT_A_MERGE,
        on_payload(lambda o: one_slice(o, lambda x: x.roll(1, 0), 1)),
    ),
    NearMiss(
        "a subset of the ranks",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: (o[:3], lse[:3])),
        num_ranks=4,
    ),
    NearMiss(
        "one rank left out of the weights",
        NOT_A_MERGE,
        Twist(weight=lambda w, lse: one_slice(w, torch.zeros_like, 3)),
        num_ranks=4,
    ),
    NearMiss(
        "one rank twice",
        NOT_A_MERGE,
        Twist(received=lambda o, lse: tuple(torch.cat([x, x[:1]]) for x in (o, lse))),
    ),
]

"""The right weights of another payload than came, or weights that depend on it."""

from __future__ import annotations

import torch
from torch import Tensor

from near_misses.reasons import ALL_WEIGHT, NOT_A_MERGE, PERMUTED
from near_misses.shows import Pair, ordinary, payload_near
from near_misses.twist import NearMiss, Twist, guarded, on_payload, one_slice


def _zero_rows(rng: torch.Generator, *shape: int) -> Pair:
    o, lse = ordinary(rng, *shape)
    kept = torch.rand(lse.shape, generator=rng) < 0.7
    return o * kept.unsqueeze(-1), lse


def _running_bf16(o: Tensor, lse: Tensor) -> Tensor:
    weight = torch.softmax(lse, 0).bfloat16()
    out = (o[0].bfloat16() * weight[0].unsqueeze(-1)).bfloat16()
    for rank in range(1, o.shape[0]):
        out = out + (o[rank].bfloat16() * weight[rank].unsqueeze(-1)).bfloat16()
    return out.float()


PAYLOAD = [
    NearMiss(
        "one source scaled by 1.01",
        ALL_WEIGHT,
        on_payload(lambda o: one_slice(o, lambda x: x * 1.01)),
    ),
    NearMiss(
        "one source scaled by 1.0001",
        NOT_A_MERGE,
        on_payload(lambda o: one_slice(o, lambda x: x * 1.0001, 1)),
    ),
    NearMiss("all scaled by 1.001", ALL_WEIGHT, on_payload(lambda o: o * 1.001)),
    NearMiss("offset 1e-3", ALL_WEIGHT, on_payload(lambda o: o + 1e-3)),
    NearMiss("relu of payload", NOT_A_MERGE, on_payload(torch.relu)),
    NearMiss("gelu of payload", ALL_WEIGHT, on_payload(torch.nn.functional.gelu)),
    NearMiss(
        "payload clamped at 3",
        PERMUTED,
        on_payload(lambda o: o.clamp(-3.0, 3.0)),
        payload_near(3.0),
    ),
    NearMiss(
        "payload clamped at 100",
        PERMUTED,
        on_payload(lambda o: o.clamp(-100.0, 100.0)),
        payload_near(100.0),
    ),
    NearMiss(
        "payload clamped at 2000",
        NOT_A_MERGE,
        on_payload(lambda o: o.clamp(-2000.0, 2000.0)),
        payload_near(2000.0),
    ),
    NearMiss(
        "payload clamped from below at -6",
        NOT_A_MERGE,
        on_payload(lambda o: o.clamp(min=-6.0)),
        payload_near(-6.0),
    ),
    NearMiss(
        "payload above 1000 halved",
        NOT_A_MERGE,
        on_payload(lambda o: torch.where(o > 1000.0, o * 0.5, o)),
        payload_near(2000.0),
    ),
    NearMiss(
        "payload below 1e-3 dropped",
        NOT_A_MERGE,
        on_payload(lambda o: torch.where(o.abs() < 1e-3, 0.0, o)),
        payload_near(1e-3),
    ),
    NearMiss(
        "payload below 1e-6 dropped",
        NOT_A_MERGE,
        on_payload(lambda o: torch.where(o.abs() < 1e-6, 0.0, o)),
        payload_near(1e-6),
    ),
    NearMiss(
        "payload 0.5 read as 0.25",
        NOT_A_MERGE,
        on_payload(lambda o: torch.where(o == 0.5, 0.25, o)),
        payload_near(0.5, 0.0),
    ),
    NearMiss(
        "payload rounded to bf16",
        "isn't a regular slice",
        on_payload(lambda o: o.bfloat16().float()),
        payload_near(1.0),
    ),
    NearMiss(
        "payload rounded to a grid of 1/4096",
        NOT_A_MERGE,
        on_payload(lambda o: torch.round(o * 4096) / 4096),
        payload_near(1e-3),
    ),
    NearMiss(
        "zero payload is empty",
        NOT_A_MERGE,
        guarded(lambda o, x: torch.where((o == 0).all(-1), -torch.inf, x)),
        _zero_rows,
    ),
    NearMiss(
        "payload of 0.25 weighs less",
        NOT_A_MERGE,
        Twist(received=lambda o, x: (o, torch.where(o[..., 5] == 0.25, x - 3.0, x))),
        lambda rng, *shape: (
            torch.randint(-4, 4, shape, generator=rng) / 4,
            torch.randn(shape[:-1], generator=rng),
        ),
    ),
    NearMiss(
        "weights bent by payload's size",
        NOT_A_MERGE,
        Twist(
            received=lambda o, x: (o, torch.where(o.abs().amax(-1) > 50, x - 1.0, x))
        ),
        lambda rng, *shape: (
            torch.randn(shape, generator=rng) * 25,
            torch.randn(shape[:-1], generator=rng),
        ),
    ),
    NearMiss(
        "bf16 sum",
        "isn't a regular slice",
        Twist(out=lambda out, o, lse: _running_bf16(o, lse)),
        num_ranks=8,
        num_heads=8,
    ),
]

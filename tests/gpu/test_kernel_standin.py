"""One GPU stands in for N ranks: N buffers on one card, N streams, one process.

What a link between cards does to the order of stores isn't tested here. Every poll is
bounded, so a fault fails a test and doesn't hang it.

Axes: N ranks, B tokens, H heads before the exchange, h = H / N after it, D head dim.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tolerances import rounding_steps
from torch import Tensor

from dcp_inductor.merge import LseMode, a2a_lse_reduce_reference
from dcp_inductor.runtime.kernels import (
    STATUS_WORDS,
    Failure,
    SlotGeometry,
    initialise,
    read_failure,
)

# Streams that share a hardware queue wait for each other; the default is 8 queues.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

INF, NAN = float("inf"), float("nan")
SPIN_LIMIT_NS = 2_000_000_000
BANK_TOKENS = 64
# float8 is compared after both were rounded.
STEP = rounding_steps(fp32=1e-5)


class Card:
    """N slots and streams on one card, and partials ``[N, BANK_TOKENS, H, D]``."""

    def __init__(
        self,
        cp_size: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        tokens: int = BANK_TOKENS,
    ) -> None:
        from dcp_inductor.runtime.kernels.exchange import resident_programs, warm_up

        self.device = torch.device("cuda", torch.cuda.current_device())
        if dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("float8 needs compute capability 8.9")
        self.geometry = SlotGeometry(cp_size, tokens * heads, head_dim, dtype)
        self.heads = heads
        warm_up(self.geometry, self.device)
        fits = resident_programs(self.geometry, self.device)
        self.max_programs = max(1, fits // (2 * cp_size))
        size = -(-self.geometry.total_bytes // 256) * 256
        self.buffers = torch.empty(cp_size, size, dtype=torch.uint8, device="cuda")
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.peers = torch.tensor(addresses, device="cuda")
        self.epochs = torch.zeros(
            cp_size, self.geometry.rows, dtype=torch.int32, device="cuda"
        )
        self.status = torch.zeros(cp_size, STATUS_WORDS, dtype=torch.int32).pin_memory()
        for buffer in self.buffers:
            initialise(buffer, self.geometry)
        self.streams = [torch.cuda.Stream() for _ in range(cp_size)]
        self.partial_o, self.partial_lse = self.random_bank()
        torch.cuda.synchronize()

    def random_bank(self) -> tuple[Tensor, Tensor]:
        rng = torch.Generator(device="cuda").manual_seed(1)
        cp_size = self.geometry.cp_size
        shape = (cp_size, BANK_TOKENS, cp_size * self.heads, self.geometry.head_dim)
        partial_o = torch.randn(shape, generator=rng, device="cuda")
        partial_lse = torch.randn(shape[:3], generator=rng, device="cuda") * 5
        partial_lse[torch.rand(shape[:3], generator=rng, device="cuda") < 0.1] = -INF
        return partial_o.to(self.geometry.dtype), partial_lse

    def outputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Filled out ``[N, B, h, D]`` and LSE ``[N, B, h]``, before anything polls."""
        shape = (self.geometry.cp_size, tokens, self.heads)
        out = torch.full((*shape, self.geometry.head_dim), 99.0, device="cuda")
        return out.to(self.geometry.dtype), torch.full(shape, 99.0, device="cuda")

    def launch(
        self,
        rank: int,
        first: int,
        outputs: tuple[Tensor, Tensor],
        lse_mode: LseMode = "base2",
        tag: int = 1,
        spin_limit_ns: int = SPIN_LIMIT_NS,
        max_programs: int | None = None,
    ) -> None:
        """One rank's call on bank rows from ``first``, on the current stream."""
        from dcp_inductor.runtime.kernels.exchange import Launch

        out, out_lse = outputs
        rows = slice(first, first + out.shape[1])
        partials = self.partial_o[rank, rows], self.partial_lse[rank, rows]
        launch = Launch(
            *partials,
            peers=self.peers,
            epochs=self.epochs[rank],
            status=self.status[rank],
            geometry=self.geometry,
            rank=rank,
            lse_mode=lse_mode,
            spin_limit_ns=spin_limit_ns,
            max_programs=max_programs or self.max_programs,
        )
        launch(*partials, out[rank], out_lse[rank], tag)

    def on_every_rank(self, act: Callable[[int], None], seed: int = 0) -> None:
        """``act(rank)`` on each rank's stream, in an order of its own every time."""
        ranks = list(range(self.geometry.cp_size))
        random.Random(seed).shuffle(ranks)
        for rank in ranks:
            with torch.cuda.stream(self.streams[rank]):
                act(rank)

    def failures(self) -> list[Failure | None]:
        torch.cuda.synchronize()
        return [read_failure(status) for status in self.status]

    def check(
        self, first: int, outputs: tuple[Tensor, Tensor], lse_mode: LseMode
    ) -> None:
        """Compare with the meaning. The device is idle."""
        out, out_lse = outputs
        dtype = self.geometry.dtype
        wide = torch.float32 if dtype.itemsize == 1 else dtype
        rows = slice(first, first + out.shape[1])
        for rank in range(self.geometry.cp_size):
            expected, expected_lse = a2a_lse_reduce_reference(
                self.partial_o[:, rows].to(wide),
                self.partial_lse[:, rows],
                rank=rank,
                lse_mode=lse_mode,
            )
            torch.testing.assert_close(
                out[rank].float(),
                expected.to(dtype).float(),
                rtol=STEP[dtype],
                atol=STEP[dtype] / 8,
                equal_nan=True,
            )
            torch.testing.assert_close(
                out_lse[rank], expected_lse, rtol=1e-5, atol=1e-5, equal_nan=True
            )

    def check_empty(self) -> None:
        """All sentinels are back and all ranks are at one epoch in each row."""
        fresh = torch.empty_like(self.buffers)
        for buffer in fresh:
            initialise(buffer, self.geometry)
        used = self.geometry.total_bytes
        assert torch.equal(fresh[:, :used], self.buffers[:, :used])
        assert (self.epochs == self.epochs[:1]).all()


CASES = [
    (cp_size, heads, head_dim, dtype)
    for cp_size, heads, head_dim in [(2, 16, 512), (3, 5, 96), (4, 8, 576), (8, 4, 192)]
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
] + [
    (2, 4, 6, torch.bfloat16),
    (4, 4, 512, torch.float16),
    (3, 4, 24, torch.float8_e5m2),
    (16, 2, 128, torch.bfloat16),
]


@pytest.mark.parametrize(("cp_size", "heads", "head_dim", "dtype"), CASES)
def test_random_widths_graphs_and_eager(
    cp_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """300 calls of random width on one slot; a third of them are graph replays."""
    card = Card(cp_size, heads, head_dim, dtype)
    pick = random.Random(2)
    graph_calls = [(pick.randrange(8), pick.randint(1, 32)) for _ in range(5)]
    graph_outputs = [card.outputs(tokens) for _, tokens in graph_calls]
    graphs = [torch.cuda.CUDAGraph() for _ in range(cp_size)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=card.streams[rank]):
            for (first, _), outputs in zip(graph_calls, graph_outputs, strict=True):
                card.launch(rank, first, outputs, "basee")

    for seed in range(20):
        calls = [(pick.randrange(16), pick.randint(1, 48)) for _ in range(10)]
        all_outputs = [card.outputs(tokens) for _, tokens in calls]
        torch.cuda.synchronize()

        def act(
            rank: int,
            calls: list[tuple[int, int]] = calls,
            all_outputs: list[tuple[Tensor, Tensor]] = all_outputs,
        ) -> None:
            for index, (first, _) in enumerate(calls):
                if index == 5:
                    graphs[rank].replay()
                card.launch(rank, first, all_outputs[index])

        card.on_every_rank(act, seed)
        assert card.failures() == [None] * cp_size
        for (first, _), outputs in zip(calls, all_outputs, strict=True):
            card.check(first, outputs, "base2")
        for (first, _), outputs in zip(graph_calls, graph_outputs, strict=True):
            card.check(first, outputs, "basee")
            outputs[0].zero_()
    torch.cuda.synchronize()
    card.check_empty()


@pytest.mark.parametrize("max_programs", [1, 3, 1000])
def test_grids_narrower_than_the_batch(max_programs: int) -> None:
    card = Card(2, 16, 512, torch.bfloat16)
    outputs = card.outputs(20)
    torch.cuda.synchronize()
    programs = min(max_programs, card.max_programs)
    card.on_every_rank(
        lambda rank: card.launch(rank, 3, outputs, max_programs=programs)
    )
    assert card.failures() == [None, None]
    card.check(3, outputs, "base2")
    card.check_empty()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2])
def test_special_values(dtype: torch.dtype) -> None:
    """Empty shards in each spelling, NaN and inf outputs, negative zeros."""
    card = Card(2, 1, 64, dtype)
    lses = [0.0, -0.0, 1.5, -INF, INF, NAN, -1e30, 120.25]
    values = [1.0, -0.0, 0.0, NAN, INF, -INF, -3.0, 448.0]
    pick = random.Random(4)
    for rank in range(2):
        for token in range(BANK_TOKENS):
            for head in range(2):
                card.partial_lse[rank, token, head] = pick.choice(lses)
                row = [pick.choice(values) for _ in range(4)] * 16
                value = torch.tensor(row, device="cuda").to(dtype)
                card.partial_o[rank, token, head] = value
    outputs = card.outputs(BANK_TOKENS)
    torch.cuda.synchronize()
    card.on_every_rank(lambda rank: card.launch(rank, 0, outputs))
    assert card.failures() == [None, None]
    card.check(0, outputs, "base2")
    card.check_empty()


def test_the_same_bits_every_time() -> None:
    card = Card(4, 8, 512, torch.bfloat16)
    runs = [card.outputs(16) for _ in range(50)]
    torch.cuda.synchronize()
    for seed, outputs in enumerate(runs):
        card.on_every_rank(partial(card.launch, first=5, outputs=outputs), seed)
    assert card.failures() == [None] * 4
    for outputs in runs:
        assert torch.equal(outputs[0].view(torch.int16), runs[0][0].view(torch.int16))
        assert torch.equal(outputs[1], runs[0][1])


def test_a_peer_that_never_comes_is_an_error_in_time() -> None:
    card = Card(3, 4, 128, torch.bfloat16)
    outputs = card.outputs(8)
    torch.cuda.synchronize()
    began = time.monotonic()
    for rank in (0, 1):
        with torch.cuda.stream(card.streams[rank]):
            card.launch(rank, 0, outputs, spin_limit_ns=200_000_000)
    failures = card.failures()
    assert 0.1 < time.monotonic() - began < 2
    for failure in failures[:2]:
        assert failure is not None
        assert (failure.kind, failure.source_rank) == ("timeout", 2)
    assert outputs[0][:2].isnan().all()
    assert outputs[1][:2].isnan().all()
    began = time.monotonic()
    with torch.cuda.stream(card.streams[0]):
        for _ in range(20):
            card.launch(0, 0, outputs)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 1, "a spoilt slot must give up at once"


def test_a_wrong_tag_is_an_error_on_every_rank() -> None:
    card = Card(2, 4, 128, torch.bfloat16)
    outputs = card.outputs(8)
    torch.cuda.synchronize()
    card.on_every_rank(lambda rank: card.launch(rank, 0, outputs, tag=rank))
    for rank, failure in enumerate(card.failures()):
        assert failure is not None
        assert (failure.kind, failure.source_rank) == ("wrong_tag", 1 - rank)
    assert outputs[0].isnan().all()

"""One exchange, microseconds a call, every way to run it beside its floors.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--heads-per-rank 16 64]

Each variant is captured 60 times into a CUDA graph; graphs are replayed in turn, 30
rounds; the median, the largest over ranks.

    nccl       all_to_all_single of the packed bytes alone
    chain      the plain torch chain (tests' spelling), eager
    compiled   the same chain, torch.compile without the pass
    collective the op on the collective backend
    fused      the op on the symm_mem backend, called eagerly
    pass       the chain, torch.compile with the pass
    flag       floor: one word to the peer and one back from it
    push       floor: the payload's bytes stored to the peers, no waiting
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from common import chain, graph_of, interleaved_us, machine, save, start, stop
from torch.distributed import _symmetric_memory as symm_mem

import dcp_inductor
from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime import kernels
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.call import ExchangeCall

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
HEAD_DIM = 512


@triton.jit
def _flag(mine, theirs, epoch):  # type: ignore[no-untyped-def]
    """Send this call's number to the peer, wait for the peer's."""
    mine = mine.to(tl.pointer_type(tl.int32))
    theirs = theirs.to(tl.pointer_type(tl.int32))
    number = tl.load(epoch) + 1
    tl.store(epoch, number)
    tl.store(theirs, number)
    spins = 0
    while (tl.load(mine, volatile=True) < number) & (spins < 100_000_000):
        spins += 1


@triton.jit
def _push(source, theirs, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store ``words`` 32-bit words to the peer."""
    theirs = theirs.to(tl.pointer_type(tl.int32))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < words
    tl.store(theirs + place, tl.load(source + place, mask=inside), mask=inside)


class Floors:
    """The two things that no exchange can be faster than, on the same links."""

    def __init__(self, rank: int, n: int, max_bytes: int) -> None:
        self.buffer = symm_mem.empty(
            max_bytes + 256, dtype=torch.uint8, device="cuda"
        ).zero_()
        handle = symm_mem.rendezvous(self.buffer, dist.group.WORLD.group_name)
        self.mine = handle.buffer_ptrs[rank]
        self.theirs = handle.buffer_ptrs[(rank + 1) % n]
        self.epoch = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.source = torch.zeros(max_bytes // 4, dtype=torch.int32, device="cuda")
        dist.barrier()

    def flag(self) -> None:
        _flag[(1,)](self.mine, self.theirs, self.epoch, num_warps=1)

    def push(self, num_bytes: int) -> None:
        words = num_bytes // 4
        grid = (triton.cdiv(words, 1024),)
        _push[grid](self.source, self.theirs + 256, words, BLOCK=1024, num_warps=8)


def compiled(n: int, group: str, with_pass: bool) -> Any:
    """The chain, compiled apart for each variant."""
    options: dict[str, Any] = {}
    if with_pass:
        options["post_grad_custom_pre_pass"] = DcpFusionPass(Config())

    def fn(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return chain(o, lse, n, group)

    return torch.compile(fn, fullgraph=True, dynamic=False, options=options)


def measure(
    b: int, h: int, rank: int, n: int, floors: Floors, only: list[str] | None
) -> dict[str, float]:
    """One row of the table: microseconds of every variant at batch ``b``."""
    torch._dynamo.reset()
    group = dist.group.WORLD
    name = group.group_name
    rng = torch.Generator(device="cuda").manual_seed(b)
    o = torch.randn(n, b, h, HEAD_DIM, device="cuda", generator=rng).bfloat16()
    lse = torch.randn(n, b, h, device="cuda", generator=rng)
    mine, my_lse = o[rank].clone(), lse[rank].clone()
    wire_bytes = b * (h // n) * HEAD_DIM * 2
    packed = torch.empty(
        n, wire_bytes + b * (h // n) * 4, dtype=torch.uint8, device="cuda"
    )
    landed = torch.empty_like(packed)
    call = ExchangeCall(mine, my_lse, group, name, "base2", False)
    plain, fused = compiled(n, name, False), compiled(n, name, True)
    collective = Collective()
    variants = {
        "nccl": lambda: dist.all_to_all_single(landed, packed),
        "chain": lambda: chain(mine, my_lse, n, name),
        "compiled": lambda: plain(mine, my_lse),
        "collective": lambda: collective.run_direct(call),
        "fused": lambda: dcp_inductor.a2a_lse_reduce(mine, my_lse, lse_mode="base2"),
        "pass": lambda: fused(mine, my_lse),
        "flag": floors.flag,
        "push": lambda: floors.push(wire_bytes * (n - 1)),
    }
    if only:
        variants = {variant: variants[variant] for variant in only}
        return interleaved_us({v: graph_of(call) for v, call in variants.items()})
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    for variant in ("chain", "compiled", "fused", "pass"):
        got = variants[variant]()
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    graphs = {variant: graph_of(call) for variant, call in variants.items()}
    return interleaved_us(graphs)


def host_us(h: int, rank: int, n: int) -> dict[str, float]:
    """Host microseconds a call without CUDA graphs: the compiled op, a bare launch."""
    torch._dynamo.reset()
    o = torch.randn(1, h, HEAD_DIM, device="cuda").bfloat16()
    lse = torch.randn(1, h, device="cuda")
    name = dist.group.WORLD.group_name
    lane_op = torch.ops.dcp_inductor.a2a_lse_reduce_lane.default
    fused = compiled(n, name, True)
    words = torch.zeros(1, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def bare() -> None:
        _push[(1,)](words, sink.data_ptr(), 1, BLOCK=1024, num_warps=8)

    calls = {
        "bare launch": bare,
        "lane op": lambda: lane_op(o, lse, name, n, "base2", 0, 1),
        "compiled call": lambda: fused(o, lse),
    }
    found = {}
    for what, call in calls.items():
        for _ in range(50):
            call()
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                call()
            times.append((time.perf_counter() - begin) * 1e6 / 50)
        torch.cuda.synchronize()
        dist.barrier()
        found[what] = sorted(times)[len(times) // 2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads-per-rank", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--warps", type=int, help="override the kernel's table")
    parser.add_argument("--only", nargs="+", help="these variants, not all")
    args = parser.parse_args()
    if args.warps:
        kernels.num_warps = lambda block, cp_size: min(args.warps, block // 32)
    rank, n = start()
    payload: dict[str, Any] = {"machine": machine(), "ranks": n, "tables": {}}
    for h in args.heads_per_rank:
        dcp_inductor.reserve(
            max_tokens=max(args.batches),
            num_heads=h * n,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
        )
        floors = Floors(rank, n, max(args.batches) * h * HEAD_DIM * 2 * (n - 1))
        rows = {b: measure(b, h * n, rank, n, floors, args.only) for b in args.batches}
        payload["tables"][h] = rows
        if not args.only:
            payload.setdefault("host_us", {})[h] = host_us(h * n, rank, n)
    dcp_inductor.check()
    if rank == 0:
        show(payload)
        save(f"exchange_{n}", payload)
    stop()


def show(payload: dict[str, Any]) -> None:
    print(payload["machine"], "ranks", payload["ranks"])
    for h, rows in payload["tables"].items():
        names = [*next(iter(rows.values()))]
        print(f"{h} heads a rank, D {HEAD_DIM}, bf16; us a call")
        print(
            "   B "
            + " ".join(f"{name:>10}" for name in names)
            + "  pass/compiled x/floor"
        )
        for b, row in rows.items():
            if "pass" not in row:
                print(f"{b:4d} " + " ".join(f"{us:10.2f}" for us in row.values()))
                continue
            floor = max(row["flag"], row["push"])
            print(
                f"{b:4d} "
                + " ".join(f"{row[name]:10.2f}" for name in names)
                + f"  1/{row['compiled'] / row['pass']:.2f}  {row['pass'] / floor:.2f}"
            )
        if "host_us" in payload:
            print("host us a call:", payload["host_us"][h])


if __name__ == "__main__":
    main()

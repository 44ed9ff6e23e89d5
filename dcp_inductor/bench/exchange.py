"""One exchange, microseconds a call, every way to run it beside its floors.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--heads-per-rank 16 64]

Each variant is captured 60 times into a CUDA graph; graphs are replayed in turn, 30
rounds; the median, the largest over ranks. ``dcp-inductor bench`` runs the same.

    nccl       all_to_all_single of the packed bytes alone
    chain      the plain torch chain (tests' spelling), eager
    compiled   the same chain, torch.compile without the pass
    collective the op on the collective backend
    fused      the op on the symm_mem backend, called eagerly
    pass       the chain, torch.compile with the pass
    followed   the same and, after it, a kernel that isn't launched as its dependent
    follower   that kernel alone
    flag       floor: one word to the peer and one back from it
    push       floor: the payload's bytes stored to the peers, no waiting

Where sglang is installed, also its own dcp_a2a_lse_reduce (sglang.py), captured on its
capture stream: sglang eager, sglang compiled, sglang pass.

fused and pass overlap with the calls beside them, for a call waits on the device for
the one before it; followed - follower is what a call costs among other kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import dcp_inductor
from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.bench.chain import chain
from dcp_inductor.bench.floors import Floors, push_kernel
from dcp_inductor.bench.results import Results, as_text
from dcp_inductor.bench.settings import BATCHES, HEAD_DIM, HEADS_PER_RANK
from dcp_inductor.bench.timing import (
    CALLS,
    graph_of,
    interleaved_us,
    machine,
    start,
    stop,
    world,
)
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.op import DIRECT
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.call import ExchangeCall


def compiled(n: int, group: str, with_pass: bool) -> Any:
    """The chain, compiled apart for each variant."""
    options: dict[str, Any] = {}
    if with_pass:
        options["post_grad_custom_pre_pass"] = DcpFusionPass(Config())

    def fn(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return chain(o, lse, n, group)

    return torch.compile(fn, fullgraph=True, dynamic=False, options=options)


def measure(
    b: int,
    h: int,
    rank: int,
    n: int,
    floors: Floors,
    only: list[str] | None,
    sglang_group: Any,
) -> dict[str, float]:
    """One row of the table: microseconds of every variant at batch ``b``.

    sglang_group: sglang's GroupCoordinator, or None to leave its columns out.
    """
    torch._dynamo.reset()
    group = world()
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
    step = torch.empty_like(mine[:, : h // n])

    def follow() -> None:
        torch.add(step, 1, out=step)

    def followed() -> None:
        fused(mine, my_lse)
        follow()

    variants = {
        "nccl": lambda: dist.all_to_all_single(landed, packed),
        "chain": lambda: chain(mine, my_lse, n, name),
        "compiled": lambda: plain(mine, my_lse),
        "collective": lambda: collective.run_direct(call),
        "fused": lambda: dcp_inductor.a2a_lse_reduce(mine, my_lse, lse_mode="base2"),
        "pass": lambda: fused(mine, my_lse),
        "followed": followed,
        "follower": follow,
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
    if sglang_group is not None:
        graphs |= _sglang_graphs(mine, my_lse, sglang_group, wanted)
    return interleaved_us(graphs)


def _sglang_graphs(
    o: torch.Tensor, lse: torch.Tensor, group: Any, wanted: torch.Tensor
) -> dict[str, torch.cuda.CUDAGraph]:
    """sglang's ways to reduce the partials, captured as its decode runner does."""
    from dcp_inductor.bench.sglang import capture, capture_session, sglang_variants

    graphs = {}
    with capture_session(group) as stream:
        for name, call in sglang_variants(o, lse, group).items():
            graph, got = capture(call, stream, calls=CALLS)
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
            graphs[f"sglang {name}"] = graph
    return graphs


def host_us(h: int, rank: int, n: int) -> dict[str, float]:
    """Host microseconds a call without CUDA graphs: the compiled op, a bare launch."""
    torch._dynamo.reset()
    o = torch.randn(1, h, HEAD_DIM, device="cuda").bfloat16()
    lse = torch.randn(1, h, device="cuda")
    name = world().group_name
    generated = DIRECT["dcp_inductor.a2a_lse_reduce_lane.default"]
    fused = compiled(n, name, True)
    words = torch.zeros(1, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def bare() -> None:
        push_kernel[(1,)](words, sink.data_ptr(), 1, BLOCK=1024, num_warps=8)

    calls = {
        "bare launch": bare,
        "generated call": lambda: generated(o, lse, name, n, "base2", 0, 1),
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


@record
def main(argv: Sequence[str] | None = None, folder: str = ".") -> None:
    """One rank's part. Rank 0 prints the table and writes exchange_N.json."""
    args = _parser().parse_args(argv)
    rank, n = start()
    payload: dict[str, Any] = {"machine": machine(), "ranks": n, "tables": {}}
    sglang_group = None
    if importlib.util.find_spec("sglang") is not None and not args.only:
        from dcp_inductor.bench.sglang import dcp_group

        sglang_group = dcp_group()
    for h in args.heads_per_rank:
        dcp_inductor.reserve(
            max_tokens=max(args.batches),
            num_heads=h * n,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
        )
        floors = Floors(rank, n, max(args.batches) * h * HEAD_DIM * 2 * (n - 1))
        if sglang_group is not None:
            dcp_inductor.reserve(
                sglang_group.unique_name,
                max_tokens=max(args.batches),
                num_heads=h * n,
                head_dim=HEAD_DIM,
                dtype=torch.bfloat16,
            )
        rows = {
            b: measure(b, h * n, rank, n, floors, args.only, sglang_group)
            for b in args.batches
        }
        payload["tables"][h] = rows
        if not args.only:
            payload.setdefault("host_us", {})[h] = host_us(h * n, rank, n)
    dcp_inductor.check()
    if rank == 0:
        path = Path(args.json or Path(folder, f"exchange_{n}.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(payload, indent=1))
        print(as_text(Results.of(payload)))
    stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads-per-rank", type=int, nargs="+", default=HEADS_PER_RANK)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--only", nargs="+", help="these variants, not all")
    parser.add_argument("--json", metavar="FILE", help="where the result goes")
    return parser


if __name__ == "__main__":
    main()

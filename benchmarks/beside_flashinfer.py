"""FlashInfer's fused op beside ours, microseconds a call in a CUDA graph, in turns.

    python benchmarks/beside_flashinfer.py [--ranks 2] [--heads-per-rank 16 64]

A process has one kind of torch's symmetric memory, chosen for good at its first use:
ours is CUDA's, FlashInfer's released op sets NCCL's. So two sets of ranks share the
GPUs, one process a rank and set, and take turns; each turn replays every graph of 60
calls three times. The figure is the median over turns of the slowest rank's median.

    fused        the op on the symm_mem backend
    collective   the op on the collective backend, in the same processes
    flashinfer   the op on the flashinfer backend: packing, then FlashInfer's kernel
    kernel       FlashInfer's kernel alone, on inputs that are packed already
    collective2  the collective backend again, in those processes; where it differs
                 from the first, the two sets disturb each other
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import folder
from torch.distributed import TCPStore

import dcp_inductor
from dcp_inductor.bench.results import Results, as_text
from dcp_inductor.bench.settings import BATCHES, HEAD_DIM, HEADS_PER_RANK
from dcp_inductor.bench.timing import (
    Call,
    graph_of,
    interleaved_us,
    machine,
    start,
    stop,
    world,
)
from dcp_inductor.bench.turns import SIDES, Turns
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.backends.flashinfer_op import InstalledOp, installed_op
from dcp_inductor.runtime.call import ExchangeCall
from dcp_inductor.runtime.workspace import Reservation

BACKENDS = ("symm_mem", "flashinfer")
ORDER = ("fused", "collective", "flashinfer", "kernel", "collective2")
TURNS, REPLAYS = 10, 3
# A rank that waits for its turn, or for FlashInfer's kernel to be built.
WAIT_S = 240.0
# torchrun needs a moment to end its ranks.
LEAVE_S = 40.0

Started = subprocess.Popen[bytes]


def variants(
    found: Reservation, o: torch.Tensor, lse: torch.Tensor, backend: str
) -> dict[str, Call]:
    """What this side measures on its rank's partials, ``[B, H, D]`` and ``[B, H]``."""
    name = world().group_name
    call = ExchangeCall(o, lse, world(), name, "base2", False)

    def op() -> torch.Tensor:
        return dcp_inductor.a2a_lse_reduce(o, lse, lse_mode="base2")

    def collective() -> torch.Tensor:
        return Collective().run_direct(call)[0]

    if backend == "symm_mem":
        return {"fused": op, "collective": collective}
    n = world().size()
    split = (n, o.shape[1] // n)
    packed = o.unflatten(1, split).transpose(1, 2).contiguous()
    packed_lse = lse.unflatten(1, split).transpose(1, 2).contiguous()
    buffers: Any = found.buffers
    # The last slot is of a second capture domain, which nothing else here takes.
    workspace = buffers.workspaces[-1]

    def kernel() -> torch.Tensor:
        rank = world().rank()
        args = (packed, packed_lse, workspace, rank, n, False, name)
        out: torch.Tensor = buffers.launch(*args)
        return out

    return {"flashinfer": op, "kernel": kernel, "collective2": collective}


def measure_row(
    turns: Turns, found: Reservation, b: int, backend: str
) -> dict[str, float]:
    """Microseconds of this side's variants at batch ``b``."""
    rank, n = world().rank(), world().size()
    rng = torch.Generator(device="cuda").manual_seed(b)
    shape = (n, b, found.geometry.num_heads)
    o = torch.randn(*shape, HEAD_DIM, device="cuda", generator=rng).bfloat16()
    lse = torch.randn(shape, device="cuda", generator=rng)
    calls = variants(found, o[rank].clone(), lse[rank].clone(), backend)
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    with turns.take():
        for call in calls.values():
            torch.testing.assert_close(call(), wanted, rtol=2e-2, atol=2e-2)
        graphs = {name: graph_of(call) for name, call in calls.items()}
    rounds = []
    for _ in range(TURNS):
        with turns.take():
            rounds.append(interleaved_us(graphs, rounds=REPLAYS))
    return {name: statistics.median(r[name] for r in rounds) for name in calls}


def rank_main(args: argparse.Namespace, side: int) -> None:
    """One rank of one side; its rank 0 leaves the side's tables in the store."""
    rank, n = start()
    store = TCPStore(
        "127.0.0.1", args.port, is_master=False, timeout=timedelta(seconds=WAIT_S)
    )

    def together() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    turns = Turns(store, side, rank, together, WAIT_S)
    tables: dict[int, dict[int, dict[str, float]]] = {}
    for h in args.heads_per_rank:
        with turns.take():
            found = dcp_inductor.reserve(
                max_tokens=max(args.batches),
                num_heads=h * n,
                head_dim=HEAD_DIM,
                dtype=torch.bfloat16,
                capture_domains=2,
            )
        tables[h] = {
            b: measure_row(turns, found, b, BACKENDS[side]) for b in args.batches
        }
    dcp_inductor.check()
    with turns.take():
        pass  # The other side's last row is measured by now.
    if rank == 0:
        store.set(f"tables {side}", json.dumps(tables))
        store.set("machine", json.dumps(machine()))
    stop()


def start_side(args: argparse.Namespace, side: int, port: int) -> Started:
    """torchrun with one side's ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(args.ranks), __file__]
    mine = ["--side", str(side), "--port", str(port), *sys.argv[1:]]
    variables = {
        "DCP_INDUCTOR_BACKEND": BACKENDS[side],
        "DCP_INDUCTOR_TIMEOUT_S": str(WAIT_S),
    }
    return subprocess.Popen(torchrun + ranks + mine, env=os.environ | variables)


def end_well(sides: list[Started], timeout_s: float) -> bool:
    """Whether all sides ended well in time; ends them all once one doesn't."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(side.poll() is None for side in sides):
            failed = any(side.poll() not in (None, 0) for side in sides)
            if failed or time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return all(side.returncode == 0 for side in sides)
    finally:
        for side in sides:
            side.terminate()
        for side in sides:
            try:
                side.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                side.kill()


def main() -> int:
    """Start both sides, print their figures beside each other. 1: a rank failed."""
    args = _parser().parse_args()
    if args.side is not None:
        rank_main(args, args.side)
        return 0
    op = installed_op()
    if not isinstance(op, InstalledOp):
        print(f"There is nothing to measure beside: {op}.")
        return 1
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Turns.begin(store)
    started = [start_side(args, side, store.port) for side in range(SIDES)]
    if not end_well(started, args.timeout):
        print("A rank failed, or all took too long; see what it said above.")
        return 1
    sides = [json.loads(store.get(f"tables {side}")) for side in range(SIDES)]
    tables = {
        h: {b: _beside(*(side[h][b] for side in sides)) for b in rows}
        for h, rows in sides[0].items()
    }
    about = json.loads(store.get("machine")) | {"FlashInfer op": op.sources}
    payload = {"machine": about, "ranks": args.ranks, "tables": tables}
    path = Path(folder(), f"beside_flashinfer_{args.ranks}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=1))
    print(as_text(Results.of(payload)))
    return 0


def _beside(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    row = ours | theirs
    return {name: row[name] for name in ORDER}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads-per-rank", type=int, nargs="+", default=HEADS_PER_RANK)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds in all")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

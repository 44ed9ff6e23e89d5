"""What the pass costs of a compilation, proof included. No GPU, no peers.

    python benchmarks/pass_cost.py [--layers 60] [--runs 3]

Compiles a chain of equal exchanges (torch's "fake" process group of two ranks), and the
same chain without exchanges, with caches off; the pass is timed inside the compilation
that it is part of. The first compilation of a process warms up and isn't counted; each
counted one proves anew.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.bench.chain import chain
from dcp_inductor.compiler.proof import forget_proofs

BATCH, HEADS, HEAD_DIM, RANKS = 8, 32, 512, 2


class Timed(DcpFusionPass):
    """The pass, with the seconds that its calls took."""

    seconds = 0.0

    def __call__(self, graph: torch.fx.Graph) -> None:
        begin = time.perf_counter()
        super().__call__(graph)
        self.seconds += time.perf_counter() - begin


def decoder(layers: int, exchange: bool) -> Callable[..., Any]:
    def fn(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            if exchange:
                out = chain(o, lse, RANKS, "0")
            else:
                out = torch.softmax(lse, -1)[:, : HEADS // RANKS, None].to(o.dtype)
                out = out * o[:, : HEADS // RANKS]
            o = torch.tanh(o + out.repeat(1, RANKS, 1))
        return o

    return fn


def cost(layers: int, exchange: bool) -> tuple[float, float]:
    """(seconds of the whole compilation, seconds of the pass in it)."""
    forget_proofs()
    torch._dynamo.reset()
    timed = Timed(Config())
    fn = torch.compile(
        decoder(layers, exchange),
        fullgraph=True,
        options={"post_grad_custom_pre_pass": timed, "fx_graph_cache": False},
    )
    args = torch.randn(BATCH, HEADS, HEAD_DIM).bfloat16(), torch.randn(BATCH, HEADS)
    begin = time.perf_counter()
    fn(*args)
    return time.perf_counter() - begin, timed.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    cost(2, True)
    for exchange in (True, False):
        runs = [cost(args.layers, exchange) for _ in range(args.runs)]
        whole = statistics.median(run[0] for run in runs)
        own = statistics.median(run[1] for run in runs)
        what = f"{args.layers} exchanges" if exchange else "no exchange"
        print(
            f"{what}: compilation {whole:.2f} s, pass {own:.3f} s, "
            f"{100 * own / whole:.2f} % (torch {torch.__version__}, {args.runs} runs)"
        )


if __name__ == "__main__":
    main()

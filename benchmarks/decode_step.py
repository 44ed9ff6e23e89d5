"""A decode step of 60 MLA layers in one CUDA graph, the pass off and on.

    torchrun --nproc-per-node 2 benchmarks/decode_step.py [--layers 60] [--context 8192]
    torchrun --nproc-per-node 2 benchmarks/decode_step.py --model deepseek_v3

By default a layer at DeepSeek-V3's latent sizes with 16 heads a rank: absorbed query
projection, attention over this rank's half of the latent KV cache (plain torch), the
exchange in plain torch, value up-projection, output projection, all-reduce. The layer's
function is compiled once and called for each layer, as sglang's decode graphs are.

``--model deepseek_v3`` is transformers' own model, 4 layers and 2048 tokens unless said
otherwise, compiled as one graph: decode_transformers.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import save

import dcp_inductor
from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.bench.chain import chain
from dcp_inductor.bench.timing import graph_of, interleaved_us, machine, start, stop

HIDDEN, LATENT, ROPE, VALUE = 2048, 512, 64, 128
HEADS_PER_RANK = 16
Weights = dict[str, torch.Tensor]
# of one batch size: milliseconds with the pass off and on, and how far results differ
Measure = Callable[[int], dict[str, Any]]


def weights(n: int, batch: int, context: int, seed: int) -> Weights:
    """One layer's weights and this rank's shard of its cache, bf16."""
    rng = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda").bfloat16() * scale

    return {
        "q": normal(HIDDEN, HEADS_PER_RANK * n * (LATENT + ROPE)),
        "v": normal(HEADS_PER_RANK, LATENT, VALUE),
        "o": normal(HEADS_PER_RANK * VALUE, HIDDEN),
        "cache": normal(batch, context // n, LATENT + ROPE, scale=1.0),
    }


def layer(x: torch.Tensor, w: Weights, n: int, group: str) -> torch.Tensor:
    """``[B, HIDDEN]`` to the same, through this rank's shard and the exchange."""
    heads = HEADS_PER_RANK * n
    q = (x @ w["q"]).view(x.shape[0], heads, LATENT + ROPE)
    scores = torch.bmm(q, w["cache"].transpose(1, 2)).float() * (LATENT + ROPE) ** -0.5
    lse = torch.logsumexp(scores, -1)
    share = torch.exp(scores - lse.unsqueeze(-1)).to(x.dtype)
    o = torch.bmm(share, w["cache"][:, :, :LATENT])
    merged = chain(o, lse * 1.4426950408889634, n, group)
    value = torch.bmm(merged.transpose(0, 1), w["v"]).transpose(0, 1)
    out = value.reshape(x.shape[0], -1) @ w["o"]
    out = dist._functional_collectives.all_reduce(out, "sum", group)
    return torch.nn.functional.rms_norm(x + out, (HIDDEN,))


def measure(batch: int, args: argparse.Namespace, n: int) -> dict[str, Any]:
    group = dist.group.WORLD.group_name
    # Layers share four sets of weights: more than the L2 holds, less to allocate.
    sets = [weights(n, batch, args.context, seed) for seed in range(4)]
    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    dist.broadcast(x, 0)
    steps, results = {}, {}
    for name, options in (
        ("off", {}),
        ("on", {"post_grad_custom_pre_pass": DcpFusionPass(Config())}),
    ):
        fn = torch.compile(layer, fullgraph=True, dynamic=False, options=options)

        def step(fn: Any = fn) -> torch.Tensor:
            y = x
            for number in range(args.layers):
                y = fn(y, sets[number % len(sets)], n, group)
            return y

        results[name] = step()
        steps[name] = graph_of(step, calls=1)
        torch._dynamo.reset()
    off = (results["on"] - results["off"]).float().norm() / results[
        "off"
    ].float().norm()
    us = interleaved_us(steps, rounds=20, calls=1)
    return {f"{name}_ms": us[name] / 1e3 for name in us} | {"difference": off.item()}


def mla(args: argparse.Namespace, n: int) -> Measure:
    """This file's own layers."""
    dcp_inductor.reserve(
        max_tokens=max(args.batches),
        num_heads=HEADS_PER_RANK * n,
        head_dim=LATENT,
        dtype=torch.bfloat16,
    )
    return lambda batch: measure(batch, args, n)


def deepseek_v3(args: argparse.Namespace, n: int) -> Measure:
    """transformers' model."""
    from decode_transformers import sharded_model, steps_of

    model, dcp = sharded_model(args.layers, args.context)
    dcp.reserve(max(args.batches))

    def measure(batch: int) -> dict[str, Any]:
        steps = steps_of(model, dcp, batch, args.context)
        results = {name: step().float() for name, step in steps.items()}
        graphs = {name: graph_of(step, calls=1) for name, step in steps.items()}
        torch._dynamo.reset()
        us = interleaved_us(graphs, rounds=20, calls=1)
        off = (results["on"] - results["off"]).norm() / results["off"].norm()
        return {f"{name}_ms": us[name] / 1e3 for name in us} | {
            "difference": off.item()
        }

    return measure


# What prepares a model, its layers and its context if not said otherwise.
MODELS: dict[str, tuple[Callable[..., Measure], int, int]] = {
    "mla": (mla, 60, 8192),
    "deepseek_v3": (deepseek_v3, 4, 2048),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mla")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    prepare, layers, context = MODELS[args.model]
    args.layers, args.context = args.layers or layers, args.context or context
    rank, n = start()
    run = prepare(args, n)
    rows = {batch: run(batch) for batch in args.batches}
    dcp_inductor.check()
    if rank == 0:
        title = f"{n} ranks, {args.layers} layers, context {args.context}"
        print(machine(), args.model, title)
        for batch, row in rows.items():
            saved = (row["off_ms"] - row["on_ms"]) * 1e3 / args.layers
            print(
                f"B {batch:3d}: off {row['off_ms']:.3f} ms, on {row['on_ms']:.3f} ms, "
                f"{saved:.2f} us a layer saved, results off {row['difference']:.1e}"
            )
        name = "decode_step" if args.model == "mla" else f"decode_step_{args.model}"
        save(f"{name}_{n}", {"machine": machine(), "ranks": n, "rows": rows})
    stop()


if __name__ == "__main__":
    main()

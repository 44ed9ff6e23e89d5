"""sglang's real DeepseekV2ForCausalLM on GPUs: ms a decode step, pass off and on.

    torchrun --nproc-per-node 2 benchmarks/sglang_model.py [--model v2-lite v3]

TP = DCP = all ranks. For each batch size and variant the model is compiled by sglang's
patch_model and captured into one CUDA graph as its decode runner does; the graphs are
replayed in turn. Real: the model at the attention shapes of DeepSeek-V2-Lite or V3,
sglang's groups, collectives and compile path. Stood in: the weights (random), the
attention kernel (a copy of its query: the KV cache costs nothing here), expert layers
(dense ones), and sglang's own CUDA kernels, which its Python sources alone don't have:
its layers run as they do where it finds no CUDA, which is also how it hands them to
torch.compile.

Needs sglang's sources and the small packages that its models import, and of this
repository tests/ beside benchmarks/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dcp_inductor.bench.sglang import capture, stand_in_for_notebooks
from dcp_inductor.bench.timing import interleaved_us, machine, start, stop
from dcp_inductor.compiler.proof import forget_proofs

SHAPES: dict[str, dict[str, Any]] = {
    "v2-lite": {
        "num_hidden_layers": 12,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
    },
    "v3": {
        "num_hidden_layers": 8,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
    },
}
COMMON = {
    "vocab_size": 4096,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}
VARIANTS = ("off", "on")
# All that is imported later and looks for CUDA while it is.
_MODULES = (
    "compilation.torch_compile_decoration",
    "layers.attention.base_attn_backend",
    "layers.dcp.comm",
    "model_executor.forward_batch_info",
    "model_executor.runner.base_cuda_graph_runner",
    "models.deepseek_v2",
)


@contextmanager
def without_its_kernels() -> Iterator[None]:
    """sglang's modules imported here find no CUDA, and so ask for none of its
    compiled extensions."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        yield


def start_sglang(rank: int, num_ranks: int, batches: list[int]) -> Any:
    """sglang's groups with their NCCL communicators, and its settings."""
    stand_in_for_notebooks()
    from sglang_decoder import stub_vllm
    from sglang_host import start_parallel

    stub_vllm()
    with without_its_kernels():
        for name in _MODULES:
            importlib.import_module(f"sglang.srt.{name}")
        state = importlib.import_module("sglang.srt.distributed.parallel_state")
        graphs = importlib.import_module("sglang.srt.model_executor.cuda_graph_config")
    state.is_cuda_alike = lambda: True  # groups live on the GPU
    decode = graphs.PhaseConfig(backend=graphs.Backend.FULL, bs=sorted(batches))
    return start_parallel(
        rank,
        num_ranks,
        backend="nccl",
        pynccl=True,
        cuda_graph_config=graphs.CudaGraphConfig(decode=decode),
        torch_compile_max_bs=max(batches),
    )


def make_model(shape: dict[str, Any]) -> Any:
    """Random weights, small enough that activations stay finite over the layers."""
    from sglang_decoder import absorb, tiny_model

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = tiny_model(**COMMON, **shape)
    rng = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=rng)
            else:
                weight.fill_(1.0)
    absorb(model)
    torch.set_default_dtype(torch.float32)
    return model


def copies_query(q: Any, k: Any, q_rope: Any, k_rope: Any, layer: Any) -> Any:
    """The stand-in for the attention kernel: partial_o, and LSEs of ordinary size."""
    return q.clone(), q_rope[..., 0].float().contiguous()


class Step:
    """One batch size's decode step: compiled, captured, timed to its first call.

    Its inputs are what its graph reads, so it must live as long as the graph.
    """

    def __init__(self, model: Any, batch: int, stream: torch.cuda.Stream) -> None:
        from sglang_decoder import attention_backend, decode_batch

        self.model, self.batch, self.stream = model, batch, stream
        self.forward_batch = decode_batch(batch, "cuda")
        self.forward_batch.input_ids = torch.arange(batch, device="cuda") * 37 % 4096
        self.forward_batch.positions = torch.arange(batch, device="cuda")
        self.backend = attention_backend(copies_query)

    @contextmanager
    def _compiled(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Nothing is left of earlier compilations, in memory or on disk."""
        from sglang.srt.compilation import torch_compile_decoration
        from sglang.srt.model_executor.forward_context import (
            ForwardContext,
            forward_context,
        )
        from sglang.srt.runtime_context import get_parallel

        torch._dynamo.reset()
        forget_proofs()
        inputs = self.forward_batch
        context = ForwardContext(attn_backend=self.backend)
        with (
            fresh_cache(),
            torch_compile_decoration.patch_model(
                self.model,
                True,
                num_tokens=self.batch,
                tp_group=get_parallel().tp_group,
            ) as forward,
            forward_context(context, forward_batch=inputs),
            torch.no_grad(),
        ):

            def call() -> torch.Tensor:
                out = forward(inputs.input_ids, inputs.positions, inputs)
                return out.next_token_logits

            yield call

    def first_call_s(self) -> float:
        """Seconds of the first call, most of which compiles."""
        with self._compiled() as call:
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            return time.perf_counter() - begin

    def captured(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The step as sglang's runner captures it, and its logits ``[B, vocab]``."""
        with self._compiled() as call:
            call()
            return capture(call, self.stream)


def set_pass(variant: str, model: Any) -> float:
    """Start the plugin as sglang does, or take the pass out; gives the seconds."""
    from sglang_host import runner_of

    from dcp_inductor.integrations import sglang as plugin

    if variant == "off":
        plugin.stop()
        return 0.0
    begin = time.perf_counter()
    with mock.patch.dict(os.environ, DCP_INDUCTOR="1"):
        plugin.after_workspaces(None, runner_of(model, torch.bfloat16, device="cuda"))
    seconds = time.perf_counter() - begin
    from dcp_inductor.integrations.inductor import installed_passes

    assert installed_passes(), "the plugin said why not"
    return seconds


def measure(
    name: str, args: argparse.Namespace, say: Callable[..., None]
) -> dict[str, Any]:
    """ms a step of each batch size and variant, and whether their logits agree."""
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner_utils import pool

    shape = {**SHAPES[name]}
    if args.layers is not None:
        shape["num_hidden_layers"] = args.layers
    layers = shape["num_hidden_layers"]
    model = make_model(shape)
    found: dict[str, Any] = {"layers": layers, "batches": {}}
    stream = pool.get_or_create_global_graph_capture_stream()
    for batch in sorted(args.batches, reverse=True):
        start_s, graphs, logits = 0.0, {}, {}
        steps = {variant: Step(model, batch, stream) for variant in VARIANTS}
        for variant, step in steps.items():
            start_s = set_pass(variant, model)
            with graph_capture(stream=stream):
                graphs[variant], logits[variant] = step.captured()
        us = interleaved_us(graphs, rounds=50, calls=1)
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
        on, off = logits["on"].float(), logits["off"].float()
        found["batches"][str(batch)] = row = {
            "ms": {variant: value / 1e3 for variant, value in us.items()},
            "us_saved_a_layer": (us["off"] - us["on"]) / layers,
            "plugin_start_s": start_s,
            "logits_off": ((on - off).norm() / off.norm()).item(),
            "tokens_equal": bool((on.argmax(-1) == off.argmax(-1)).all()),
        }
        say(name, f"{layers} layers", "B", batch, row)
    if args.compiles:
        found["first_call_s"] = seconds = {variant: [] for variant in VARIANTS}
        for variant, spent in first_calls(model, batch, stream, args.compiles):
            seconds[variant].append(spent)
            say(name, "B", batch, "first call", variant, f"{spent:.1f} s")
    return found


def first_calls(
    model: Any, batch: int, stream: torch.cuda.Stream, times: int
) -> Iterator[tuple[str, float]]:
    """Variants in turn, and the seconds of their first calls, after one to warm up."""
    step = Step(model, batch, stream)
    set_pass("off", model)
    step.first_call_s()
    for variant in VARIANTS * times:
        set_pass(variant, model)
        yield variant, step.first_call_s()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, help="instead of each model's own number")
    parser.add_argument(
        "--compiles",
        type=int,
        default=0,
        help="also time this many first calls of each variant, at the least batch",
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    rank, num_ranks = start()

    def say(*what: Any) -> None:
        if rank == 0:
            print(*what, flush=True)

    start_sglang(rank, num_ranks, args.batches)
    from sglang.srt.compilation import torch_compile_decoration

    torch_compile_decoration.set_torch_compile_config()
    found: dict[str, Any] = {"machine": machine(), "ranks": num_ranks}
    for name in args.model:
        found[name] = measure(name, args, say)
        torch.cuda.empty_cache()
        dist.barrier()
    if rank == 0 and args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    stop()


if __name__ == "__main__":
    main()

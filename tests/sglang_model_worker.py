"""The process of test_sglang_model.py: sglang's real DeepseekV2ForCausalLM, traced.

Run with scenarios as arguments, ``4`` or ``4,symm_mem``: a batch size and what is
different; prints one JSON object. Real: the model (three
dense layers, tiny), sglang's groups, patch_model, torch.compile up to and including
Inductor's post-grad passes for graphs with an exchange. Stood in: the process group
(torch's fake one, rank 0 of 2), the CUDA device (fake tensors), Triton's launcher and
the attention kernel, which breaks the graph as FlashInfer's does; with ``symm_mem``
what NCCL's memory pool does, which breaks it too; with ``fi_a2a`` FlashInfer.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from sglang_decoder import attention_backend, decode_batch, stub_vllm, tiny_model
from sglang_host import flashinfer_of, sglang_module, start_parallel, triton_target
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.integrations import sglang_flashinfer
from dcp_inductor.runtime.groups import alias_group

CALLS_PER_BATCH = 3


def main(scenarios: list[str]) -> dict[str, Any]:
    stub_vllm()
    _fake_groups()
    state = start_parallel(0, 2, backend="fake")
    group = next(g() for n, g in state._groups.items() if n == "dcp:0")
    alias_group("dcp:0", group.device_group.group_name)
    with triton_target(), FakeTensorMode(allow_non_fake_inputs=True):
        return dict(_decode(scenarios))


def _fake_groups() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    make = dist.new_group
    dist.new_group = lambda ranks=None, backend=None, **kwargs: make(
        ranks, backend="fake"
    )


@contextlib.contextmanager
def _different(what: str) -> Iterator[None]:
    """sglang's settings with one difference; "" for none."""
    runtime = sglang_module("srt.runtime_context")
    allocator = sglang_module("srt.distributed.device_communicators.pynccl_allocator")
    parallel = runtime.get_parallel()
    with contextlib.ExitStack() as stack:
        if what == "symm_mem":
            stack.enter_context(runtime.get_exec().comm.override(enable_symm_mem=True))
            for method in ("__init__", "__enter__", "__exit__"):
                stub = torch.compiler.disable(lambda *args: None)
                context = allocator.SymmetricMemoryContext
                stack.enter_context(mock.patch.object(context, method, stub))
        elif what:
            stack.enter_context(parallel.override(dcp_comm_backend=what))
        if what == "fi_a2a":
            stack.enter_context(flashinfer_of(_untraceable))
            sglang_flashinfer.show("dcp:0")
        yield


@torch.compiler.disable
def _untraceable(
    partial_o: Any, softmax_stats: Any, workspace: Any, cp_rank: Any, cp_size: Any
) -> Any:
    raise AssertionError("what the compiler sees is the op")


def _decode(scenarios: list[str]) -> Iterator[tuple[str, Any]]:
    from sglang.srt.compilation import torch_compile_decoration
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda self, *args, **kwargs: None
    recorder = _Recorder()
    torch_compile_decoration.set_torch_compile_config()
    compile_ = torch.compile

    def compiled(fn: Any, *, mode: str, dynamic: bool) -> Any:
        assert mode == "max-autotune-no-cudagraphs"
        return compile_(fn, backend=recorder.backend, dynamic=dynamic)

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = tiny_model()
    torch.compile = compiled
    for scenario in scenarios:
        batch, _, what = scenario.partition(",")
        recorder.reports.clear()
        recorder.config = Config(ag_rs=what == "ag_rs")
        with _different(what):
            _forward(model, int(batch))
        yield scenario, [*recorder.reports]


def _forward(model: Any, batch: int) -> None:
    """A few decode steps of one batch size, as the CUDA graph runner makes them."""
    from sglang.srt.compilation import torch_compile_decoration
    from sglang.srt.model_executor.forward_context import (
        ForwardContext,
        forward_context,
    )
    from sglang.srt.runtime_context import get_parallel

    forward_batch = decode_batch(batch, "cuda")
    context = ForwardContext(attn_backend=attention_backend(_empty))
    with (
        torch_compile_decoration.patch_model(
            model, True, num_tokens=batch, tp_group=get_parallel().tp_group
        ) as forward,
        forward_context(context, forward_batch=forward_batch),
        torch.no_grad(),
    ):
        for _ in range(CALLS_PER_BATCH):
            forward(forward_batch.input_ids, forward_batch.positions, forward_batch)


class _Recorder:
    """A Dynamo backend: graphs with an exchange go through Inductor's post-grad
    passes, with the pass among them; all run eagerly."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.config = Config()

    def backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        text = str(gm.graph)
        if "all_to_all" in text or "reduce_scatter" in text:
            patch = {
                "post_grad_custom_pre_pass": self._settle,
                "joint_graph_constant_folding": False,
                "force_disable_caches": True,
            }
            with inductor_config.patch(patch):
                compile_fx.compile_fx(gm, example_inputs, inner_compile=self._inner)
        return gm.forward

    def _settle(self, graph: torch.fx.Graph) -> None:
        reports: list[Any] = []
        DcpFusionPass(self.config, reports.append)(graph)
        left = [str(n.target) for n in graph.nodes if n.op == "call_function"]
        self.reports.append(
            {
                "fused": reports[0].fused,
                "findings": [str(finding) for finding in reports[0].findings],
                "lse_modes": [finding.lse_mode for finding in reports[0].findings],
                "nodes": left,
            }
        )

    def _inner(self, gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        compile_fx.view_to_reshape(gm)
        mode = torch._guards.detect_fake_mode(example_inputs)
        with torch._inductor.virtualized.V.set_fake_mode(mode):
            compile_fx.FakeTensorProp(gm, mode).propagate(*example_inputs)
            compile_fx._recursive_post_grad_passes(gm, is_inference=True)
        return gm.forward


def _empty(q: Tensor, k: Any, q_rope: Any, k_rope: Any, layer: Any) -> Any:
    rows = (q.shape[0], layer.tp_q_head_num)
    lse = q.new_empty(rows, dtype=torch.float32)
    return q.new_empty((*rows, layer.v_head_dim)), lse


if __name__ == "__main__":
    found = main(sys.argv[1:])
    print(json.dumps(found), flush=True)

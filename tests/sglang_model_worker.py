"""The process of test_sglang_model.py: sglang's real DeepseekV2ForCausalLM, traced.

Run with the batch sizes as arguments; prints one JSON object. Real: the model (three
dense layers, tiny), sglang's groups, patch_model, torch.compile up to and including
Inductor's post-grad passes for graphs with an exchange. Stood in: the process group
(torch's fake one, rank 0 of 2), the CUDA device (fake tensors), Triton's launcher and
the attention kernel, which breaks the graph as FlashInfer's does.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from sglang_host import start_parallel, triton_target
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_inductor import Config, DcpFusionPass

NUM_LAYERS = 3
CALLS_PER_BATCH = 3


def main(batches: list[int]) -> dict[str, Any]:
    for name in ("vllm", "vllm._custom_ops"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm._custom_ops"].rotary_embedding = lambda *args: None  # type: ignore
    _fake_groups()
    state = start_parallel(0, 2, backend="fake")
    assert state is not None
    with triton_target(), FakeTensorMode(allow_non_fake_inputs=True):
        return {str(batch): found for batch, found in _decode(batches)}


def _fake_groups() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    make = dist.new_group
    dist.new_group = lambda ranks=None, backend=None, **kwargs: make(
        ranks, backend="fake"
    )


def _decode(batches: list[int]) -> Any:
    from sglang.srt.compilation import torch_compile_decoration
    from sglang.srt.model_executor.forward_context import (
        ForwardContext,
        forward_context,
    )
    from sglang.srt.runtime_context import get_parallel
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda self, *args, **kwargs: None
    recorder = _Recorder()
    torch_compile_decoration.set_torch_compile_config()
    compile_ = torch.compile

    def compiled(fn: Any, *, mode: str, dynamic: bool) -> Any:
        assert mode == "max-autotune-no-cudagraphs"
        return compile_(fn, backend=recorder.backend, dynamic=dynamic)

    with torch.device("cuda"):
        model = _model()
    torch.compile = compiled
    attention = _attention_backend()
    for batch in batches:
        recorder.reports.clear()
        forward_batch = _forward_batch(batch)
        context = ForwardContext(attn_backend=attention)
        with (
            torch_compile_decoration.patch_model(
                model, True, num_tokens=batch, tp_group=get_parallel().tp_group
            ) as forward,
            forward_context(context, forward_batch=forward_batch),
            torch.no_grad(),
        ):
            for _ in range(CALLS_PER_BATCH):
                forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
        yield batch, [*recorder.reports]


class _Recorder:
    """A Dynamo backend: graphs with an exchange go through Inductor's post-grad
    passes, with the pass among them; all run eagerly."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        if "all_to_all" in str(gm.graph):
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
        DcpFusionPass(Config(), reports.append)(graph)
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


def _model() -> Any:
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from transformers import DeepseekV3Config

    torch.set_default_dtype(torch.bfloat16)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=8,
        kv_lora_rank=64,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=32,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=NUM_LAYERS,
        max_position_embeddings=512,
    )
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"
    config.num_nextn_predict_layers = config.moe_layer_freq = 1
    model = DeepseekV2ForCausalLM(config).eval()
    model.requires_grad_(False)
    for layer in model.model.layers:
        _absorb(layer.self_attn)
    return model


def _absorb(attention: Any) -> None:
    """w_kc and w_vc, as sglang's weight loader makes them."""
    widths = [attention.qk_nope_head_dim, attention.v_head_dim]
    weight = attention.kv_b_proj.weight.unflatten(0, (-1, sum(widths)))
    w_kc, w_vc = weight.split(widths, dim=1)
    attention.w_kc = w_kc.transpose(1, 2).contiguous().transpose(1, 2)
    attention.w_vc = w_vc.contiguous().transpose(1, 2)


def _attention_backend() -> Any:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class Backend(AttentionBackend):
        prefill_attention_backend_str = decode_attention_backend_str = "flashinfer"
        token_to_kv_pool = req_to_token_pool = None

        def __init__(self) -> None: ...

        def init_forward_metadata(self, forward_batch: Any) -> None: ...

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, **_: Any
        ) -> Any:
            return self.kernel(q, layer.tp_q_head_num, layer.v_head_dim)

        @torch.compiler.disable
        def kernel(self, q: Any, num_heads: int, head_dim: int) -> Any:
            rows = (q.shape[0], num_heads)
            lse = q.new_empty(rows, dtype=torch.float32)
            return q.new_empty((*rows, head_dim)), lse

    return Backend()


def _forward_batch(batch: int) -> Any:
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    ones = {
        name: torch.ones(batch, dtype=torch.int64, device="cuda")
        for name in (
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "positions",
        )
    }
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=batch,
        seq_lens_sum=batch,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        **ones,
    )


if __name__ == "__main__":
    found = main([int(text) for text in sys.argv[1:]])
    print(json.dumps(found), flush=True)

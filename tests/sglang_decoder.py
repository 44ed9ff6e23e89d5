"""sglang's real DeepseekV2ForCausalLM at a tiny size, and what stands in around it.

For the processes of test_sglang_model.py and test_sglang_decode.py. Needs groups
(sglang_host.start_parallel) and a default dtype and device; sglang is imported inside
the functions.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NUM_LAYERS = 3
VOCABULARY = 256


def stub_vllm() -> None:
    """sglang's rotary embedding imports one function of vLLM's off CUDA."""
    for name in ("vllm", "vllm._custom_ops"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm._custom_ops"].rotary_embedding = lambda *args: None  # type: ignore


_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


def stand_in_for_structs() -> None:
    """Dataclasses in place of what sglang's layers make while they are traced.

    Those are msgspec's structs, which Dynamo can construct from torch 2.12 on. Called
    after the layers are imported; does nothing where Dynamo needs nothing.
    """
    if torch.__version__ >= torch.torch_version.TorchVersion("2.12"):
        return
    package = "sglang.srt.layers.layer_boundary"
    twins: dict[type, type] = {}
    for module_name, names in (
        ("residual.stream", ("DeclaredSum", "Contribution", "OwedOutput")),
        ("output", ("UnreducedOutput",)),
    ):
        module = importlib.import_module(f"{package}.{module_name}")
        structs = [getattr(module, name) for name in names]
        twins |= {struct: _dataclass_of(struct) for struct in structs}
    modules = [m for name, m in sys.modules.items() if name.startswith(package)]
    for module in modules:
        for name, value in [*vars(module).items()]:
            if isinstance(value, type) and value in twins:
                setattr(module, name, twins[value])


def _dataclass_of(struct: type) -> type:
    """A dataclass with a struct's fields, defaults and methods."""
    import msgspec

    fields = [
        (field.name, Any)
        if field.default is msgspec.NODEFAULT
        else (field.name, Any, dataclasses.field(default=field.default))
        for field in msgspec.structs.fields(struct)
    ]
    methods = {k: v for k, v in vars(struct).items() if inspect.isfunction(v)}
    return dataclasses.make_dataclass(struct.__name__, fields, namespace=methods)


def tiny_model(**changed: Any) -> Any:
    """Dense layers, all of them; absorbed weights are set. changed: of _TINY."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from transformers import DeepseekV3Config

    stand_in_for_structs()
    settings = {**_TINY, **changed}
    num_layers = settings["num_hidden_layers"]
    config = DeepseekV3Config(**settings, first_k_dense_replace=num_layers)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"
    config.num_nextn_predict_layers = config.moe_layer_freq = 1
    model = DeepseekV2ForCausalLM(config).eval()
    model.requires_grad_(False)
    absorb(model)
    return model


def absorb(model: Any) -> None:
    """w_kc and w_vc of each layer, as sglang's weight loader makes them."""
    for layer in model.model.layers:
        attention = layer.self_attn
        widths = [attention.qk_nope_head_dim, attention.v_head_dim]
        weight = attention.kv_b_proj.weight.unflatten(0, (-1, sum(widths)))
        w_kc, w_vc = weight.split(widths, dim=1)
        attention.w_kc = w_kc.transpose(1, 2).contiguous().transpose(1, 2)
        attention.w_vc = w_vc.contiguous().transpose(1, 2)


Kernel = Callable[..., tuple[Tensor, Tensor]]


def attention_backend(kernel: Kernel) -> Any:
    """An attention backend of sglang's whose ``kernel(q, k, q_rope, k_rope, layer)``
    breaks the graph, as FlashInfer's does; it returns partial_o ``[B, H, D]`` and
    partial_lse ``[B, H]`` in base 2, fp32."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    hidden = torch.compiler.disable(kernel)

    class Backend(AttentionBackend):
        prefill_attention_backend_str = decode_attention_backend_str = "flashinfer"
        token_to_kv_pool = req_to_token_pool = None

        def __init__(self) -> None: ...

        def init_forward_metadata(self, forward_batch: Any) -> None: ...

        def forward_decode(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            q_rope: Any = None,
            k_rope: Any = None,
            **_: Any,
        ) -> Any:
            return hidden(q, k, q_rope, k_rope, layer)

    return Backend()


def decode_batch(batch: int, device: str) -> Any:
    """A ForwardBatch of one token for each of ``batch`` requests."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    names = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions")
    ones = {name: torch.ones(batch, dtype=torch.int64, device=device) for name in names}
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=batch,
        seq_lens_sum=batch,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        **ones,
    )

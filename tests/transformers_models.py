"""Tiny transformers models of random weights, and a compiler that stops half way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.report import GraphReport

LAYERS = 2
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Random weights of the usual size give one token over and over.
    "initializer_range": 0.2,
}


def deepseek_v3(**changed: Any) -> Any:
    """Latent attention, one dense layer and one with experts."""
    sizes: dict[str, Any] = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return _model("DeepseekV3", **{**sizes, **changed})


def qwen3(**changed: Any) -> Any:
    """Grouped-query attention: two heads share their keys and values."""
    return _model("Qwen3", **{"num_key_value_heads": 2, "head_dim": 16, **changed})


def gpt_oss() -> Any:
    """Attention sinks; one layer sees 8 tokens, one all."""
    model = _model(
        "GptOss",
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    for layer in model.model.layers:
        layer.self_attn.sinks.data.add_(2.0)
    return model


def gemma2() -> Any:
    """Soft-capped scores; one layer sees 8 tokens, one all."""
    return _model(
        "Gemma2",
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4,
    )


def _model(name: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **changed})
    # Sinks and soft caps are in the library's eager attention.
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind._from_config(config, attn_implementation="eager").eval()


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    """A batch of random prompts, padded on the left."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 128, (len(lengths), max(lengths)), generator=rng)
    places = torch.arange(max(lengths))
    mask = (places >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def post_grad(reports: list[GraphReport]) -> Callable[..., Any]:
    """A Dynamo backend: Inductor up to its post-grad passes, with the pass among them;
    what comes out is run eagerly. reports: one a graph is appended."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        patch: dict[str, Any] = {
            "post_grad_custom_pre_pass": DcpFusionPass(Config(), reports.append),
            "force_disable_caches": True,
        }
        with inductor_config.patch(patch):
            return compile_fx.compile_fx(gm, example_inputs, inner_compile=_inner)

    return backend


def _inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
    compile_fx.view_to_reshape(gm)
    fake_mode = torch._guards.detect_fake_mode(example_inputs)
    with torch._inductor.virtualized.V.set_fake_mode(fake_mode):
        compile_fx.FakeTensorProp(gm, fake_mode).propagate(*example_inputs)
        compile_fx._recursive_post_grad_passes(
            gm, is_inference=kwargs.get("is_inference", False)
        )

    def run(*args: Any) -> Any:
        return (
            gm(*args[0]) if len(args) == 1 and isinstance(args[0], list) else gm(*args)
        )

    return run

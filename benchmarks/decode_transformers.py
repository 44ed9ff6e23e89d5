"""Decode steps of transformers' own DeepseekV3ForCausalLM, for decode_step.py.

Attention at DeepSeek-V3's sizes: 128 heads, keys of 192 and values of 128 elements, a
latent of 512 + 64 elements a token in the cache. Its layers are all dense, without
experts, and the vocabulary is small: neither takes part in what is compared. The
model expands the latents of the whole shard to keys and values in each step, which is
most of its time at long contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.integrations.transformers import Sharded, shard

# Warm-up, replays and rounds of one variant: each puts a token into its cache.
MAX_STEPS = 64
FULL: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def sharded_model(
    layers: int, context: int, device: str = "cuda", **sizes: Any
) -> tuple[Any, Sharded]:
    """The model, the same random weights on every rank, bf16, and its sharding over
    the default group. sizes: other than FULL."""
    config = DeepseekV3Config(
        **{**FULL, **sizes},
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        vocab_size=4096,
        max_position_embeddings=context + MAX_STEPS,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    return model, shard(model)


@torch.no_grad()
def steps_of(
    model: Any, dcp: Sharded, batch: int, context: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """A compiled decode step with the pass "off" and "on", after a prefill.

    Each call gives logits ``[B, 1, vocab]`` and puts one token into a cache that is its
    variant's alone.
    """
    rng = torch.Generator().manual_seed(batch)
    prompt = torch.randint(0, 4096, (batch, context), generator=rng).to(model.device)
    token = prompt[:, :1].contiguous()
    variants: dict[str, dict[str, Any]] = {
        "off": {},
        "on": {"post_grad_custom_pre_pass": DcpFusionPass(Config(on_miss="raise"))},
    }
    return {
        name: _step(model, dcp.cache(context + MAX_STEPS), prompt, token, options)
        for name, options in variants.items()
    }


def _step(
    model: Any, cache: Any, prompt: torch.Tensor, token: torch.Tensor, options: Any
) -> Callable[[], torch.Tensor]:
    model(prompt, past_key_values=cache, logits_to_keep=1)

    def decode(token: torch.Tensor) -> torch.Tensor:
        return model(token, past_key_values=cache).logits

    # A function of its own for each variant: nothing compiled is shared between them.
    compiled = torch.compile(decode, fullgraph=True, dynamic=False, options=options)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return compiled(token)

    return step

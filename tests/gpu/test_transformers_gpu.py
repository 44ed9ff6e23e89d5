"""Unmodified transformers models decode over real GPUs' shards: tokens, CUDA graphs.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_transformers_gpu.py -m gpu

Needs the transformers package. Weights are random and equal on all ranks, so each rank
knows the tokens of one process that holds the whole cache.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent.parent))

import transformers_models as models
from transformers import CompileConfig

import dcp_inductor
from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.integrations.transformers import shard

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_NEW = 64
LENGTHS = (1, 3, 5)
# Without experts, whose kernels differ from card to card.
SIZES: dict[str, dict[str, int]] = {
    "deepseek_v3": {
        "v_head_dim": 64,
        "num_key_value_heads": 8,
        "first_k_dense_replace": models.LAYERS,
    },
    "qwen3": {"head_dim": 64},
}


def model_of(name: str, device: str = "cuda") -> Any:
    return getattr(models, name)(num_attention_heads=8, **SIZES[name]).to(device)


def generated(model: Any, **options: Any) -> list[list[int]]:
    batch = {k: v.to(model.device) for k, v in models.prompts(*LENGTHS).items()}
    with torch.no_grad():
        return model.generate(
            **batch, max_new_tokens=NUM_NEW, do_sample=False, **options
        ).tolist()


@pytest.fixture
def reports():
    """Of the pass, which is in Inductor's global hook here."""
    torch._dynamo.reset()
    found: list[Any] = []
    fusion_pass = DcpFusionPass(Config(on_miss="raise"), found.append)
    patch = {"post_grad_custom_pre_pass": fusion_pass, "force_disable_caches": True}
    with torch._inductor.config.patch(patch):
        yield found


def checked_generate(model: Any, reports: list[Any], mode: str) -> None:
    whole = generated(model, disable_compile=True)
    dcp = shard(model)
    dcp.reserve(len(LENGTHS))
    config = CompileConfig(fullgraph=True, dynamic=False, mode=mode)
    config._compile_all_devices = True
    cache = dcp.cache(max(LENGTHS) + NUM_NEW)
    sharded = generated(model, past_key_values=cache, compile_config=config)
    dcp_inductor.check()
    assert sharded == whole
    assert [report.fused for report in reports] == [models.LAYERS]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", SIZES)
def test_generate_gives_the_tokens_of_one_process(ranks, reports, name, mode):
    """reduce-overhead is the library's own choice on a GPU: it captures the steps."""
    checked_generate(model_of(name), reports, mode)


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_a_captured_step_gives_the_tokens_of_one_process(ranks, reports, name):
    model = model_of(name)
    prompt = torch.arange(2, 12, device="cuda").view(2, 5)
    whole = model.generate(
        prompt, max_new_tokens=24, do_sample=False, disable_compile=True
    )
    dcp = shard(model)
    dcp.reserve(len(prompt))
    cache = dcp.cache(5 + 24)
    token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)

    @torch.compile(fullgraph=True, dynamic=False)
    def step(token: torch.Tensor) -> torch.Tensor:
        return model(token, past_key_values=cache).logits.argmax(-1)

    said = [token.clone()]
    for _ in range(3):  # also warms up what a capture can't
        token.copy_(step(token))
        said.append(token.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(step(token))
    for _ in range(20):
        graph.replay()
        said.append(token.clone())
    dcp_inductor.check()
    assert torch.cat([prompt, *said], 1).tolist() == whole.tolist()
    assert [report.fused for report in reports] == [models.LAYERS]

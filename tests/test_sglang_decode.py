"""sglang's real model on two real ranks: the plugin, the pass and the op end to end.

Two gloo processes, TP = DCP = 2, fp32. The plugin starts as in a server, sglang's
patch_model compiles each batch size, and the same tokens are decoded compiled, eagerly,
and eagerly with the plugin's hook in place. Real: sglang's model, groups, exchange and
compile path, and a KV cache that is sharded by position. Stood in: the attention kernel
(plain torch over the rank's shard, base 2), the CUDA device, and Triton's launcher (its
interpreter).
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from sglang_decoder import (
    VOCABULARY,
    absorb,
    attention_backend,
    decode_batch,
    stub_vllm,
    tiny_model,
)
from sglang_host import (
    interpret_kernels,
    on_cpu,
    plugin_lines,
    real_comm,
    runner_of,
    sglang_module,
    start_parallel,
    triton_target,
)
from torch import Tensor

pytestmark = pytest.mark.sglang

BATCHES = (2, 1)
NUM_LAYERS = 2
NUM_STEPS = 5
WAYS = ("compiled", "hooked", "eager", "wrong")


@pytest.fixture(scope="module")
def decoded(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank decoded."""
    real_comm()
    env = {
        "SGLANG_LOG_LEVEL": "error",
        "DCP_INDUCTOR_EAGER_DECODE": "1",
        "SGLANG_TORCH_COMPILE_MODE": "default",  # no autotuning of CPU matmuls
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
    }
    return run_ranks(decode_on_rank, 2, env=env, timeout_s=280)


class ShardedAttention:
    """MLA decode over the positions that this rank holds: every N-th of them."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.forget()

    def forget(self) -> None:
        self.position = 0
        self.cache: dict[int, list[Tensor]] = {}

    def kernel(self, q: Any, k: Any, q_rope: Any, k_rope: Any, layer: Any) -> Any:
        held = self.cache.setdefault(layer.layer_id, [])
        if self.position % self.num_ranks == self.rank:
            held.append(torch.cat([k, k_rope], -1).squeeze(1))
        if not held:
            return torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)
        cache = torch.stack(held, 1)
        query = torch.cat([q, q_rope], -1)
        scores = torch.einsum("bhd,btd->bht", query, cache) * layer.scaling
        values = cache[..., : q.shape[-1]]
        out = torch.einsum("bht,btd->bhd", scores.softmax(-1), values)
        return out, scores.logsumexp(-1) / math.log(2)


def decode_on_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    from dcp_inductor.integrations import sglang as plugin

    plugin.register()  # before anything of sglang's is imported, as in a server
    stub_vllm()
    graphs = sglang_module("srt.model_executor.cuda_graph_config")
    decode = graphs.PhaseConfig(backend=graphs.Backend.FULL, bs=[*sorted(BATCHES)])
    state = start_parallel(
        rank,
        num_ranks,
        cuda_graph_config=graphs.CudaGraphConfig(decode=decode),
        torch_compile_max_bs=max(BATCHES),
    )
    on_cpu(state)
    model = tiny_model(num_hidden_layers=NUM_LAYERS)
    fill(model, rank)
    with plugin_lines() as lines:
        reports = start_plugin(model)
        found = decode_in_all_ways(model, ShardedAttention(rank, num_ranks))
    fused = [report.fused for report in reports if report.findings]
    return {**found, "fused": fused, "lines": lines}


def start_plugin(model: Any) -> list[Any]:
    """The reports that its pass will make."""
    from dcp_inductor.integrations import sglang as plugin
    from dcp_inductor.integrations.inductor import installed_passes

    reports: list[Any] = []
    plugin.after_workspaces(None, runner_of(model, torch.float32))
    (fusion_pass,) = installed_passes()
    fusion_pass.listener = reports.append
    return reports


def decode_in_all_ways(model: Any, attention: ShardedAttention) -> dict[str, Any]:
    """What is decoded, by way and batch; "calls": of the op, in the hooked way."""
    from sglang.srt.compilation import torch_compile_decoration
    from sglang.srt.runtime_context import get_parallel

    from dcp_inductor.integrations import sglang_eager
    from dcp_inductor.op import workspace

    backend = attention_backend(attention.kernel)
    torch_compile_decoration.set_torch_compile_config()
    torch._inductor.config.coordinate_descent_tuning = False
    found: dict[str, Any] = {name: {} for name in WAYS}
    # Compiled first: the interpreter leaves triton.language patched.
    with triton_target():
        for batch in BATCHES:
            with torch_compile_decoration.patch_model(
                model, True, num_tokens=batch, tp_group=get_parallel().tp_group
            ) as forward:
                found["compiled"][batch] = greedy(forward, backend, attention, batch)
    mla = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"
    with interpret_kernels():
        with mock.patch.object(workspace, "run", wraps=workspace.run) as op:
            for batch in BATCHES:
                found["hooked"][batch] = greedy(
                    model.forward, backend, attention, batch
                )
        found["calls"] = op.call_count
        sglang_eager.stop()
        for batch in BATCHES:
            found["eager"][batch] = greedy(model.forward, backend, attention, batch)
        with mock.patch(f"{mla}.is_mla_dcp_lse_base_on_e", return_value=True):
            for batch in BATCHES:
                found["wrong"][batch] = greedy(model.forward, backend, attention, batch)
    return found


def fill(model: Any, rank: int) -> None:
    """Weights that are the rank's own where sglang shards them, and equal elsewhere."""
    replicated = ("norm", "fused_qkv", "kv_a")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            own = 0 if any(part in name for part in replicated) else 1 + rank
            torch.manual_seed(sum(map(ord, name)) + 1000 * own)
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 0.1)
            else:
                weight.fill_(1.0)
    absorb(model)


def greedy(
    forward: Any, backend: Any, attention: ShardedAttention, batch: int
) -> dict[str, Any]:
    """Tokens ``[steps, B]`` and logits ``[steps, B, vocabulary]`` from a few steps."""
    from sglang.srt.model_executor.forward_context import (
        ForwardContext,
        forward_context,
    )

    attention.forget()
    tokens = torch.arange(batch) * 31 + 7
    chosen, logits = [], []
    for step in range(NUM_STEPS):
        forward_batch = decode_batch(batch, "cpu")
        forward_batch.input_ids = tokens
        forward_batch.positions = torch.full((batch,), step)
        attention.position = step
        context = ForwardContext(attn_backend=backend)
        with forward_context(context, forward_batch=forward_batch), torch.no_grad():
            out = forward(tokens, forward_batch.positions, forward_batch)
        logits.append(out.next_token_logits.clone())
        tokens = logits[-1].argmax(-1)
        chosen.append(tokens)
    return {
        "tokens": torch.stack(chosen).tolist(),
        "logits": torch.stack(logits).tolist(),
    }


def off(found: dict[str, Any], one: str, other: str, batch: int) -> float:
    """Relative distance of two ways' logits, over the steps that had equal tokens."""
    a, b = (torch.tensor(found[way][batch]["logits"]) for way in (one, other))
    assert a.shape == (NUM_STEPS, batch, VOCABULARY)
    assert bool(a.isfinite().all())
    return ((a - b).norm() / b.norm()).item()


def test_the_plugin_started(decoded):
    (line,) = decoded[0]["lines"]
    assert "fusing DCP exchanges, backend collective, 2 ranks, capacity 2" in line
    assert decoded[1]["lines"] == []


def test_one_fused_graph_a_batch_size(decoded):
    for found in decoded:
        assert found["fused"] == [1] * len(BATCHES)


def test_every_eager_exchange_went_through_the_hook(decoded):
    for found in decoded:
        assert found["calls"] == NUM_LAYERS * NUM_STEPS * len(BATCHES)


@pytest.mark.parametrize("way", ["compiled", "hooked"])
@pytest.mark.parametrize("batch", BATCHES)
def test_logits_and_tokens_are_those_of_eager_sglang(decoded, batch, way):
    for found in decoded:
        assert off(found, way, "eager", batch) <= 1e-5
        assert found[way][batch]["tokens"] == found["eager"][batch]["tokens"]


@pytest.mark.parametrize("batch", BATCHES)
def test_the_wrong_base_would_show(decoded, batch):
    """Negative control: the comparison above can fail."""
    for found in decoded:
        assert off(found, "wrong", "eager", batch) > 1e-3


def test_decoding_is_not_a_loop_of_one_token(decoded):
    tokens = decoded[0]["eager"][2]["tokens"]
    assert len({token for step in tokens for token in step}) > 2
    assert decoded[1]["eager"][2]["tokens"] == tokens

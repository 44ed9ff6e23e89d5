"""Unmodified transformers models decode over two gloo ranks' shards of the cache.

The process pairs start once: each test looks at its part of what they found.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

import torch.distributed as dist  # noqa: E402
import transformers_models as models  # noqa: E402
from harness import fake_world  # noqa: E402
from ranks import run_ranks  # noqa: E402
from transformers import CompileConfig, StaticCache, T5Config  # noqa: E402
from transformers import T5ForConditionalGeneration as T5  # noqa: E402

import dcp_inductor  # noqa: E402
from dcp_inductor import Config, DcpFusionPass  # noqa: E402
from dcp_inductor.errors import BadInput, RanksDisagree  # noqa: E402
from dcp_inductor.integrations.transformers import shard  # noqa: E402
from dcp_inductor.integrations.transformers_attention import attend  # noqa: E402

COMPILED = ("deepseek_v3", "qwen3")
NUM_NEW = 64
# The second is shorter than there are ranks: rank 1's shard is empty at first.
BATCHES = {"unequal": (1, 3, 5), "short": (1, 1, 1)}


def compile_config(backend: Any = "inductor") -> CompileConfig:
    config = CompileConfig(
        fullgraph=True, dynamic=False, mode="default", backend=backend
    )
    config._compile_all_devices = True
    return config


def generated(model: Any, batch: str, num_new: int = NUM_NEW, **options: Any) -> Any:
    return model.generate(
        **models.prompts(*BATCHES[batch]),
        max_new_tokens=num_new,
        do_sample=False,
        **options,
    ).tolist()


def logits_of(model: Any, batch: dict[str, Any], cache: Any, sizes: list[int]) -> Any:
    """Logits of every token, given to the model in pieces of these sizes."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, end = [], 0
    for size in sizes:
        start, end = end, end + size
        out = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        found.append(out.logits)
    return torch.cat(found, 1)[mask.bool()]


@torch.no_grad()
def on_a_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    """All that the tests of two ranks look at."""
    found: dict[str, Any] = {}
    for name in COMPILED:
        found[name] = _generate(getattr(models, name)())
    for name in (*COMPILED, "gpt_oss", "gemma2"):
        found[f"{name} logits"] = _logits(getattr(models, name)())
    one_head = models.qwen3(num_attention_heads=2, num_key_value_heads=1)
    found["one head logits"] = _logits(one_head)
    found["disagreeing"] = _disagreeing(rank)
    found["inductor"] = _compiled_by_inductor()
    return found


def _generate(model: Any) -> dict[str, Any]:
    whole = {batch: generated(model, batch) for batch in BATCHES}
    dcp, reports, sharded = shard(model), [], {}
    cache = dcp.cache(NUM_NEW + 5)
    config = compile_config(models.post_grad(reports))
    for batch in BATCHES:
        sharded[batch] = generated(
            model, batch, past_key_values=cache, compile_config=config
        )
        cache.reset()
    return {"whole": whole, "sharded": sharded, "fused": fused(reports)}


def fused(reports: list[Any]) -> list[tuple[int, int]]:
    return [(report.fused, len(report.findings)) for report in reports]


def _compiled_by_inductor() -> dict[str, Any]:
    """The whole compiler, with the pass in its global hook."""
    model = models.qwen3(num_hidden_layers=1)
    whole = generated(model, "unequal", 8)
    dcp, reports = shard(model), []
    patch = {
        "post_grad_custom_pre_pass": DcpFusionPass(Config(), reports.append),
        "fx_graph_cache": False,
        "compile_threads": 1,
    }
    with torch._inductor.config.patch(patch):
        sharded = generated(
            model,
            "unequal",
            8,
            past_key_values=dcp.cache(13),
            compile_config=compile_config(),
        )
    return {"whole": whole, "sharded": sharded, "fused": fused(reports)}


def _logits(model: Any) -> dict[str, float]:
    """How far logits are from the model's own, by how the cache was filled."""
    batch = models.prompts(12, 7, 11)
    want = logits_of(model, batch, None, [12])
    dcp = shard(model)
    cache = dcp.cache(12)

    def error(cache: Any, sizes: list[int]) -> float:
        got = logits_of(model, batch, cache, sizes)
        return ((got - want).abs().max() / want.abs().max()).item()

    errors = {
        "token by token": error(cache, [1] * 12),
        "prefill, then tokens": error(dcp.cache(13), [9] + [1] * 3),
        "two pieces of prefill": error(dcp.cache(14), [3, 1, 5, 1, 2]),
    }
    cache.reset()
    errors["after a reset"] = error(cache, [9] + [1] * 3)
    return errors


def _disagreeing(rank: int) -> list[str]:
    model = models.qwen3()
    dcp = shard(model)
    said = []
    with pytest.raises(RanksDisagree) as caught:
        dcp.cache(64 + rank)
    said.append(str(caught.value))
    cache = dcp.cache(64)
    with pytest.raises(RanksDisagree) as caught:
        model(torch.ones(1 + rank, 1, dtype=torch.long), past_key_values=cache)
    said.append(str(caught.value))
    return said


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(on_a_rank, 2, timeout_s=240)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", COMPILED)
def test_generate_gives_the_tokens_of_one_process(two_ranks, name, batch):
    whole = two_ranks[0][name]["whole"][batch]
    assert len({*whole[0]}) > 10, "a model that says something"
    for found in two_ranks:
        assert found[name]["sharded"][batch] == whole


@pytest.mark.parametrize("name", COMPILED)
def test_one_exchange_a_layer_is_fused_and_no_token_recompiles(two_ranks, name):
    for found in two_ranks:
        assert found[name]["fused"] == [(models.LAYERS, models.LAYERS)]


@pytest.mark.parametrize("name", [*COMPILED, "gpt_oss", "gemma2", "one head"])
def test_logits_are_the_model_s_own(two_ranks, name):
    for found in two_ranks:
        for how, error in found[f"{name} logits"].items():
            assert error < 2e-5, how


def test_other_caches_on_one_rank_are_told_before_any_exchange(two_ranks):
    for found in two_ranks:
        length, batch = found["disagreeing"]
        assert "another length on each rank (rank 0: 64, rank 1: 65)" in length
        assert "number of sequences on each rank (rank 0: 1, rank 1: 2)" in batch


def test_compiled_to_the_end(two_ranks):
    for found in two_ranks:
        assert found["inductor"]["sharded"] == found["inductor"]["whole"]
        assert found["inductor"]["fused"] == [(1, 1)]


@pytest.fixture
def groups():
    with fake_world() as groups:
        yield groups


@pytest.mark.parametrize("name", COMPILED)
def test_four_ranks_of_one_head_each_fuse(groups, name):
    model = getattr(models, name)()
    cache = shard(model, groups["4"]).cache(64)
    with torch.no_grad():
        model(**models.prompts(2, 5), past_key_values=cache)
        report = dcp_inductor.explain(
            lambda ids: model(ids, past_key_values=cache).logits,
            torch.ones(2, 1, dtype=torch.long),
        )
    assert report.breaks == []
    assert (report.fused, len(report.exchanges)) == (models.LAYERS,) * 2, str(report)
    assert {finding.num_ranks for finding in report.exchanges} == {4}


def test_reserve_takes_the_sizes_of_the_model(groups):
    reserved = shard(models.deepseek_v3(), groups["2"]).reserve(8).geometry
    assert (reserved.max_tokens, reserved.num_heads, reserved.head_dim) == (8, 4, 12)
    reserved = shard(models.qwen3(), groups["2"]).reserve(3).geometry
    assert (reserved.max_tokens, reserved.num_heads, reserved.head_dim) == (3, 4, 16)


def linear_attention() -> Any:
    model = models.qwen3()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


def shared_layers() -> Any:
    model = models.qwen3()
    model.config.num_kv_shared_layers = 1
    return model


def encoder_decoder() -> Any:
    return T5(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=4))


def without_interface() -> Any:
    """A class that doesn't say that its attention can be replaced."""
    model = copy.copy(models.qwen3())
    model._can_set_attn_implementation = lambda: False
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.qwen3(num_attention_heads=6), "has 6 attention heads"),
        (lambda: models.qwen3().double(), "torch.float64"),
        (linear_attention, "has linear_attention"),
        (shared_layers, "has layers that share their keys"),
        (encoder_decoder, "is an encoder-decoder"),
        (without_interface, "doesn't go through transformers' attention interface"),
    ],
)
def test_a_model_that_can_t_is_refused(groups, make, words):
    with pytest.raises(BadInput, match="was asked to decode with DCP") as caught:
        shard(make(), groups["4"])
    assert words in str(caught.value)


def no_lse(*args: Any) -> Any:
    return attend(*args)[0]


def half_lse(*args: Any) -> Any:
    o, lse = attend(*args)
    return o, lse.half()


def base_2(*args: Any) -> Any:
    o, lse = attend(*args)
    return o, lse / 0.6931471805599453


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (no_lse, "and gave none"),
        (half_lse, "and gave torch.float16"),
        (lambda *args: (attend(*args)[0], attend(*args)[1][0]), "float32 [4, 1]"),
        (base_2, "in base 2"),
        (lambda *args: (attend(*args)[0], attend(*args)[1] * 0), "gave 0.000"),
    ],
)
def test_an_attention_without_the_right_lse_is_refused(groups, other, words):
    with pytest.raises(BadInput, match="log-sum-exp") as caught:
        shard(models.qwen3(), groups["2"], attend=other)
    assert words in str(caught.value)


def test_a_reset_cache_takes_a_prompt_as_an_empty_one_does(groups):
    model = models.qwen3()
    cache = shard(model, groups["2"]).cache(8)
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
    assert cache.get_mask_sizes(5, 0) == (8, 0)
    cache.reset()
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.get_seq_length() == 0


@contextlib.contextmanager
def sending_nothing():
    """Fails where an exchange is made."""

    def sent(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an exchange was made")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", sent)
        yield


@pytest.mark.parametrize("length", [63, 64])
def test_an_ordinary_cache_is_refused(groups, length):
    model = models.qwen3()
    shard(model, groups["2"])
    cache = StaticCache(model.config, max_cache_len=length)
    with sending_nothing(), torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long), past_key_values=cache)
        with pytest.raises(BadInput, match="that isn't a cache of 2 shards"):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize(
    ("option", "accepted"),
    [
        ({"position_bias": torch.zeros(1)}, False),
        ({"dropout": 0.1}, False),
        ({"is_causal": False}, False),
        ({"output_attentions": True}, False),
        ({"cu_seq_lens_q": torch.zeros(1)}, False),
        ({"position_bias": None, "dropout": 0.0, "is_causal": True}, True),
        ({"sliding_window": 8, "output_attentions": False}, True),
    ],
)
def test_options_of_an_attention_are_taken_or_refused_by_name(groups, option, accepted):
    dcp = shard(models.qwen3(), groups["2"])
    query, mask = torch.ones(1, 4, 1, 16), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    name = next(iter(option))
    with sending_nothing():
        refusal = BadInput if not accepted else AssertionError
        words = f"passes {name} " if not accepted else "an exchange was made"
        with pytest.raises(refusal, match=words):
            dcp.attention(torch.nn.Module(), query, query, query, mask, **option)


def test_a_prompt_that_doesn_t_fit_is_refused(groups):
    model = models.qwen3()
    cache = shard(model, groups["2"]).cache(4)
    with pytest.raises(BadInput, match="A prompt of 5 tokens was given"):
        model(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)


def test_the_cache_is_first_filled_outside_the_compiler(groups):
    model = models.qwen3()
    cache = shard(model, groups["2"]).cache(4)
    with pytest.raises(Exception, match="first time inside a compiled forward"):
        torch.compile(model, backend="eager", fullgraph=True)(
            torch.ones(1, 1, dtype=torch.long), past_key_values=cache
        )

"""sglang's own, unmodified dcp_a2a_lse_reduce: proved, fused, nothing left behind."""

from __future__ import annotations

import re
from typing import Any

import expecttest
import pytest
import torch
from harness import Captured, captured
from sglang_cases import (
    assert_all_agree,
    assert_fused,
    graph_text,
    partials,
    twisted_kernels,
)
from sglang_host import group_of, run_on_ranks
from tolerances import rounding_steps
from torch import Tensor
from torch._inductor import config as inductor_config

from dcp_inductor.merge import a2a_lse_reduce_reference

pytest_plugins = ("sglang_cases",)
pytestmark = pytest.mark.sglang

BF16 = torch.bfloat16
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
STEP = rounding_steps(fp32=1e-6)


def trace(
    comm: Any,
    num_ranks: int,
    dtype: torch.dtype = BF16,
    *,
    base_e: bool = False,
    v2: bool = True,
    dynamic: bool = False,
    shape: tuple[int, int, int] = (3, 8, 16),
) -> Captured:
    group = group_of(num_ranks)

    def reduce(o: Tensor, lse: Tensor) -> Tensor:
        return comm.dcp_a2a_lse_reduce(o, lse, group, is_lse_base_on_e=base_e)

    o, lse = partials(1, shape, dtype)[0]
    if dynamic:
        torch._dynamo.mark_dynamic(o, 0)
        torch._dynamo.mark_dynamic(lse, 0)
    with inductor_config.patch(enable_auto_functionalized_v2=v2):
        return captured(reduce, (o, lse))


@pytest.mark.parametrize("base_e", [False, True], ids=["base2", "basee"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fuses(comm, dtype, num_ranks, base_e):
    found = trace(comm, num_ranks, dtype, base_e=base_e)
    assert_fused(found, "basee" if base_e else "base2", num_ranks)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_every_form_of_the_graph_fuses(comm, dtype, v2, dynamic):
    found = trace(comm, 4, dtype, v2=v2, dynamic=dynamic)
    assert_fused(found, "base2", 4)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_batches_of_any_size_fuse(comm, num_tokens):
    assert_fused(trace(comm, 4, shape=(num_tokens, 16, 32)), "base2", 4)


@pytest.mark.parametrize("base_e", [False, True], ids=["base2", "basee"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_all_ranks(comm, dtype, base_e):
    """The rewritten graph, the original one and merge.py agree."""
    num_ranks, lse_mode = 4, "basee" if base_e else "base2"
    found = trace(comm, num_ranks, dtype, base_e=base_e)
    assert_fused(found, lse_mode, num_ranks)
    inputs = partials(num_ranks, (3, 8, 16), dtype, seed=1)
    assert_all_agree(
        inputs,
        lse_mode,
        run_on_ranks(found, inputs, before=True),
        run_on_ranks(found, inputs),
        rtol=STEP[dtype],
        atol=STEP[dtype] / 8,
    )


def test_dynamic_graph_runs_at_other_batches(comm):
    found = trace(comm, 2, dynamic=True)
    for num_tokens in (2, 9):
        inputs = partials(2, (num_tokens, 8, 16), BF16, seed=num_tokens)
        assert_fused(found, "base2", 2)
        outputs = run_on_ranks(found, inputs)
        o, lse = (torch.stack(parts) for parts in zip(*inputs, strict=True))
        wanted, _ = a2a_lse_reduce_reference(o, lse, rank=1, lse_mode="base2")
        assert torch.equal(outputs[1][0], wanted)


def test_kernels_write_what_their_ir_says(comm):
    """Guards the harness: without a Triton target every argument counts as written."""
    found = trace(comm, 4)
    written = [
        [*node.kwargs["tensors_to_clone"]]
        for node in found.before.nodes
        if "triton_kernel_wrapper" in str(node.target)
    ]
    assert written == [["dst_o_ptr", "dst_lse_ptr"], ["out_ptr"]]


def test_what_is_around_stays(comm):
    """As in the model: a flat partial output, and a result that leaves twice."""
    group = group_of(4)

    def layer(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged = comm.dcp_a2a_lse_reduce(
            o.view(-1, 8, 16).contiguous(), lse.contiguous(), group, False
        )
        return merged, merged.transpose(0, 1)

    found = captured(layer, (torch.randn(3, 128).to(BF16), torch.randn(3, 8)))
    assert found.reasons == []
    calls = [node for node in found.after.nodes if node.op == "call_function"]
    names = [node.target._opname for node in calls]
    assert names == ["reshape", "a2a_lse_reduce", "permute"]


def test_layers_of_one_model_are_proved_once(comm):
    group = group_of(4)

    def two_layers(o: Tensor, lse: Tensor) -> Tensor:
        first = comm.dcp_a2a_lse_reduce(o, lse, group, False)
        again = first.repeat(1, 4, 1) * 1.5
        return comm.dcp_a2a_lse_reduce(again, lse, group, False)

    found = captured(two_layers, (torch.randn(3, 8, 16).to(BF16), torch.randn(3, 8)))
    assert found.num_ops == 2
    assert found.report.findings[1].from_memo


# --- what must not fuse ---------------------------------------------------------------


def test_buffers_of_the_caller_are_observable(comm):
    group = group_of(4)

    def reduce(o: Tensor, lse: Tensor, send: Tensor, recv: Tensor) -> Tensor:
        buffers = {"send_combined": send, "recv_combined": recv}
        return comm.dcp_a2a_lse_reduce(o, lse, group, False, buffers)

    o, lse = partials(1, (3, 8, 16), BF16)[0]
    buffers = (torch.empty(4, 6, 2, 18, dtype=BF16) for _ in range(2))
    found = captured(reduce, (o, lse, *buffers))
    assert found.num_ops == 0
    (reason,) = found.reasons
    assert "a buffer of the caller" in reason
    assert "ranks" not in str(found.report.findings[0]), (
        "the graph doesn't say how many"
    )


CENTERED = "centered = lse_i - lse_max"
COMBINE = {
    "a temperature": (CENTERED, "centered = (lse_i - lse_max) * 0.99"),
    "a missing rank": ("in tl.static_range(N):", "in tl.static_range(N - 1):"),
    "not normalised": ("acc = acc / tl.maximum(weight_sum, 1.0)", "acc = acc * 1.0"),
    "an epsilon": ("tl.maximum(weight_sum, 1.0)", "(weight_sum + 0.02)"),
    "a clamp": (CENTERED, "centered = tl.maximum(lse_i - lse_max, -20.0)"),
    "a threshold": (CENTERED, "centered = tl.where(lse_i < -700.0, 0.0, lse_i)"),
    "one head": ("weight_sum += w", "w *= 1 + i * (head_idx == 1); weight_sum += w"),
}


@pytest.mark.parametrize("twist", COMBINE)
def test_a_twisted_combine_of_the_same_name_is_refused(
    comm, monkeypatch, tmp_path, twist
):
    kernels = twisted_kernels(tmp_path, "_dcp_lse_combine_kernel", *COMBINE[twist])
    monkeypatch.setattr(comm, "dcp_lse_combine_triton", kernels.dcp_lse_combine_triton)
    found = trace(comm, 4)
    assert found.num_ops == 0
    assert re.search("isn't the LSE merge|isn't a merge by LSE", found.reasons[0])


def test_a_kernel_that_looks_at_its_place_in_a_dynamic_batch(
    comm, monkeypatch, tmp_path
):
    twist = ("weight_sum += w", "w *= 1 + i * (batch_idx > 99); weight_sum += w")
    kernels = twisted_kernels(tmp_path, "_dcp_lse_combine_kernel", *twist)
    monkeypatch.setattr(comm, "dcp_lse_combine_triton", kernels.dcp_lse_combine_triton)
    assert trace(comm, 4).num_ops == 1, "a batch of 3 has no such row"
    (reason,) = trace(comm, 4, dynamic=True).reasons
    assert "the batch is dynamic" in reason
    assert "batch_idx > 99" in reason


LOADED = "tl.load(lse_ptr + b * lse_stride_B + h * lse_stride_H)"
PACK = {
    "LSEs dropped": (LOADED, "0.0"),
    "LSEs scaled": (LOADED, f"0.99 * {LOADED}"),
    "heads interleaved": (
        "peer = h // H_PER_RANK\n    h_local = h % H_PER_RANK",
        "peer = h % (8 // H_PER_RANK)\n    h_local = h // (8 // H_PER_RANK)",
    ),
    "half of the payload": ("mask = offs < WORDS", "mask = offs < WORDS // 2"),
}


@pytest.mark.parametrize("twist", PACK)
def test_a_twisted_pack_keeps_its_meaning(comm, monkeypatch, tmp_path, twist):
    """Either nothing is fused, or what the kernel packs is what the op gets."""
    kernels = twisted_kernels(tmp_path, "_dcp_pack_a2a_send_kernel", *PACK[twist])
    monkeypatch.setattr(comm, "dcp_pack_a2a_send", kernels.dcp_pack_a2a_send)
    found = trace(comm, 4)
    if found.num_ops == 0:
        return
    inputs = partials(4, (3, 8, 16), BF16, seed=2)
    original = run_on_ranks(found, inputs, before=True)
    for was, now in zip(original, run_on_ranks(found, inputs), strict=True):
        torch.testing.assert_close(now[0], was[0], rtol=2.0**-7, atol=1e-3)


def test_a_pack_that_shifts_every_lse_is_refused(comm, monkeypatch, tmp_path):
    """It cancels where all ranks run this pack; another rank may add another number."""
    twist = LOADED, f"{LOADED} + 2.0"
    kernels = twisted_kernels(tmp_path, "_dcp_pack_a2a_send_kernel", *twist)
    monkeypatch.setattr(comm, "dcp_pack_a2a_send", kernels.dcp_pack_a2a_send)
    found = trace(comm, 4)
    assert found.num_ops == 0
    (reason,) = found.reasons
    assert "a user kernel that packs, changes the LSE" in reason


# --- golden graphs --------------------------------------------------------------------


class TestGolden(expecttest.TestCase):
    maxDiff = None

    @pytest.fixture(autouse=True)
    def _comm(self, comm: Any) -> None:
        self.comm = comm

    def test_bf16_static(self):
        found = trace(self.comm, 4)
        self.assertExpectedInline(
            graph_text(found.before),
            """\
%0: bfloat16[3, 8, 16] = input
%1: float32[3, 8] = input
%2: float32[3, 8, 8] = view(%0, float32)
%3: bfloat16[4, 3, 2, 18] = empty([4, 3, 2, 18])
%4: bfloat16[4, 3, 2, 16] = slice(%3, 3, 0, 16)
%5: float32[4, 3, 2, 8] = view(%4, float32)
%6: float32[4, 3, 2, 9] = view(%3, float32)
%7: float32[4, 3, 2] = select(%6, 3, 8)
%8: tuple = triton_kernel_wrapper_functional(grid=[[3, 8, 1]],
    tma_descriptor_metadata={}, kwargs={'out_ptr': view_1, 'lse_ptr': arg1_1,
    'dst_o_ptr': view_2, 'dst_lse_ptr': select}, tensors_to_clone=[GROUP, GROUP])
%9: float32[4, 3, 2, 8] = getitem(%8, GROUP)
%10: float32[4, 3, 2] = getitem(%8, GROUP)
%11: bfloat16[4, 3, 2, 16] = view(%9, bfloat16)
%12: bfloat16[4, 3, 2, 18] = slice_scatter(%3, %11, 3, 0, 16)
%13: float32[4, 3, 2, 9] = view(%12, float32)
%14: float32[4, 3, 2, 9] = select_scatter(%13, %10, 3, 8)
%15: bfloat16[4, 3, 2, 18] = view(%14, bfloat16)
%16: bfloat16[432] = reshape(%15, [-1])
%17: uint8[864] = view(%16, uint8)
%18: bfloat16[4, 3, 2, 18] = empty([4, 3, 2, 18])
%19: bfloat16[432] = reshape(%18, [-1])
%20: uint8[864] = view(%19, uint8)
%21: tuple = auto_functionalized_v2(sglang.reg_all_to_all_single.default, input=%17,
    group_name=GROUP, _output_base_index=0, _all_bases=[%20])
%22: uint8[864] = getitem(%21, 1)
%23: bfloat16[432] = view(%22, bfloat16)
%24: bfloat16[4, 3, 2, 18] = reshape(%23, [4, 3, 2, 18])
%25: bfloat16[4, 3, 2, 16] = slice(%24, 3, 0, 16)
%26: float32[4, 3, 2, 9] = view(%24, float32)
%27: float32[4, 3, 2] = select(%26, 3, 8)
%28: bfloat16[3, 2, 16] = empty([3, 2, 16])
%29: float32[0] = empty([0])
%30: tuple = triton_kernel_wrapper_functional(grid=[[3, 2, 1]],
    tma_descriptor_metadata={}, kwargs={'recv_output_ptr': slice_5, 'recv_lse_ptr':
    select_3, 'out_ptr': empty_2, 'out_lse_ptr': empty_3}, tensors_to_clone=[GROUP])
%31: bfloat16[3, 2, 16] = getitem(%30, GROUP)
return [%31]""",
        )
        self.assertExpectedInline(
            graph_text(found.after),
            """\
%0: bfloat16[3, 8, 16] = input
%1: float32[3, 8] = input
%2: bfloat16[3, 2, 16] = a2a_lse_reduce(%0, %1, GROUP, 4, base2)
return [%2]""",
        )

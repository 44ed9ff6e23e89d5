"""sglang's own, unmodified cp_lse_ag_out_rs_mla: fused when asked for, on all ranks."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from harness import Captured, normalised
from sglang_cases import (
    assert_all_agree,
    assert_fused,
    graph_text,
    partials,
    twisted_kernels,
)
from sglang_host import captured_on_cuda, group_of, run_as_ranks
from torch import Tensor

from dcp_inductor import Config
from dcp_inductor.compiler import gather_scatter

pytest_plugins = ("sglang_cases",)
pytestmark = pytest.mark.sglang

BF16 = torch.bfloat16
SHAPE = (3, 8, 16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Heads come first in what it gives back; "mul" is of sizes.
BESIDE = ("permute", "sym_size", "mul")


def trace(
    comm: Any,
    num_ranks: int,
    rank: int,
    dtype: torch.dtype = BF16,
    *,
    base_e: bool = False,
    dynamic: bool = False,
    allowed: bool = True,
    as_rank: int | None = None,
) -> Captured:
    """Compiled by rank ``rank``; as_rank: what the group says this process is."""
    group = group_of(num_ranks, rank)

    def reduce(o: Tensor, lse: Tensor) -> Tensor:
        return comm.cp_lse_ag_out_rs_mla(o, lse, group, is_lse_base_on_e=base_e)

    o, lse = partials(1, SHAPE, dtype)[0]
    if dynamic:
        torch._dynamo.mark_dynamic(o, 0)
        torch._dynamo.mark_dynamic(lse, 0)
    mine = rank if as_rank is None else as_rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_scatter, "rank_in_group", lambda name: mine)
        return captured_on_cuda(reduce, (o, lse), config=Config(ag_rs=allowed))


@pytest.mark.parametrize("base_e", [False, True], ids=["base2", "basee"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fuses_with_the_numbers_of_all_ranks(comm, dtype, base_e):
    """The rewritten graph, the original one and merge.py agree."""
    num_ranks, lse_mode = 4, "basee" if base_e else "base2"
    found = trace(comm, num_ranks, 1, dtype, base_e=base_e)
    assert_fused(found, lse_mode, num_ranks, BESIDE)
    inputs = partials(num_ranks, SHAPE, dtype, seed=1)
    allowed = 4 * torch.finfo(dtype).eps
    assert_all_agree(
        inputs,
        lse_mode,
        run_as_ranks(found.before, inputs),
        run_as_ranks(found.after, inputs),
        rtol=allowed,
        atol=allowed,
        heads_first=True,
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_get_the_same_graph(comm, num_ranks, dynamic):
    after = set()
    for rank in range(num_ranks):
        found = trace(comm, num_ranks, rank, dynamic=dynamic)
        assert_fused(found, "base2", num_ranks, BESIDE)
        after.add(normalised(found.after))
    assert len(after) == 1


@pytest.mark.parametrize(("rank", "mine"), [(0, 1), (1, 0), (3, 2)])
def test_a_rank_that_takes_anothers_lse_is_refused(comm, rank, mine):
    found = trace(comm, 4, rank, as_rank=mine)
    assert found.num_ops == 0
    assert f"this one's, which is {mine}" in found.reasons[0]


def test_without_leave_it_stays(comm):
    found = trace(comm, 4, 1, allowed=False)
    assert found.num_ops == 0
    assert "DCP_INDUCTOR_AG_RS=1" in found.reasons[0]


def test_gathered_into_a_buffer_of_the_caller_it_stays(comm):
    """What is in the buffer afterwards can be read."""
    group = group_of(4, 1)

    def reduce(o: Tensor, lse: Tensor, buffer: Tensor) -> Tensor:
        group.all_gather_into_tensor(buffer, lse)
        out = o.new_empty(o.transpose(0, 1).shape, dtype=torch.float32)
        lses = buffer.view(4, *lse.shape)
        comm.correct_attn_out(o, lses, 1, comm.CPTritonContext(), out)
        return group.reduce_scatter_along_dim(out, dim=0).to(o.dtype)

    o, lse = partials(1, SHAPE, BF16)[0]
    args = o, lse, torch.empty(4 * SHAPE[0], SHAPE[1])
    found = captured_on_cuda(reduce, args, config=Config(ag_rs=True))
    assert found.num_ops == 0
    assert "a buffer of the caller" in found.reasons[0]


CORRECTION = {
    "a temperature": ("lse = lse - lse_max", "lse = (lse - lse_max) * 0.99"),
    "the next rank's weight": (
        "lse_offset = lse_idx * lses_stride_N",
        "lse_offset = ((lse_idx + 1) % N_ROUNDED) * lses_stride_N",
    ),
    "not normalised": ("output = output * factor", "output = output * (factor + 1)"),
    "a clamp": (
        "lse_diff = local_lse - final_lse",
        "lse_diff = tl.maximum(local_lse - final_lse, -20.0)",
    ),
    "the other base": (
        "if IS_LSE_BASE_ON_E else tl.exp2(lse_diff)",
        "if IS_LSE_BASE_ON_E else tl.exp(lse_diff)",
    ),
}


@pytest.mark.parametrize("twist", CORRECTION)
def test_a_twisted_correction_of_the_same_name_is_refused(
    comm, monkeypatch, tmp_path, twist
):
    kernels = twisted_kernels(
        tmp_path, "_correct_attn_cp_out_kernel", *CORRECTION[twist]
    )
    monkeypatch.setattr(comm, "correct_attn_out", kernels.correct_attn_out)
    monkeypatch.setattr(comm, "CPTritonContext", kernels.CPTritonContext)
    found = trace(comm, 4, 1)
    assert found.num_ops == 0
    assert "merge" in found.reasons[0] or "permuted" in found.reasons[0]


class TestGolden(expecttest.TestCase):
    maxDiff = None

    @pytest.fixture(autouse=True)
    def _comm(self, comm: Any) -> None:
        self.comm = comm

    def test_bf16_static(self):
        found = trace(self.comm, 4, 1)
        self.assertExpectedInline(
            graph_text(found.before),
            """\
%0: bfloat16[3, 8, 16] = input
%1: float32[3, 8] = input
%2: float32[12, 8] = empty([12, 8])
%3: tuple = auto_functionalized_v2(sglang.reg_all_gather_into_tensor.default,
    input=%1, group_name=GROUP, _output_base_index=0, _all_bases=[%2])
%4: float32[12, 8] = getitem(%3, 1)
%5: float32[8, 3, 16] = empty([8, 3, 16])
%6: float32[4, 3, 8] = reshape(%4, [4, 3, 8])
%7: float32[4, 3, 8] = permute(%6, [0, 1, 2])
%8: float32[3, 8] = empty_strided([3, 8], [8, 1])
%9: tuple = triton_kernel_wrapper_functional(grid=[[3, 8, 1]],
    tma_descriptor_metadata={}, kwargs={'outputs_ptr': arg0_1, 'new_output_ptr':
    empty, 'lses_ptr': permute_4, 'vlse_ptr': empty_strided},
    tensors_to_clone=[GROUP, GROUP])
%10: float32[8, 3, 16] = getitem(%9, GROUP)
%11: float32[8, 3, 16] = permute(%10, [0, 1, 2])
%12: float32[2, 3, 16] = empty([2, 3, 16])
%13: tuple = auto_functionalized_v2(sglang.reg_reduce_scatter_tensor.default,
    input=%11, group_name=GROUP, _output_base_index=0, _all_bases=[%12])
%14: float32[2, 3, 16] = getitem(%13, 1)
%15: float32[2, 3, 16] = permute(%14, [0, 1, 2])
%16: bfloat16[2, 3, 16] = convert_element_type(%15, bfloat16)
return [%16]""",
        )
        self.assertExpectedInline(
            graph_text(found.after),
            """\
%0: bfloat16[3, 8, 16] = input
%1: float32[3, 8] = input
%2: bfloat16[3, 2, 16] = a2a_lse_reduce(%0, %1, GROUP, 4, base2)
%3: bfloat16[2, 3, 16] = permute(%2, [1, 0, 2])
return [%3]""",
        )

"""The op on real gloo processes, its fake, its errors."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import dcp_inductor.op as op
from dcp_inductor.errors import BadInput, UnknownGroup
from dcp_inductor.merge import PARTIAL_DTYPES, a2a_lse_reduce_reference

MODES = ("base2", "basee")


def partials(num_ranks: int, b: int, h: int, d: int, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    o = torch.randn(num_ranks, b, h, d, generator=rng).to(dtype)
    lse = torch.randn(num_ranks, b, h, generator=rng) * 5
    return o, lse


def check(o, lse, rank, mode, given_o=None, given_lse=None):
    """The op on this rank's partials (or respelled ones) against merge.py, exactly."""
    out, out_lse = op.a2a_lse_reduce(
        o[rank] if given_o is None else given_o,
        lse[rank] if given_lse is None else given_lse,
        lse_mode=mode,
        return_lse=True,
    )
    wanted, wanted_lse = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=mode)
    assert out.dtype == o.dtype
    assert out.is_contiguous()
    assert torch.equal(out.float(), wanted.float())
    assert torch.equal(out_lse, wanted_lse)


def every_dtype_stride_and_special_value(rank, num_ranks):
    for dtype in PARTIAL_DTYPES:
        for mode in MODES:
            check(*partials(num_ranks, 3, 4 * num_ranks, 5, dtype), rank, mode)
    o, lse = partials(num_ranks, 5, 2 * num_ranks, 16)
    head_major = o[rank].transpose(0, 1).contiguous().transpose(0, 1)
    pitched = torch.zeros(2 * num_ranks, 8, 16)
    pitched[:, :5] = o[rank].transpose(0, 1)
    spellings = {
        "head-major": (head_major, lse[rank]),
        "capacity-pitched": (pitched[:, :5].transpose(0, 1), lse[rank]),
        "[B, H, 1] LSE": (o[rank], lse[rank].unsqueeze(-1)),
        "transposed LSE": (o[rank], lse[rank].t().contiguous().t()),
        "every second column": (o[rank].repeat_interleave(2, -1)[..., ::2], lse[rank]),
    }
    for given in spellings.values():
        check(o, lse, rank, "base2", *given)
    lse[0], lse[:, 1] = -torch.inf, torch.inf
    o[0], lse[1, 2] = torch.nan, torch.nan
    check(o, lse, rank, "basee")
    one_lse = o[:1, :, :1, 0].expand(num_ranks, 5, 2 * num_ranks).contiguous()
    check(o.nan_to_num(), one_lse.nan_to_num(), rank, "base2")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equals_merge_on_real_processes(num_ranks):
    run_ranks(every_dtype_stride_and_special_value, num_ranks)


def sub_groups_and_sizes(rank, num_ranks):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    o, lse = partials(4, 2, 4, 3, seed=rank // 2)
    o, lse = o[:2], lse[:2]
    out = op.a2a_lse_reduce(o[rank % 2], lse[rank % 2], mine, lse_mode="basee")
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank % 2, lse_mode="basee")
    assert torch.equal(out, wanted)
    by_name = op.a2a_lse_reduce(
        o[rank % 2], lse[rank % 2], mine.group_name, lse_mode="basee"
    )
    assert torch.equal(by_name, wanted)
    empty = op.a2a_lse_reduce(torch.zeros(0, 4, 3), torch.zeros(0, 4), lse_mode="base2")
    assert empty.shape == (0, 1, 3)
    with pytest.raises(BadInput, match=r"for 4 ranks, but group .* has 2"):
        torch.ops.dcp_inductor.a2a_lse_reduce(o[0], lse[0], mine.group_name, 4, "base2")


def test_sub_groups_and_empty_batch():
    run_ranks(sub_groups_and_sizes, 4)


def alone(fn, *args):
    """Run with a process group of one rank, in this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()


def in_compiled_functions(rank, num_ranks):
    """Whichever way the group is given, and never one group for another."""

    @torch.compile(fullgraph=True)
    def reduced(o, lse, group):
        return op.a2a_lse_reduce(o, lse, group, lse_mode="base2", return_lse=True)

    o, lse = partials(num_ranks, 2, 4, 8)
    world = dist.group.WORLD
    alone = [dist.new_group([member]) for member in range(num_ranks)][rank]
    whole = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    for group, wanted in (
        (world, whole),
        (alone, (o[rank], lse[rank])),
        (None, whole),
        (alone.group_name, (o[rank], lse[rank])),
        (world.group_name, whole),
    ):
        found = reduced(o[rank], lse[rank], group)
        assert all(map(torch.equal, found, wanted))


def test_in_a_function_that_is_compiled_whole():
    run_ranks(in_compiled_functions, 2)


def test_world_size_one_is_the_identity():
    o, lse = partials(1, 3, 4, 5)

    def run():
        return op.a2a_lse_reduce(o[0], lse[0], lse_mode="base2", return_lse=True)

    out, out_lse = alone(run)
    assert torch.equal(out, o[0])
    assert torch.equal(out_lse, lse[0])
    assert out.data_ptr() != o.data_ptr()


GOOD = (torch.zeros(2, 4, 8), torch.zeros(2, 4))
BAD = {
    "2-D partial": (GOOD[0][0], GOOD[1], r"takes \[B, H, D\]"),
    "fp64 partial": (GOOD[0].double(), GOOD[1], "Cast it before"),
    "bf16 LSE": (GOOD[0], GOOD[1].bfloat16(), "must be torch.float32"),
    "LSE of another batch": (GOOD[0], torch.zeros(3, 4), "one LSE belongs to each"),
    "[H, B] LSE": (GOOD[0], torch.zeros(4, 2), r"Transpose an \[H, B\]"),
    "meta LSE": (GOOD[0], torch.zeros(2, 4, device="meta"), "both must be on"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_partials_are_named(name):
    o, lse, message = BAD[name]
    with pytest.raises(BadInput, match=message):
        alone(lambda: op.a2a_lse_reduce(o, lse, lse_mode="base2"))


def test_bad_group_and_base_are_named():
    with pytest.raises(UnknownGroup, match="before any process group exists"):
        op.a2a_lse_reduce(*GOOD, lse_mode="base2")
    with pytest.raises(UnknownGroup, match="is called 'nope'; it has"):
        alone(lambda: op.a2a_lse_reduce(*GOOD, "nope", lse_mode="base2"))
    with pytest.raises(BadInput, match="lse_mode='base10' is unknown"):
        alone(lambda: op.a2a_lse_reduce(*GOOD, lse_mode="base10"))


@pytest.mark.parametrize("group", ["nope", None])
def test_a_compiled_call_names_an_unknown_group_too(group):
    compiled = torch.compile(op.a2a_lse_reduce, backend="aot_eager", fullgraph=True)
    message = "before any process group exists"
    with pytest.raises(UnknownGroup, match=message):
        compiled(*GOOD, group, lse_mode="base2")


def heads_that_dont_divide(rank, num_ranks):
    with pytest.raises(BadInput, match="3 heads can't be shared by 2 ranks"):
        op.a2a_lse_reduce(torch.zeros(1, 3, 4), torch.zeros(1, 3), lse_mode="base2")


def test_bad_heads_and_device_are_named():
    run_ranks(heads_that_dont_divide, 2)
    nccl = types.SimpleNamespace(_device_types=[torch.device("cuda")])
    with pytest.raises(BadInput, match=r"'dcp' communicates on \['cuda'\] only"):
        op._check_device(GOOD[0], nccl, "dcp")


def opcheck_all(rank, num_ranks):
    (o, lse), (name,) = partials(num_ranks, 3, 4, 5), [dist.group.WORLD.group_name]
    strided = o[rank].transpose(0, 1).contiguous().transpose(0, 1)
    for overload in ("a2a_lse_reduce", "a2a_lse_reduce_with_lse"):
        target = getattr(torch.ops.dcp_inductor, overload).default
        for args in ((o[rank], lse[rank]), (strided, lse[rank])):
            torch.library.opcheck(target, (*args, name, num_ranks, "base2"))
        lane = getattr(torch.ops.dcp_inductor, overload + "_lane").default
        torch.library.opcheck(
            lane, (o[rank], lse[rank], name, num_ranks, "basee", 1, 2)
        )


def test_opcheck():
    run_ranks(opcheck_all, 2)


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_fake_is_exact_for_any_strides(batch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        o = torch.empty(8, batch, 16, dtype=torch.bfloat16).transpose(0, 1)
        lse = torch.empty(batch, 8).expand(batch, 8)
        out, out_lse = torch.ops.dcp_inductor.a2a_lse_reduce_with_lse(
            o, lse, "any", 4, "base2"
        )
    assert out.shape == (batch, 2, 16)
    assert out.stride() == (32, 16, 1)
    assert out.dtype == torch.bfloat16
    assert (out_lse.shape, out_lse.stride()) == ((batch, 2), (2, 1))
    assert out_lse.dtype == torch.float32

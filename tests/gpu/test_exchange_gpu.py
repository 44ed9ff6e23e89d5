"""The fused op on real GPUs: numbers, CUDA graphs, streams, lanes, neighbours.

Launched with torchrun, one rank a GPU; every rank makes all ranks' partials from one
seed, so each checks its own results against merge.py.
"""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from tolerances import assert_merged, rounding_steps
from torch.distributed import _symmetric_memory as symm_mem

import dcp_inductor
from dcp_inductor.errors import NotReserved, StreamConflict
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime import workspace

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOLERANCE = rounding_steps(fp32=1e-5)


def partials(num_ranks, b, h, d, dtype=torch.bfloat16, seed=0):
    rng = torch.Generator(device="cuda").manual_seed(seed)
    shape = (num_ranks, b, h, d)
    o = torch.randn(shape, generator=rng, device="cuda").to(dtype)
    lse = torch.randn(shape[:-1], generator=rng, device="cuda") * 4
    return o, lse


def newest():
    return workspace.reservations()[-1][1]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", ["base2", "basee"])
def test_every_dtype_and_head_dim(ranks, dtype, mode):
    rank, n = ranks
    for d in (64, 96, 192, 512, 576):
        for h in (n, 3 * n, 16 * n):
            o, lse = partials(n, 5, h, d, dtype)
            out, out_lse = dcp_inductor.a2a_lse_reduce(
                o[rank], lse[rank], lse_mode=mode, return_lse=True
            )
            assert_merged(out, o, lse, rank, mode)
            _, wanted = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=mode)
            torch.testing.assert_close(out_lse, wanted, rtol=1e-5, atol=1e-5)
            assert newest().backend.name == "symm_mem"


def test_special_values_and_strides(ranks):
    rank, n = ranks
    o, lse = partials(n, 6, 4 * n, 128)
    lse[0, 0] = -math.inf
    lse[:, 1] = -math.inf
    lse[0, 2] = math.inf
    lse[0, 3] = math.nan
    o[0, :4] = math.nan
    o[:, 4] = -0.0
    lse[:, 4] = -0.0
    head_major = o[rank].transpose(0, 1).contiguous().transpose(0, 1)
    lse_t = lse[rank].t().contiguous().t()
    wide = torch.zeros(6, 4 * n, 130, device="cuda", dtype=o.dtype)
    wide[..., 1:129] = o[rank]
    for given, given_lse in (
        (o[rank], lse[rank]),
        (head_major, lse_t),
        (wide[..., 1:129], lse[rank].unsqueeze(-1)),
    ):
        out = dcp_inductor.a2a_lse_reduce(given, given_lse, lse_mode="basee")
        assert_merged(out, o, lse, rank, "basee")


def test_calls_that_differ_in_one_thing_follow_one_another(ranks):
    """Each would be wrong on the launch that was prepared for the one before."""
    rank, n = ranks
    o, lse = partials(n, 3, 2 * n, 64)
    wide = torch.zeros(3, 2 * n, 80, device="cuda", dtype=o.dtype)
    far = torch.zeros(1 << 20, device="cuda", dtype=o.dtype)
    one = far.as_strided((1, 2 * n, 64), (1 << 31, 64, 1))
    one.copy_(o[rank, :1])
    for mode in ("base2", "basee"):
        for start in (0, 1, 8):
            wide[..., start : start + 64] = o[rank]
            given = wide[..., start : start + 64]
            out = dcp_inductor.a2a_lse_reduce(given, lse[rank], lse_mode=mode)
            assert_merged(out, o, lse, rank, mode)
        for tokens in (3, 2):
            out, out_lse = dcp_inductor.a2a_lse_reduce(
                o[rank, :tokens], lse[rank, :tokens], lse_mode=mode, return_lse=True
            )
            assert_merged(out, o[:, :tokens], lse[:, :tokens], rank, mode)
            assert out_lse.shape == (tokens, 2)
        out = dcp_inductor.a2a_lse_reduce(one, lse[rank, :1], lse_mode=mode)
        assert_merged(out, o[:, :1], lse[:, :1], rank, mode)


def test_an_eager_call_and_a_graph_at_once_in_opposite_order(ranks):
    """Wider than fits twice: neither may keep the other's programs from their place."""
    rank, n = ranks
    h, d, b = 16 * n, 512, 320
    dcp_inductor.reserve(max_tokens=b, num_heads=h, head_dim=d, dtype=torch.bfloat16)
    o, lse = partials(n, b, h, d)
    mine, my_lse = o[rank].clone(), lse[rank].clone()

    def call():
        return dcp_inductor.a2a_lse_reduce(mine, my_lse, lse_mode="base2")

    call()
    graph, captured = capture(lambda: [call() for _ in range(3)][-1])
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def eager():
        with torch.cuda.stream(streams[0]):
            return [call() for _ in range(3)][-1]

    def replay():
        with torch.cuda.stream(streams[1]):
            graph.replay()

    for step in range(40):
        if (step + rank) % 2:
            out = eager()
            replay()
        else:
            replay()
            out = eager()
        torch.cuda.synchronize()
        for result in (out, captured):
            assert_merged(result, o, lse, rank)
    dcp_inductor.check()


def test_results_are_identical_from_run_to_run(ranks):
    rank, n = ranks
    o, lse = partials(n, 32, 16 * n, 512)
    first = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
    for _ in range(50):
        again = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
        assert torch.equal(first, again)


def test_wider_than_the_slot_and_empty(ranks):
    rank, n = ranks
    dcp_inductor.reserve(
        max_tokens=16, num_heads=2 * n, head_dim=32, dtype=torch.bfloat16
    )
    for b in (1, 16, 17, 48, 49):
        o, lse = partials(n, b, 2 * n, 32, seed=b)
        out = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
        assert_merged(out, o, lse, rank)
    empty = dcp_inductor.a2a_lse_reduce(o[rank, :0], lse[rank, :0], lse_mode="base2")
    assert empty.shape == (0, 2, 32)


def test_rows_that_are_no_whole_words_go_to_the_next_backend(ranks):
    rank, n = ranks
    o, lse = partials(n, 3, 2 * n, 33)
    out = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
    assert_merged(out, o, lse, rank)
    assert newest().backend.name == "collective"


def capture(fn, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = fn()
    return graph, out


def test_graphs_of_several_widths_mixed_with_eager_on_other_streams(ranks):
    rank, n = ranks
    h, d = 16 * n, 512
    dcp_inductor.reserve(max_tokens=64, num_heads=h, head_dim=d, dtype=torch.bfloat16)
    graphs = {}
    for b in (1, 7, 32, 64):
        o = torch.zeros(b, h, d, dtype=torch.bfloat16, device="cuda")
        lse = torch.zeros(b, h, device="cuda")
        graph, out = capture(
            lambda o=o, lse=lse: dcp_inductor.a2a_lse_reduce(o, lse, lse_mode="base2")
        )
        graphs[b] = (graph, o, lse, out)
    choose = random.Random(5)
    side = torch.cuda.Stream()
    for step in range(300):
        b = choose.choice([*graphs])
        o, lse = partials(n, b, h, d, seed=step)
        torch.cuda.synchronize()
        stream = choose.choice([torch.cuda.default_stream(), side])
        with torch.cuda.stream(stream):
            if choose.random() < 0.5:
                graph, o_in, lse_in, out = graphs[b]
                o_in.copy_(o[rank])
                lse_in.copy_(lse[rank])
                graph.replay()
            else:
                out = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
        torch.cuda.synchronize()
        assert_merged(out, o, lse, rank)
    dcp_inductor.check()


def test_first_call_in_a_capture_says_what_to_call(ranks):
    rank, n = ranks
    o, lse = partials(n, 2, 2 * n, 40)
    with pytest.raises(NotReserved, match=r"head_dim=40, dtype=torch\.bfloat16"):
        capture(
            lambda: dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
        )
    torch.cuda.synchronize()


def test_second_capture_stream_is_refused_before_the_exchange(ranks):
    rank, n = ranks
    shape = {"num_heads": 2 * n, "head_dim": 48, "dtype": torch.bfloat16}
    o, lse = partials(n, 2, 2 * n, 48)

    def call():
        return dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")

    dcp_inductor.reserve(max_tokens=8, **shape)
    first, out = capture(call, torch.cuda.Stream())
    with pytest.raises(StreamConflict, match="capture_domains=2"):
        capture(call, torch.cuda.Stream())
    torch.cuda.synchronize()
    first.replay()
    assert_merged(out, o, lse, rank)
    dcp_inductor.reserve(max_tokens=8, capture_domains=2, **shape)
    for _ in range(2):
        graph, out = capture(call, torch.cuda.Stream())
        graph.replay()
        assert_merged(out, o, lse, rank)


def chain(o, lse, num_ranks, group):
    """Plain torch: payload bits, then LSE bits, one all-to-all, merge in base 2."""
    b, h, d = o.shape
    shape = (num_ranks, b, h // num_ranks)
    o_parts = o.view(b, num_ranks, h // num_ranks, d).transpose(0, 1)
    lse_parts = lse.view(b, num_ranks, h // num_ranks).transpose(0, 1)
    sent = torch.cat(
        [
            o_parts.reshape(num_ranks, -1),
            lse_parts.reshape(num_ranks, -1).view(o.dtype),
        ],
        1,
    )
    received = dist._functional_collectives.all_to_all_single(sent, None, None, group)
    got_o = received[:, : b * (h // num_ranks) * d].reshape(*shape, d).float()
    got_lse = received[:, b * (h // num_ranks) * d :].contiguous()
    got_lse = got_lse.view(torch.float32).view(*shape, 1)
    weight = torch.exp2(got_lse - got_lse.amax(0, keepdim=True))
    return ((got_o * weight).sum(0) / weight.sum(0)).to(o.dtype)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("d", [512, 576])
def test_compiled_with_the_pass(ranks, mode, d):
    rank, n = ranks
    group = dist.group.WORLD.group_name
    h, layers = 16 * n, 4
    torch._dynamo.reset()
    dcp_inductor.reserve(max_tokens=32, num_heads=h, head_dim=d, dtype=torch.bfloat16)

    def decoder(o, lse):
        outs = []
        for layer in range(layers):
            outs.append(chain(o * (1 + layer), lse + layer, n, group))
            o = o + outs[-1].repeat(1, n, 1) * 0.125
        return outs

    fused = []
    dcp_inductor.install().listener = lambda report: fused.append(report.fused)
    try:
        fn = torch.compile(decoder, fullgraph=True, mode=mode)
        torch._inductor.config.force_disable_caches = True
        for step in range(6):
            o, lse = partials(n, 4, h, d, seed=step)
            torch.compiler.cudagraph_mark_step_begin()
            outs = [out.clone() for out in fn(o[rank].clone(), lse[rank].clone())]
            assert_merged(outs[0], o, lse, rank)
            unfused = decoder(o[rank], lse[rank])
            for out, other in zip(outs, unfused, strict=True):
                off = (out - other).float().norm() / other.float().norm()
                assert off.item() < 1e-2
    finally:
        dcp_inductor.uninstall()
        torch._inductor.config.force_disable_caches = False
    assert sum(fused) == layers
    dcp_inductor.check()


def test_user_streams_get_their_own_lanes(ranks):
    rank, n = ranks
    group = dist.group.WORLD.group_name
    h, d = 4 * n, 64
    dcp_inductor.reserve(
        max_tokens=16, num_heads=h, head_dim=d, dtype=torch.bfloat16, lanes=3
    )
    side = [torch.cuda.Stream(), torch.cuda.Stream()]

    def two(o, lse):
        outs = []
        for stream, scale in zip(side, (1.0, 2.0), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs.append(chain(o * scale, lse, n, group))
        for stream in side:
            torch.cuda.current_stream().wait_stream(stream)
        return outs

    dcp_inductor.install()
    torch._dynamo.reset()
    try:
        fn = torch.compile(two)
        for step in range(20):
            o, lse = partials(n, 3, h, d, seed=step)
            outs = fn(o[rank], lse[rank])
            torch.cuda.synchronize()
            assert_merged(outs[0], o, lse, rank)
            assert_merged(outs[1], o * 2, lse, rank)
    finally:
        dcp_inductor.uninstall()


def test_one_shot_all_reduce_stays_exact_around_fused_calls(ranks):
    rank, n = ranks
    group = dist.group.WORLD.group_name
    assert symm_mem.get_backend(torch.device("cuda")) == "CUDA"
    shared = symm_mem.empty(4096, dtype=torch.float32, device="cuda")
    symm_mem.rendezvous(shared, group)
    for step in range(100):
        o, lse = partials(n, 8, 8 * n, 128, seed=step)
        out = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
        shared.fill_(rank + step)
        total = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
        assert_merged(out, o, lse, rank)
        assert (total == sum(r + step for r in range(n))).all()
    assert symm_mem.get_backend(torch.device("cuda")) == "CUDA"


def test_two_groups_and_two_geometries_side_by_side(ranks):
    rank, n = ranks
    other = dist.new_group([*range(n)])
    for step in range(20):
        for group, d in ((None, 512), (other, 128), (other, 512)):
            o, lse = partials(n, 4, 4 * n, d, seed=step)
            out = dcp_inductor.a2a_lse_reduce(
                o[rank], lse[rank], group, lse_mode="base2"
            )
            assert_merged(out, o, lse, rank)


def test_a_write_behind_a_slot_shows(ranks):
    _, n = ranks
    buffers = dcp_inductor.reserve(
        max_tokens=3, num_heads=n, head_dim=40, dtype=torch.float16
    ).buffers
    assert not buffers.trespassed()
    buffers.buffer[buffers.slot_bytes - 1] = 0
    assert buffers.trespassed()


SOAK_CALLS = int(os.environ.get("DCP_SOAK_CALLS", "20000"))


def test_soak(ranks):
    """Random widths, eager and replay mixed, random skew; every result checked.

    Checked on the device against a reference computed there; the flag is read at the
    end of a block, so that ranks run apart.
    """
    rank, n = ranks
    # The widest has two rows a program, and half a row more.
    h, d, widths = 16 * n, 128, (1, 2, 3, 5, 8, 16, 31, 160)
    reservation = dcp_inductor.reserve(
        max_tokens=160, num_heads=h, head_dim=d, dtype=torch.bfloat16
    )
    choose = random.Random(11)
    skew = random.Random(100 + rank)
    graphs, pool = {}, []
    for seed in range(16):
        b = widths[seed % len(widths)]
        o, lse = partials(n, b, h, d, seed=seed)
        wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
        mine, my_lse = o[rank].clone(), lse[rank].clone()
        graph, out = capture(
            lambda o=mine, lse=my_lse: dcp_inductor.a2a_lse_reduce(
                o, lse, lse_mode="base2"
            )
        )
        graphs[seed] = (graph, out)
        pool.append((mine, my_lse, wanted))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    worst = torch.zeros((), device="cuda")
    for call in range(SOAK_CALLS):
        seed = choose.randrange(len(pool))
        mine, my_lse, wanted = pool[seed]
        if choose.random() < 0.5:
            graph, out = graphs[seed]
            graph.replay()
        else:
            out = dcp_inductor.a2a_lse_reduce(mine, my_lse, lse_mode="base2")
        off = (out.float() - wanted.float()).abs().amax()
        worst = torch.maximum(worst, off.nan_to_num(1e9))
        wrong += ~(off <= 2**-6)
        if skew.random() < 0.02:
            torch.cuda._sleep(skew.randrange(200_000))
        if call % 5000 == 4999:
            assert wrong.item() == 0, (call, worst.item())
    assert wrong.item() == 0
    dcp_inductor.check()
    assert not reservation.buffers.trespassed()
    if rank == 0:
        print(f"\nsoak: {SOAK_CALLS} calls, worst absolute error {worst.item():.3g}")

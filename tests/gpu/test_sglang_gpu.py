"""sglang's real function on real GPUs: numbers, the pass, CUDA graphs made its way.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_sglang_gpu.py -m gpu

Needs sglang's Python sources. Real: sglang's pack, exchange, combine, its group with
its NCCL communicator, its capture context and stream. Every rank makes all ranks'
partials from one seed, so each checks its own results against merge.py.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from tolerances import assert_merged, rounding_steps

import dcp_inductor
from dcp_inductor.runtime import workspace

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

D = 512
BATCHES = (1, 7, 32)
TOLERANCE = rounding_steps(fp32=1e-5)


@pytest.fixture(scope="module")
def group(ranks):
    """sglang's own group; module-wide, since its name is taken once a process."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang's sources on the path")
    from dcp_inductor.bench.sglang import dcp_group

    return dcp_group()


@pytest.fixture(autouse=True)
def _no_caches():
    """The pass must look at every graph, so that its reports can be counted."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def partials(n, b, h, dtype=torch.bfloat16, seed=0):
    rng = torch.Generator(device="cuda").manual_seed(seed)
    o = torch.randn(n, b, h, D, generator=rng, device="cuda").to(dtype)
    return o, torch.randn(n, b, h, generator=rng, device="cuda") * 4


def reserve(group, h, dtype=torch.bfloat16):
    return dcp_inductor.reserve(
        group.unique_name, max_tokens=64, num_heads=h, head_dim=D, dtype=dtype
    )


def variants_of(group, o, lse, base_e=False):
    """The three variants, and the reports that the pass will make."""
    from dcp_inductor.bench.sglang import sglang_variants

    reports = []
    variants = sglang_variants(o, lse, group, base_e=base_e, listener=reports.append)
    return variants, reports


def assert_fused(reports, mode):
    (report,) = reports
    assert report.fused == 1, [str(finding) for finding in report.findings]
    assert [finding.lse_mode for finding in report.findings] == [mode]
    assert workspace.reservations()[-1][1].backend.name == "symm_mem"


@pytest.mark.parametrize("base_e", [False, True], ids=["base2", "basee"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_eager_compiled_and_fused_agree(ranks, group, dtype, base_e):
    rank, n = ranks
    h, mode = 4 * n, "basee" if base_e else "base2"
    reserve(group, h, dtype)
    o, lse = partials(n, 5, h, dtype)
    variants, reports = variants_of(group, o[rank].clone(), lse[rank].clone(), base_e)
    if dtype.itemsize == 1 and torch.__version__ < (2, 12):
        del variants["compiled"]  # This Inductor can't fill float8 tensors.
    for call in variants.values():
        assert_merged(call(), o, lse, rank, mode)
    assert_fused(reports, mode)


@pytest.mark.parametrize("heads_per_rank", [16, 64])
def test_graphs_captured_as_sglang_does(ranks, group, heads_per_rank):
    """One graph a batch size and variant on sglang's capture stream, replayed on
    another, with new inputs each time, in turns."""
    from dcp_inductor.bench.sglang import capture, capture_session

    rank, n = ranks
    h = heads_per_rank * n
    reserve(group, h)
    graphs = {}
    with capture_session(group) as stream:
        for b in reversed(BATCHES):
            torch._dynamo.reset()
            o, lse = partials(n, b, h)
            mine, my_lse = o[rank].clone(), lse[rank].clone()
            variants, reports = variants_of(group, mine, my_lse)
            for name, call in variants.items():
                graphs[b, name] = (*capture(call, stream), mine, my_lse)
            assert_fused(reports, "base2")
    assert stream != torch.cuda.current_stream()
    for step in range(20):
        for (b, _), (graph, out, mine, my_lse) in graphs.items():
            o, lse = partials(n, b, h, seed=step)
            mine.copy_(o[rank])
            my_lse.copy_(lse[rank])
            graph.replay()
            assert_merged(out, o, lse, rank, "base2")
    dcp_inductor.check()


def test_a_graph_of_sixty_layers_replays_to_the_same_bits(ranks, group):
    from dcp_inductor.bench.sglang import capture, capture_session

    rank, n = ranks
    h = 16 * n
    reserve(group, h)
    o, lse = partials(n, 8, h)
    variants, _ = variants_of(group, o[rank].clone(), lse[rank].clone())
    with capture_session(group) as stream:
        graph, out = capture(variants["pass"], stream, calls=60)
    graph.replay()
    first = out.clone()
    assert_merged(first, o, lse, rank, "base2")
    for _ in range(50):
        graph.replay()
        assert torch.equal(out, first)


def test_empty_shards(ranks, group):
    rank, n = ranks
    h = 4 * n
    reserve(group, h)
    o, lse = partials(n, 4, h)
    lse[0, 0] = -math.inf
    lse[:, 1] = -math.inf
    variants, reports = variants_of(group, o[rank].clone(), lse[rank].clone())
    for call in variants.values():
        assert_merged(call(), o, lse, rank, "base2")
    assert_fused(reports, "base2")


def test_ag_rs_where_it_is_allowed(ranks, group):
    """Each rank's graph holds its own rank; all fuse, and agree with merge.py."""
    from sglang.srt.layers.dcp import comm

    rank, n = ranks
    h = 16 * n
    reserve(group, h)
    o, lse = partials(n, 5, h)

    def reduce(o, lse):
        return comm.cp_lse_ag_out_rs_mla(o, lse, group, is_lse_base_on_e=False)

    reports = []
    config = dcp_inductor.Config(ag_rs=True)
    fusion_pass = dcp_inductor.DcpFusionPass(config, reports.append)
    options = {"post_grad_custom_pre_pass": fusion_pass}
    fused = torch.compile(reduce, fullgraph=True, dynamic=False, options=options)
    for fn in (reduce, fused):
        assert_merged(fn(o[rank], lse[rank]).transpose(0, 1), o, lse, rank, "base2")
    assert_fused(reports, "base2")


def test_the_eager_hook_in_a_capture(ranks, group, monkeypatch):
    """A server that doesn't compile: the hook sends what was reserved to the op."""
    from sglang.srt.layers.dcp import comm

    from dcp_inductor.bench.sglang import capture, capture_session
    from dcp_inductor.integrations import sglang_eager
    from dcp_inductor.integrations.sglang_plan import Plan

    rank, n = ranks
    h = 16 * n
    reserve(group, h)
    names = group.unique_name, group.device_group.group_name
    plan = Plan(*names, n, 64, h, D, torch.bfloat16, None, "a2a", False, True)
    monkeypatch.setattr(sglang_eager, "_serving", {})
    sglang_eager.serve(plan)
    o, lse = partials(n, 8, h)
    mine, my_lse = o[rank].clone(), lse[rank].clone()

    def call():
        return sglang_eager.around(
            comm.dcp_a2a_lse_reduce, mine, my_lse, group, is_lse_base_on_e=False
        )

    with capture_session(group) as stream:
        graph, out = capture(call, stream)
    for step in range(10):
        o, lse = partials(n, 8, h, seed=step)
        mine.copy_(o[rank])
        my_lse.copy_(lse[rank])
        graph.replay()
        assert_merged(out, o, lse, rank, "base2")
        assert_merged(call(), o, lse, rank, "base2")
    dcp_inductor.check()


def test_buffers_of_the_caller_stay_unfused_on_a_gpu(ranks, group):
    from sglang.srt.layers.dcp import comm

    rank, n = ranks
    h = 4 * n
    o, lse = partials(n, 3, h)
    buffers = [
        torch.empty(n, 3, h // n, D + 2, dtype=o.dtype, device="cuda") for _ in range(2)
    ]

    def reduce(o, lse, sent, received):
        given = {"send_combined": sent, "recv_combined": received}
        return comm.dcp_a2a_lse_reduce(o, lse, group, False, given)

    reports = []
    fusion_pass = dcp_inductor.DcpFusionPass(dcp_inductor.Config(), reports.append)
    compiled = torch.compile(
        reduce, fullgraph=True, options={"post_grad_custom_pre_pass": fusion_pass}
    )
    assert_merged(compiled(o[rank], lse[rank], *buffers), o, lse, rank, "base2")
    (report,) = reports
    assert report.fused == 0
    assert "a buffer of the caller" in str(report.findings[0])
    # What the peers sent is in the buffer: it is observable.
    assert torch.equal(buffers[1][rank, ..., :D], o[rank].chunk(n, 1)[rank])

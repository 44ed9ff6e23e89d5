"""FlashInfer's own op under backend="flashinfer", on real GPUs.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_flashinfer_gpu.py -m gpu

The released op sets torch's symmetric memory to NCCL's for the whole process, so these
tests skip unless they are alone in theirs. It waits for its peers without a bound: no
test lets a rank stay away, and one that hangs is ended by its timeout, process and all.
Without FlashInfer, or where it can't run, they skip and say why.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tolerances import NARROW, assert_merged
from torch.distributed import _symmetric_memory as symm_mem

import dcp_inductor
from dcp_inductor.bench.chain import chain
from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime.backends import flashinfer as backend
from dcp_inductor.runtime.backends.flashinfer import FlashInfer
from dcp_inductor.runtime.backends.flashinfer_op import installed_op

# A rank in a kernel that waits can't be interrupted, its process can.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

D = 512


@pytest.fixture(scope="module")
def op(request, ranks):
    """What the installed op does, once its kernel is known to load here."""
    here = Path(__file__)
    if any(item.path != here for item in request.session.items):
        pytest.skip(
            "FlashInfer's op changes torch's symmetric memory for the whole process; "
            "run this file alone"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    reason = FlashInfer().unavailable(dist.group.WORLD, device)
    if reason is not None:
        pytest.skip(f"FlashInfer's op can't run here: {reason}")
    found = installed_op()
    try:
        backend._load(found)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return found


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    """Building may take minutes, and ranks wait for each other meanwhile."""
    monkeypatch.setenv("DCP_INDUCTOR_BACKEND", "flashinfer")
    monkeypatch.setenv("DCP_INDUCTOR_TIMEOUT_S", "100")


def reserve(h, d=D, dtype=torch.bfloat16, max_tokens=64, **more):
    return dcp_inductor.reserve(
        max_tokens=max_tokens, num_heads=h, head_dim=d, dtype=dtype, **more
    )


def partials(n, b, h, d=D, dtype=torch.bfloat16, seed=0):
    """Of all ranks, with empty shards that hold NaN and a row that is empty on all."""
    rng = torch.Generator(device="cuda").manual_seed(seed)
    o = torch.randn(n, b, h, d, generator=rng, device="cuda").to(dtype)
    lse = torch.randn(n, b, h, generator=rng, device="cuda") * 4
    for rank, empty in zip(range(n), (-math.inf, math.inf, math.nan), strict=False):
        lse[rank, :, rank::5] = empty
        o[rank, :, rank::5] = math.nan
    lse[:, 0, -1] = -math.inf
    return o, lse


def call(o, lse, rank, mode="base2"):
    return dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode=mode)


def test_reserve_makes_proved_workspaces(ranks, op):
    _, n = ranks
    before = symm_mem.get_backend("cuda")
    found = reserve(8 * n, capture_domains=2)
    assert found.backend.name == "flashinfer"
    assert len(found.buffers.workspaces) == found.geometry.num_slots == 3
    assert found.nbytes == 3 * FlashInfer().slot_bytes(found.geometry)
    assert symm_mem.get_backend("cuda") == ("NCCL" if op.sets_backend else before)
    if dist.get_rank() == 0:
        print(f"\n{op}, clears_empty: {found.buffers.clears_empty}")


@pytest.mark.parametrize("scale", [1.25, math.nan])
def test_reserve_finds_wrong_numbers(ranks, op, monkeypatch, scale):
    _, n = ranks

    class Wrong(backend.FlashInferBuffers):
        def __init__(self, *args):
            super().__init__(*args)
            right = self.launch
            self.launch = lambda *args: right(*args) * scale

    monkeypatch.setattr(backend, "FlashInferBuffers", Wrong)
    with pytest.raises(BackendUnavailable, match=r"off by .* from merge\.py"):
        reserve(3 * n)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("mode", ["base2", "basee"])
def test_against_merge(ranks, op, dtype, mode):
    rank, n = ranks
    for h, d in ((n, 64), (3 * n, 192), (16 * n, 512), (64 * n, 576)):
        reserve(h, d, dtype)
        for b in (1, 3, 16, 64):
            o, lse = partials(n, b, h, d, dtype, seed=b)
            for _ in range(3):  # Both halves of the workspace, and back.
                assert_merged(call(o, lse, rank, mode), o, lse, rank, mode)


def test_views_pieces_and_no_tokens(ranks, op):
    rank, n = ranks
    h = 4 * n
    reserve(h, max_tokens=16)
    for b in (16, 17, 49):
        o, lse = partials(n, b, h, seed=b)
        head_major = o[rank].transpose(0, 1).contiguous().transpose(0, 1)
        odd = torch.empty(b, h, D + 1, dtype=o.dtype, device="cuda")[:, :, 1:]
        for mine in (head_major, odd.copy_(o[rank])):
            out = dcp_inductor.a2a_lse_reduce(mine, lse[rank], lse_mode="base2")
            assert_merged(out, o, lse, rank)
    assert call(o[:, :0], lse[:, :0], rank).shape == (0, 4, D)


def test_a_merged_lse(ranks, op):
    rank, n = ranks
    reserve(4 * n)
    o, lse = partials(n, 5, 4 * n)
    out, out_lse = dcp_inductor.a2a_lse_reduce(
        o[rank], lse[rank], lse_mode="basee", return_lse=True
    )
    assert_merged(out, o, lse, rank, "basee")
    _, wanted = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="basee")
    torch.testing.assert_close(out_lse, wanted, rtol=1e-5, atol=1e-5)


def capture(fn):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    return graph, out


def test_graphs_replayed_between_eager_calls(ranks, op):
    """Graphs of several widths, replayed in turns with eager calls on two streams."""
    rank, n = ranks
    h = 16 * n
    reserve(h)
    graphs = {}
    for b in (1, 7, 64):
        o, lse = (tensor[rank].clone() for tensor in partials(n, b, h))
        graph, out = capture(
            lambda o=o, lse=lse: dcp_inductor.a2a_lse_reduce(o, lse, lse_mode="base2")
        )
        graphs[b] = (graph, o, lse, out)
    side = torch.cuda.Stream()
    for step in range(36):
        b = (1, 7, 64)[step % 3]
        o, lse = partials(n, b, h, seed=step)
        torch.cuda.synchronize()
        with torch.cuda.stream(side if step % 2 else torch.cuda.default_stream()):
            eager = call(o, lse, rank)
            graph, o_in, lse_in, out = graphs[b]
            o_in.copy_(o[rank])
            lse_in.copy_(lse[rank])
            graph.replay()
            graph.replay()
        torch.cuda.synchronize()
        assert_merged(out, o, lse, rank)
        assert_merged(eager, o, lse, rank)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_with_the_pass(ranks, op, mode):
    rank, n = ranks
    h, name = 16 * n, dist.group.WORLD.group_name
    reserve(h)
    torch._dynamo.reset()
    fused = []
    dcp_inductor.install().listener = lambda report: fused.append(report.fused)
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            fn = torch.compile(lambda o, lse: chain(o, lse, n, name), mode=mode)
            for step in range(5):
                o, lse = partials(n, 4, h, seed=step)
                torch.compiler.cudagraph_mark_step_begin()
                out = fn(o[rank].clone(), lse[rank].clone()).clone()
                assert_merged(out, o, lse, rank)
    finally:
        dcp_inductor.uninstall()
    assert fused == [1]


def test_what_was_read_of_the_op_is_so(ranks, op):
    """Its checks come before anything is sent: no rank is left waiting."""
    rank, n = ranks
    found = reserve(2 * n)
    o, lse = partials(n, 4, 2 * n)
    views = (
        o[rank].unflatten(1, (n, 2)).transpose(1, 2),
        lse[rank].unflatten(1, (n, 2)).transpose(1, 2),
    )

    def launch(o, lse):
        group = dist.group.WORLD.group_name
        workspace = found.buffers.workspaces[0]
        return found.buffers.launch(o, lse, workspace, rank, n, False, group)

    if op.needs_packed:
        with pytest.raises(RuntimeError, match="partial_o must be contiguous"):
            launch(*views)
    else:
        launch(*views)
    assert launch(*(view.contiguous() for view in views)).shape == (4, 2, D)
    torch.cuda.synchronize()


def test_lanes_that_could_deadlock_are_refused(ranks, op):
    _, n = ranks
    with pytest.raises(BackendUnavailable, match="is cooperative"):
        reserve(16 * n, lanes=2)


def test_auto_takes_it_only_if_it_changes_nothing(ranks, op, monkeypatch):
    """After the switch: `symm_mem` can't run here either, and `collective` serves."""
    rank, n = ranks
    monkeypatch.setenv("DCP_INDUCTOR_BACKEND", "auto")
    found = reserve(5 * n)
    assert found.backend.name == ("collective" if op.sets_backend else "symm_mem")
    o, lse = partials(n, 3, 5 * n)
    assert_merged(call(o, lse, rank), o, lse, rank)

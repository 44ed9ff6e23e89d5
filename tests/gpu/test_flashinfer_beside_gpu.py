"""FlashInfer beside others in one process: who is taken, and whose memory it stays.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_flashinfer_beside_gpu.py -m gpu

The released op isn't run here; test_flashinfer_gpu.py runs it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem

import dcp_inductor
from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime.backends.flashinfer import FlashInfer
from dcp_inductor.runtime.backends.flashinfer_op import InstalledOp, installed_op

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]


def reserve(n, head_dim):
    return dcp_inductor.reserve(
        max_tokens=8, num_heads=2 * n, head_dim=head_dim, dtype=torch.bfloat16
    )


def exchange(ranks, head_dim):
    """One call, held against merge.py."""
    rank, n = ranks
    rng = torch.Generator(device="cuda").manual_seed(head_dim)
    o = torch.randn(n, 4, 2 * n, head_dim, generator=rng, device="cuda").bfloat16()
    lse = torch.randn(n, 4, 2 * n, generator=rng, device="cuda")
    out = dcp_inductor.a2a_lse_reduce(o[rank], lse[rank], lse_mode="base2")
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def test_auto_leaves_symmetric_memory_alone(ranks):
    assert symm_mem.get_backend("cuda") == "CUDA"
    assert reserve(ranks[1], 88).backend.name == "symm_mem"
    exchange(ranks, 88)
    assert symm_mem.get_backend("cuda") == "CUDA"


def test_asked_for_where_it_cant_run_it_names_the_blocker(ranks, monkeypatch):
    """What a rank lacks; or that symmetric memory is in use, where it lacks nothing."""
    op = installed_op()
    if isinstance(op, InstalledOp) and not op.sets_backend:
        pytest.skip("the installed FlashInfer's op would run here")
    exchange(ranks, 88)
    device = torch.device("cuda", torch.cuda.current_device())
    blocker = FlashInfer().unavailable(dist.group.WORLD, device)
    monkeypatch.setenv("DCP_INDUCTOR_BACKEND", "flashinfer")
    monkeypatch.setenv("DCP_INDUCTOR_TIMEOUT_S", "100")
    with pytest.raises(BackendUnavailable) as caught:
        reserve(ranks[1], 104)
    if dist.get_rank() == 0:
        print(f"\n{caught.value}")
    # A kernel that can't be built here is named before the memory is looked at.
    in_use = ("is CUDA and in use", "can't be built or loaded here")
    assert any(why in str(caught.value) for why in ([blocker] if blocker else in_use))
    monkeypatch.delenv("DCP_INDUCTOR_BACKEND")
    exchange(ranks, 88)
    assert symm_mem.get_backend("cuda") == "CUDA"

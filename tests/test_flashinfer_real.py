"""The flashinfer backend against the real package: its signatures, sizes and errors.

It imports without a GPU, and its kernel isn't built there: on gloo ranks a stand-in for
the torch op runs behind FlashInfer's own Python.
"""

from __future__ import annotations

import inspect
import itertools
import re
import types
from dataclasses import replace
from pathlib import Path

import flashinfer_package as stand_in
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime.backends import flashinfer as backend
from dcp_inductor.runtime.backends.flashinfer import FlashInfer
from dcp_inductor.runtime.backends.flashinfer_op import (
    DEVCOMM,
    OP,
    SCHEMA,
    SIGNATURES,
    InstalledOp,
    installed_op,
    torch_gives_devcomm,
)
from dcp_inductor.runtime.call import ExchangeCall, Geometry

pytestmark = pytest.mark.flashinfer
comm = pytest.importorskip("flashinfer.comm")
GEOMETRY = Geometry(2, 8, 32, 64, torch.bfloat16)


@pytest.fixture(scope="module")
def op():
    found = installed_op()
    assert isinstance(found, InstalledOp), found
    return found


@pytest.fixture(scope="module")
def package():
    return Path(comm.__file__).parents[1]


@pytest.fixture(scope="module")
def kernel(package):
    return (package / "data" / "csrc" / "dcp_lse_reduce.cu").read_text()


def test_what_the_released_op_does(op):
    assert (op.sets_backend, op.needs_devcomm, op.needs_packed) == (True, True, True)
    assert "breaks custom all-reduce" in FlashInfer().only_if_asked()


def test_this_torch_has_the_headers(op):
    assert op.missing_headers == ()
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert torch_gives_devcomm() == (version >= (2, 14))


def test_without_device_communicators_it_is_compiled_empty(kernel):
    body = kernel[kernel.index("at::Tensor dcp_lse_reduce(") :]
    first, last = body.splitlines()[3:4], body[: body.index("#else")]
    assert first == [f"#ifdef {DEVCOMM}"]
    assert "return output;" in last


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(comm, name)).parameters
    assert tuple(parameters) == SIGNATURES[name]


def test_the_torch_ops_schema(kernel):
    (literals,) = re.findall(r'm\.def\(((?:\s*"[^"]*")+)\);', kernel)
    assert "".join(re.findall(r'"([^"]*)"', literals)) == SCHEMA


def test_cards_are_those_that_it_builds_for(package):
    source = (package / "jit" / "comm.py").read_text()
    function = source[source.index("def gen_dcp_lse_reduce_module") :]
    (versions,) = re.findall(r"supported_major_versions=\[([^]]*)]", function)[:1]
    assert tuple(map(int, versions.split(","))) == backend.CARDS


def test_device_communicators_need_the_nccl_that_it_names(kernel):
    (version,) = re.findall(r"requires NCCL >= ([\d.]+)", kernel)
    assert tuple(map(int, version.split("."))) == backend._LEAST_NCCL


def test_sizes_that_its_workspace_takes_arent_declined_and_others_are():
    size_of = getattr(comm, f"{OP}_workspace_size")
    taken = set()
    for n, head_dim, dtype in itertools.product(
        (2, 3, 8, 64, 65),
        (8, 12, 60, 96, 512, 576),
        (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
    ):
        geometry = Geometry(n, 8, 4 * n, head_dim, dtype)
        try:
            wanted = size_of(8, 4, n, head_dim, dtype)
        except (ValueError, TypeError):
            wanted = None
        assert (FlashInfer().declines(geometry) is None) == (wanted is not None)
        if wanted is not None:
            assert FlashInfer().slot_bytes(geometry) == wanted
        taken.add(wanted is not None)
    assert taken == {True, False}


def test_a_workspace_is_pinned_to_a_stream_by_the_wrapper(monkeypatch):
    """Why the torch op is called: flashinfer.py, NOTE [stream]."""
    module = inspect.getmodule(inspect.unwrap(getattr(comm, OP)))
    workspace = torch.zeros(16, dtype=torch.uint8)
    state = module._WorkspaceState(None, "0", workspace.device)
    monkeypatch.setitem(module._workspace_keepalive, workspace.data_ptr(), state)
    raw = iter([1, 1, 2])
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: types.SimpleNamespace(cuda_stream=next(raw)),
    )
    module._get_workspace_state(workspace)
    module._get_workspace_state(workspace)
    with pytest.raises(RuntimeError, match="one ordered CUDA stream"):
        module._get_workspace_state(workspace)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may build")
def test_a_kernel_that_cant_be_built_makes_it_unavailable():
    with pytest.raises(BackendUnavailable, match="can't be built or loaded here"):
        FlashInfer().allocate(None, GEOMETRY, torch.device("cpu"))


def on_ranks(rank, n):
    """FlashInfer's own create_workspace, on memory and with an op that stand in."""
    import flashinfer.comm.dcp_lse_reduce as module

    memory = stand_in.SymmetricMemory()
    memory.stand_in()
    stand_in.Op(memory)
    module.get_dcp_lse_reduce_module = lambda: None
    geometry = replace(GEOMETRY, capture_domains=2)
    buffers = FlashInfer().allocate(dist.group.WORLD, geometry, torch.device("cpu"))
    assert memory.backend == "NCCL"
    buffers.connect()
    assert len(memory.made) == geometry.num_slots == 3
    assert buffers.nbytes == 3 * FlashInfer().slot_bytes(geometry)
    for slot, mode in itertools.product(range(3), ("base2", "basee")):
        rng = torch.Generator().manual_seed(slot)
        o = torch.randn(n, 8, 32, 64, generator=rng).bfloat16()
        lse = torch.randn(n, 8, 32, generator=rng)
        lse[0, :, ::5], o[0, :, ::5] = -torch.inf, torch.nan
        call = ExchangeCall(o[rank], lse[rank], dist.group.WORLD, "0", mode, False)
        out, _ = buffers.run(call, slot)
        wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=mode)
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    return True


def test_its_own_workspaces_on_ranks():
    assert run_ranks(on_ranks, 2) == [True, True]

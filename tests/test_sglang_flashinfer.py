"""sglang's ``fi_a2a``: FlashInfer's exchange as an op that the pass sees.

Real: sglang's call site, traced; FlashInfer's source, where it is installed, read for
its signature. FlashInfer's kernel needs a card that shares MNNVL memory; a stand-in
moves the data here.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Captured, captured
from sglang_cases import assert_all_agree, assert_fused, partials, tracing
from sglang_host import flashinfer_of, group_of, real_comm, run_as_ranks
from tolerances import NARROW
from torch import Tensor
from torch.fx import Graph

from dcp_inductor.integrations import sglang_flashinfer

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def _host():
    """Skips where sglang or triton is missing, before anything needs them."""
    real_comm()


SHAPE = (3, 8, 16)


@torch.compiler.disable
def exchange(
    partial_o: Any,
    softmax_stats: Any,
    workspace: Any,
    cp_rank: int,
    cp_size: int,
    enable_pdl: Any = None,
    out: Any = None,
) -> Any:
    """FlashInfer's on one rank alone: gives back what it is sent, contiguous."""
    contiguous = torch.contiguous_format
    return tuple(
        sent.clone(memory_format=contiguous) for sent in (partial_o, softmax_stats)
    )


@pytest.fixture
def shown(_host):
    with tracing(), flashinfer_of(exchange) as module:
        sglang_flashinfer.show("dcp:0")
        yield module


def trace(num_ranks: int, dtype: torch.dtype, base_e: bool = False) -> Captured:
    comm = real_comm()
    group = group_of(num_ranks)

    def reduce(o: Tensor, lse: Tensor) -> Tensor:
        return comm.dcp_a2a_lse_reduce(
            o, lse, group, is_lse_base_on_e=base_e, comm_backend="fi_a2a"
        )

    return captured(reduce, partials(1, SHAPE, dtype)[0])


@pytest.mark.parametrize("base_e", [False, True], ids=["base2", "basee"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fuses_with_the_numbers_of_all_ranks(shown, dtype, num_ranks, base_e):
    found = trace(num_ranks, dtype, base_e)
    lse_mode = "basee" if base_e else "base2"
    assert_fused(found, lse_mode, num_ranks)
    inputs = partials(num_ranks, SHAPE, dtype, seed=1)
    assert_all_agree(
        inputs,
        lse_mode,
        lockstep(found.before, inputs),
        lockstep(found.after, inputs),
        rtol=NARROW[dtype],
        atol=NARROW[dtype] / 8,
    )


def lockstep(graph: Graph, inputs: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """All ranks' outputs; FlashInfer moves peer p's slice r to rank r's slice p."""

    def moved(sent: list[Any]) -> list[Any]:
        return [
            tuple(
                torch.stack([rank[place][..., me, :] for rank in sent], -2)
                for place in range(2)
            )
            for me in range(len(sent))
        ]

    exchanged = torch.ops.dcp_inductor.fi_all_to_all.default
    return run_as_ranks(graph, inputs, {exchanged: moved})


def test_unseen_it_breaks_the_graph():
    """What the plugin is for."""
    with (
        tracing(),
        flashinfer_of(exchange),
        pytest.raises(torch._dynamo.exc.Unsupported),
    ):
        trace(4, torch.bfloat16)


def test_eager_calls_and_unfused_graphs_run_flashinfers(shown):
    o, stats = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 2)
    seen = shown.decode_cp_a2a_alltoall(o, stats, torch.zeros(1), 0, 4)
    op = torch.ops.dcp_inductor.fi_all_to_all(o, stats, 4, "dcp:0")
    for got in (seen, op):
        assert torch.equal(got[0], o)
        assert torch.equal(got[1], stats)


def test_the_fake_is_exact(shown):
    o = torch.randn(2, 4, 3, 8).transpose(1, 2)
    args = (o, torch.randn(2, 3, 4, 2), 4, "dcp:0")
    torch.library.opcheck(
        torch.ops.dcp_inductor.fi_all_to_all.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_outputs_of_the_caller_are_no_exchange_of_ours(shown):
    """``out=`` is observable: under the compiler it stays FlashInfer's, and breaks."""
    o, stats = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 2)

    def fn(o: Tensor, stats: Tensor) -> Any:
        return shown.decode_cp_a2a_alltoall(o, stats, o, 0, 4, None, (o, stats))

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(fn, backend="eager", fullgraph=True)(o, stats)


def test_hiding_puts_flashinfers_back():
    with flashinfer_of(exchange) as module:
        sglang_flashinfer.show("dcp:0")
        assert module.decode_cp_a2a_alltoall is sglang_flashinfer.visible
        sglang_flashinfer.hide()
        assert module.decode_cp_a2a_alltoall is exchange


def test_flashinfer_itself_has_the_parameters_that_are_known():
    """Read, not imported: importing FlashInfer needs most of its dependencies."""
    found = importlib.util.find_spec("flashinfer")
    if found is None:
        pytest.skip("flashinfer-python isn't installed")
    (folder,) = found.submodule_search_locations
    tree = ast.parse((Path(folder) / "comm" / "dcp_alltoall.py").read_text())
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "decode_cp_a2a_alltoall"
    )
    names = [argument.arg for argument in function.args.args]
    assert tuple(names[:5]) == sglang_flashinfer._PARAMETERS
    assert len(function.args.defaults) == len(names) - 5, "the rest has defaults"

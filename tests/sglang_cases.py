"""What the tests of sglang's traced functions share: ``comm``, inputs, what must hold.

A plugin of pytest's, for the fixture's sake: ``pytest_plugins = ("sglang_cases",)``.
What stands in for a GPU, a group or a runner is in sglang_host.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Captured, normalised
from sglang_host import real_comm, sglang_module, triton_target
from torch import Tensor
from torch.fx import Graph

from dcp_inductor.merge import LseMode, a2a_lse_reduce_reference

OP = torch.ops.dcp_inductor.a2a_lse_reduce.default


@contextlib.contextmanager
def tracing() -> Iterator[Any]:
    """sglang's module of the exchanges, to be traced; nothing compiled is left."""
    module = real_comm()
    with triton_target():
        yield module
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def comm() -> Iterator[Any]:
    """``tracing()``, for all tests of a file."""
    with tracing() as module:
        yield module


def partials(
    num_ranks: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Each rank's partial_o ``[B, H, D]`` and partial_lse ``[B, H]``, fp32."""
    rng = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(shape, generator=rng).to(dtype),
            torch.randn(shape[:2], generator=rng) * 4,
        )
        for _ in range(num_ranks)
    ]


def twisted_kernels(folder: Path, kernel: str, old: str, new: str) -> Any:
    """sglang's kernels with one line of one kernel changed, under their own names."""
    original = sglang_module("kernels.ops.attention.dcp_kernels")
    text = Path(original.__file__).read_text()
    start = text.index(f"def {kernel}")
    assert old in text[start:]
    path = folder / "dcp_kernels.py"
    path.write_text(text[:start] + text[start:].replace(old, new, 1))
    spec = importlib.util.spec_from_file_location("twisted_dcp_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_fused(
    found: Captured, lse_mode: LseMode, num_ranks: int, beside: Collection[str] = ()
) -> None:
    """One op in the right base; what else computes or moves is named in ``beside``."""
    assert found.reasons == []
    (finding,) = found.report.findings
    assert (finding.lse_mode, finding.num_ranks) == (lse_mode, num_ranks)
    called = [node.target for node in found.after.nodes if node.op == "call_function"]
    assert called.count(OP) == 1
    others = {
        getattr(target, "_opname", None) or target.__name__
        for target in called
        if target is not OP
    }
    assert others <= {*beside}


def assert_all_agree(
    inputs: Sequence[tuple[Tensor, Tensor]],
    lse_mode: LseMode,
    original: Sequence[Sequence[Tensor]],
    rewritten: Sequence[Sequence[Tensor]],
    *,
    rtol: float,
    atol: float,
    heads_first: bool = False,
) -> None:
    """The rewritten graph gives merge.py's outputs on every rank, the original nearly.

    inputs: each rank's partials. original, rewritten: each rank's outputs, the merged
    ``[B, h, D]`` first. rtol, atol: between the original's and merge.py's.
    heads_first: both graphs give ``[h, B, D]``.
    """
    o, lse = (torch.stack(parts) for parts in zip(*inputs, strict=True))
    for rank in range(len(inputs)):
        wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=lse_mode)
        if heads_first:
            wanted = wanted.transpose(0, 1)
        was, now = original[rank][0], rewritten[rank][0]
        assert was.dtype == now.dtype == wanted.dtype
        assert torch.equal(now.float(), wanted.float())
        torch.testing.assert_close(was.float(), wanted.float(), rtol=rtol, atol=atol)


def graph_text(graph: Graph) -> str:
    """Wrapped; without what counts calls in a process or is new in a torch."""
    text = re.sub(r"(kernel_idx|constant_args_idx)=\d+, ", "", normalised(graph))
    text = re.sub(r", launch_kwargs=\[[^]]*\]", "", text)
    return "\n".join(
        textwrap.fill(line, 84, subsequent_indent="    ", break_long_words=False)
        for line in text.splitlines()
    )

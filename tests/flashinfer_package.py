"""Stand-ins for FlashInfer: packages on disk, and its torch op on gloo ranks.

The op checks what the released CUDA source checks (flashinfer csrc/dcp_lse_reduce.cu)
and computes on the CPU, exchanging over the group; symmetric memory is plain memory.
"""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

from dcp_inductor.merge import merge
from dcp_inductor.runtime.backends import flashinfer_op

MODULE = """
import functools
import torch.distributed._symmetric_memory as symm_mem


@functools.cache
def get_dcp_lse_reduce_module():
    return None


def decode_cp_a2a_lse_reduce_workspace_size(
    max_tokens, local_heads, cp_size, head_dim, dtype
):
    itemsize = dtype.itemsize
    return 128 + 2 * cp_size * max_tokens * local_heads * (head_dim * itemsize + 4)


def decode_cp_a2a_lse_reduce_create_workspace(
    max_tokens, local_heads, cp_size, head_dim, dtype, group
):
    {switch}
    size = decode_cp_a2a_lse_reduce_workspace_size(
        max_tokens, local_heads, cp_size, head_dim, dtype
    )
    workspace = symm_mem.empty(size, dtype=__import__("torch").uint8, device="cuda")
    symm_mem.rendezvous(workspace, group)
    return workspace


def decode_cp_a2a_lse_reduce(
    partial_o, partial_lse, workspace, cp_rank, cp_size, {last}
):
    raise AssertionError("the torch op is called, not the wrapper")
"""
RELEASED_SOURCE = """
#include <torch/library.h>
#ifdef NCCL_HAS_DEVCOMM
TORCH_CHECK(partial_o.is_contiguous(), "partial_o must be contiguous");
#endif
"""
COMING_SOURCE = "#include <torch/library.h>\n// strided views, any backend\n"
SWITCH = 'symm_mem.set_backend("NCCL")'


def write(
    folder: Path,
    switch: str = SWITCH,
    last: str = 'lse_mode="base2"',
    source: str | None = RELEASED_SOURCE,
    module: str = MODULE,
) -> Path:
    """A package ``flashinfer`` in ``folder``, its path."""
    package = folder / "flashinfer"
    (package / "comm").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "comm" / "__init__.py").write_text("")
    text = module.replace("{switch}", switch).replace("{last}", last)
    (package / "comm" / "dcp_lse_reduce.py").write_text(text)
    if source is not None:
        (package / "data" / "csrc").mkdir(parents=True)
        (package / "data" / "csrc" / "dcp_lse_reduce.cu").write_text(source)
    return package


def write_coming(folder: Path) -> Path:
    return write(folder, switch="pass", source=COMING_SOURCE)


def first_on_path(folder: Path) -> None:
    """Let ``import flashinfer`` find the package in ``folder``."""
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


class SymmetricMemory:
    """torch's symmetric memory as plain memory: a backend name, and what was made."""

    def __init__(self, backend: str = "CUDA", in_use: bool = False) -> None:
        self.backend, self.in_use = backend, in_use
        self.made: list[torch.Tensor] = []

    def stand_in(self) -> None:
        """In place of torch's, and of what of torch.cuda this needs. For good."""
        from torch.distributed import _symmetric_memory

        _symmetric_memory.get_backend = lambda device: self.backend
        _symmetric_memory.set_backend = self.set_backend
        _symmetric_memory.empty = self.empty
        _symmetric_memory.rendezvous = lambda tensor, group: group
        torch.cuda.device = lambda device: contextlib.nullcontext()
        torch.cuda.current_device = lambda: 0
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(
            cuda_stream=7, synchronize=lambda: None
        )

    def set_backend(self, name: str) -> None:
        if self.in_use and name != self.backend:
            raise RuntimeError("backend can't be changed after an allocation")
        self.backend = name

    def empty(self, size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        self.in_use = True
        self.made.append(torch.zeros(size, dtype=dtype))
        return self.made[-1]


class Op:
    """The torch op, by the checks of the CUDA source.

    packed: inputs must be contiguous. selects: clears the rows of empty shards itself.
    needs_nccl: the workspace must be NCCL's. error, scale: what is wrong with it.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        *,
        packed: bool = True,
        selects: bool = False,
        needs_nccl: bool = True,
        error: str = "",
        scale: float = 1.0,
        schema: str = flashinfer_op.SCHEMA,
    ) -> None:
        self.memory, self.packed, self.selects = memory, packed, selects
        self.needs_nccl, self.error, self.scale = needs_nccl, error, scale
        self.calls: list[tuple[int, bool]] = []
        self.library = torch.library.Library("flashinfer", "FRAGMENT")
        self.library.define(schema)
        self.library.impl("decode_cp_a2a_lse_reduce", self, "CPU")

    def __call__(self, o, lse, workspace, rank, n, base_e, group_name):
        self._check(o, lse, workspace, n)
        slot = next(i for i, made in enumerate(self.memory.made) if made is workspace)
        self.calls.append((slot, o.is_contiguous()))
        group = dist.distributed_c10d._resolve_process_group(group_name)
        assert (rank, n) == (group.rank(), group.size())
        got_o, got_lse = _exchanged(o, n, group), _exchanged(lse, n, group)
        got_lse = torch.where(got_lse.isfinite(), got_lse, -torch.inf)
        mode = "basee" if base_e else "base2"
        out, _ = merge(got_o, got_lse, lse_mode=mode)
        if not self.selects:
            out = out + (got_o * 0).sum(0)  # NaN gets through as 0 * NaN
        return out * self.scale

    def close(self) -> None:
        """Take the op away, so that another can be registered."""
        self.library._destroy()

    def _check(self, o, lse, workspace, n):
        if self.error:
            raise RuntimeError(self.error)
        if self.needs_nccl and self.memory.backend != "NCCL":
            raise RuntimeError("workspace requires the NCCL symmetric-memory backend")
        assert o.dim() == 4
        assert o.shape[:3] == lse.shape
        assert o.shape[2] == n
        assert o.dtype in (torch.float16, torch.bfloat16)
        assert lse.dtype == torch.float32
        if self.packed and not (o.is_contiguous() and lse.is_contiguous()):
            raise RuntimeError("partial_o must be contiguous")
        assert o.stride(-1) == 1
        rows, row_bytes = o.shape[0] * o.shape[1], o.shape[3] * 2
        assert row_bytes % 16 == 0
        assert 0 < 2 * n * rows * (row_bytes + 4) <= workspace.numel()


def _exchanged(tensor, n, group):
    """``[B, h, N, ...]`` to ``[N, B, h, ...]``: from each rank what it has for this."""
    sent = tensor.movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(
        received.view(torch.uint8), sent.view(torch.uint8), group=group
    )
    return received

"""Backend ``flashinfer``: FlashInfer's own fused op, decode_cp_a2a_lse_reduce.

What the installed one does, and so needs, is flashinfer_op.py's; lanes, slots and
streams are workspace.py's. The op has no bounded spin: a peer that
never comes leaves it waiting on the device, and nothing here can name the rank.

NOTE [switch]
The released op sets torch's symmetric-memory backend to NCCL for the whole process.
torch allows that only before the first symmetric allocation, and whoever allocates
afterwards gets NCCL's: custom all-reduce over torch's CUDA symmetric memory stops
working. So "auto" never takes such an op. Asked for by name, the switch is made in
``allocate``, where an error is voted on before any rank waits for another.

NOTE [stream]
FlashInfer's wrapper pins a workspace to the first raw stream that it sees and raises on
any other, also where the two are ordered by an event, and can't see replays. Here a
workspace is a slot: workspace.py gives it to one ordered stream at a time, and each
capture stream has its own. So the torch op behind the wrapper is called, whose schema
is checked once it is loaded.

NOTE [merge rule]
The op multiplies a partial by its weight where merge.py selects: a NaN in the output of
an empty shard would get through as 0 * NaN. So the rows of empty shards are cleared
while packing, unless the op is seen to clear them itself. It differs where a shard that
isn't empty has a weight that underflows and an output that isn't finite. It returns no
merged LSE: calls that want one run on ``collective``, on all ranks alike.
"""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.logs import runtime as log
from dcp_inductor.merge import LSE_MODES, LseMode, a2a_lse_reduce_reference
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.backends.flashinfer_op import (
    DEVCOMM,
    OP,
    SCHEMA,
    InstalledOp,
    installed_op,
    torch_gives_devcomm,
)
from dcp_inductor.runtime.call import ExchangeCall, Geometry

CARDS = (9, 10, 11, 12)
MAX_RANKS = 64
DTYPES = (torch.float16, torch.bfloat16)
_ROW_ALIGNMENT = 16
# The coming op reads 8-byte words of strided rows.
_VIEW_ALIGNMENT = 8
_LEAST_NCCL = (2, 29)
# The kernel is cooperative: one that doesn't fit beside another waits for it. Every
# card that it runs on keeps so many of its blocks resident.
_RESIDENT_BLOCKS = 64
# What four warps of the coming op carry of one row, the most that a block does.
_BLOCK_BYTES = 1920
# From so many rows on the released op runs another variant of its kernel.
_VARIANT_ROWS = 16
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


class FlashInfer:
    """The op behind flashinfer.comm, on workspaces of ours."""

    name = "flashinfer"
    needs_buffers = True

    def unavailable(
        self, group: ProcessGroup | None, device: torch.device
    ) -> str | None:
        """The first blocker of this rank, in the order of docs/backends.md."""
        if device.type != "cuda":
            return f"the partials are on {device.type}, its kernel runs on CUDA"
        op = installed_op()
        if isinstance(op, str):
            return op
        return _blocked_by_card(device) or _blocked_by_torch(op, group, device)

    def identity(self) -> str:
        """The op's sources: its protocol is FlashInfer's to change."""
        op = installed_op()
        return op if isinstance(op, str) else op.sources

    def only_if_asked(self) -> str | None:
        """NOTE [switch]."""
        op = installed_op()
        if isinstance(op, str) or not op.sets_backend:
            return None
        return (
            "the installed FlashInfer's op sets torch's symmetric memory to NCCL for "
            "the whole process, which breaks custom all-reduce over it; only "
            "Config(backend='flashinfer') asks for that"
        )

    def declines(self, geometry: Geometry) -> str | None:
        """What FlashInfer's workspace_size refuses, and lanes that could deadlock."""
        if geometry.dtype not in DTYPES:
            return f"partial_o is {geometry.dtype}; FlashInfer takes fp16 and bf16"
        if not 2 <= geometry.cp_size <= MAX_RANKS:
            return f"{geometry.cp_size} ranks; FlashInfer serves 2 to {MAX_RANKS}"
        row_bytes = geometry.head_dim * geometry.dtype.itemsize
        if row_bytes % _ROW_ALIGNMENT:
            return (
                f"a row of {geometry.head_dim} {geometry.dtype} elements is "
                f"{row_bytes} bytes; FlashInfer needs a multiple of {_ROW_ALIGNMENT}"
            )
        blocks_of_row = max(geometry.cp_size, -(-row_bytes // _BLOCK_BYTES))
        blocks = geometry.lanes * geometry.rows * blocks_of_row
        if geometry.lanes > 1 and blocks > _RESIDENT_BLOCKS:
            return (
                f"{geometry.lanes} lanes of {geometry.rows} rows; FlashInfer's kernel "
                f"is cooperative, and two that need more than {_RESIDENT_BLOCKS} "
                "blocks together could each wait for the other's peer"
            )
        return None

    def slot_bytes(self, geometry: Geometry) -> int:
        """What FlashInfer says itself. Raises BackendUnavailable where it can't."""
        op = installed_op()
        if isinstance(op, str):
            raise BackendUnavailable(op)
        try:
            module = importlib.import_module(op.module)
        except Exception as error:
            raise BackendUnavailable(
                f"FlashInfer can't be imported here: {type(error).__name__}: {error}"
            ) from error
        return getattr(module, f"{OP}_workspace_size")(*_sizes(geometry))

    def allocate(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> FlashInferBuffers:
        """Build or load the kernel, and switch torch's symmetric memory if it must.

        Waits for no other rank. Raises BackendUnavailable for what doesn't build or
        can't be switched.
        """
        op = installed_op()
        assert isinstance(op, InstalledOp), op
        module = _load(op)
        if op.sets_backend:
            _switch(device)
        return FlashInferBuffers(group, geometry, device, op, module)

    def run_direct(self, call: ExchangeCall) -> tuple[Tensor, Tensor]:
        """Never called: this backend runs on buffers."""
        raise AssertionError("the flashinfer backend runs on buffers")


def _sizes(geometry: Geometry) -> tuple[int, int, int, int, torch.dtype]:
    """As workspace_size and create_workspace take them."""
    return (
        geometry.max_tokens,
        geometry.num_heads // geometry.cp_size,
        geometry.cp_size,
        geometry.head_dim,
        geometry.dtype,
    )


def _blocked_by_card(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major in CARDS:
        return None
    return (
        f"the card has compute capability {major}.{minor}; FlashInfer's kernel is "
        f"built for {', '.join(map(str, CARDS))}.x"
    )


def _blocked_by_torch(
    op: InstalledOp, group: ProcessGroup | None, device: torch.device
) -> str | None:
    """Headers, NCCL and the group's communicator, as far as the op needs them."""
    if op.missing_headers:
        return (
            f"torch {torch.__version__} has no {op.missing_headers[0]}, which "
            "FlashInfer's kernel includes"
        )
    if not op.needs_devcomm:
        return None
    version = torch.cuda.nccl.version()
    if version < _LEAST_NCCL:
        return (
            f"torch is built with NCCL {'.'.join(map(str, version))}; device "
            f"communicators need {'.'.join(map(str, _LEAST_NCCL))}"
        )
    if not torch_gives_devcomm():
        return (
            f"torch {torch.__version__} doesn't give extensions NCCL's device "
            f"communicators (its headers don't define {DEVCOMM}), without which "
            "FlashInfer's kernel is compiled empty"
        )
    if group is not None and group._get_backend(device).name() != "nccl":
        return (
            f"the group communicates by {group._get_backend(device).name()}; "
            "FlashInfer's op needs NCCL's communicator"
        )
    return None


def _load(op: InstalledOp) -> ModuleType:
    """FlashInfer's module, its kernel built and its torch op registered."""
    try:
        module = importlib.import_module(op.module)
        module.get_dcp_lse_reduce_module()
        schema = str(getattr(torch.ops.flashinfer, OP).default._schema)
    except Exception as error:
        raise BackendUnavailable(
            "FlashInfer's op can't be built or loaded here: "
            f"{type(error).__name__}: {error}"
        ) from error
    if schema != f"flashinfer::{SCHEMA}":
        raise BackendUnavailable(
            f"FlashInfer's torch op is {schema}; this backend calls {SCHEMA}"
        )
    return module


def _switch(device: torch.device) -> None:
    """NOTE [switch]."""
    from torch.distributed import _symmetric_memory

    before = _symmetric_memory.get_backend(device)
    if before == "NCCL":
        return
    try:
        _symmetric_memory.set_backend("NCCL")
    except RuntimeError as error:
        raise BackendUnavailable(
            f"torch's symmetric memory is {before} and in use, and FlashInfer's op "
            f"needs NCCL: {error}"
        ) from error
    log.warning(
        "Config(backend='flashinfer') switched torch's symmetric memory of this "
        "process from %s to NCCL. Whoever allocates from now on gets NCCL's; custom "
        "all-reduce over symmetric memory doesn't work with it.",
        before,
    )


class FlashInferBuffers:
    """A workspace a slot, each warmed and proved by ``connect``."""

    def __init__(
        self,
        group: ProcessGroup,
        geometry: Geometry,
        device: torch.device,
        op: InstalledOp,
        module: ModuleType,
    ) -> None:
        self.group_name = group.group_name
        self.rank = group.rank()
        self.geometry = geometry
        self.device = device
        self.op = op
        self.module = module
        self.workspaces: list[Tensor] = []
        self.launch: Any = getattr(torch.ops.flashinfer, OP).default
        self.clears_empty = True
        self.without_lse = torch.empty(0, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return sum(workspace.numel() for workspace in self.workspaces)

    def connect(self) -> None:
        """Make the workspaces, then call the op on each: a collective, as all of it.

        A call loads the kernel and makes the device communicator, neither of which a
        capture allows, and shows whether the op works: a build without device
        communicators registers and fails only when called. Raises BackendUnavailable.
        """
        from torch.distributed import _symmetric_memory

        create = getattr(self.module, f"{OP}_create_workspace")
        before = _symmetric_memory.get_backend(self.device)
        with torch.cuda.device(self.device):
            for _ in range(self.geometry.num_slots):
                self.workspaces.append(create(*_sizes(self.geometry), self.group_name))
            if _symmetric_memory.get_backend(self.device) != before:
                raise BackendUnavailable(
                    "FlashInfer's op has set torch's symmetric-memory backend, which "
                    "its source didn't show"
                )
            try:
                self._prove()
            except RuntimeError as error:
                raise BackendUnavailable(
                    f"FlashInfer's op doesn't run here: {error}"
                ) from error

    def run(self, call: ExchangeCall, slot: int) -> tuple[Tensor, Tensor]:
        """One launch behind the packing; calls with LSE: NOTE [merge rule]."""
        if call.with_lse:
            return Collective().run_direct(call)
        out = self._exchange(call.partial_o, call.partial_lse, call.lse_mode, slot)
        return out, self.without_lse

    def spoilt(self, slot: int) -> bool:
        """False: the op keeps no record of a failure."""
        del slot
        return False

    def failure(self, slot: int) -> str:
        """Never called: spoilt() is asked first."""
        raise AssertionError(f"slot {slot} of the flashinfer backend can't be spoilt")

    def _exchange(self, o: Tensor, lse: Tensor, lse_mode: LseMode, slot: int) -> Tensor:
        n = self.geometry.cp_size
        heads = self.geometry.num_heads // n
        o = o.unflatten(1, (n, heads)).transpose(1, 2)
        lse = lse.unflatten(1, (n, heads)).transpose(1, 2)
        if self.clears_empty:
            o = _without_empty_rows(o, lse)
        elif self.op.needs_packed or not _readable(o):
            o = o.contiguous()
        if self.op.needs_packed:
            lse = lse.contiguous()
        return self.launch(
            o,
            lse,
            self.workspaces[slot],
            self.rank,
            n,
            lse_mode == "basee",
            self.group_name,
        )

    def _prove(self) -> None:
        """Hold the op against merge.py, every variant and every slot, on all ranks.

        All ranks make the same calls whatever they find, and speak then. The first
        shows whether the op clears empty rows itself: NOTE [merge rule].
        """
        self.clears_empty = False
        alone = self._error(1, LSE_MODES[0], 0).item()
        self.clears_empty = alone > _TOLERANCE[self.geometry.dtype]
        errors = [
            self._error(num_tokens, lse_mode, slot)
            for num_tokens, lse_mode, slot in self._calls_to_prove()
        ]
        # Waits for the device: what follows may be a capture.
        worst = torch.stack(errors).max().item()
        allowed = _TOLERANCE[self.geometry.dtype]
        if worst > allowed:
            raise BackendUnavailable(
                f"FlashInfer's op is off by {worst:.2e} from merge.py on this machine; "
                f"{allowed:.0e} is rounding"
            )

    def _calls_to_prove(self) -> list[tuple[int, LseMode, int]]:
        """(tokens, base, slot): every variant on the first slot, one call on others."""
        heads = self.geometry.num_heads // self.geometry.cp_size
        wide = -(-_VARIANT_ROWS // heads)
        widths = {1, min(wide, self.geometry.max_tokens)}
        variants = itertools.product(sorted(widths), LSE_MODES)
        return [
            *((width, lse_mode, 0) for width, lse_mode in variants),
            *((1, LSE_MODES[0], slot) for slot in range(1, self.geometry.num_slots)),
        ]

    def _error(self, num_tokens: int, lse_mode: LseMode, slot: int) -> Tensor:
        """The largest difference from merge.py, on the device; inf for NaN."""
        n, geometry = self.geometry.cp_size, self.geometry
        rng = torch.Generator().manual_seed(slot * 1000 + num_tokens)
        shape = (n, num_tokens, geometry.num_heads)
        o = torch.randn(*shape, geometry.head_dim, generator=rng).to(geometry.dtype)
        lse = torch.randn(shape, generator=rng) * 4
        # For each rank: the last shard is empty for its first head, and holds NaN
        # there; all shards are empty for its last one, where it has two.
        heads = geometry.num_heads // n
        if heads > 1:
            lse[:, :, heads - 1 :: heads] = -torch.inf
        lse[-1, :, ::heads] = -torch.inf
        o[-1, :, ::heads] = torch.nan
        o, lse = o.to(self.device), lse.to(self.device)
        got = self._exchange(o[self.rank], lse[self.rank], lse_mode, slot)
        wanted, _ = a2a_lse_reduce_reference(o, lse, rank=self.rank, lse_mode=lse_mode)
        difference = (got.float() - wanted.float()).abs().max()
        return difference.nan_to_num(nan=torch.inf)


def _without_empty_rows(o: Tensor, lse: Tensor) -> Tensor:
    """``o``, packed, zero where a shard is empty: NOTE [merge rule]."""
    cleared = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    return torch.where(lse.isfinite().unsqueeze(-1), o, o.new_zeros(()), out=cleared)


def _readable(o: Tensor) -> bool:
    """Whether an op that takes views takes this one."""
    itemsize = o.dtype.itemsize
    return (
        o.stride(-1) == 1
        and o.data_ptr() % _VIEW_ALIGNMENT == 0
        and all(stride * itemsize % _VIEW_ALIGNMENT == 0 for stride in o.stride()[:-1])
    )

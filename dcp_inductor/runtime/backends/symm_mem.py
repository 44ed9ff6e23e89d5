"""Backend ``symm_mem``: one Triton kernel over torch's symmetric memory, one host.

The kernel and its protocol are in runtime/kernels; which slot a call runs on, and on
which stream, is workspace.py's. The process's symmetric-memory backend is read and
never switched: others share it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import socket
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.config import Config
from dcp_inductor.runtime import kernels
from dcp_inductor.runtime.call import ExchangeCall, Geometry

_SLOT_ALIGNMENT = 256


class SymmMem:
    """The fused kernel; needs CUDA, triton and peer access between all ranks."""

    name = "symm_mem"
    needs_buffers = True

    def unavailable(self, group: ProcessGroup, device: torch.device) -> str | None:
        """Looks at this rank alone; whether ranks share a card is place()'s."""
        del group
        if device.type != "cuda":
            return f"the partials are on {device.type}, the kernel runs on CUDA"
        if importlib.util.find_spec("triton") is None:
            return "triton isn't installed"
        from torch.distributed import _symmetric_memory

        backend = _symmetric_memory.get_backend(device)
        if backend != "CUDA":
            return (
                f"symmetric memory is set to {backend} in this process; the kernel "
                "needs CUDA, and switching it would break its other users"
            )
        return None

    def declines(self, geometry: Geometry) -> str | None:
        """What the kernel can't hold: see kernels.declines."""
        return kernels.declines(geometry.dtype, geometry.head_dim, geometry.cp_size)

    def allocate(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> SymmMemBuffers:
        """Symmetric memory for all slots of a reservation, not yet connected."""
        return SymmMemBuffers(group, geometry, device)

    def run_direct(self, call: ExchangeCall) -> tuple[Tensor, Tensor]:
        """Never called: this backend runs on buffers."""
        raise AssertionError("the symm_mem backend runs on buffers")


def place(device: torch.device) -> dict[str, str]:
    """Where this rank runs: host and card. Two ranks must differ, hosts must not."""
    if device.type != "cuda":
        return {"host": socket.gethostname(), "card": ""}
    properties: Any = torch.cuda.get_device_properties(device)
    return {"host": socket.gethostname(), "card": str(properties.uuid)}


def blocked_by_places(places: list[dict[str, str]]) -> str | None:
    """Why ranks at these places can't reach each other's memory, or None."""
    hosts = sorted({where["host"] for where in places})
    if len(hosts) > 1:
        return f"the ranks are on several hosts ({', '.join(hosts)})"
    cards = [where["card"] for where in places]
    for rank, card in enumerate(cards):
        first = cards.index(card)
        if first != rank:
            return f"ranks {first} and {rank} share one card"
    return _no_peer_access(cards)


def _no_peer_access(cards: list[str]) -> str | None:
    """Cards that this process sees and that can't reach each other.

    A card hidden from this process (its own CUDA_VISIBLE_DEVICES) isn't judged here.
    """
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    here = [(rank, visible[card]) for rank, card in enumerate(cards) if card in visible]
    for rank, index in here:
        for other, other_index in here:
            if index != other_index and not torch.cuda.can_device_access_peer(
                index, other_index
            ):
                return f"the cards of ranks {rank} and {other} have no peer access"
    return None


class SymmMemBuffers:
    """All slots of one reservation in one symmetric allocation."""

    def __init__(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> None:
        from torch.distributed import _symmetric_memory

        self.group_name = group.group_name
        self.rank = group.rank()
        self.geometry = geometry
        self.heads = geometry.num_heads // geometry.cp_size
        self.device = device
        self.slot_geometry = kernels.SlotGeometry(
            geometry.cp_size, geometry.rows, geometry.head_dim, geometry.dtype
        )
        self.slot_bytes = -(-self.slot_geometry.total_bytes // _SLOT_ALIGNMENT)
        self.slot_bytes *= _SLOT_ALIGNMENT
        num_slots = geometry.num_slots
        with torch.cuda.device(device):
            self.buffer = _symmetric_memory.empty(
                num_slots * self.slot_bytes, dtype=torch.uint8, device=device
            )
            self.epochs = torch.zeros(
                num_slots, geometry.rows, dtype=torch.int32, device=device
            )
            self.status = torch.zeros(
                num_slots, kernels.STATUS_WORDS, dtype=torch.int32, pin_memory=True
            )
            self.no_lse = torch.empty(0, dtype=torch.float32, device=device)
        # Of each slot: addresses of all ranks' buffers, epochs, status.
        self.slots: list[tuple[Tensor, Tensor, Tensor]] = []
        self.launch: Any = None
        self.max_programs = 0
        self.spin_limit_ns = int(Config.from_env().timeout_s * 1e9)
        self._codes = [
            ctypes.c_int32.from_address(self.status[slot].data_ptr())
            for slot in range(num_slots)
        ]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() + self.epochs.numel() * 4

    def connect(self) -> None:
        """Rendezvous, empty the slots, load the kernel; ends with all ranks ready."""
        from torch.distributed import _symmetric_memory

        from dcp_inductor.runtime.kernels import exchange

        with torch.cuda.device(self.device):
            handle = _symmetric_memory.rendezvous(self.buffer, self.group_name)
            addresses = [
                [base + slot * self.slot_bytes for base in handle.buffer_ptrs]
                for slot in range(self.geometry.num_slots)
            ]
            peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
            self.slots = [*zip(peers, self.epochs, self.status, strict=True)]
            self.launch = exchange.launch
            for slot in range(self.geometry.num_slots):
                start = slot * self.slot_bytes
                kernels.initialise(
                    self.buffer[start : start + self.slot_bytes], self.slot_geometry
                )
            exchange.warm_up(self.slot_geometry, self.device)
            resident = exchange.resident_programs(self.slot_geometry, self.device)
            self.max_programs = max(1, resident // self.geometry.lanes)
            torch.cuda.synchronize(self.device)

    def run(self, call: ExchangeCall, slot: int) -> tuple[Tensor, Tensor]:
        """One launch. The merged LSE is empty where the call doesn't want it."""
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.run(call, slot)
        o = call.partial_o
        out = o.new_empty((o.shape[0], self.heads, self.geometry.head_dim))
        if call.with_lse:
            lse = call.partial_lse.new_empty((o.shape[0], self.heads))
        else:
            lse = self.no_lse
        peers, epochs, status = self.slots[slot]
        self.launch(
            o,
            call.partial_lse,
            out,
            lse if call.with_lse else None,
            peers=peers,
            epochs=epochs,
            status=status,
            geometry=self.slot_geometry,
            rank=self.rank,
            lse_mode=call.lse_mode,
            tag=_tag(call.site, o.shape, call.with_lse, call.lse_mode),
            spin_limit_ns=self.spin_limit_ns,
            max_programs=self.max_programs,
        )
        return out, lse

    def spoilt(self, slot: int) -> bool:
        """A plain read of pinned memory that the kernel writes."""
        return self._codes[slot].value != 0

    def failure(self, slot: int) -> str:
        """The kernel's record in words."""
        failure = kernels.read_failure(self.status[slot])
        assert failure is not None, "spoilt() was asked first"
        heads = self.geometry.num_heads // self.geometry.cp_size
        where = f"token {failure.row // heads}, local head {failure.row % heads}"
        peer = f"rank {failure.source_rank}"
        if failure.kind == "timeout":
            return (
                f"{peer} sent nothing for {where} (use {failure.epoch} of the row) "
                f"within {self.spin_limit_ns / 1e9:g} s"
            )
        return (
            f"{peer} sent another call's data for {where}: it is at another call site, "
            "or at a call of another width, dtype or base"
        )


@functools.lru_cache(maxsize=4096)
def _tag(site: int, shape: torch.Size, with_lse: bool, lse_mode: str) -> int:
    """What matching calls have in common; a hash, 31 bits."""
    return zlib.crc32(repr((site, *shape, with_lse, lse_mode)).encode())

"""Backend ``symm_mem``: one Triton kernel over torch's symmetric memory, one host.

The kernel and its protocol are in runtime/kernels; which slot a call runs on, and on
which stream, is workspace.py's. The process's symmetric-memory backend is read and
never switched: others share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.config import Config
from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.runtime import kernels
from dcp_inductor.runtime.call import ExchangeCall, Geometry, tag_of

_SLOT_ALIGNMENT = 256
# Behind each slot, of this value: whoever writes past a slot, ours or not, shows.
_CANARY_BYTES, _CANARY = 256, 0xA5
# Prepared launches of one reservation; a program whose shapes never repeat starts over.
_MOST_PREPARED = 4096
_NEEDS_CAPABILITY = (8, 0)
_EPOCH_BYTES = 4


class SymmMem:
    """The fused kernel; needs CUDA, triton and peer access between all ranks."""

    name = "symm_mem"
    needs_buffers = True

    def unavailable(
        self, group: ProcessGroup | None, device: torch.device
    ) -> str | None:
        """Looks at this rank alone; whether ranks share a card is place()'s."""
        del group
        if device.type != "cuda":
            return f"the partials are on {device.type}, the kernel runs on CUDA"
        if importlib.util.find_spec("triton") is None:
            return "triton isn't installed"
        capability = torch.cuda.get_device_capability(device)
        if capability < _NEEDS_CAPABILITY:
            have, need = (
                ".".join(map(str, c)) for c in (capability, _NEEDS_CAPABILITY)
            )
            return f"the card has compute capability {have}, the kernel needs {need}"
        from torch.distributed import _symmetric_memory

        backend = _symmetric_memory.get_backend(device)
        if backend != "CUDA":
            return (
                f"symmetric memory is set to {backend} in this process; the kernel "
                "needs CUDA, and switching it would break its other users"
            )
        return None

    def identity(self) -> str:
        """Empty: all of it is in this library, whose sources are agreed on."""
        return ""

    def only_if_asked(self) -> str | None:
        """None: it changes nothing for anybody else."""
        return None

    def declines(self, geometry: Geometry) -> str | None:
        """What the kernel can't hold: see kernels.declines."""
        return kernels.declines(geometry.dtype, geometry.head_dim, geometry.cp_size)

    def slot_bytes(self, geometry: Geometry) -> int:
        """Symmetric memory of one slot, and its rows' epochs."""
        slot = _slot_geometry(geometry)
        return _slot_stride(slot) + slot.rows * _EPOCH_BYTES

    def allocate(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> SymmMemBuffers:
        """Symmetric memory for all slots of a reservation, not yet connected."""
        return SymmMemBuffers(group, geometry, device)

    def run_direct(self, call: ExchangeCall) -> tuple[Tensor, Tensor]:
        """Never called: this backend runs on buffers."""
        raise AssertionError("the symm_mem backend runs on buffers")


def place(device: torch.device) -> dict[str, Any]:
    """Where this rank runs: host and card. Two ranks must differ, hosts must not.

    apart: pairs of cards that this process sees and that have no peer access.
    """
    if device.type != "cuda":
        return {"host": socket.gethostname(), "card": "", "apart": []}
    cards = [str(_properties(index).uuid) for index in range(torch.cuda.device_count())]
    apart = [
        [cards[one], cards[other]]
        for one, other in itertools.permutations(range(len(cards)), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    card = str(_properties(device).uuid)
    return {"host": socket.gethostname(), "card": card, "apart": apart}


def _properties(device: torch.device | int) -> Any:
    return torch.cuda.get_device_properties(device)


def blocked_by_places(places: list[dict[str, Any]]) -> str | None:
    """Why ranks at these places can't reach each other's memory, or None.

    The same on every rank: it looks at nothing but ``places``. Cards that no rank sees
    together (each has its own CUDA_VISIBLE_DEVICES) aren't judged.
    """
    hosts = sorted({where["host"] for where in places})
    if len(hosts) > 1:
        return f"the ranks are on several hosts ({', '.join(hosts)})"
    cards = [where["card"] for where in places]
    for rank, card in enumerate(cards):
        first = cards.index(card)
        if first != rank:
            return f"ranks {first} and {rank} share one card"
    for one, other in itertools.chain(*(where["apart"] for where in places)):
        if one in cards and other in cards:
            ranks = sorted([cards.index(one), cards.index(other)])
            return "the cards of ranks {} and {} have no peer access".format(*ranks)
    return None


def _slot_geometry(geometry: Geometry) -> kernels.SlotGeometry:
    return kernels.SlotGeometry(
        geometry.cp_size, geometry.rows, geometry.head_dim, geometry.dtype
    )


def _slot_stride(slot: kernels.SlotGeometry) -> int:
    """Bytes from one slot to the next in a reservation's buffer."""
    slots = -(-slot.total_bytes // _SLOT_ALIGNMENT)
    return slots * _SLOT_ALIGNMENT + _CANARY_BYTES


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
        self.slot_geometry = _slot_geometry(geometry)
        self.slot_bytes = _slot_stride(self.slot_geometry)
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
        self.prepare: Any = None
        self.launches: dict[tuple[Any, ...], Any] = {}
        self.max_programs = 0
        self.spin_limit_ns = int(Config.from_env().timeout_s * 1e9)
        self._codes = [
            ctypes.c_int32.from_address(self.status[slot].data_ptr())
            for slot in range(num_slots)
        ]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() + self.epochs.numel() * _EPOCH_BYTES

    def connect(self) -> None:
        """Rendezvous, empty the slots, load the kernel; ends with all ranks ready.

        Raises BackendUnavailable if the kernel doesn't build for this card.
        """
        from torch.distributed import _symmetric_memory

        with torch.cuda.device(self.device):
            handle = _symmetric_memory.rendezvous(self.buffer, self.group_name)
            addresses = [
                [base + slot * self.slot_bytes for base in handle.buffer_ptrs]
                for slot in range(self.geometry.num_slots)
            ]
            peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
            self.slots = [*zip(peers, self.epochs, self.status, strict=True)]
            for slot in self.buffer.view(-1, self.slot_bytes):
                kernels.initialise(slot, self.slot_geometry)
                slot[-_CANARY_BYTES:] = _CANARY
            with building():
                from dcp_inductor.runtime.kernels import exchange

                resident = exchange.resident_programs(self.slot_geometry, self.device)
            self.prepare = exchange.Launch
            # All slots may be in use at once: protocol.py, NOTE [one row ahead].
            self.max_programs = max(1, resident // self.geometry.num_slots)
            torch.cuda.synchronize(self.device)

    def run(self, call: ExchangeCall, slot: int) -> tuple[Tensor, Tensor]:
        """One launch. The merged LSE is empty where the call doesn't want it."""
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.run(call, slot)
        o, partial_lse = call.partial_o, call.partial_lse
        out = o.new_empty((o.shape[0], self.heads, self.geometry.head_dim))
        lse = None
        if call.with_lse:
            lse = partial_lse.new_empty((o.shape[0], self.heads))
        key = launch_key(call, slot)
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = self._prepared(call, slot)
        kind = *o.shape, call.with_lse, call.lse_mode
        tag = tag_of(call.site, call.caller, call.instance, *kind)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        launch(o, partial_lse, out, lse, tag, stream=stream)
        return out, self.no_lse if lse is None else lse

    def _prepared(self, call: ExchangeCall, slot: int) -> Any:
        if len(self.launches) >= _MOST_PREPARED:
            self.launches.clear()
        peers, epochs, status = self.slots[slot]
        return self.prepare(
            call.partial_o,
            call.partial_lse,
            peers=peers,
            epochs=epochs,
            status=status,
            geometry=self.slot_geometry,
            rank=self.rank,
            lse_mode=call.lse_mode,
            spin_limit_ns=self.spin_limit_ns,
            max_programs=self.max_programs,
        )

    def trespassed(self) -> bool:
        """Whether somebody has written behind a slot. Waits for the device."""
        behind = self.buffer.view(-1, self.slot_bytes)[:, -_CANARY_BYTES:]
        return bool((behind != _CANARY).any())

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
            f"{peer} sent another call's data for {where}: it is at another call site "
            "or function, or at a call of another width, dtype or base"
        )


def launch_key(call: ExchangeCall, slot: int) -> tuple[Any, ...]:
    """All that a prepared launch depends on. An fp32 address is a multiple of 4."""
    return (
        slot,
        call.lse_mode,
        call.with_lse,
        call.partial_o.shape,
        call.partial_o.stride(),
        call.partial_lse.stride(),
        call.partial_o.data_ptr() % 16,
    )


@contextlib.contextmanager
def building() -> Iterator[None]:
    """What Triton or its import raises becomes BackendUnavailable: others may serve."""
    try:
        yield
    except BackendUnavailable:
        raise
    except Exception as error:
        raise BackendUnavailable(
            f"the exchange kernel doesn't build: {type(error).__name__}: {error}"
        ) from error

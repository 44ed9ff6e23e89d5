"""The table of implementations of the exchange, best first.

A backend answers three questions apart: can it run here at all (``unavailable``), does
it take this geometry (``declines``), and, by its place in the table, is it preferred;
preference.py changes places where a benchmark says so. Choosing one that all ranks can
run is selection.py's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.backends.flashinfer import FlashInfer
from dcp_inductor.runtime.backends.symm_mem import SymmMem
from dcp_inductor.runtime.call import ExchangeCall, Geometry

Merged = tuple[Tensor, Tensor]


class Buffers(Protocol):
    """A backend's memory for one reservation: ``num_slots`` independent slots."""

    @property
    def nbytes(self) -> int:
        """Device memory of this rank, all slots."""

    def connect(self) -> None:
        """Make the peers' buffers usable; all ranks call it. Then slots are ready."""

    def run(self, call: ExchangeCall, slot: int) -> Merged:
        """Run a call of at most max_tokens on the current stream, on ``slot``."""

    def spoilt(self, slot: int) -> bool:
        """True once a call on the slot has failed on the device."""

    def failure(self, slot: int) -> str:
        """What spoilt the slot: a peer that never came, or another call."""


class Backend(Protocol):
    """One way to run the exchange."""

    name: str
    # True if a call needs Buffers; False if any call runs at once, through run_direct.
    needs_buffers: bool

    def unavailable(
        self, group: ProcessGroup | None, device: torch.device
    ) -> str | None:
        """Why this backend can't run for ``group`` on this rank, or None.

        Without a group: what can be said before there is one.
        """

    def identity(self) -> str:
        """What of it comes from another package; a rank with another is no peer."""

    def only_if_asked(self) -> str | None:
        """Why "auto" leaves it out although it could run here, or None."""

    def declines(self, geometry: Geometry) -> str | None:
        """Why it can't take calls of this geometry, or None; equal on all ranks."""

    def slot_bytes(self, geometry: Geometry) -> int:
        """Device memory of one slot on each rank. Asked of what isn't declined only."""

    def allocate(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> Buffers:
        """This rank's memory, alone; may raise out-of-memory."""

    def run_direct(self, call: ExchangeCall) -> Merged:
        """Run a call that needs no buffers."""


BACKENDS: tuple[Backend, ...] = (SymmMem(), FlashInfer(), Collective())

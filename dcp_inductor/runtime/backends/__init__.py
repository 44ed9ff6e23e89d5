"""The table of implementations of the exchange, best first, and the choice among them.

A backend answers three questions apart: can it run here at all (``unavailable``), does
it take this call (``declines``), and, by its place in the table, is it preferred.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.call import ExchangeCall

Merged = tuple[Tensor, Tensor]


class Backend(Protocol):
    """One way to run the exchange."""

    @property
    def name(self) -> str: ...

    def unavailable(self, group: ProcessGroup, device_type: str) -> str | None:
        """Why this backend can't run for ``group`` on this rank, or None."""

    def run(self, call: ExchangeCall) -> Merged:
        """``(out [B, H/N, D], lse [B, H/N])``, contiguous and fresh."""


BACKENDS: tuple[Backend, ...] = (Collective(),)


def run(call: ExchangeCall) -> Merged:
    """Run one checked call on the backend of its group."""
    return BACKENDS[-1].run(call)

"""What the doctor found, as values; every one can be written as JSON.

How it is found is the other modules', what it means for the user is advice.py's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Need:
    """The exchange that is asked about, all sizes positive, H a multiple of N.

    max_tokens: B. num_heads: H, before the exchange. head_dim: D. dtype: torch's name
    of it, without "torch.".
    """

    num_ranks: int
    max_tokens: int = 64
    num_heads: int = 128
    head_dim: int = 512
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Card:
    """A GPU that this process sees.

    multicast: whether card and driver have NVLink multicast, used or not; None: not
    known.
    """

    index: int
    name: str
    capability: str
    memory_mib: int
    multicast: bool | None


@dataclass(frozen=True)
class Link:
    """Two cards. nvlinks: how many join them, None: not known."""

    cards: tuple[int, int]
    peer_access: bool
    nvlinks: int | None


@dataclass(frozen=True)
class BackendState:
    """A row of the backends' table, in its order.

    why_not: None if every rank on this machine could run it for the need.
    taken: it is the one that a reservation would get now.
    slot_bytes: device memory of one slot a rank; None where that can't be told.
    total_bytes: of one lane and one capture stream, ``num_slots`` slots.
    """

    name: str
    fused: bool
    why_not: str | None
    taken: bool
    slot_bytes: int | None
    num_slots: int
    total_bytes: int | None


@dataclass(frozen=True)
class Hook:
    """One of Inductor's pass hooks, and the passes in it, in order."""

    name: str
    passes: list[str]


@dataclass(frozen=True)
class Host:
    """A package that calls, or is called: its version or None, and what holds of it."""

    name: str
    version: str | None
    note: str


@dataclass(frozen=True)
class Reserved:
    """A living reservation of this process."""

    group: str
    backend: str
    max_tokens: int
    num_heads: int
    head_dim: int
    dtype: str
    lanes: int
    slots: int
    total_bytes: int


@dataclass(frozen=True)
class Checkup:
    """Everything, in the order of the screen."""

    need: Need
    versions: dict[str, str | None]
    cards: list[Card]
    links: list[Link]
    symmetric_memory: str
    backends: list[BackendState]
    hooks: list[Hook]
    caches: dict[str, str]
    hosts: list[Host]
    reserved: list[Reserved]
    enabled: bool
    asked_backend: str
    next: list[str] = field(default_factory=list)

    @property
    def fused(self) -> bool:
        """Whether an exchange of the need would run on a fused backend here."""
        return any(state.taken and state.fused for state in self.backends)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "fused": self.fused}

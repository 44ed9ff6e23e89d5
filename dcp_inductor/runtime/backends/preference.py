"""Which of two fused backends goes first: the one that was measured to be faster.

The table of backends has the order for everything that wasn't measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_inductor.runtime.call import Geometry

if TYPE_CHECKING:
    from dcp_inductor.runtime.backends import Backend


@dataclass(frozen=True)
class Measured:
    """Two backends in one run of benchmarks/, microseconds a call in a CUDA graph.

    capability: of the card. tokens: B, from and to, both measured. run: where the
    figures are written down, with versions.
    """

    capability: tuple[int, int]
    num_ranks: int
    tokens: tuple[int, int]
    faster: str
    faster_us: float
    slower: str
    slower_us: float
    run: str

    def speaks_of(self, geometry: Geometry, capability: tuple[int, int] | None) -> bool:
        """Whether a reservation of this geometry lies in what was measured."""
        low, high = self.tokens
        return (
            capability == self.capability
            and geometry.cp_size == self.num_ranks
            and low <= geometry.max_tokens <= high
        )


# Empty: the FlashInfer op that "auto" may take (flashinfer#5726) is in no release, so
# no run has held it against ours. The released one is taken only when it is asked for.
MEASURED: tuple[Measured, ...] = ()


def in_order(
    backends: Sequence[Backend],
    geometry: Geometry,
    capability: tuple[int, int] | None,
) -> list[Backend]:
    """``backends``, each measured pair in the order of its speed.

    capability: of all ranks' cards, or None where they differ or there are none: then
    nothing that was measured speaks of them. The same on every rank.
    """
    ordered = list(backends)
    for row in MEASURED:
        if not row.speaks_of(geometry, capability):
            continue
        names = [backend.name for backend in ordered]
        if row.faster in names and row.slower in names:
            first, second = names.index(row.faster), names.index(row.slower)
            if first > second:
                ordered.insert(second, ordered.pop(first))
    return ordered

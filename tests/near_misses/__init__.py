"""Functions that look like DCP's exchange and aren't: each must be left alone.

A NearMiss is the plainest spelling with one thing changed, a Twist. Its ``shows`` makes
partials on which the change shows in the numbers, so that a wrong fusion would be wrong
there. A Structure is a whole function, right or wrong by what is around it.
"""

from __future__ import annotations

from near_misses.around import REST
from near_misses.batch_sizes import BATCH_SIZES
from near_misses.hidden_conditions import HIDDEN
from near_misses.lses import LSES, ROWS
from near_misses.merged_lse import MERGED_LSES
from near_misses.other_exchanges import OTHER_EXCHANGES
from near_misses.payload import PAYLOAD
from near_misses.places import PLACES
from near_misses.structure import Structure
from near_misses.surroundings import SURROUNDINGS
from near_misses.twist import NearMiss
from near_misses.undefined import UNDEFINED
from near_misses.weights import WEIGHTS

__all__ = [
    "NEAR_MISSES",
    "REST",
    "STRUCTURES",
    "UNDEFINED",
    "NearMiss",
    "Structure",
]

NEAR_MISSES = [*WEIGHTS, *LSES, *ROWS, *HIDDEN, *PAYLOAD, *PLACES]
STRUCTURES = [*SURROUNDINGS, *MERGED_LSES, *OTHER_EXCHANGES, *BATCH_SIZES]

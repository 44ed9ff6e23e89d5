"""Parts of the pass's refusals that many near misses share."""

from __future__ import annotations

NOT_A_MERGE = "it isn't the LSE merge"
NOT_IN_EITHER_BASE = "it isn't the LSE merge in either base"
ALL_WEIGHT = "with all weight on one rank"
PERMUTED = "the ranks or heads are permuted"

"""What the ranks send to the parent, and what they measured. Imports no torch.

Axes: S steps, B sequences.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from dcp_inductor.report import Finding, GraphReport

# A run may be off by this many times what one rank in the same dtype is off by. Right
# runs of this model stay below 1.6 on 1 to 8 ranks in fp32, bf16 and fp16; the wrong
# base of the LSE, the closest mistake, begins at 5.
_ROUNDING_FACTOR = 3.0


@dataclass(frozen=True)
class Progress:
    """A rank begins its ``done``-th piece of work of ``total``."""

    rank: int
    done: int
    total: int
    doing: str


@dataclass(frozen=True)
class Failure:
    """A rank can't go on. died: its process ended without saying why.

    error: one line. detail: the end of what the rank printed; the parent reads it.
    """

    rank: int
    error: str
    detail: str = ""
    died: bool = False


@dataclass(frozen=True)
class Accuracy:
    """A run against one rank that holds the whole cache in fp64, same weights.

    The one rank is fed with the tokens that the run chose, so that each of the S * B
    choices is judged by itself, those after a tie too; with all equal the one rank
    would have decoded the same by itself.

    num_equal: how often both chose the same token. largest_gap: where they didn't, by
    how much the one rank's logit of its own choice is above that of the run's. error:
    largest difference of a logit. one_rank_error: the same for one rank that holds
    the whole cache in the dtype of the run.
    """

    num_tokens: int
    num_equal: int
    largest_gap: float
    error: float
    one_rank_error: float

    @property
    def tolerance(self) -> float:
        """Up to here a logit's error is the rounding of the dtype."""
        return _ROUNDING_FACTOR * self.one_rank_error

    @property
    def within_rounding(self) -> bool:
        """True if every logit is right; NaN is not."""
        return self.error <= self.tolerance

    @property
    def num_differing(self) -> int:
        return self.num_tokens - self.num_equal

    @property
    def only_ties(self) -> bool:
        """True if both logits of each differing choice can round to one."""
        return self.largest_gap <= 2 * self.tolerance


@dataclass(frozen=True)
class RunRecord:
    """One way to run the decoder, on one rank.

    tokens: ``[S][B]``. step_ms: S times. graphs: what the pass said, if it ran.
    accuracy: on rank 0 only.
    """

    name: str
    tokens: tuple[tuple[int, ...], ...]
    step_ms: tuple[float, ...]
    graphs: tuple[GraphReport, ...] = ()
    accuracy: Accuracy | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for graph in self.graphs for finding in graph.findings)


@dataclass(frozen=True)
class RankRecord:
    """All that a rank did. device, backend: readable, as ``cpu`` and ``gloo``."""

    rank: int
    device: str
    backend: str
    plain: RunRecord
    fused: RunRecord


Message = Progress | Failure | RankRecord

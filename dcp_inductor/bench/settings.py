"""What the benchmark was asked for, checked. Imports no torch.

Whether this machine can run it is run.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_inductor.errors import BadInput

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
HEADS_PER_RANK = (16, 64)
HEAD_DIM = 512
MAX_RANKS = 16


@dataclass(frozen=True)
class BenchSettings:
    """One run of the benchmark. ``check`` raises BadInput for what can't be run."""

    num_ranks: int = 2
    heads_per_rank: tuple[int, ...] = HEADS_PER_RANK
    batches: tuple[int, ...] = BATCHES
    timeout_s: float = 1800.0

    def check(self) -> None:
        """Raise BadInput for numbers that no exchange has."""
        if not 2 <= self.num_ranks <= MAX_RANKS:
            raise BadInput(
                f"--ranks {self.num_ranks} was asked for, and an exchange is measured "
                f"between 2 to {MAX_RANKS} ranks, a GPU each. Pass for example "
                "--ranks 2."
            )
        for flag, numbers in (
            ("--heads-per-rank", self.heads_per_rank),
            ("--batches", self.batches),
        ):
            if not numbers or min(numbers) < 1:
                raise BadInput(
                    f"{flag} {' '.join(map(str, numbers))} was asked for; it takes "
                    "positive whole numbers. Pass for example 16 64."
                )
        if not self.timeout_s > 0:
            raise BadInput(
                f"--timeout {self.timeout_s:g} was asked for; a wait needs a positive "
                "number of seconds. Pass for example --timeout 1800."
            )

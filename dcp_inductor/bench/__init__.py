"""The benchmark of one exchange: measured under torchrun, shown and drawn anywhere.

    timing, chain, floors, exchange   in the rank processes: torch and triton, no rich
    results                           a stored result, checked; goals. Imports no torch
    command, run, plot                in the console command

The figures that count, and what they were measured on, are in benchmarks/RESULTS.md.
"""

from __future__ import annotations

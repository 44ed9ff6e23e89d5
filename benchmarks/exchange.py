"""One exchange, microseconds a call, every way to run it beside its floors.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--heads-per-rank 16 64]

The same as ``dcp-inductor bench``, which starts the ranks itself; the code and what the
columns mean are in dcp_inductor/bench/exchange.py.
"""

from __future__ import annotations

from common import folder

from dcp_inductor.bench.exchange import main

if __name__ == "__main__":
    main(folder=folder())

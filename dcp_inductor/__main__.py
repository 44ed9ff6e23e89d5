"""``python -m dcp_inductor``: the same as the console script ``dcp-inductor``."""

from __future__ import annotations

import sys

from dcp_inductor.cli import main

if __name__ == "__main__":
    sys.exit(main())

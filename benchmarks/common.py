"""Where a benchmark's result goes. How things are measured is dcp_inductor/bench's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def folder() -> str:
    """$BENCH_OUT, or the working directory."""
    return os.environ.get("BENCH_OUT", ".")


def save(name: str, payload: dict[str, Any]) -> None:
    """Write ``name``.json into the folder."""
    Path(folder()).mkdir(parents=True, exist_ok=True)
    Path(folder(), f"{name}.json").write_text(json.dumps(payload, indent=1))

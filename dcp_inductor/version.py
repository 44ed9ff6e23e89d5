"""Which library this is: its version and a hash of its sources.

Part of every cache key and of what ranks agree on.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def source_hash() -> str:
    """Of every source file of the package, by relative path."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def library_identity() -> str:
    """Short and readable; differs where any source line does."""
    return f"dcp_inductor sources {source_hash()[:16]}"

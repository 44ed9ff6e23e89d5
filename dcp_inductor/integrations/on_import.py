"""Acts on a module when a process imports it, without importing it itself.

What is done then is the caller's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dcp_inductor.logs import integrations as log


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if module ``name`` is imported, else right after it is."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(MetaPathFinder):
    """Finds its one module as everybody would, and acts once it has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                try:
                    self.action()
                except Exception:
                    log.exception("dcp_inductor: its hook on %s failed", self.name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

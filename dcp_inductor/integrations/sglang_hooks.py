"""Puts one hook on a function of sglang, through its registry. SGLang 0.5.23.

What the hooks do is the caller's.

NOTE [one target]
sglang's ``apply_hooks()`` applies everything that is pending. A module that sglang
imports in order to apply another plugin's hook is where ours are registered; from
there it would apply that hook too, and sglang, coming back to it, a second time. So
only our own target is applied here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.plugins.hook_registry import HookType


def bind(target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
    """Register ``hook`` on ``target``, whose module is imported, and apply it.

    Where others' hooks on it are pending, sglang applies ours together with them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    others = bool(HookRegistry._hooks.get(target))
    HookRegistry.register(target, hook, hook_type)
    if others and target not in HookRegistry._patched:
        return
    HookRegistry._apply_target(target, HookRegistry._hooks[target][-1:])
    HookRegistry._patched.add(target)


def unbound(module: str, function: str, hook: Callable[..., Any]) -> str | None:
    """Why calls of ``function`` don't all come to ``hook``, or None where they do.

    function: of a module, imported under its own name wherever else it is used.
    """
    home = sys.modules.get(module)
    if home is None:
        return f"{module} isn't imported"
    current = getattr(home, function, None)
    if current is None:
        return f"{module} has no {function}"
    chain = _chain(current)
    ours = [place for place, f in enumerate(chain) if _calls(f, hook)]
    if not ours:
        return f"sglang's hook registry hasn't put it on {module}.{function}"
    without = {id(wrapped) for wrapped in chain[ours[-1] + 1 :]}
    stale = [
        name
        for name, other in [*sys.modules.items()]
        if isinstance(other, ModuleType) and id(vars(other).get(function)) in without
    ]
    return f"{', '.join(stale)} calls {function} without it" if stale else None


def _chain(function: Any) -> list[Any]:
    """A function and what sglang has wrapped in it, the original last."""
    chain = []
    while function is not None:
        chain.append(function)
        function = getattr(function, "__wrapped__", None)
    return chain


def _calls(wrapper: Any, hook: Callable[..., Any]) -> bool:
    """True for the wrapper that sglang has made of ``hook``, which it closes over."""
    for cell in getattr(wrapper, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # A cell that is empty yet.
            if cell.cell_contents is hook:
                return True
    return False

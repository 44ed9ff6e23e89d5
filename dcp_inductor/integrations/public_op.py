"""The op as programs get it: Inductor lowers it, also where the pass isn't installed.

Without its lowering the op would be an unknown kernel, which Inductor may move past
collectives, and which carries no place (compiler/lowering.py). Inductor takes seconds
to import and a program that doesn't compile needs none of it, so the lowering is
registered once Inductor has been imported.
"""

from __future__ import annotations

from dcp_inductor.integrations.on_import import when_imported
from dcp_inductor.op import a2a_lse_reduce

__all__ = ["a2a_lse_reduce"]


def _register() -> None:
    from dcp_inductor.compiler import lowering

    lowering.register()


when_imported("torch._inductor.lowering", _register)

"""dcp_inductor: finds decode context parallelism's exchange in torch.compile graphs,
proves what it means, and runs it as one fused op.

Importing the package touches neither CUDA nor triton nor any host.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_inductor.compiler.fusion_pass import DcpFusionPass
    from dcp_inductor.config import Config
    from dcp_inductor.integrations.inductor import explain, install, uninstall
    from dcp_inductor.integrations.public_op import a2a_lse_reduce
    from dcp_inductor.report import Report
    from dcp_inductor.runtime.groups import alias_group
    from dcp_inductor.runtime.workspace import check, reserve

__version__ = "0.1.0"

_HOME = {
    "Config": "config",
    "DcpFusionPass": "compiler.fusion_pass",
    "Report": "report",
    "a2a_lse_reduce": "integrations.public_op",
    "alias_group": "runtime.groups",
    "explain": "integrations.inductor",
    "install": "integrations.inductor",
    "check": "runtime.workspace",
    "reserve": "runtime.workspace",
    "uninstall": "integrations.inductor",
}

__all__ = [
    "Config",
    "DcpFusionPass",
    "Report",
    "a2a_lse_reduce",
    "alias_group",
    "check",
    "explain",
    "install",
    "reserve",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package stays light."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

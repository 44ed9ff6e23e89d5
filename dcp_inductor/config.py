"""Config: every choice that a user can make, and the only reader of os.environ.

What a field means is said at the field; who acts on it is the module that reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal, get_args

from dcp_inductor.errors import BadInput

Backend = Literal["auto", "symm_mem", "flashinfer", "collective"]
OnMiss = Literal["log", "warn", "raise"]

_OFF = frozenset({"0", "false", "off", "no"})
_SWITCHES = {
    "DCP_INDUCTOR": "enabled",
    "DCP_INDUCTOR_AG_RS": "ag_rs",
    "DCP_INDUCTOR_EAGER_DECODE": "eager_decode",
}


@dataclass(frozen=True)
class Config:
    """What the pass may do and what the op runs on. Immutable, hashable, picklable.

    enabled: False leaves every graph and every host alone (``DCP_INDUCTOR=0``).
    backend: which implementation runs the op (``DCP_INDUCTOR_BACKEND``). "auto" takes
        the first one that every rank of the group can run.
    timeout_s: seconds that a rank waits for its peers before it raises
        (``DCP_INDUCTOR_TIMEOUT_S``).
    on_miss: what happens to an exchange that was found and not fused: "log" (one info
        line a graph), "warn" (a Python warning too) or "raise" (``FusionMissed``,
        ``DCP_INDUCTOR_ON_MISS``).
    ag_rs: also fuse a merge that is spelled as all-gather of the LSEs, correction and
        reduce-scatter (``DCP_INDUCTOR_AG_RS``). Off by default: that spelling sums in
        the collective, so the fused result is rounded differently.
    eager_decode: in a host that runs decode without compiling it, let the plugin call
        the op directly (``DCP_INDUCTOR_EAGER_DECODE``); sglang's is the one known.
    """

    enabled: bool = True
    backend: Backend = "auto"
    timeout_s: float = 30.0
    on_miss: OnMiss = "log"
    ag_rs: bool = False
    eager_decode: bool = False

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, get_args(Backend))
        _one_of("on_miss", self.on_miss, get_args(OnMiss))
        if not self.timeout_s > 0:
            raise BadInput(
                f"Config(timeout_s={self.timeout_s!r}): a wait needs a positive number "
                "of seconds; pass for example timeout_s=30."
            )

    @classmethod
    def from_env(cls) -> Config:
        """The defaults, changed by the ``DCP_INDUCTOR*`` variables that are set."""
        found: dict[str, object] = {}
        for variable, switch in _SWITCHES.items():
            if (text := os.environ.get(variable)) is not None:
                found[switch] = text.strip().lower() not in _OFF
        if text := os.environ.get("DCP_INDUCTOR_BACKEND"):
            found["backend"] = text.strip().lower()
        if text := os.environ.get("DCP_INDUCTOR_TIMEOUT_S"):
            found["timeout_s"] = _number("DCP_INDUCTOR_TIMEOUT_S", text)
        if text := os.environ.get("DCP_INDUCTOR_ON_MISS"):
            found["on_miss"] = text.strip().lower()
        return cls(**found)  # type: ignore[arg-type]

    def key(self) -> tuple[tuple[str, object], ...]:
        """Every field by name: the config's share of a cache key."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInput(
            f"Config({name}={value!r}) is unknown; it can be "
            + ", ".join(repr(choice) for choice in allowed)
            + "."
        )


def _number(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(
            f"{variable}={text!r} is no number; it takes seconds, for example 30."
        ) from None

"""How much work an interpreted kernel does. Only for the process of the interpreter.

NOTE [steps]
A kernel that runs too long is refused; by the clock, a busy machine would refuse what
its peers take. So work is counted: each operation that Triton's interpreter makes is a
step, and so is every further bulk of elements in it, and starting a program is many.
The count is the same on every machine of the same versions, and a step was about 20 us
of a busy one. What can't be counted, a loop of plain Python, is left to the parent's
clock, which speaks much later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Of one launch; a minute, or so.
MOST_STEPS = 3_000_000
_ELEMENTS_A_STEP = 4096
_STEPS_A_PROGRAM = 100


class TooMuchWork(BaseException):
    """More steps than allowed. No Exception: the interpreter would wrap it."""


class Meter:
    """Counts the steps of one launch."""

    def __init__(self) -> None:
        self.most = MOST_STEPS
        self.steps = 0

    def start(self, most: int) -> None:
        """From 0 again, up to ``most``."""
        self.steps, self.most = 0, most

    def spend(self, steps: int) -> None:
        """Raises TooMuchWork."""
        self.steps += steps
        if self.steps > self.most:
            raise TooMuchWork(
                f"it takes more than {self.most:,} steps of the interpreter a launch"
            )

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, an operation of the interpreter's builder, on this meter."""

        @functools.wraps(method)
        def counting(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            largest = max(map(_elements, (*args, result)), default=0)
            self.spend(1 + largest // _ELEMENTS_A_STEP)
            return result

        return counting

    def attach(self, builder: type) -> None:
        """Count all operations of a builder's class, and every program's start."""
        for name in dir(builder):
            if name.startswith("create_"):
                setattr(builder, name, self.counted(getattr(builder, name)))
        set_grid_idx: Any = builder.set_grid_idx  # type: ignore[attr-defined]

        def starting(*args: Any) -> None:
            self.spend(_STEPS_A_PROGRAM)
            set_grid_idx(*args)

        builder.set_grid_idx = starting  # type: ignore[attr-defined]


def _elements(value: Any) -> int:
    return getattr(getattr(value, "data", None), "size", 0)


METER = Meter()

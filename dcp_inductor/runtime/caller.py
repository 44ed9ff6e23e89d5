"""Which function makes a call of the op: equal on ranks that run the same program.

NOTE [caller]
It is the innermost Python function outside of torch and this library: the one that
calls, or that was compiled. It is known by its file's name and first line, not by the
line in it, since ranks may stand in different branches of one function. It is looked
for at each call: two functions with equal graphs share one compiled artifact, so
nothing in generated code tells them apart.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import NamedTuple

# Frames of these packages stand between a call and the function that made it.
_BETWEEN = ("torch", "dcp_inductor", "contextlib", "functools")
_KNOWN_BETWEEN: set[str | None] = set()
# What Dynamo calls the rest of a function behind a graph break, which the function
# calls: a rank that breaks alone, to print say, is in the same function.
_RESUMED = "torch_dynamo_resume_in"


class Caller(NamedTuple):
    """A function's file, first line and name. The empty one is no Python function."""

    filename: str = ""
    line: int = 0
    name: str = ""

    @classmethod
    def of(cls, code: CodeType) -> Caller:
        """The function with this code."""
        return cls(code.co_filename, code.co_firstlineno, code.co_name)

    def __str__(self) -> str:
        """Without the folder, which may differ from rank to rank."""
        if not self.filename:
            return ""
        return f"{os.path.basename(self.filename)}:{self.line} {self.name}"


NO_CALLER = Caller()


def find_caller() -> Caller:
    """The function that made the call that is being run. One or two microseconds."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module not in _KNOWN_BETWEEN:
            if module is None or module.split(".")[0] in _BETWEEN:
                _KNOWN_BETWEEN.add(module)
            elif not frame.f_code.co_name.startswith(_RESUMED):
                return Caller.of(frame.f_code)
        frame = frame.f_back
    return NO_CALLER

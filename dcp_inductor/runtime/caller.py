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
from types import CodeType
from typing import NamedTuple

# Frames of these packages stand between a call and the function that made it.
_BETWEEN = ("torch", "dcp_inductor", "contextlib", "functools")
_KNOWN_BETWEEN: set[str | None] = set()
# What Dynamo calls the rest of a function behind a graph break, which the function
# calls: a rank that breaks alone, to print say, is in the same function.
_RESUMED = "torch_dynamo_resume_in"
# Frames from find_caller() to the caller of the op's entry.
_ENTRY = 3


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


if sys.version_info >= (3, 12):
    _module_at = sys._getframemodulename
else:

    def _module_at(depth: int) -> str | None:
        try:
            frame = sys._getframe(depth + 1)
        except ValueError:  # the stack has no such frame
            return None
        return frame.f_globals.get("__name__")


def find_caller() -> Caller:
    """The function that made the call that is being run.

    For op.py, which calls it two frames below the op's entry. About a microsecond on
    Python 3.12, two before.
    """
    depth = _ENTRY
    while True:
        while _module_at(depth) in _KNOWN_BETWEEN:
            depth += 1
        module = _module_at(depth)
        if module is None:
            if not _is_frame(depth):
                return NO_CALLER
            depth += 1
        elif module.split(".")[0] in _BETWEEN:
            _KNOWN_BETWEEN.add(module)
        else:
            code = sys._getframe(depth).f_code
            if not code.co_name.startswith(_RESUMED):
                return Caller.of(code)
            depth += 1


def _is_frame(depth: int) -> bool:
    """Whether the stack of whoever asks has a frame there, of whatever module."""
    try:
        sys._getframe(depth + 1)
    except ValueError:
        return False
    return True

"""Which function, of which object, makes a call of the op: equal on ranks that run the
same program.

NOTE [caller]
It is the innermost Python function outside of torch and this library: the one that
calls, or that was compiled. It is known by its file's name and first line, not by the
line in it, since ranks may stand in different branches of one function. It is looked
for at each call: two functions with equal graphs share one compiled artifact, so
nothing in generated code tells them apart.

NOTE [instance]
Layers that share a compiled graph share its function too; what differs is `self`. Where
that function is a method, its objects are numbered in the order in which they first
called, lane by lane, which is one order on all ranks as long as they call alike. A rank
that leaves a layer out, or takes one twice, is met at its next call. A number ends with
its object, is never given again, and is kept only if its first call went well: ranks
that disagree have given theirs to different objects.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from types import CodeType, FrameType
from typing import Any, NamedTuple

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


def find_caller() -> tuple[Caller, object | None]:
    """The function that made the call that is being run, and the object that it is a
    method of. One or two microseconds."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module not in _KNOWN_BETWEEN:
            if module is None or module.split(".")[0] in _BETWEEN:
                _KNOWN_BETWEEN.add(module)
            elif not frame.f_code.co_name.startswith(_RESUMED):
                return Caller.of(frame.f_code), _owner(frame)
        frame = frame.f_back
    return NO_CALLER, None


def _owner(frame: FrameType) -> object | None:
    """What the frame's function is a method of, by the name of its first argument."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    variables = frame.f_locals
    owner: object | None = variables.get("self")
    if sys.version_info < (3, 13):
        # A copy, that would keep tensors alive as long as the function runs.
        variables.clear()
    return owner


class Instances:
    """The objects whose methods have called on one lane of a group: NOTE [instance]."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Caller, int], tuple[weakref.ref[Any], int]] = {}
        self._given: dict[Caller, int] = {}

    def number(self, caller: Caller, owner: object | None) -> tuple[int, bool]:
        """``owner``'s number, from 1, and whether it is one to keep(). 0 for none."""
        if owner is None:
            return 0, False
        known = self._numbers.get((caller, id(owner)))
        if known is not None and known[0]() is owner:
            return known[1], False
        return self._given.get(caller, 0) + 1, True

    def keep(self, caller: Caller, owner: object, number: int) -> None:
        """``owner`` has this number as long as it lives."""
        key = caller, id(owner)
        self._given[caller] = number
        # An object that can't be referred to weakly is a new one each time.
        with contextlib.suppress(TypeError):
            ref = weakref.ref(owner, lambda gone: self._drop(key, gone))
            self._numbers[key] = ref, number

    def _drop(self, key: tuple[Caller, int], gone: weakref.ref[Any]) -> None:
        known = self._numbers.get(key)
        if known is not None and known[0] is gone:
            del self._numbers[key]

"""What is no verdict: a failure of this moment and this machine, not of the graph.

Memory that was short, a machine that was busy, a process that somebody ended. Another
rank, or the next compilation, may well come to the verdict; so such a refusal is
remembered nowhere. Who finds out is proof.py and what it calls.

NOTE [unsaved]
Inductor makes a graph's key before its passes run and saves what comes out of them
under it, for all ranks and later starts; no pass can take that back. But it pickles the
counters that a compilation has moved along with the code, and saves nothing that can't
be pickled: it warns "unable to serialize compiled graph" and goes on. So a transient
refusal is counted by a number that refuses to be pickled. AOTAutogradCache saves a
reference to what isn't there, and compiles again when it doesn't find it.
"""

from __future__ import annotations

from typing import Any, NoReturn

_NO_ROOM = (
    "out of memory",
    "out_of_memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "status_alloc_failed",
)
COUNTER = "dcp_a2a_lse_reduce_transient"


class Transient(Exception):
    """Failed here and now; str() says how."""


def is_transient(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says nothing of the graph."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, Transient) or out_of_memory(found):
            return True
        found = found.__cause__
    return False


def what_to_do(error: BaseException) -> str:
    """A transient error as the reason of a refusal."""
    what = f"{error}"
    if out_of_memory(error):
        what = f"its proof has too little memory: {type(error).__name__}: {error}"
    return (
        f"{what}; that is this machine's state and not the graph's, so it is "
        "remembered nowhere: compile again with more memory free or less running, or "
        "set DCP_INDUCTOR=0 on all ranks, since peers that fuse will wait for this one"
    )


def out_of_memory(error: BaseException) -> bool:
    """For torch's, the driver's, Triton's and Python's own errors, which share no type.

    The amount of shared memory that a kernel asks for is none of them.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(said in text for said in _NO_ROOM)


class Unsaved(int):
    """A count that keeps what holds it out of Inductor's caches: NOTE [unsaved]."""

    def __add__(self, other: int) -> Unsaved:
        return Unsaved(int(self) + int(other))

    __radd__ = __add__

    def __sub__(self, other: int) -> Unsaved:
        return Unsaved(int(self) - int(other))

    def __copy__(self) -> Unsaved:
        return self

    def __deepcopy__(self, memo: Any) -> Unsaved:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "dcp_inductor refused an exchange for a reason that may pass, so this "
            "graph is saved in no cache; its log says why, and what to do"
        )

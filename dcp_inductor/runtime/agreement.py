"""What all ranks of a group must agree on, and the error when they don't.

Ranks meet through the group's key-value store, on the host: that works before any
collective can, and tells which rank is missing. What is agreed on is the caller's.

NOTE [one round]
Each rank writes its statement under a key of its own and reads everybody's. A round's
keys carry the group's name, its ranks, its life and the round's number, which is the
same on all of them. Whoever has read a round's statements deletes its own of the round
before: all ranks have left that one.

NOTE [one decision]
A round ends in one decision, which the store's compare_set settles for all: the first
to write it decides, and all others obey. "Go" is written by who has seen all
statements, "stopped", with the ranks that are missing, by whose time has run out. So no
rank goes on where another has given up, whoever comes late or looks last; and one that
gives up in the moment in which the rest goes on, goes on too, since all are there. A
rank that dies after its statement is its peers' next step to notice.

NOTE [lives]
A group that is made again may have its old name, and the same store, which still holds
rounds of its first life; or a peer that has been started again and counts from 0. So
rounds are counted by group object, and each rank counts in the store which life of the
group this is.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from dcp_inductor.errors import DcpError, RanksDisagree

Statement = dict[str, Any]

_GO = b"go"
# Seconds between two looks at the store: a wait would hold the connection, which other
# groups and threads of this process share.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 1e-2


@dataclass
class _Meetings:
    """What this process remembers of one group object. turn: one thread at a time."""

    base: str = ""
    rounds: int = 0
    turn: threading.RLock = field(default_factory=threading.RLock)


_MEETINGS: weakref.WeakKeyDictionary[ProcessGroup, _Meetings] = (
    weakref.WeakKeyDictionary()
)
_MEETINGS_LOCK = threading.Lock()


def agree(
    group: ProcessGroup, topic: str, mine: Statement, timeout_s: float
) -> list[Statement]:
    """Every rank's statement, in rank order; all ranks of ``group`` must call this.

    topic names the step in errors. Raises RanksDisagree on all ranks that come, naming
    the ranks that didn't within ``timeout_s`` seconds of another's coming, or who can't
    reach the store.
    """
    if dist.get_backend(group) == "fake":
        # torch's stand-in for compiling alone: no peers, a store that keeps nothing.
        return [{"topic": topic, **mine}] * group.size()
    with one_at_a_time(group) as meetings:
        try:
            meeting = _next_round(group, meetings)
            meeting.state({"topic": topic, **mine})
            decision = meeting.decision(topic, timeout_s)
            if decision != _GO:
                stopped = json.loads(decision)
                raise RanksDisagree(_stopped(group, topic, stopped))
            statements = meeting.statements()
            meeting.forget_last()
        except DcpError:
            raise
        except (dist.DistError, RuntimeError) as error:
            raise RanksDisagree(_no_store(group, topic, error)) from error
    require_equal(group, statements, ["topic"])
    return statements


@contextlib.contextmanager
def one_at_a_time(group: ProcessGroup) -> Iterator[_Meetings]:
    """Inside, this thread alone agrees on something with the group's other ranks: steps
    of two threads would meet each other's. Reentrant."""
    with _MEETINGS_LOCK:
        meetings = _MEETINGS.setdefault(group, _Meetings())
    with meetings.turn:
        yield meetings


def _next_round(group: ProcessGroup, meetings: _Meetings) -> Round:
    store = dist.distributed_c10d._get_process_group_store(group)
    rank = group.rank()
    if not meetings.base:
        ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
        name = f"dcp_inductor/{group.group_name}/{ranks}"
        life = store.add(f"{name}/lives/{rank}", 1)
        meetings.base = f"{name}/{life}"
    number = meetings.rounds
    meetings.rounds += 1
    return Round(store, meetings.base, number, rank, group.size())


@dataclass(frozen=True)
class Round:
    """One round of ``size`` ranks over a store, as ``rank`` sees it."""

    store: Store
    base: str
    number: int
    rank: int
    size: int

    def state(self, mine: Statement) -> None:
        """Show this rank's statement to all."""
        self.store.set(self._key(self.rank), json.dumps(mine))

    def decision(self, topic: str, timeout_s: float) -> bytes:
        """What is decided, NOTE [one decision]: "go", or who stopped and why, as JSON.

        The same on every rank, and within ``timeout_s`` seconds on this one.
        """
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while not self.store.check(self._keys()):
            if self.store.check([self._decided]):
                break
            left = deadline - time.monotonic()
            missing = self._missing() if left <= 0 else []
            if missing:
                why = {"missing": missing, "by": self.rank, "topic": topic}
                return self._settle(json.dumps({**why, "timeout_s": timeout_s}))
            time.sleep(min(pause, max(left, 0.0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._settle(_GO.decode())

    def statements(self) -> list[Statement]:
        """Everybody's, in rank order, once it is decided that all are there."""
        return [json.loads(self.store.get(key)) for key in self._keys()]

    def forget_last(self) -> None:
        """Delete what this rank has left of the round before: NOTE [one round]."""
        if self.number:
            last = Round(self.store, self.base, self.number - 1, self.rank, self.size)
            self.store.delete_key(last._key(self.rank))
            if self.rank == 0:
                self.store.delete_key(last._decided)

    def _settle(self, wanted: str) -> bytes:
        """Decide ``wanted`` unless something is decided; what is decided."""
        return self.store.compare_set(self._decided, "", wanted)

    def _missing(self) -> list[int]:
        keys = enumerate(self._keys())
        return [rank for rank, key in keys if not self.store.check([key])]

    def _keys(self) -> list[str]:
        return [*map(self._key, range(self.size))]

    def _key(self, rank: int) -> str:
        return f"{self.base}/{self.number}/{rank}"

    @property
    def _decided(self) -> str:
        return f"{self.base}/{self.number}/decided"


def require_equal(
    group: ProcessGroup, statements: Sequence[Statement], names: Sequence[str]
) -> None:
    """Raise RanksDisagree, the same on every rank, unless all state the same."""
    difference = first_difference(statements, names)
    if difference is not None:
        name, stated = difference
        by_rank = ", ".join(f"rank {r}: {v!r}" for r, v in enumerate(stated))
        raise RanksDisagree(
            f"The ranks of group {group.group_name!r} differ in {name}: {by_rank}. "
            "All ranks must run the same dcp_inductor with the same settings and "
            "reserve the same shapes in the same order; make them equal."
        )


def first_difference(
    statements: Sequence[Statement], names: Iterable[str]
) -> tuple[str, list[Any]] | None:
    """The first of ``names`` of which ranks state different things, and what each
    states; or None."""
    for name in names:
        stated = [statement.get(name) for statement in statements]
        if any(value != stated[0] for value in stated):
            return name, stated
    return None


def first_objection(
    statements: Sequence[Statement], name: str, describe: Callable[[int, str], str]
) -> str | None:
    """The first rank's non-empty text under ``name``, described; None if all agree."""
    for rank, statement in enumerate(statements):
        if statement.get(name):
            return describe(rank, statement[name])
    return None


def _no_store(group: ProcessGroup, topic: str, error: Exception) -> str:
    head = f"Rank {group.rank()} of group {group.group_name!r} can't "
    if isinstance(error, NotImplementedError):
        return (
            f"{head}settle {topic} with its peers: the group's store lacks what that "
            f"takes ({error}). Give init_process_group a TCPStore, FileStore or "
            "HashStore."
        )
    return (
        f"{head}reach the group's store at {topic}: {error}. The process that keeps "
        "it, usually rank 0, has ended; look at its log and start all ranks again."
    )


def _stopped(group: ProcessGroup, topic: str, stopped: Statement) -> str:
    """stopped: a round's decision that isn't "go"."""
    missing, by, limit = stopped["missing"], stopped["by"], stopped["timeout_s"]
    name, rank = group.group_name, group.rank()
    if rank in missing:
        return (
            f"Rank {rank} of group {name!r} came to {topic} after rank {by} had "
            f"waited {limit:g} s for it at {stopped['topic']} and stopped, so no rank "
            "goes on. Find what kept it, or let the others wait longer by "
            "Config(timeout_s=...); then all ranks can call again."
        )
    ranks = ", ".join(map(str, missing))
    return (
        f"Rank(s) {ranks} of group {name!r} didn't come to {stopped['topic']} within "
        f"{limit:g} s; rank {by} stopped waiting then, and all ranks with it. They "
        "have crashed, don't run dcp_inductor (not installed, DCP_INDUCTOR=0, or their "
        "graph wasn't fused), or are somewhere else in the program. Look at their "
        "logs; Config(timeout_s=...) waits longer."
    )

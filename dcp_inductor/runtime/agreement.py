"""What all ranks of a group must agree on, and the error when they don't.

Ranks meet through the group's key-value store, on the host: that works before any
collective can, and tells which rank is missing. What is agreed on is the caller's.

NOTE [one round]
Each rank writes its statement under a key of its own and reads everybody's. A round's
keys carry the group's name, its ranks and the round's number, which is the same on all
of them; a rank deletes its key of the round before last, which all have read by then.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dcp_inductor.errors import RanksDisagree

Statement = dict[str, Any]

_ROUNDS: Counter[str] = Counter()


def agree(
    group: ProcessGroup, topic: str, mine: Statement, timeout_s: float
) -> list[Statement]:
    """Every rank's statement, in rank order; all ranks of ``group`` must call this.

    topic names the step in errors. Raises RanksDisagree, naming the ranks that didn't
    come within ``timeout_s`` seconds.
    """
    if dist.get_backend(group) == "fake":
        # torch's stand-in for compiling alone: no peers, a store that keeps nothing.
        return [{"topic": topic, **mine}] * group.size()
    store = dist.distributed_c10d._get_process_group_store(group)
    ranks = dist.get_process_group_ranks(group)
    base = f"dcp_inductor/{group.group_name}/{'-'.join(map(str, ranks))}"
    number = _ROUNDS[base]
    _ROUNDS[base] += 1

    def key(round_number: int, rank: int) -> str:
        return f"{base}/{round_number}/{rank}"

    try:
        store.set(key(number, group.rank()), json.dumps({"topic": topic, **mine}))
    except (dist.DistError, RuntimeError) as error:
        raise RanksDisagree(_no_store(group, topic, error)) from error
    deadline = time.monotonic() + timeout_s
    statements, missing = [], []
    for rank in range(group.size()):
        left = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([key(number, rank)], timedelta(seconds=left))
        except (dist.DistError, RuntimeError):
            missing.append(rank)
            continue
        statements.append(json.loads(store.get(key(number, rank))))
    if missing:
        raise RanksDisagree(_missing(group, topic, missing, timeout_s))
    if number >= 2:
        store.delete_key(key(number - 2, group.rank()))
    require_equal(group, statements, ["topic"])
    return statements


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
        stated = [statement[name] for statement in statements]
        if any(value != stated[0] for value in stated):
            return name, stated
    return None


def first_objection(
    statements: Sequence[Statement], name: str, describe: Callable[[int, str], str]
) -> str | None:
    """The first rank's non-empty text under ``name``, described; None if all agree."""
    for rank, statement in enumerate(statements):
        if statement[name]:
            return describe(rank, statement[name])
    return None


def _no_store(group: ProcessGroup, topic: str, error: Exception) -> str:
    return (
        f"Rank {group.rank()} of group {group.group_name!r} can't reach the group's "
        f"store at {topic}: {error}. The process that keeps it, usually rank 0, has "
        "ended; look at its log and start all ranks again."
    )


def _missing(
    group: ProcessGroup, topic: str, missing: list[int], timeout_s: float
) -> str:
    ranks = ", ".join(map(str, missing))
    return (
        f"Rank(s) {ranks} of group {group.group_name!r} didn't come to {topic} within "
        f"{timeout_s:g} s. They have crashed, don't run dcp_inductor (not installed, "
        "DCP_INDUCTOR=0, or their graph wasn't fused), or are somewhere else in the "
        "program. Look at their logs; Config(timeout_s=...) waits longer."
    )

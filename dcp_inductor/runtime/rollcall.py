"""Before an exchange on the host: are all ranks at the same call?

For backends that would pair whatever comes: gloo hands one call's bytes to another of
the same size, and ends the process at two of different sizes. What a device kernel
sends along instead is its backend's.

NOTE [roll call]
Each rank tells every other rank, point to point, which call it is at, and goes on when
all have told it the same. So ranks at different calls get the same error, no payload
has moved by then, and a rank that doesn't come is known by its number. What tells calls
apart:
- shape, dtype and base;
- the place in a compiled graph;
- the function that calls, or that was compiled, and the object that it is a method of,
  by number (caller.py);
- the number on this group, which also counts empty batches: they send nothing, and a
  rank that alone has one would be a call ahead.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.errors import PeerTimeout, RanksDisagree
from dcp_inductor.logs import runtime as log
from dcp_inductor.merge import LSE_MODES, PARTIAL_DTYPES
from dcp_inductor.runtime.call import ExchangeCall

# Told apart from a program's own messages between two ranks.
_MESSAGE_TAG = 0xDC9
_WORDS = ("number", "tokens", "heads", "head dim", "dtype", "base", "site", "object")
_CALLER_BYTES = 64

_NUMBERS: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def count(group: ProcessGroup) -> int:
    """The number of this call on ``group``, from 1. Calls that send nothing count."""
    number = _NUMBERS.get(group, 0) + 1
    _NUMBERS[group] = number
    return number


def call_roll(call: ExchangeCall, timeout_s: float) -> None:
    """Return once all ranks of the group are at ``call``; all of them must call this.

    Raises PeerTimeout, naming the ranks that didn't come within ``timeout_s`` seconds,
    or RanksDisagree, the same on every rank, naming what the ranks are at.
    """
    if dist.get_backend(call.group) == "fake":
        return  # no peers, and what is received is whatever lies there
    mine = _message(call, count(call.group))
    try:
        told = _exchange(call.group, mine, timeout_s)
    except _NoMessages as error:
        log.debug("group %s: no roll call: %s", call.group_name, error)
        return
    missing = [rank for rank, message in enumerate(told) if message is None]
    if missing:
        raise PeerTimeout(_didnt_come(call, missing, timeout_s))
    stated = [_Stated.of(message) for message in told if message is not None]
    if any(statement != stated[0] for statement in stated):
        raise RanksDisagree(_different(call, stated))


class _NoMessages(Exception):
    """The group's backend, the same on all ranks, knows collectives alone."""


@dataclass(frozen=True)
class _Stated:
    """What a rank said of its call: _WORDS by name, and the function that calls."""

    words: dict[str, int]
    caller: str

    @classmethod
    def of(cls, message: Tensor) -> _Stated:
        """What _message() wrote."""
        words = message[: len(_WORDS)].tolist()
        caller = bytes(message[len(_WORDS) :].view(torch.uint8).tolist())
        return cls(
            dict(zip(_WORDS, words, strict=True)),
            caller.rstrip(b"\0").decode(errors="replace"),
        )

    def __str__(self) -> str:
        said = self.words
        dtype = str(PARTIAL_DTYPES[said["dtype"]]).removeprefix("torch.")
        place = f"place {said['site']:08x} of a graph" if said["site"] else "eager"
        of = f" of object {said['object']}" if said["object"] else ""
        return (
            f"call {said['number']}, {said['tokens']} tokens, {said['heads']} heads of "
            f"{said['head dim']}, {dtype}, {LSE_MODES[said['base']]}, {place}, made by "
            f"{self.caller or 'no Python function'}{of}"
        )


def _message(call: ExchangeCall, number: int) -> Tensor:
    """int64: _WORDS, then the caller's name in bytes."""
    o = call.partial_o
    base, dtype = LSE_MODES.index(call.lse_mode), PARTIAL_DTYPES.index(o.dtype)
    words = torch.tensor([number, *o.shape, dtype, base, call.site, call.instance])
    caller = str(call.caller).encode()[:_CALLER_BYTES].ljust(_CALLER_BYTES, b"\0")
    named = torch.tensor([*caller], dtype=torch.uint8).view(words.dtype)
    return torch.cat([words, named])


def _exchange(
    group: ProcessGroup, mine: Tensor, timeout_s: float
) -> list[Tensor | None]:
    """Every rank's message in rank order; None of a rank that didn't come.

    Raises _NoMessages if the group can't send between two ranks.
    """
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    told: list[Tensor | None] = [mine] * group.size()
    deadline = time.monotonic() + timeout_s
    received = {rank: torch.zeros_like(mine) for rank in peers}
    works: list[tuple[int, Any, Any]] = []
    for rank in peers:
        told[rank] = None
        try:
            sent = dist.isend(mine, group=group, group_dst=rank, tag=_MESSAGE_TAG)
            came = dist.irecv(
                received[rank], group=group, group_src=rank, tag=_MESSAGE_TAG
            )
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or "not support" in str(error):
                raise _NoMessages(str(error)) from error
            continue
        works.append((rank, came, sent))
    for rank, came, sent in works:
        with contextlib.suppress(RuntimeError):
            came.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            sent.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            told[rank] = received[rank]
    return told


def _didnt_come(call: ExchangeCall, missing: list[int], timeout_s: float) -> str:
    ranks = ", ".join(map(str, missing))
    return (
        f"Rank(s) {ranks} of group {call.group_name!r} didn't come to the exchange of "
        f"{tuple(call.partial_o.shape)} that rank {call.group.rank()} is at, within "
        f"{timeout_s:g} s or before their process ended. They have crashed, skipped "
        "the call, or run it unfused. Look at their logs; the group can't be used any "
        "more. Config(timeout_s=...) waits longer."
    )


def _different(call: ExchangeCall, stated: list[_Stated]) -> str:
    differing = [n for n in _WORDS if len({s.words[n] for s in stated}) > 1]
    differing += ["caller"] * (len({s.caller for s in stated}) > 1)
    by_rank = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(stated))
    return (
        f"The ranks of group {call.group_name!r} met at different exchanges "
        f"({', '.join(differing)}): {by_rank}. Nothing was exchanged. All ranks must "
        "make the same calls in the same order with the same batch; find the rank that "
        "took another branch, skipped a call, or was given another batch."
    )

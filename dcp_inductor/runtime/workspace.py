"""Reservations, lanes and slots: which memory a call runs on. The only mutable state.

What a slot holds is its backend's; which backend that is, selection.py's.

NOTE [slots]
A call arrives with a group, a geometry (H, D, dtype, device) and a lane. Each lane of
a reservation has one slot for eager calls and one for each capture domain. A slot is
used by one ordered stream at a time:
- eager: a call from another stream than the last first waits, on the device, for what
  the last one has been given so far;
- capture: the first capture stream that comes takes the next free domain of the lane
  and keeps it; a stream that finds none is refused before anything is sent. Streams
  come in the same order on all ranks, since ranks run one program.
Graphs captured on one domain must be replayed one after the other, as graphs that share
memory must anyway; nothing runs here at a replay that could check it.

NOTE [reserve]
Slots are made by reserve(), on all ranks at once, never inside a capture. Its steps
are votes: an error on one rank is an error on all (selection.py). Threads of a process
take turns at a group, and one that finds what it wanted made by another makes nothing:
its peers may have made it once.

NOTE [life]
A reservation lives as long as its process group; a group made again under the same
name starts empty. A larger reservation of the same geometry comes beside the old one,
which stays: captured graphs hold its addresses.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.config import Config
from dcp_inductor.errors import (
    BadInput,
    NotReserved,
    PeerTimeout,
    StreamConflict,
)
from dcp_inductor.logs import runtime as log
from dcp_inductor.merge import PARTIAL_DTYPES
from dcp_inductor.runtime.agreement import one_at_a_time
from dcp_inductor.runtime.backends import Backend, Buffers
from dcp_inductor.runtime.call import ExchangeCall, Geometry
from dcp_inductor.runtime.caller import Instances
from dcp_inductor.runtime.groups import group_name_of, resolve_group
from dcp_inductor.runtime.rollcall import call_roll
from dcp_inductor.runtime.selection import choose

# Tokens of a reservation that a first call makes: room for most decode batches, and
# few MiB. A wider batch runs in pieces, or reserves wider itself.
_FIRST_CALL_TOKENS = 64
_FIRST_CALL_MOST_TOKENS = 512

Merged = tuple[Tensor, Tensor]
Kind = tuple[int, int, torch.dtype, torch.device]


@dataclass
class Slot:
    """An eager slot's guard: the stream that used it last, and its raw handle."""

    raw_stream: int | None = None
    stream: torch.cuda.Stream | None = None


@dataclass
class Reservation:
    """What reserve() made for one group and geometry, on one backend.

    It doesn't hold the group, whose end is its own.
    """

    group_name: str
    rank: int
    geometry: Geometry
    backend: Backend
    device: torch.device
    buffers: Buffers | None
    timeout_s: float = Config.timeout_s
    eager: list[Slot] = field(default_factory=list)
    # Of each lane: the capture streams that own its domains, in order.
    owners: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.eager = [Slot() for _ in range(self.geometry.lanes)]
        self.owners = [[] for _ in range(self.geometry.lanes)]

    @property
    def nbytes(self) -> int:
        """Device memory of this rank in bytes."""
        return 0 if self.buffers is None else self.buffers.nbytes

    def run(self, call: ExchangeCall) -> Merged:
        """Run a call of any width, in equal pieces where it exceeds max_tokens."""
        if self.buffers is None:
            if self.device.type == "cpu":
                call_roll(call, self.timeout_s)
            return self.backend.run_direct(call)
        slot = self._slot(call)
        if self.buffers.spoilt(slot):
            self._raise_spoilt(slot)
        if call.num_tokens <= self.geometry.max_tokens:
            return self.buffers.run(call, slot)
        pieces = _pieces(call.num_tokens, self.geometry.max_tokens)
        parts = [self.buffers.run(call.narrow(*piece), slot) for piece in pieces]
        return (
            torch.cat([part[0] for part in parts]),
            torch.cat([part[1] for part in parts]),
        )

    def raise_if_spoilt(self) -> None:
        """Raise PeerTimeout if any slot's last call failed on the device."""
        if self.buffers is None:
            return
        for slot in range(self.geometry.num_slots):
            if self.buffers.spoilt(slot):
                self._raise_spoilt(slot)

    def _slot(self, call: ExchangeCall) -> int:
        """Eager slots come first, then each lane's capture domains."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if not torch.cuda.is_current_stream_capturing():
            guard = self.eager[call.lane]
            if raw != guard.raw_stream:
                self._hand_over(guard, raw)
            return call.lane
        owners = self.owners[call.lane]
        if raw not in owners:
            if len(owners) == self.geometry.capture_domains:
                raise StreamConflict(_conflict(call, self.geometry))
            owners.append(raw)
        domain = owners.index(raw)
        return self.geometry.lanes + call.lane * self.geometry.capture_domains + domain

    def _hand_over(self, guard: Slot, raw: int) -> None:
        """Order the current stream behind all that the last one was given."""
        current = torch.cuda.current_stream(self.device)
        if guard.stream is not None:
            current.wait_event(guard.stream.record_event())
        guard.stream, guard.raw_stream = current, raw

    def _raise_spoilt(self, slot: int) -> None:
        assert self.buffers is not None
        reason = self.buffers.failure(slot)
        lanes, domains = self.geometry.lanes, self.geometry.capture_domains
        lane = slot if slot < lanes else (slot - lanes) // domains
        raise PeerTimeout(
            f"Rank {self.rank}, group {self.group_name!r}, lane {lane}: "
            f"{reason}. The ranks' exchanges no longer match, so the results since "
            "then are NaN. A rank crashed, skipped a call, or called with another "
            "batch; look at its log, then restart the group's processes."
        )


class _Groups:
    """Reservations by group name, dropped when the group object is gone."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[weakref.ref[ProcessGroup], OfGroup]] = {}
        self._changing = threading.Lock()

    def find(self, name: str, group: ProcessGroup) -> OfGroup:
        known = self._of.get(name)
        if known is None or known[0]() is not group:
            with self._changing:
                known = self._of.get(name)
                if known is None or known[0]() is not group:
                    known = self._of[name] = (weakref.ref(group), OfGroup())
        return known[1]

    def living(self) -> list[tuple[str, OfGroup]]:
        found = [*self._of.items()]
        return [(name, of) for name, (ref, of) in found if ref() is not None]


@dataclass
class OfGroup:
    """One group's reservations: newest last, by kind; retired ones stay in the list.

    accepted: kinds of calls that passed every check, by signature; a decoder repeats a
    few. instances: of each lane, whose methods have called.
    """

    accepted: dict[tuple[Any, ...], Kind] = field(default_factory=dict)
    instances: defaultdict[int, Instances] = field(
        default_factory=lambda: defaultdict(Instances)
    )
    of_kind: dict[Kind, list[Reservation]] = field(default_factory=dict)

    def newest(self, kind: Kind) -> Reservation | None:
        found = self.of_kind.get(kind)
        return found[-1] if found else None


_GROUPS = _Groups()


def known_of(name: str, group: ProcessGroup) -> OfGroup:
    """What is known of a group so far; goes with it."""
    return _GROUPS.find(name, group)


def run(call: ExchangeCall, known: OfGroup, kind: Kind, owner: object | None) -> Merged:
    """Run a checked call on the reservation of its group, made now if there is none.

    owner: what the caller is a method of.
    """
    reservation = known.newest(kind)
    if reservation is None or call.lane >= reservation.geometry.lanes:
        reservation = _reserve_in_turn(call, known, kind)
    instances = known.instances[call.lane]
    call.instance, new = instances.number(call.caller, owner)
    merged = reservation.run(call)
    if new:
        instances.keep(call.caller, owner, call.instance)
    return merged


def _reserve_in_turn(call: ExchangeCall, known: OfGroup, kind: Kind) -> Reservation:
    """What ``call`` needs, by now made by another thread, or made here."""
    with one_at_a_time(call.group):
        reservation = known.newest(kind)
        if reservation is None or call.lane >= reservation.geometry.lanes:
            reservation = _reserve_for(call, reservation)
        return reservation


def _reserve_for(call: ExchangeCall, known: Reservation | None) -> Reservation:
    """The first call of a kind, or of a lane, reserves; every rank is at that call."""
    if call.partial_o.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotReserved(_not_reserved(call, known))
    width = 1 << (call.num_tokens - 1).bit_length()
    max_tokens = min(max(width, _FIRST_CALL_TOKENS), _FIRST_CALL_MOST_TOKENS)
    if known is not None:
        max_tokens = max(max_tokens, known.geometry.max_tokens)
    geometry = Geometry(
        call.cp_size,
        max_tokens,
        call.partial_o.shape[1],
        call.partial_o.shape[2],
        call.partial_o.dtype,
        lanes=call.lane + 1,
        capture_domains=1 if known is None else known.geometry.capture_domains,
    )
    return _reserve(call.group_name, call.group, geometry, call.partial_o.device)


def reserve(
    group: ProcessGroup | str | None = None,
    *,
    max_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    lanes: int = 1,
    capture_domains: int = 1,
    device: torch.device | str | None = None,
) -> Reservation:
    """Make the workspaces of a group, on all its ranks at once, before any capture.

    Args:
        group: process group, its name, or None for the default group.
        max_tokens: B of the widest call that runs in one piece.
        num_heads: H, before the exchange. head_dim: D. dtype: of partial_o.
        lanes: how many streams exchange beside each other in one compiled function.
        capture_domains: how many capture streams capture exchanges of one lane.
        device: of the partials; by default the current CUDA device where the group
            communicates on CUDA, else the CPU.

    Device memory a rank, per slot, with rows = max_tokens * H/N: about
    ``2 * N * rows * (D * itemsize + 8)`` bytes; ``lanes * (1 + capture_domains)``
    slots. ``Reservation.nbytes`` has the sum.

    Raises BadInput for shapes that can't be; RanksDisagree if a rank is missing or
    asks for something else; BackendUnavailable if ``Config(backend=...)`` names one
    that can't run. An error on one rank is an error on all, within Config.timeout_s.
    """
    name = group_name_of(group)
    process_group = resolve_group(name)
    geometry = Geometry(
        process_group.size(),
        max_tokens,
        num_heads,
        head_dim,
        dtype,
        lanes,
        capture_domains,
    )
    _check_geometry(geometry)
    where = _device(process_group, device)
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotReserved(
            "reserve() was called inside a CUDA graph capture; memory made there would "
            "belong to the graph. Call it before the capture, on every rank."
        )
    return _reserve(name, process_group, geometry, where)


def reservations() -> list[tuple[str, Reservation]]:
    """Every living reservation with its group's name, oldest first."""
    return [
        (name, reservation)
        for name, of_group in _GROUPS.living()
        for found in of_group.of_kind.values()
        for reservation in found
    ]


def check() -> None:
    """Wait for the device and raise PeerTimeout if an exchange failed on it.

    A failed call leaves NaN and a record that the next call raises. A replayed CUDA
    graph calls nothing, so a loop of replays asks here.
    """
    for _, reservation in reservations():
        if reservation.buffers is not None:
            torch.cuda.synchronize(reservation.device)
        reservation.raise_if_spoilt()


def _reserve(
    name: str, group: ProcessGroup, geometry: Geometry, device: torch.device
) -> Reservation:
    config = Config.from_env()
    kind = (geometry.num_heads, geometry.head_dim, geometry.dtype, device)
    with one_at_a_time(group):
        backend, buffers = choose(group, geometry, device, config)
        reservation = Reservation(
            name, group.rank(), geometry, backend, device, buffers, config.timeout_s
        )
        _GROUPS.find(name, group).of_kind.setdefault(kind, []).append(reservation)
    log.info(
        "group %s: backend %s, %d tokens, %d heads of %d, %d slots, %.1f MiB",
        name,
        backend.name,
        geometry.max_tokens,
        geometry.num_heads,
        geometry.head_dim,
        geometry.num_slots if buffers is not None else 0,
        reservation.nbytes / 2**20,
    )
    return reservation


def _pieces(num_tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """(start, length) of the fewest pieces of at most max_tokens, as equal as can be;
    the same on every rank."""
    count = -(-num_tokens // max_tokens)
    ends = [num_tokens * piece // count for piece in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(ends)]


def _device(group: ProcessGroup, asked: torch.device | str | None) -> torch.device:
    """A device with its number, as tensors have it."""
    if asked is None:
        on_cuda = any(device.type == "cuda" for device in group._device_types)
        asked = "cuda" if on_cuda and torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_geometry(geometry: Geometry) -> None:
    for name in ("max_tokens", "num_heads", "head_dim", "lanes", "capture_domains"):
        value = getattr(geometry, name)
        if not isinstance(value, int) or value < 1:
            raise BadInput(
                f"reserve({name}={value!r}): a workspace needs a positive whole number."
            )
    if geometry.num_heads % geometry.cp_size:
        raise BadInput(
            f"reserve(num_heads={geometry.num_heads}) on a group of "
            f"{geometry.cp_size} ranks: H must be a multiple of N, since each rank "
            "keeps H/N heads."
        )
    if geometry.dtype not in PARTIAL_DTYPES:
        raise BadInput(
            f"reserve(dtype={geometry.dtype}): the exchange takes "
            f"{', '.join(map(str, PARTIAL_DTYPES))}."
        )


def _call_to_make(call: ExchangeCall) -> str:
    o = call.partial_o
    return (
        f"dcp_inductor.reserve({call.group_name!r}, max_tokens={o.shape[0]}, "
        f"num_heads={o.shape[1]}, head_dim={o.shape[2]}, dtype={o.dtype}, "
        f"lanes={call.lane + 1})"
    )


def _not_reserved(call: ExchangeCall, known: Reservation | None) -> str:
    have = "nothing" if known is None else f"{known.geometry.lanes} lane(s)"
    return (
        f"An exchange of {tuple(call.partial_o.shape)} on group {call.group_name!r}, "
        f"lane {call.lane}, is being captured into a CUDA graph, and {have} is "
        "reserved for it. Workspaces can't be made during a capture. Call "
        f"{_call_to_make(call)} on every rank before it, or run the function once."
    )


def _conflict(call: ExchangeCall, geometry: Geometry) -> str:
    return (
        f"An exchange on group {call.group_name!r}, lane {call.lane}, is being "
        f"captured on another stream than the {geometry.capture_domains} capture "
        "stream(s) that own its slots. Two streams on one slot would mix their data "
        "at replay. "
        "Capture on the same stream (torch.cuda.graph(..., stream=...)), or reserve("
        f"capture_domains={geometry.capture_domains + 1}) before the first capture."
    )

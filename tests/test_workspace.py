"""Lanes, slots, pieces and agreement, with buffers that stand in for a GPU's."""

from __future__ import annotations

import importlib.util
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import dcp_inductor
from dcp_inductor import Config
from dcp_inductor.errors import (
    BackendUnavailable,
    BadInput,
    NotReserved,
    PeerTimeout,
    RanksDisagree,
    StreamConflict,
)
from dcp_inductor.runtime import agreement, backends, selection, workspace
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.backends.symm_mem import SymmMem, blocked_by_places
from dcp_inductor.runtime.call import ExchangeCall, Geometry

HAS_TRITON = importlib.util.find_spec("triton") is not None

GEOMETRY = Geometry(2, 16, 4, 8, torch.float32, lanes=2, capture_domains=2)


@dataclass
class StubBuffers:
    """Records which slot each piece of a call ran on."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    failed: str | None = None
    nbytes: int = 0

    def run(self, call: ExchangeCall, slot: int):
        self.runs.append((slot, call.num_tokens))
        return call.partial_o[:, :2], call.partial_lse[:, :2]

    def spoilt(self, slot: int) -> bool:
        return self.failed is not None

    def failure(self, slot: int) -> str:
        return self.failed or ""


class Streams:
    """The current stream, and whether it captures, as a test wants them."""

    def __init__(self, monkeypatch):
        self.raw, self.capturing, self.waits = 1, False, []
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: self.raw, raising=False
        )
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.capturing
        )
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream)

    def stream(self, device=None):
        raw = self.raw
        return types.SimpleNamespace(
            wait_event=lambda event: self.waits.append((event, raw)),
            record_event=lambda: raw,
        )


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def reserved(buffers=None):
    device = torch.device("cuda", 0)
    buffers = StubBuffers() if buffers is None else buffers
    return workspace.Reservation("dcp", 1, GEOMETRY, SymmMem(), device, buffers)


def call(num_tokens=3, lane=0):
    o, lse = torch.randn(num_tokens, 4, 8), torch.randn(num_tokens, 4)
    return ExchangeCall(o, lse, None, "dcp", "base2", True, lane)


def test_each_lane_and_capture_domain_has_its_slot(streams):
    reservation = reserved()
    for lane in (0, 1):
        reservation.run(call(lane=lane))
    streams.capturing = True
    for lane in (0, 1):
        for streams.raw in (7, 8, 7):
            reservation.run(call(lane=lane))
    slots = [slot for slot, _ in reservation.buffers.runs]
    assert slots == [0, 1, 2, 3, 2, 4, 5, 4]
    assert GEOMETRY.num_slots == 6


def test_a_capture_stream_too_many_is_refused_before_anything_runs(streams):
    reservation = reserved()
    streams.capturing = True
    for streams.raw in (7, 8):
        reservation.run(call())
    streams.raw = 9
    with pytest.raises(StreamConflict, match="capture_domains=3"):
        reservation.run(call())
    assert len(reservation.buffers.runs) == 2
    streams.raw = 7
    reservation.run(call())


def test_an_eager_slot_is_handed_over_in_order(streams):
    reservation = reserved()
    for streams.raw in (1, 1, 2, 2, 1):
        reservation.run(call())
    # (event of the stream before, stream that waits)
    assert streams.waits == [(1, 2), (2, 1)]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 49])
def test_wide_calls_run_in_the_fewest_equal_pieces(streams, num_tokens):
    reservation = reserved()
    given = call(num_tokens)
    out, lse = reservation.run(given)
    lengths = [length for _, length in reservation.buffers.runs]
    assert sum(lengths) == num_tokens
    assert len(lengths) == -(-num_tokens // 16)
    assert max(lengths) - min(lengths) <= 1
    assert torch.equal(out, given.partial_o[:, :2])
    assert torch.equal(lse, given.partial_lse[:, :2])


def test_a_spoilt_slot_raises_before_the_next_call_and_in_check(streams):
    reservation = reserved(StubBuffers(failed="rank 0 sent nothing"))
    for attempt in (lambda: reservation.run(call()), reservation.raise_if_spoilt):
        with pytest.raises(PeerTimeout, match="Rank 1, group 'dcp', lane 0: rank 0"):
            attempt()
    assert reservation.buffers.runs == []


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([("a", "x"), ("a", "y")], None),
        ([("a", "x"), ("a", "x")], "ranks 0 and 1 share one card"),
        ([("a", "x"), ("b", "y")], "several hosts (a, b)"),
        ([("a", "x"), ("a", "y", ["x", "z"])], None),
        ([("a", "x"), ("a", "y", ["y", "x"])], "ranks 0 and 1 have no peer access"),
    ],
)
def test_places_that_cant_share_memory(places, reason):
    found = blocked_by_places(
        [{"host": h, "card": c, "apart": apart} for h, c, *apart in places]
    )
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"num_heads": 3},
        {"lanes": 1.5},
        {"dtype": torch.float64},
    ],
)
def test_reserve_refuses_what_cant_be(wrong):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    good = {"max_tokens": 4, "num_heads": 4, "head_dim": 8, "dtype": torch.float32}
    try:
        if "num_heads" in wrong:
            bad = Geometry(2, 4, 3, 8, torch.float32)
            with pytest.raises(BadInput, match="multiple of N"):
                workspace._check_geometry(bad)
            return
        with pytest.raises(BadInput, match=r"reserve\("):
            dcp_inductor.reserve(**{**good, **wrong})
        assert dcp_inductor.reserve(**good).backend.name == "collective"
    finally:
        dist.destroy_process_group()


def test_a_first_call_inside_a_capture_names_the_call_to_make(streams):
    streams.capturing = True
    on_card = types.SimpleNamespace(is_cuda=True, shape=(3, 4, 8), dtype=torch.float32)
    given = call()
    given.partial_o = on_card
    with pytest.raises(NotReserved, match=r"reserve\('dcp', max_tokens=3, num_heads=4"):
        workspace._reserve_for(given, None)


def exchange(**reserve):
    shape = {"num_heads": 4, "head_dim": 8, "dtype": torch.float32, "max_tokens": 4}
    return dcp_inductor.reserve(**{**shape, **reserve})


def differs(rank, num_ranks, what):
    timeout = Config(timeout_s=4.0)
    workspace.Config = types.SimpleNamespace(from_env=lambda: timeout)
    if what == "missing" and rank == 1:
        dist.barrier()
        return ""
    if what == "geometry":
        reserve = {"max_tokens": 4 + rank}
    elif what == "config":
        other = Config(timeout_s=4.0 + rank)
        workspace.Config = types.SimpleNamespace(from_env=lambda: other)
        reserve = {}
    elif what == "library":
        selection.library_identity = lambda: f"sources {rank}"
        reserve = {}
    else:
        reserve = {}
    if what == "memory":
        selection.blocked_by_places = lambda places: None
        selection.backends = types.SimpleNamespace(BACKENDS=(Failing(rank),))
    try:
        exchange(**reserve)
        text = ""
    except RanksDisagree as error:
        text = str(error)
    if what == "missing":
        dist.barrier()
    return text


class Failing(Collective):
    """Needs buffers, and rank 1 can't allocate them."""

    name = "failing"
    needs_buffers = True

    def __init__(self, rank):
        self.rank = rank

    def allocate(self, group, geometry, device):
        if self.rank == 1:
            raise MemoryError("out of memory")
        return StubBuffers()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("geometry", "differ in geometry"),
        ("config", "differ in config: rank 0"),
        ("library", "differ in library: rank 0: 'sources 0', rank 1: 'sources 1'"),
        ("memory", "failed on rank 1: MemoryError: out of memory"),
    ],
)
def test_a_difference_is_an_error_on_every_rank(what, says):
    for text in run_ranks(differs, 2, what):
        assert says in text


def test_a_missing_rank_is_named_in_time():
    first, _ = run_ranks(differs, 2, "missing")
    assert "Rank(s) 1 of group" in first
    assert "within 4 s" in first


def explicit_backend(rank, num_ranks):
    config = Config(backend="symm_mem")
    workspace.Config = types.SimpleNamespace(from_env=lambda: config)
    with pytest.raises(BackendUnavailable, match="the kernel runs on CUDA"):
        exchange()
    return True


def test_an_explicit_backend_that_cant_run_names_the_blocker():
    assert run_ranks(explicit_backend, 2) == [True, True]


def group_made_again(rank, num_ranks):
    name = dist.group.WORLD.group_name
    first = exchange()
    assert [r for _, r in workspace.reservations()] == [first]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    assert dist.group.WORLD.group_name == name
    second = exchange(max_tokens=8)
    assert second is not first
    kinds = workspace._GROUPS.find(name, dist.group.WORLD).of_kind
    assert [r for found in kinds.values() for r in found] == [second]
    return True


def test_a_group_made_again_under_its_name_starts_empty():
    assert run_ranks(group_made_again, 2) == [True, True]


def test_the_table_ends_with_a_backend_that_always_runs():
    last = backends.BACKENDS[-1]
    assert isinstance(last, Collective)
    assert last.unavailable(None, torch.device("cpu")) is None
    assert last.declines(GEOMETRY) is None
    assert agreement.first_objection([{"x": ""}], "x", lambda r, w: w) is None


def test_a_kernel_that_does_not_build_is_no_more_than_unavailable() -> None:
    from dcp_inductor.runtime.backends.symm_mem import building

    message = "the exchange kernel doesn't build: ImportError: no gdc_wait"
    with pytest.raises(BackendUnavailable, match=message), building():
        raise ImportError("no gdc_wait")
    with pytest.raises(BackendUnavailable, match=r"^copied$"), building():
        raise BackendUnavailable("copied")


def test_a_prepared_launch_serves_only_its_own_calls() -> None:
    """The key of launches tells apart whatever a launch keeps."""
    from dcp_inductor.runtime.backends.symm_mem import launch_key
    from dcp_inductor.runtime.call import ExchangeCall

    wide = torch.zeros(4, 2, 48, dtype=torch.bfloat16)
    lse = torch.zeros(4, 2)
    base = {
        "partial_o": wide[..., :16],
        "partial_lse": lse,
        "group": None,
        "group_name": "0",
        "lse_mode": "base2",
        "with_lse": False,
    }

    def key(slot: int = 0, **changed: Any) -> Any:
        return launch_key(ExchangeCall(**(base | changed)), slot)

    others = [
        key(slot=1),
        key(lse_mode="basee"),
        key(with_lse=True),
        key(partial_o=wide[:3, :, :16], partial_lse=lse[:3]),
        key(partial_o=wide[..., 1:17]),
        key(partial_o=wide[..., :16].contiguous()),
        key(partial_lse=torch.zeros(2, 4).t()),
    ]
    assert key() == key(partial_o=wide[..., 16:32])
    assert len({key(), *others}) == len(others) + 1


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_a_stride_that_no_axis_uses_is_not_passed_on() -> None:
    from dcp_inductor.runtime.kernels.exchange import _WORD_LIMIT, _dense, _reachable

    one = torch.zeros(64).as_strided((1, 4, 16), (1 << 30, 16, 1))
    assert not _reachable(one, 16)
    assert _reachable(one[:, :, 1:].clone(), 4)
    assert not _reachable(one[:, :, 1:], 16)
    assert max(_dense(one).stride()) * 4 < _WORD_LIMIT

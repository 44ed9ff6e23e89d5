"""Whatever goes wrong on one rank is an error on every rank that runs the library.

It comes within Config.timeout_s, names the rank and the difference, and nothing wrong
is computed before. docs/reliability.md has the table. Differences in library, geometry
and memory are test_workspace.py's.
"""

from __future__ import annotations

import os
import re
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from decoders import packed
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import ProcessGroup

from dcp_inductor import DcpFusionPass
from dcp_inductor.errors import RanksDisagree
from dcp_inductor.merge import PARTIAL_DTYPES, a2a_lse_reduce_reference
from dcp_inductor.op import a2a_lse_reduce
from dcp_inductor.runtime import agreement, backends, rollcall, selection, workspace
from dcp_inductor.runtime.backends import collective
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.call import ExchangeCall, tag_of
from dcp_inductor.runtime.caller import Caller

TIMEOUT_S = 2.0
# What an error may take beyond the timeout on a busy machine.
LATE_S = 2.0

Seen = tuple[str, str, float]


def partials(b: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(b)
    o = torch.randn(2, b, 4, 8, generator=rng).to(dtype)
    lse = torch.randn(2, b, 4, generator=rng)
    rank = dist.get_rank()
    return o[rank], lse[rank]


def attempt(call: Callable[[], Any]) -> Seen:
    """Name and text of what a call raises, ("ok", "") if nothing, and its seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "ok", "", time.monotonic() - start


def assert_right(group: ProcessGroup) -> None:
    assert_merged(a2a_lse_reduce(*partials(), group, lse_mode="base2"))


def assert_merged(out: Tensor) -> None:
    """``out`` is this rank's merge of partials()."""
    rng = torch.Generator().manual_seed(4)
    o = torch.randn(2, 4, 4, 8, generator=rng)
    lse = torch.randn(2, 4, 4, generator=rng)
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=dist.get_rank(), lse_mode="base2")
    assert torch.equal(out, wanted)


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    options = {"post_grad_custom_pre_pass": DcpFusionPass()}
    return torch.compile(fn, fullgraph=True, options=options)(*args)


# ------------------------------------------------- the group stays usable


def target(o: Tensor, lse: Tensor, name: str) -> Tensor:
    return packed(o, lse, 2, name)


def draft(o: Tensor, lse: Tensor, name: str) -> Tensor:
    return packed(o + 1, lse, 2, name)


def both(o: Tensor, lse: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return packed(o, lse, 2, name), packed(o + 1, lse, 2, name)


def eager_target(group: ProcessGroup) -> Tensor:
    return a2a_lse_reduce(*partials(), group, lse_mode="base2")


def eager_draft(group: ProcessGroup) -> Tensor:
    return a2a_lse_reduce(*partials(), group, lse_mode="base2")


def differ(what: str, rank: int, group: ProcessGroup) -> Seen:
    """Rank 1 does something else than rank 0."""
    other, name = rank == 1, group.group_name
    if what == "batch":
        o, lse = partials(5 if other else 4)
        return attempt(lambda: a2a_lse_reduce(o, lse, group, lse_mode="base2"))
    if what == "base":
        mode = "basee" if other else "base2"
        return attempt(lambda: a2a_lse_reduce(*partials(), group, lse_mode=mode))
    if what == "function":
        call = eager_draft if other else eager_target
        return attempt(lambda: call(group))
    if what == "compiled function":
        return attempt(lambda: compiled(draft if other else target, *partials(), name))
    if what == "call site":
        return attempt(lambda: compiled(both if other else target, *partials(), name))
    if what == "eager beside compiled":
        call = eager_target if other else lambda _: compiled(target, *partials(), name)
        return attempt(lambda: call(group))
    if what == "empty batch":
        calls = [0, 4] if other else [4]
        for b in calls:
            o, lse = partials(b)
            seen = attempt(lambda o=o, lse=lse: _reduced(o, lse, group))
        return seen
    raise AssertionError(what)


def _reduced(o: Tensor, lse: Tensor, group: ProcessGroup) -> Tensor:
    return a2a_lse_reduce(o, lse, group, lse_mode="base2")


# Rank 1 does something else: what the error says.
DIFFERENT = {
    "batch": r"\(tokens\): rank 0: call 6, 4 tokens, .* rank 1: call 6, 5 tokens",
    "base": r"\(base\): .* base2, .* rank 1: .* basee",
    "function": r"\(caller\): .* made by test_faults.py:\d+ eager_target; "
    r"rank 1: .* made by test_faults.py:\d+ eager_draft",
    "compiled function": r"\(caller\): .* target; rank 1: .* draft",
    "call site": r"\(site, caller\): .* place [0-9a-f]{8} of a graph",
    "eager beside compiled": "site.*: rank 0: .* place .* rank 1: .* eager",
    # The last, since the ranks stay a call apart.
    "empty batch": r"\(number\): rank 0: call (\d+), .* rank 1: call (?!\1)",
}


def reserve_differently(what: str, rank: int, group: ProcessGroup) -> Seen:
    """Rank 1 was started otherwise, or from another installation."""
    other = rank == 1
    patched = pytest.MonkeyPatch()
    if what == "backend":
        patched.setenv("DCP_INDUCTOR_BACKEND", "collective" if other else "auto")
    if what == "timeout":
        patched.setenv("DCP_INDUCTOR_TIMEOUT_S", "61" if other else "60")
    if what == "torch":
        version = "2.99.0" if other else "2.98.0"
        stub = types.SimpleNamespace(__version__=version, cuda=torch.cuda)
        patched.setattr(selection, "torch", stub)
    try:
        return attempt(lambda: _reduced(*partials(), group))
    finally:
        patched.undo()


STARTED = {
    "backend": r"differ in config: rank 0: .*'auto'.* rank 1: .*'collective'",
    "timeout": r"differ in config: rank 0: .*timeout_s=60\.0.* rank 1: .*timeout_s=61",
    "torch": r"differ in torch: rank 0: '2\.98\.0', rank 1: '2\.99\.0'",
}


class Crooked(Collective):
    """Preferred, and asking it fails on rank 1."""

    name = "crooked"

    def unavailable(self, group: ProcessGroup, device: torch.device) -> str | None:
        if group.rank() == 1:
            raise ImportError("its library doesn't load")
        return None


def one_rank_cant_run_a_backend(group: ProcessGroup) -> str:
    patched = pytest.MonkeyPatch()
    patched.setattr(backends, "BACKENDS", (Crooked(), Collective()))
    try:
        assert_right(group)
    finally:
        patched.undo()
    ((_, reservation),) = [
        found for found in workspace.reservations() if found[0] == group.group_name
    ]
    return reservation.backend.name


def beside(o: Tensor, lse: Tensor, name: str, other: Tensor) -> tuple[Tensor, Tensor]:
    """An exchange beside a tensor whose size has nothing to do with it."""
    return packed(o, lse, 2, name), other.sum() + other.shape[0]


def recompile_alone(rank: int, group: ProcessGroup) -> list[Any]:
    """Rank 1's other tensor changes its size: what was computed, and compilations."""
    options = {"post_grad_custom_pre_pass": DcpFusionPass()}
    call = torch.compile(beside, fullgraph=True, dynamic=False, options=options)
    before = counters["stats"]["unique_graphs"]
    seen = []
    for size in ((4, 4, 4), (4, 5, 4))[rank]:
        out, total = call(*partials(), group.group_name, torch.ones(size))
        assert_merged(out)
        seen.append(int(total))
    return [seen, counters["stats"]["unique_graphs"] - before]


# ------------------------------------------------- the group is lost


def lose(what: str, rank: int, group: ProcessGroup) -> Seen:
    """Rank 1 isn't at the exchange that rank 0 is at."""
    o, lse = partials(dtype=torch.bfloat16 if what == "dtype" and rank else o_dtype)
    if rank == 0 or what == "dtype":
        return attempt(lambda: _reduced(o, lse, group))
    if what == "never fused":
        return attempt(lambda: target(o, lse, group.group_name).sum())
    assert what in ("skipped", "unfused")
    if what == "unfused":
        return attempt(lambda: target(o, lse, group.group_name).sum())
    return "ok", "", 0.0


o_dtype = torch.float32
LOST = {
    "never fused": r"Rank\(s\) 1 of group '\w+' didn't come to the first exchange",
    "unfused": r"Rank\(s\) 1 of group '\w+' didn't come to the exchange of \(4, 4, 8\)",
    "skipped": r"Rank\(s\) 1 of group '\w+' didn't come to the exchange of \(4, 4, 8\)",
    "dtype": r"Rank\(s\) 1 of group '\w+' didn't come to the exchange of \(4, 4, 8\)",
}


def every_fault(rank: int, num_ranks: int) -> dict[str, Any]:
    def new_group() -> ProcessGroup:
        return dist.new_group([0, 1], timeout=timedelta(seconds=2 * TIMEOUT_S))

    seen: dict[str, Any] = {}
    for what in STARTED:
        group = new_group()
        seen[what] = reserve_differently(what, rank, group)
        assert_right(group)
    group = new_group()
    assert_right(group)
    seen["recompiled"] = recompile_alone(rank, group)
    for what in DIFFERENT:
        assert_right(group)
        seen[what] = differ(what, rank, group)
    seen["crooked"] = one_rank_cant_run_a_backend(new_group())
    os.environ["DCP_INDUCTOR_TIMEOUT_S"] = str(TIMEOUT_S)
    groups = {what: new_group() for what in LOST}
    for what, group in groups.items():
        if what != "never fused":
            assert_right(group)
        dist.barrier()
        seen[what] = lose(what, rank, group)
        dist.barrier()
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {
        "DCP_INDUCTOR_TIMEOUT_S": "60",  # where nothing waits but for a compile
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }
    return run_ranks(every_fault, 2, env=env, timeout_s=280.0)


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_at_different_calls_are_told_which(ranks, what):
    (name, text, _), second = (seen[what] for seen in ranks)
    assert name == "RanksDisagree"
    assert re.search(DIFFERENT[what], text), text
    assert second[:2] == (name, text)
    assert "Nothing was exchanged" in text


@pytest.mark.parametrize("what", STARTED)
def test_ranks_started_differently_are_told_how(ranks, what):
    (name, text, _), second = (seen[what] for seen in ranks)
    assert name == "RanksDisagree"
    assert re.search(STARTED[what], text), text
    assert second[:2] == (name, text)


def test_a_rank_may_recompile_alone(ranks):
    assert [seen["recompiled"] for seen in ranks] == [[[8, 8, 8], 1], [[8, 10, 8], 2]]


def test_a_backend_that_one_rank_cant_run_is_nobodys(ranks):
    assert [seen["crooked"] for seen in ranks] == ["collective", "collective"]


@pytest.mark.parametrize("what", LOST)
def test_a_rank_that_isnt_there_is_named_in_time(ranks, what):
    name, text, seconds = ranks[0][what]
    assert name in ("PeerTimeout", "RanksDisagree")
    assert re.search(LOST[what], text), text
    assert seconds < TIMEOUT_S + LATE_S
    name, text, seconds = ranks[1][what]
    if what == "dtype":
        assert name == "RanksDisagree"
        assert "Rank(s) 0" in text
    elif what != "skipped":
        assert name == "RuntimeError", "its own collective ends, at its own timeout"
    assert seconds < 2 * TIMEOUT_S + LATE_S


# ------------------------------------------------- a rank dies


def dies(rank: int, num_ranks: int, after: int) -> Seen:
    """Rank 1 ends after so many exchanges; rank 0 goes on."""
    for _ in range(after):
        assert_right(dist.group.WORLD)
    if rank == 1:
        os._exit(3)
    time.sleep(0.2)
    seen = attempt(lambda: _reduced(*partials(), None))
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize(("after", "error"), [(0, "RanksDisagree"), (2, "PeerTimeout")])
def test_a_rank_that_dies_is_named(after, error):
    env = {"DCP_INDUCTOR_TIMEOUT_S": str(TIMEOUT_S)}
    name, text, seconds = run_ranks(dies, 2, after, env=env, dying=frozenset({1}))[0]
    assert (name, "Rank(s) 1" in text) == (error, True), text
    assert seconds < TIMEOUT_S + LATE_S


def test_a_store_that_is_gone_is_named():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    patched = pytest.MonkeyPatch()

    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise dist.DistNetworkError("Connection reset by peer")

    patched.setattr(
        dist.distributed_c10d, "_get_process_group_store", lambda group: Gone()
    )
    try:
        with pytest.raises(RanksDisagree, match="can't reach the group's store"):
            agreement.agree(dist.group.WORLD, "reserve()", {}, 1.0)
    finally:
        patched.undo()
        dist.destroy_process_group()


# ------------------------------------------------- without the roll call


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotImplementedError(), "ok"),
        (RuntimeError("Backend other does not support send"), "ok"),
        (RuntimeError("Connection reset by peer"), "PeerTimeout"),
    ],
    ids=str,
)
def test_a_group_of_collectives_alone_goes_without(monkeypatch, error, outcome):
    def isend(*args: Any, **kwargs: Any) -> None:
        raise error

    class Group:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

    monkeypatch.setattr(dist, "get_backend", lambda group: "other")
    monkeypatch.setattr(dist, "isend", isend)
    o, lse = torch.zeros(4, 4, 8), torch.zeros(4, 4)
    call = ExchangeCall(o, lse, cast(ProcessGroup, Group()), "g", "base2", False)
    assert attempt(lambda: rollcall.call_roll(call, 1.0))[0] == outcome


_DECODE, _DRAFT = Caller("m.py", 3, "decode"), Caller("m.py", 9, "draft")
_KINDS = [
    (1, _DECODE, 1, torch.Size((3, 4, 8)), "base2"),
    (2, _DECODE, 1, torch.Size((3, 4, 8)), "base2"),
    (1, _DRAFT, 1, torch.Size((3, 4, 8)), "base2"),
    (1, _DECODE, 2, torch.Size((3, 4, 8)), "base2"),
    (1, _DECODE, 1, torch.Size((4, 4, 8)), "base2"),
    (1, _DECODE, 1, torch.Size((3, 4, 8)), "basee"),
]


@pytest.mark.parametrize("dtype", PARTIAL_DTYPES, ids=str)
@pytest.mark.parametrize("other", _KINDS, ids=str)
def test_on_a_device_another_calls_message_makes_nan(dtype, other):
    """No roll call there; the tag in the message tells."""
    sent = torch.zeros(2, 64, dtype=torch.uint8)
    received = sent.clone()
    for message, kind in (
        (sent, _KINDS[0]),
        (received[:1], _KINDS[0]),
        (received[1:], other),
    ):
        tag = message[:, : collective._TAG_BYTES].view(torch.int64)
        site, caller, instance, shape, mode = kind
        tag.fill_(tag_of(site, caller, instance, *shape, mode))
    merged = torch.ones(3, 2, 8).to(dtype), torch.ones(3, 2)
    for result in collective._nan_if_mixed(sent, received, merged):
        value = result.float()
        assert bool((value == 1 if other is _KINDS[0] else value.isnan()).all())

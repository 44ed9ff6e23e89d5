"""The votes of reserve(): one decision for all ranks, whoever is late or gives up."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import ProcessGroup

import dcp_inductor
from dcp_inductor.errors import DcpError, PeerTimeout, RanksDisagree
from dcp_inductor.op import a2a_lse_reduce
from dcp_inductor.runtime import agreement, selection, workspace
from dcp_inductor.runtime.agreement import Round, agree

# ------------------------------------------------- every order of steps


class Turns:
    """Runs programs in threads, one step of one of them at a time. A step ends before
    the next access to the store."""

    def __init__(self, num_ranks: int) -> None:
        self.go = [threading.Semaphore(0) for _ in range(num_ranks)]
        self.paused = [threading.Semaphore(0) for _ in range(num_ranks)]
        self.alive = set(range(num_ranks))

    def wait(self, rank: int) -> None:
        self.paused[rank].release()
        self.go[rank].acquire()

    def run(
        self, programs: Sequence[Callable[[], Any]], pick: Callable[[list[int]], int]
    ) -> list[Any]:
        """What the programs return; ``pick`` says whose step is next."""
        results: list[Any] = [None] * len(programs)

        def work(rank: int) -> None:
            self.wait(rank)
            try:
                results[rank] = programs[rank]()
            finally:
                self.alive.discard(rank)
                self.paused[rank].release()

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(len(programs))
        ]
        for rank, thread in enumerate(threads):
            thread.start()
            assert self.paused[rank].acquire(timeout=10)
        while self.alive:
            rank = pick(sorted(self.alive))
            self.go[rank].release()
            assert self.paused[rank].acquire(timeout=10)
        return results


class SteppedStore:
    """A store each of whose accesses waits for its rank's turn, up to the decision."""

    def __init__(self, store: dist.Store, turns: Turns, rank: int) -> None:
        self.store, self.turns, self.rank = store, turns, rank

    def __getattr__(self, name: str) -> Any:
        def access(*args: Any) -> Any:
            if name != "get":
                self.turns.wait(self.rank)
            return getattr(self.store, name)(*args)

        return access


def vote(store: Any, rank: int, size: int, timeout_s: float) -> bytes:
    meeting = Round(store, "base", 0, rank, size)
    meeting.state({"of": rank})
    decision = meeting.decision("the vote", timeout_s)
    if decision == b"go":
        assert meeting.statements() == [{"of": rank} for rank in range(size)]
    return decision


def voted(timeouts_s: Sequence[float], pick: Callable[[list[int]], int]) -> list[bytes]:
    size = len(timeouts_s)
    turns, store = Turns(size), dist.HashStore()
    programs = [
        lambda rank=rank, timeout_s=timeout_s: vote(
            SteppedStore(store, turns, rank), rank, size, timeout_s
        )
        for rank, timeout_s in enumerate(timeouts_s)
    ]
    return turns.run(programs, pick)


def every_order() -> Iterator[Callable[[list[int]], int]]:
    """Pickers for all orders of steps, each followed to the end before the next."""
    path: list[tuple[int, int]] = []
    while True:
        depth = itertools.count()

        def pick(alive: list[int], depth: Any = depth) -> int:
            at = next(depth)
            if at == len(path):
                path.append((0, len(alive)))
            return alive[path[at][0]]

        yield pick
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1] = (path[-1][0] + 1, path[-1][1])


def test_two_ranks_come_to_one_decision_in_every_order():
    """Both give up at once unless the other's statement is there."""
    seen = set()
    for pick in every_order():
        first, second = voted((0.0, 0.0), pick)
        assert first == second
        seen.add(first if first == b"go" else first[:16])
    assert seen == {b"go", b'{"missing": [1],', b'{"missing": [0],'}


def test_three_ranks_come_to_one_decision(monkeypatch):
    """One that gives up at once, one after a while, one late."""
    clock = threading.local()

    class Time:
        @staticmethod
        def monotonic() -> float:
            return getattr(clock, "now", 0.0)

        @staticmethod
        def sleep(seconds: float) -> None:
            clock.now = Time.monotonic() + 1.0

    monkeypatch.setattr(agreement, "time", Time)
    outcomes = set()
    for seed in range(400):
        rng = random.Random(seed)
        timeouts_s = rng.sample([0.0, 1.0, 3.0], 3)
        decisions = voted(timeouts_s, rng.choice)
        assert len(set(decisions)) == 1, seed
        outcomes.add(decisions[0][:16])
    assert len(outcomes) > 3


# ------------------------------------------------- processes


def attempt(
    call: Callable[[], Any], expected: type[DcpError] = RanksDisagree
) -> tuple[str, float]:
    """What a call raises, "" if nothing, and its seconds."""
    start = time.monotonic()
    try:
        call()
    except expected as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def late(rank: int) -> list[tuple[str, float]]:
    """Rank 1 comes to the last vote when rank 0 has left, then in time."""
    group = dist.group.WORLD
    seen = [attempt(lambda: agree(group, "the first vote", {}, 20.0))]
    if rank == 1:
        time.sleep(1.6)
    seen.append(attempt(lambda: agree(group, "the last vote", {}, 1.0)))
    dist.barrier()
    seen.append(attempt(lambda: agree(group, "another vote", {}, 20.0)))
    return seen


def reserve(group: ProcessGroup, head_dim: int = 8, max_tokens: int = 4) -> Any:
    return dcp_inductor.reserve(
        group,
        max_tokens=max_tokens,
        num_heads=4,
        head_dim=head_dim,
        dtype=torch.float32,
    )


def exchange(group: ProcessGroup) -> Any:
    return a2a_lse_reduce(
        torch.ones(2, 4, 8), torch.zeros(2, 4), group, lse_mode="base2"
    )


def crossed(rank: int, num_ranks: int) -> dict[str, Any]:
    """Ranks that vote late, in other orders, in threads, or more often than others."""
    limit = timedelta(seconds=4)
    first, second, third, fourth = (
        dist.new_group([0, 1], timeout=limit) for _ in range(4)
    )
    seen: dict[str, Any] = {"late": late(rank)}

    order = [first, second][:: 1 if rank == 0 else -1]
    seen["other order"] = [attempt(lambda g=g: reserve(g)) for g in order]
    dist.barrier()
    seen["same order"] = [attempt(lambda g=g: reserve(g)) for g in (first, second)]

    def in_threads(calls: Sequence[Callable[[], Any]]) -> list[tuple[str, float]]:
        results: list[Any] = [None] * len(calls)

        def work(place: int) -> None:
            results[place] = attempt(calls[place])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    # Two groups in two threads, started in another order on each rank.
    calls = [lambda: reserve(third), lambda: reserve(fourth)]
    seen["two groups"] = in_threads(calls[:: 1 if rank == 0 else -1])
    dist.barrier()
    # One group in four threads.
    seen["one group"] = in_threads([lambda: reserve(third, 16)] * 4)
    dist.barrier()

    if rank == 1:
        time.sleep(3.0)
    seen["late exchange"] = attempt(lambda: exchange(third), PeerTimeout)
    dist.barrier()

    lonely = dist.new_group([0, 1], timeout=limit)
    seen["twice"] = attempt(lambda: reserve(lonely))
    if rank == 0:
        seen["again"] = attempt(lambda: reserve(lonely, 16))
    else:
        seen["exchange"] = attempt(lambda: exchange(lonely), PeerTimeout)
    dist.barrier()
    return seen


@pytest.fixture(scope="module")
def crossed_ranks():
    return run_ranks(crossed, 2, env={"DCP_INDUCTOR_TIMEOUT_S": "2"})


def test_a_late_rank_hears_that_the_other_has_left(crossed_ranks):
    first, second = (seen["late"] for seen in crossed_ranks)
    for of_rank in (first, second):
        assert [of_rank[0][0], of_rank[2][0]] == ["", ""]
    text, seconds = first[1]
    assert "Rank(s) 1 of group '0' didn't come to the last vote within 1 s" in text
    assert 1.0 <= seconds < 1.5
    text, seconds = second[1]
    assert "Rank 1 of group '0' came to the last vote after rank 0 had" in text
    assert "no rank goes on" in text
    assert seconds < 0.5


def test_reserving_two_groups_in_another_order_ends_in_time(crossed_ranks):
    """Who gives up first may meet the other at its next one: both do, or neither."""
    first, second = (seen["other order"] for seen in crossed_ranks)
    failed = [[bool(text) for text, _ in order] for order in (first, second[::-1])]
    assert failed[0] == failed[1]
    assert any(failed[0])
    for text, seconds in first + second:
        assert not text or re.search("(didn't come|came) to the first exchange", text)
        assert seconds < 3.0
    for seen in crossed_ranks:
        assert [text for text, _ in seen["same order"]] == ["", ""]


def test_threads_reserve_two_groups_or_one(crossed_ranks):
    for seen in crossed_ranks:
        assert [text for text, _ in seen["two groups"]] == ["", ""]
        assert [text for text, _ in seen["one group"]] == [""] * 4


def test_a_rank_that_reserves_once_more_is_told_and_named(crossed_ranks):
    first, second = crossed_ranks
    assert (first["twice"][0], second["twice"][0]) == ("", "")
    text, seconds = first["again"]
    assert "Rank(s) 1 of group" in text
    assert seconds < 3.0
    assert "Rank(s) 0 of group" in second["exchange"][0]


def test_a_rank_that_is_late_at_an_exchange_hears_so_at_once(crossed_ranks):
    for other, seen, limit_s in zip((1, 0), crossed_ranks, (3.0, 1.0), strict=True):
        text, seconds = seen["late exchange"]
        assert f"Rank(s) {other} of group" in text
        assert seconds < limit_s


# ------------------------------------------------- threads and lives


@pytest.fixture
def alone():
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_threads_that_need_the_same_first_reservation_make_one(alone, monkeypatch):
    """Another rank may have come to its calls one after the other, and made one."""
    made, looked = [], set()
    both_looked = threading.Barrier(2)
    find, choose = workspace.OfGroup.newest, selection.choose

    def newest(known: Any, kind: Any) -> Any:
        found = find(known, kind)
        thread = threading.current_thread()
        if thread in threads and thread not in looked:
            looked.add(thread)
            both_looked.wait(10)
        return found

    def counted(*args: Any) -> Any:
        made.append(args)
        return choose(*args)

    monkeypatch.setattr(workspace, "choose", counted)
    monkeypatch.setattr(workspace.OfGroup, "newest", newest)
    known = workspace.known_of("0", alone)
    o, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    call = workspace.ExchangeCall(o, lse, alone, "0", "base2", False)
    args = (call, known, (4, 8, o.dtype, o.device), None)
    threads = [threading.Thread(target=workspace.run, args=args) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1
    assert len(workspace.reservations()) == 1


class Group:
    """As much of a process group as a vote asks for."""

    def __init__(self, rank: int, group_name: str = "again") -> None:
        self._rank, self.group_name = rank, group_name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


@pytest.fixture
def stores(monkeypatch):
    """The store of each stub group, by group."""
    found: dict[Any, Any] = {}
    c10d = dist.distributed_c10d
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(c10d, "_get_process_group_store", found.__getitem__)
    return found


def both_agree(groups: Sequence[Any], timeout_s: float = 5.0) -> list[str]:
    results = ["", ""]

    def work(rank: int) -> None:
        results[rank] = attempt(lambda: agree(groups[rank], "it", {}, timeout_s))[0]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_a_group_left_in_its_store_isnt_read_by_its_next_life(stores):
    store = dist.HashStore()
    first = [Group(0), Group(1)]
    stores |= dict.fromkeys(first, store)
    assert both_agree(first) == ["", ""]
    second = [Group(0), Group(1)]
    stores |= dict.fromkeys(second, store)
    text, _ = attempt(lambda: agree(second[0], "it", {}, 0.1))
    assert "Rank(s) 1 of group 'again' didn't come to it" in text


def test_a_restarted_peer_meets_one_that_lived_on(stores):
    """The group is made again over a new store; one rank's process has counted."""
    first, store = [Group(0), Group(1)], dist.HashStore()
    stores |= dict.fromkeys(first, store)
    for _ in range(3):
        assert both_agree(first) == ["", ""]
    second, store = [Group(0), Group(1)], dist.HashStore()
    stores |= dict.fromkeys(second, store)
    assert both_agree(second) == ["", ""]


def test_a_round_leaves_little_behind(stores):
    store = dist.HashStore()
    groups = [Group(0), Group(1)]
    stores |= dict.fromkeys(groups, store)
    sizes = []
    for _ in range(5):
        assert both_agree(groups) == ["", ""]
        sizes.append(store.num_keys())
    assert len({*sizes[1:]}) == 1, sizes


def test_threads_that_share_a_connection_dont_hold_it(stores):
    """Two groups over one connection a rank, voted on in another order on each: a vote
    that waited inside the store would keep the other from being stated."""
    server = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
    clients = server, dist.TCPStore("localhost", server.port, 2, is_master=False)
    groups = {name: [Group(0, name), Group(1, name)] for name in ("a", "b")}
    for name, pair in groups.items():
        for rank, group in enumerate(pair):
            stores[group] = dist.PrefixStore(name, clients[rank])
    results: dict[tuple[str, int], str] = {}

    def work(name: str, rank: int) -> None:
        group = groups[name][rank]
        results[name, rank] = attempt(lambda: agree(group, "it", {}, 3.0))[0]

    threads = []
    for name, rank in (("a", 0), ("b", 1), ("b", 0), ("a", 1)):
        threads.append(threading.Thread(target=work, args=(name, rank)))
        threads[-1].start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(results, "")
    assert len(results) == 4


def test_a_store_that_cant_compare_and_set_is_named(stores):
    group = Group(0)

    class Plain:
        add = set = check = staticmethod(lambda *args: 1)

        def compare_set(self, *args: Any) -> None:
            raise NotImplementedError("compare_set")

    stores[group] = Plain()
    with pytest.raises(RanksDisagree, match=r"store lacks .* \(compare_set\)"):
        agree(group, "it", {}, 1.0)

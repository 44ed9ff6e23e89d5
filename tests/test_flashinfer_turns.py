"""bench/turns.py: two sides never measure at once, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistStoreError, HashStore

from dcp_inductor.bench.turns import SIDES, Turns

RANKS, TURNS = 2, 5


def test_sides_alternate_and_never_overlap():
    store, done = HashStore(), []
    meetings = [threading.Barrier(RANKS, timeout=20) for _ in range(SIDES)]

    def rank_of(side, rank):
        turns = Turns(store, side, rank, meetings[side].wait, timeout_s=20)
        for turn in range(TURNS):
            with turns.take():
                done.append((turn, side))
                meetings[side].wait()
                done.append((turn, side))

    with ThreadPoolExecutor(SIDES * RANKS) as pool:
        ranks = [
            pool.submit(rank_of, side, rank)
            for side in range(SIDES)
            for rank in range(RANKS)
        ]
        assert not done
        Turns.begin(store)
        for rank in ranks:
            rank.result(timeout=20)
    every = [(turn, side) for turn in range(TURNS) for side in range(SIDES)]
    assert done == [step for step in every for _ in range(2 * RANKS)]


def test_a_side_that_never_comes_is_waited_for_in_bounds():
    store = HashStore()
    with (
        pytest.raises(DistStoreError, match=r"(?i)time"),
        Turns(store, 1, 0, lambda: None, timeout_s=0.2).take(),
    ):
        pytest.fail("it isn't this side's turn")


def test_a_turn_that_fails_isnt_passed_on():
    store = HashStore()
    Turns.begin(store)
    with (
        pytest.raises(ZeroDivisionError),
        Turns(store, 0, 0, lambda: None, timeout_s=0.2).take(),
    ):
        _ = 1 / 0
    with (
        pytest.raises(DistStoreError),
        Turns(store, 1, 0, lambda: None, timeout_s=0.2).take(),
    ):
        pytest.fail("the first side's turn hasn't ended")

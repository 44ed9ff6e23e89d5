"""Which backend a reservation gets: by name, by what works, by what was measured."""

from __future__ import annotations

import time
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dcp_inductor import Config
from dcp_inductor.errors import BackendUnavailable, RanksDisagree
from dcp_inductor.runtime import backends, selection
from dcp_inductor.runtime.backends import preference
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.backends.flashinfer import FlashInfer
from dcp_inductor.runtime.backends.preference import Measured, in_order
from dcp_inductor.runtime.backends.symm_mem import SymmMem
from dcp_inductor.runtime.call import Geometry

GEOMETRY = Geometry(2, 8, 32, 64, torch.bfloat16)


class Stub(Collective):
    """A fused backend that can be told to fail, by rank."""

    needs_buffers = True

    def __init__(self, name, *, asked=None, identity="", fails=None, error=None):
        self.name, self.asked, self.built_from = name, asked, identity
        self.fails, self.error = fails, error

    def identity(self):
        if isinstance(self.built_from, Exception):
            raise self.built_from
        return self.built_from

    def only_if_asked(self):
        return self.asked

    def allocate(self, group, geometry, device):
        if group.rank() == self.fails:
            raise (self.error or BackendUnavailable)("no nvcc")
        return types.SimpleNamespace(connect=lambda: None)


# Stubs by rank, Config.backend, and what is chosen or said.
CHOICES = {
    "auto leaves it out": (
        lambda rank: [Stub("flashinfer", asked="it switches things")],
        "auto",
        "collective",
    ),
    "asked for": (
        lambda rank: [Stub("flashinfer", asked="it switches things")],
        "flashinfer",
        "flashinfer",
    ),
    "another is asked for": (
        lambda rank: [Stub("symm_mem"), Stub("flashinfer")],
        "flashinfer",
        "flashinfer",
    ),
    "fails on a rank": (
        lambda rank: [Stub("symm_mem", fails=1), Stub("flashinfer")],
        "auto",
        "flashinfer",
    ),
    "asked for, fails on a rank": (
        lambda rank: [Stub("symm_mem", fails=1), Stub("flashinfer")],
        "symm_mem",
        "BackendUnavailable: reserve() of symm_mem workspaces failed on rank 1: "
        "BackendUnavailable: no nvcc",
    ),
    "another error": (
        lambda rank: [Stub("symm_mem", fails=0, error=MemoryError)],
        "auto",
        "RanksDisagree: reserve() of symm_mem workspaces failed on rank 0: MemoryError",
    ),
    "two packages": (
        lambda rank: [Stub("flashinfer", identity=f"of rank {rank}")],
        "auto",
        "collective",
    ),
    "a package that one rank can't read": (
        lambda rank: [
            Stub("flashinfer", identity=OSError("cut off") if rank else "whole")
        ],
        "auto",
        "collective",
    ),
    "two packages, asked for": (
        lambda rank: [Stub("flashinfer", identity=f"of rank {rank}")],
        "flashinfer",
        "BackendUnavailable: Config(backend='flashinfer') was asked for on group",
    ),
}


def choices(rank, n):
    """Of each case, the chosen backend's name, or the error."""
    selection.blocked_by_places = lambda places: None
    found = {}
    for case, (stubs, asked, _) in CHOICES.items():
        table = (*stubs(rank), Collective())
        selection.backends = types.SimpleNamespace(BACKENDS=table)
        config = Config(backend=asked, timeout_s=20.0)
        try:
            backend, _ = selection.choose(
                dist.group.WORLD, GEOMETRY, torch.device("cpu"), config
            )
            found[case] = backend.name
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def choosing_ranks():
    return run_ranks(choices, 2)


@pytest.mark.parametrize("case", CHOICES)
def test_the_choice_is_the_same_on_all_ranks(choosing_ranks, case):
    first, second = (found[case] for found in choosing_ranks)
    assert first == second
    assert first.startswith(CHOICES[case][2])


def test_ranks_with_different_packages_hear_which(choosing_ranks):
    text = choosing_ranks[0]["two packages, asked for"]
    assert "different ones installed: ['of rank 0', 'of rank 1']" in text


LOOKS = ("place", "_capability", "library_identity")


def troubled(rank, n):
    """Rank 1 can't find out about itself: each time the error and its seconds."""
    found = {}
    config = Config(timeout_s=20.0)
    fail = mock.Mock(side_effect=RuntimeError("the driver is gone"))
    for what in LOOKS:
        kept = getattr(selection, what)
        start = time.monotonic()
        with (
            mock.patch.object(selection, what, fail if rank == 1 else kept),
            pytest.raises(RanksDisagree) as caught,
        ):
            selection.choose(dist.group.WORLD, GEOMETRY, torch.device("cpu"), config)
        found[what] = str(caught.value), time.monotonic() - start
    return found


@pytest.fixture(scope="module")
def troubled_ranks():
    return run_ranks(troubled, 2)


@pytest.mark.parametrize("what", LOOKS)
def test_a_rank_that_cant_look_at_itself_says_so_to_all(troubled_ranks, what):
    for text, seconds in (found[what] for found in troubled_ranks):
        assert "failed on rank 1: RuntimeError: the driver is gone" in text
        assert seconds < 10.0


def places_differ(rank, n):
    """Rank 0 alone sees both cards, which have no peer access."""
    apart = [["card 0", "card 1"]] if rank == 0 else []
    here = {"host": "a", "card": f"card {rank}", "apart": apart}
    selection.place = lambda device: here
    selection.backends = types.SimpleNamespace(BACKENDS=(Stub("fused"), Collective()))
    config = Config(timeout_s=5.0)
    device = torch.device("cpu")
    return selection.choose(dist.group.WORLD, GEOMETRY, device, config)[0].name


def test_what_one_rank_sees_of_the_cards_counts_for_all():
    assert run_ranks(places_differ, 2) == ["collective", "collective"]


ROW = Measured((10, 0), 8, (1, 128), "flashinfer", 3.0, "symm_mem", 4.0, "nowhere")


@pytest.mark.parametrize(
    ("change", "capability", "first"),
    [
        ({}, (10, 0), "flashinfer"),
        ({}, (9, 0), "symm_mem"),
        ({}, None, "symm_mem"),
        ({"cp_size": 4}, (10, 0), "symm_mem"),
        ({"max_tokens": 129}, (10, 0), "symm_mem"),
    ],
)
def test_a_measured_row_changes_the_order(monkeypatch, change, capability, first):
    monkeypatch.setattr(preference, "MEASURED", (ROW,))
    geometry = replace(Geometry(8, 128, 128, 512, torch.bfloat16), **change)
    ordered = in_order(backends.BACKENDS, geometry, capability)
    assert ordered[0].name == first
    assert {type(one) for one in ordered} == {SymmMem, FlashInfer, Collective}
    assert isinstance(ordered[-1], Collective)


def test_a_row_for_the_order_as_it_is_changes_nothing(monkeypatch):
    row = replace(ROW, faster="symm_mem", slower="flashinfer")
    monkeypatch.setattr(preference, "MEASURED", (row,))
    geometry = Geometry(8, 128, 128, 512, torch.bfloat16)
    assert in_order(backends.BACKENDS, geometry, (10, 0)) == [*backends.BACKENDS]


def test_every_measured_row_is_of_backends_that_there_are():
    names = {backend.name for backend in backends.BACKENDS}
    for row in preference.MEASURED:
        assert {row.faster, row.slower} <= names
        assert row.faster_us < row.slower_us
        assert row.run

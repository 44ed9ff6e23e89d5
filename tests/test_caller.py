"""caller.py: which function makes a call, eager and compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, cast
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import dcp_inductor
from dcp_inductor.runtime import workspace
from dcp_inductor.runtime.call import ExchangeCall, tag_of
from dcp_inductor.runtime.caller import NO_CALLER, Caller, find_caller

CALL = {"lse_mode": "base2"}


def target(o: Tensor, lse: Tensor) -> Tensor:
    return dcp_inductor.a2a_lse_reduce(o, lse, **CALL)


def draft(o: Tensor, lse: Tensor) -> Tensor:
    return dcp_inductor.a2a_lse_reduce(o, lse, **CALL)


def line_of(function: Any) -> int:
    return cast(CodeType, function.__code__).co_firstlineno


@torch.compiler.disable
def greet(rank: int) -> None:
    assert rank == 0


def greeting(o: Tensor, lse: Tensor, rank: int) -> Tensor:
    if rank == 0:
        greet(rank)
    return dcp_inductor.a2a_lse_reduce(o, lse, **CALL)


def _greeted(rank: int) -> tuple[bool, dict[str, int]]:
    """Whether eager and compiled agree, and the graph breaks of this rank."""
    o, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    torch._dynamo.utils.counters.clear()
    merged = torch.compile(greeting)(o, lse, rank)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    return torch.equal(merged, target(o, lse)), breaks


def _callers() -> list[str]:
    """Of an eager and a compiled call of each function, and of one by a library."""
    seen: list[str] = []
    run = workspace.run

    def noting(call: ExchangeCall, *known: Any) -> Any:
        seen.append(str(call.caller))
        return run(call, *known)

    o, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    with mock.patch.object(workspace, "run", noting):
        for function in (target, draft):
            function(o, lse)
            torch.compile(function, fullgraph=True)(o, lse)
        with contextlib.ExitStack() as stack:
            stack.callback(dcp_inductor.a2a_lse_reduce, o, lse, **CALL)
    return seen


def _on_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    return {"callers": _callers(), "greeted": _greeted(rank)}


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_ranks(_on_rank, 2)


def test_the_function_that_calls_or_was_compiled(on_ranks) -> None:
    """The two have one graph, and so one compiled artifact."""
    expected = [
        f"test_caller.py:{line_of(function)} {function.__name__}"
        for function in (target, draft)
        for _ in range(2)
    ]
    expected.append(f"test_caller.py:{line_of(_callers)} _callers")
    assert [found["callers"] for found in on_ranks] == [expected] * 2


def attend_in(module: str) -> Callable[[], Caller]:
    """A function of ``module`` that calls the op, as far as frames go."""
    op: dict[str, Any] = {"__name__": "dcp_inductor.op", "find_caller": find_caller}
    exec("def run(): return find_caller()\ndef reduce(): return run()", op)
    space: dict[str, Any] = {"__name__": module, "reduce": op["reduce"]}
    exec("def attend(): return reduce()", space)
    return cast("Callable[[], Caller]", space["attend"])


def test_torch_stands_between_and_what_only_starts_alike_does_not() -> None:
    """Near miss: torchvision's models are a program."""
    here = "test_torch_stands_between_and_what_only_starts_alike_does_not"
    assert attend_in("torchvision.models")().name == "attend"
    assert attend_in("torch.nn")().name == here
    assert attend_in("torch.nn")().name == here  # known by now


def test_frames_of_no_module_are_passed_over() -> None:
    """As some that Dynamo and AOTAutograd make are."""
    space: dict[str, Any] = {"find_caller": find_caller}
    exec("def attend(): return find_caller()", space)
    space["__name__"] = None
    assert space["attend"]().name == "test_frames_of_no_module_are_passed_over"
    space["__name__"] = "functools"
    assert space["attend"]().name == "test_frames_of_no_module_are_passed_over"
    space["__name__"] = "model"
    assert space["attend"]().name == "attend"


def test_where_no_frame_is_a_programs_there_is_no_caller() -> None:
    frame = mock.Mock(f_globals={"__name__": "torch.somewhere"}, f_back=None)
    with mock.patch.object(sys, "_getframe", return_value=frame):
        assert find_caller() == NO_CALLER
    assert str(NO_CALLER) == ""


def test_a_rank_that_breaks_its_graph_alone_is_in_the_same_function(on_ranks) -> None:
    for rank, found in enumerate(on_ranks):
        equal, breaks = found["greeted"]
        assert equal
        assert bool(breaks) == (rank == 0), breaks


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (Caller("/a/m.py", 3, "decode"), True),
        (Caller("/b/m.py", 3, "decode"), True),
        (Caller("/a/m.py", 4, "decode"), False),
        (Caller("/a/m.py", 3, "draft"), False),
        (Caller("/a/n.py", 3, "decode"), False),
    ],
)
def test_a_row_carries_the_function_but_not_the_folder(other, equal) -> None:
    here = Caller("/a/m.py", 3, "decode")
    assert (tag_of(1, here, "base2") == tag_of(1, other, "base2")) is equal

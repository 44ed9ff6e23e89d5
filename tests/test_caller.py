"""caller.py: which function makes a call, eager and compiled."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, cast
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import dcp_inductor
from dcp_inductor.errors import RanksDisagree
from dcp_inductor.runtime import workspace
from dcp_inductor.runtime.call import ExchangeCall, tag_of
from dcp_inductor.runtime.caller import NO_CALLER, Caller, Instances, find_caller

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


class Layer:
    """A layer of a decoder, whose compiled graph all its instances share."""

    def __init__(self) -> None:
        self.call = torch.compile(self.attend, fullgraph=True)

    def attend(self, o: Tensor, lse: Tensor) -> Tensor:
        return dcp_inductor.a2a_lse_reduce(o, lse, **CALL)


class Passing(Layer):
    """As a host makes one for a batch."""

    def __init__(self) -> None:
        self.myself = self  # goes when the collector comes


def _taken(layers: list[Layer], way: str) -> str:
    """What becomes of one exchange of each layer."""
    o, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    try:
        for layer in layers:
            getattr(layer, way)(o, lse)
    except RanksDisagree as error:
        return str(error)
    return ""


def _in_layers(rank: int, way: str) -> list[str]:
    """Two whole steps, one in which rank 1 leaves the second layer out, and a whole one
    with another layer."""
    layers = [Layer() for _ in range(4)]
    told = [_taken(layers, way), _taken(layers, way)]
    told.append(_taken([layers[0], *layers[1 + rank : 3 + rank]], way))
    return [*told, _taken([*layers, Layer()], way)]


def _in_passing(rank: int) -> str:
    """Objects of one call, that only rank 0 collects; and ids that come again."""
    if rank == 1:
        gc.disable()
    try:
        told = [_taken([Passing()], "attend") for _ in range(20) if not gc.collect(0)]
    finally:
        gc.enable()
    return "".join(told)


def _on_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    return {
        "callers": _callers(),
        "greeted": _greeted(rank),
        "layers": {way: _in_layers(rank, way) for way in ("attend", "call")},
        "passing": _in_passing(rank),
    }


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


@pytest.mark.parametrize("way", ["attend", "call"], ids=["eager", "compiled"])
def test_a_layer_left_out_is_noticed_though_layers_share_a_function(on_ranks, way):
    one, other = (found["layers"][way] for found in on_ranks)
    first, second, skipped, whole = one
    assert (first, second, whole) == ("", "", "")
    assert "(object)" in skipped
    numbers = re.search(r"attend of object (\d+); .* attend of object (\d+)\.", skipped)
    assert numbers is not None, skipped
    assert int(numbers[1]) + 1 == int(numbers[2])
    assert one == other


def test_objects_of_one_call_are_no_difference(on_ranks) -> None:
    assert [found["passing"] for found in on_ranks] == ["", ""]


def test_finding_the_object_keeps_none_of_the_functions_variables() -> None:
    class Probe:
        def attend(self, reduce: Callable[[], Any]) -> tuple[bool, bool]:
            wide = torch.ones(3)
            ref = weakref.ref(wide)
            _, owner = reduce()
            del wide
            return owner is self, ref() is None

    assert Probe().attend(find_caller) == (True, True)


def test_numbers_end_with_their_objects_and_never_come_again() -> None:
    instances, caller = Instances(), Caller("m.py", 3, "attend")
    one, two = Passing.__new__(Passing), Passing.__new__(Passing)
    assert instances.number(caller, None) == (0, False)
    assert instances.number(caller, one) == (1, True)
    assert instances.number(caller, two) == (1, True)  # one's call has failed
    instances.keep(caller, two, 1)
    instances.keep(caller, one, 2)
    assert instances.number(caller, two) == (1, False)
    assert instances.number(caller, one) == (2, False)
    assert instances.number(Caller("m.py", 9, "draft"), one) == (1, True)
    del one
    assert instances.number(caller, Passing.__new__(Passing)) == (3, True)
    assert len(instances._numbers) == 1


def test_an_object_without_weak_references_is_a_new_one_each_time() -> None:
    class Slotted:
        __slots__ = ()

    instances, caller, slotted = Instances(), NO_CALLER, Slotted()
    for number in (1, 2):
        assert instances.number(caller, slotted) == (number, True)
        instances.keep(caller, slotted, number)


def attend_in(module: str) -> Callable[[], Caller]:
    """A function of ``module`` that calls the op, as far as frames go."""
    op: dict[str, Any] = {"__name__": "dcp_inductor.op", "find_caller": find_caller}
    exec("def run(): return find_caller()[0]\ndef reduce(): return run()", op)
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
    exec("def attend(): return find_caller()[0]", space)
    space["__name__"] = None
    assert space["attend"]().name == "test_frames_of_no_module_are_passed_over"
    space["__name__"] = "functools"
    assert space["attend"]().name == "test_frames_of_no_module_are_passed_over"
    space["__name__"] = "model"
    assert space["attend"]().name == "attend"


def test_where_no_frame_is_a_programs_there_is_no_caller() -> None:
    frame = mock.Mock(f_globals={"__name__": "torch.somewhere"}, f_back=None)
    with mock.patch.object(sys, "_getframe", return_value=frame):
        assert find_caller() == (NO_CALLER, None)
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
    assert (tag_of(1, here, 0, "base2") == tag_of(1, other, 0, "base2")) is equal

"""The hook on sglang's exchange for eager decode: what goes to the op, what doesn't."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness import captured, normalised
from sglang_host import group_of, real_comm, sglang_module, triton_target
from torch import Tensor

from dcp_inductor.integrations import sglang_eager
from dcp_inductor.integrations.sglang_plan import Plan

pytestmark = pytest.mark.sglang

B, H, D, N = 3, 8, 16, 4
PLAN = Plan("dcp:0", "7", N, 4, H, D, torch.bfloat16, None, "a2a", False, True)
GROUP = SimpleNamespace(unique_name="dcp:0")


@pytest.fixture
def op(monkeypatch) -> mock.Mock:
    """Stands for the op; the hook is serving."""
    called = mock.Mock(return_value="op")
    monkeypatch.setattr(torch.ops.dcp_inductor, "a2a_lse_reduce", called)
    monkeypatch.setattr(sglang_eager, "_serving", {})
    sglang_eager.serve(PLAN)
    return called


def partials(b: int = B, h: int = H, d: int = D) -> tuple[Tensor, Tensor]:
    return torch.randn(b, h, d).bfloat16(), torch.randn(b, h)


@pytest.mark.parametrize(("base_e", "lse_mode"), [(True, "basee"), (False, "base2")])
def test_what_was_reserved_goes_to_the_op(op, base_e, lse_mode):
    original = mock.Mock()
    o, lse = partials()
    assert sglang_eager.around(original, o, lse, GROUP, base_e) == "op"
    op.assert_called_once_with(o, lse, "dcp:0", N, lse_mode)
    original.assert_not_called()


o_, lse_ = partials()
KEPT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "the caller's buffers": ((o_, lse_, GROUP), {"cuda_graph_buffers": {}}),
    "another backend": ((o_, lse_, GROUP), {"comm_backend": "fi_a2a"}),
    "another group": ((o_, lse_, SimpleNamespace(unique_name="dcp:1")), {}),
    "wider than reserved": ((*partials(5), GROUP), {}),
    "an empty batch": ((*partials(0), GROUP), {}),
    "other heads": ((*partials(h=4), GROUP), {}),
    "another head dim": ((*partials(d=32), GROUP), {}),
    "another dtype": ((o_.float(), lse_, GROUP), {}),
    "a narrow LSE": ((o_, lse_.bfloat16(), GROUP), {}),
    "LSEs of another shape": ((o_, lse_[:, :4], GROUP), {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_the_rest_stays_sglangs(op, case):
    """With every argument as it was given, and sglang's own defaults."""
    args, kwargs = KEPT[case]
    original = mock.Mock(return_value="sglang's")
    assert sglang_eager.around(original, *args, **kwargs) == "sglang's"
    op.assert_not_called()
    given = inspect.signature(_reduce).bind(*original.call_args[0])
    wanted = inspect.signature(_reduce).bind(*args, **kwargs)
    for bound in (given, wanted):
        bound.apply_defaults()
    assert given.arguments.keys() == wanted.arguments.keys()
    for name, value in wanted.arguments.items():
        assert given.arguments[name] is value


def test_several_models_are_served_each_by_its_plan(op):
    """Of one geometry by the widest, whichever comes last."""
    sglang_eager.serve(replace(PLAN, head_dim=2 * D, max_tokens=9))
    sglang_eager.serve(replace(PLAN, max_tokens=2))
    for b, d, sent in (
        (4, D, True),
        (5, D, False),
        (9, 2 * D, True),
        (1, 3 * D, False),
    ):
        answer = sglang_eager.around(
            mock.Mock(return_value="s"), *partials(b, d=d), GROUP
        )
        assert (answer == "op") == sent


def test_nothing_is_sent_before_the_start(op, monkeypatch):
    sglang_eager.stop()
    original = mock.Mock(return_value="sglang's")
    assert sglang_eager.around(original, *partials(), GROUP) == "sglang's"


def _reduce(
    o,
    lse,
    group,
    is_lse_base_on_e=True,
    cuda_graph_buffers=None,
    comm_backend="a2a",
):
    """sglang 0.5.23's parameters, held against the real ones below."""


def test_sglangs_function_has_the_parameters_that_are_known():
    comm = real_comm()
    real = inspect.signature(comm.dcp_a2a_lse_reduce).parameters
    assert tuple(real) == sglang_eager._PARAMETERS
    for known, there in zip(
        inspect.signature(_reduce).parameters.values(), real.values(), strict=True
    ):
        assert known.default == there.default
    around = [*inspect.signature(sglang_eager.around).parameters.values()][1:]
    for ours, there in zip(around, real.values(), strict=True):
        assert (ours.name, ours.default) == (there.name, there.default)


def test_a_function_with_other_parameters_isnt_hooked(monkeypatch, caplog):
    comm = real_comm()
    monkeypatch.setattr(comm, "dcp_a2a_lse_reduce", lambda o, lse, group: o)
    registry = sglang_module("srt.plugins.hook_registry").HookRegistry
    monkeypatch.setattr(registry, "register", mock.Mock())
    sglang_eager.hook.__wrapped__()
    registry.register.assert_not_called()
    assert "no hook for eager decode: sglang's dcp_a2a_lse_reduce takes (o, lse, g" in (
        caplog.text
    )
    assert "hasn't put it on" in sglang_eager.objection()


def test_under_the_compiler_the_pass_sees_sglangs_graph(monkeypatch):
    """With the hook in place and serving: the same graph, fused by the pass."""
    comm = real_comm()
    original, group = comm.dcp_a2a_lse_reduce, group_of(N)
    plan = replace(PLAN, host_group=group.unique_name)
    monkeypatch.setattr(sglang_eager, "_serving", {})
    sglang_eager.serve(plan)
    graphs = []
    with triton_target():
        for hooked in (False, True):

            def reduce(o: Tensor, lse: Tensor, hooked: bool = hooked) -> Tensor:
                if hooked:
                    return sglang_eager.around(original, o, lse, group, False)
                return original(o, lse, group, False)

            found = captured(reduce, partials())
            assert (found.num_ops, found.reasons) == (1, [])
            graphs.append((normalised(found.before), normalised(found.after)))
    kernels = [text.replace("kernel_idx", "") for text in graphs[0]]
    assert len(kernels) == 2
    assert graphs[0][1] == graphs[1][1]
    assert graphs[0][0].count("triton_kernel") == graphs[1][0].count("triton_kernel")

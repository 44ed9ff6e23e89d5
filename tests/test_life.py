"""Each exchange runs exactly once a call, in program order, on every rank.

Told by what ran: the calls that reached the backend, and the collectives that torch's
profiler saw. One pair of processes runs every scenario; the tests look at what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from decoders import layers, packed
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from versions import since_2_13

import dcp_inductor.op as dcp_op
from dcp_inductor import DcpFusionPass
from dcp_inductor.runtime.backends.collective import Collective

_SCHEDULER = "aten_distributed_optimizations."
_NAMESPACES = ("c10d::", "exchange::")


def op(o: Tensor, lse: Tensor) -> Tensor:
    return torch.ops.dcp_inductor.a2a_lse_reduce(o, lse, "0", 2, "base2")


# ------------------------------------------------------------- programs


def unused(o, lse):
    op(o, lse)
    return lse + 1


def used_on_rank_0(o, lse):
    out = op(o, lse)
    return out if dist.get_rank() == 0 else lse


def equal_calls(o, lse):
    return op(o, lse), op(o, lse)


def equal_spelled(o, lse):
    return packed(o, lse, 2), packed(o, lse, 2)


def three_layers(o, lse):
    return layers(o, lse, 2, 3)


def _gathered(x: Tensor) -> Tensor:
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "0")
    return torch.ops._c10d_functional.wait_tensor(gathered)


def mixed(o, lse, o2, lse2):
    """Independent exchanges and collectives, read in the opposite order."""
    first = packed(o, lse, 2)
    reduced = funcol.all_reduce(o2, "sum", "0")
    second = op(o2, lse2)
    gathered = _gathered(lse)
    third = packed(o2 * 2, lse2, 2)
    return third.sum(), gathered.sum(), second.sum(), reduced.sum(), first


def trained_behind(o, lse, weight):
    """The backward pass needs the exchange's result."""
    return (op(o.detach(), lse) * weight).sin().sum()


def trained_through(o, lse, weight):
    return (packed(o * weight[:1], lse, 2) * weight).sin().sum()


def trained_again(o, lse, weight):
    def block(o, lse, weight):
        return (packed(o, lse, 2) * weight).sin()

    return checkpoint(block, o.detach(), lse, weight, use_reentrant=False).sum()


# name: function, exchanges a call. ``mixed`` runs under each of ORDERS.
COUNTS: dict[str, tuple[Callable[..., Any], int]] = {
    "unused": (unused, 1),
    "used on rank 0": (used_on_rank_0, 1),
    "equal calls": (equal_calls, 2),
    "equal spelled": (equal_spelled, 2),
    "three layers": (three_layers, 3),
}
TRAINED = {
    "behind": trained_behind,
    "through": trained_through,
    "again": trained_again,
}


def _estimated(node: torch.fx.Node, size: int | None = None) -> float:
    """Milliseconds; the scheduler's own estimate asks a GPU."""
    return 1.0


ORDERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "overlap": {"reorder_for_compute_comm_overlap": True},
    "bucketing": {
        "bucket_all_gathers_fx": "all",
        "bucket_reduce_scatters_fx": "all",
        "bucket_all_reduces_fx": "all",
    },
    "scheduler": {
        _SCHEDULER + "enable_overlap_scheduling": True,
        _SCHEDULER + "collective_bucketing": True,
        _SCHEDULER + "insert_overlap_deps": True,
        _SCHEDULER + "enable_fusion_regions": False,
        _SCHEDULER + "custom_runtime_estimation": _estimated,
    },
}
SHAPES = ((64, 4), (4, 64))
# Sizes matter to peak memory and locality, which the defaults have on.
CASES = [(name, SHAPES[0]) for name in ORDERS] + [("defaults", SHAPES[1])]

# ------------------------------------------------------------- the run


class Watched:
    """The backend's calls and torch's collectives, in the order in which they ran."""

    def __init__(self) -> None:
        run_direct = Collective.run_direct

        def watched(backend: Any, call: Any) -> Any:
            with record_function(f"exchange::{call.num_tokens}"):
                return run_direct(backend, call)

        Collective.run_direct = watched  # type: ignore[method-assign]

    def run(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
        """The result, and [tokens of an exchange | name of a collective]."""
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            result = fn(*args)
        ran: list[Any] = []
        end = 0.0
        for event in sorted(seen.events(), key=lambda event: event.time_range.start):
            where, name = event.time_range, event.name.split("::")[-1].strip("_")
            name = name.partition("_")[0]
            if not event.name.startswith(_NAMESPACES) or name in _ROLL_CALL:
                continue
            if where.start >= end:  # not within an exchange, or within itself
                ran.append(int(name) if name.isdigit() else name)
                end = where.end
        return result, ran


# What the ranks tell each other before an exchange.
_ROLL_CALL = ("send", "recv")


def partials(rank: int, *batches: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    made = []
    for b in batches:
        made += [torch.randn(b, 4, 8, generator=rng), torch.randn(b, 4, generator=rng)]
    return made


def compiled(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": DcpFusionPass(), **options}
    return torch.compile(fn, fullgraph=True, options=options)


def run_everything(rank: int, num_ranks: int) -> dict[Any, Any]:
    watched, seen = Watched(), {}
    for name, (fn, _) in COUNTS.items():
        args = partials(rank, 4)
        call = compiled(fn, {})
        call(*args)
        seen[name] = watched.run(call, *args)[1]
    for shape in SHAPES:
        args = partials(rank, *shape)
        wanted, seen["mixed", "eager", shape] = watched.run(mixed, *args)
        for name, options in ORDERS.items():
            if (name, shape) not in CASES:
                continue
            call = compiled(mixed, options)
            torch.testing.assert_close(call(*args), wanted)
            seen["mixed", name, shape] = watched.run(call, *args)[1]
    for name, fn in TRAINED.items():
        seen["trained", name] = _train(watched, fn, rank)
    return seen


def _train(watched: Watched, fn: Callable[..., Any], rank: int) -> dict[str, Any]:
    """Exchanges of one step and the gradients, eager and compiled."""
    found: dict[str, Any] = {}
    for name, call in (("eager", fn), ("compiled", compiled(fn, {}))):
        (o, lse), weight = partials(rank, 4), torch.linspace(1, 2, 8)
        weight.requires_grad_()

        def step(o=o, lse=lse, weight=weight, call=call):
            weight.grad = None
            loss = call(o, lse, weight)
            loss.backward()
            return loss.item()

        step()
        loss, ran = watched.run(step)
        found[name] = (ran, loss, weight.grad.tolist())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("cache")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "KINETO_LOG_LEVEL": "5"}
    return run_ranks(run_everything, 2, env=env, timeout_s=280.0)


# ------------------------------------------------------------- what it saw


@pytest.mark.parametrize("name", COUNTS)
def test_an_exchange_runs_once_a_call_on_every_rank(ranks, name):
    for seen in ranks:
        assert seen[name] == [4] * COUNTS[name][1]


@since_2_13("it moves calls of the op past other collectives, the same on every rank")
@pytest.mark.parametrize(
    ("options", "shape"), [case for case in CASES if case[0] != "scheduler"], ids=str
)
def test_order_is_the_programs(ranks, options, shape):
    wide, narrow = shape
    for seen in ranks:
        assert seen["mixed", options, shape] == [
            wide,
            "allreduce",
            narrow,
            "allgather",
            narrow,
        ]


@pytest.mark.parametrize(("options", "shape"), CASES, ids=str)
def test_no_option_and_no_version_moves_an_exchange_past_another(ranks, options, shape):
    """torch's own collectives may start earlier, the same on every rank."""
    first, second = (seen["mixed", options, shape] for seen in ranks)
    assert first == second
    assert [each for each in first if isinstance(each, int)] == [*shape, shape[1]]
    assert len(first) == 5


@pytest.mark.parametrize("name", TRAINED)
def test_training_has_its_gradients_and_as_many_exchanges(ranks, name):
    for seen in ranks:
        found = seen["trained", name]
        (eager, *wanted), (ran, *got) = found["eager"], found["compiled"]
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        assert len(ran) == len(eager), (eager, ran)
        assert any(wanted[1])
    assert ranks[0]["trained", name]["compiled"][0] == ran


def test_the_op_carries_what_keeps_it_in_place():
    for name in dcp_op._OPS:
        target = getattr(torch.ops.dcp_inductor, name).default
        assert torch.Tag.nondeterministic_seeded in target.tags
        assert torch.fx.node._side_effectful_functions >= {target}

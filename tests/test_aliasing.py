"""What the op returns is its own: no workspace, no input, whatever users do with it.

That the fake has the real op's strides for any input is test_fuzz.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import packed
from ranks import run_ranks
from torch import Tensor

from dcp_inductor import DcpFusionPass
from dcp_inductor.runtime.backends.collective import Collective


def op(o: Tensor, lse: Tensor) -> Tensor:
    return torch.ops.dcp_inductor.a2a_lse_reduce(o, lse, "0", 2, "base2")


def op_with_lse(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.dcp_inductor.a2a_lse_reduce_with_lse(o, lse, "0", 2, "base2")


# Each returns what is compared with eager's, after all that it does in place.


def written_behind(o, lse):
    """The result is written in place; so are the inputs, before and after the call."""
    lse.mul_(0.5)
    out = packed(o, lse, 2)
    out.mul_(2)
    o.add_(1)
    lse.zero_()
    return out


def written_twice(o, lse):
    """Two results of equal inputs, one of them written, the other returned twice."""
    first, second = op(o, lse), op(o, lse)
    first.neg_()
    return first, second, second.transpose(0, 1)


def written_lse(o, lse):
    out, merged = op_with_lse(o, lse)
    merged.add_(out[..., 0])
    out.zero_()
    return out, merged


def read_behind(o, lse):
    """The inputs are read after the call: it left them as they were."""
    out = packed(o, lse, 2)
    return torch.relu(o), lse + 1, out


def views_of_inputs(o, lse):
    """Half the batch and every second head of what the caller holds."""
    out = packed(o[1::2, ::2].contiguous(), lse[1::2, ::2].contiguous(), 2)
    o[1::2, ::2].mul_(3)
    return out


def strided_views(o, lse):
    """Views reach the op as they are."""
    return op(o[1::2, ::2], lse[1::2, ::2])


PROGRAMS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        written_behind,
        written_twice,
        written_lse,
        read_behind,
        views_of_inputs,
        strided_views,
    )
}


def head_major(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def pitched(x: Tensor) -> Tensor:
    space = torch.zeros(x.shape[1], x.shape[0] + 3, *x.shape[2:])
    space[:, : x.shape[0]] = x.transpose(0, 1)
    return space[:, : x.shape[0]].transpose(0, 1)


def overlapping(x: Tensor) -> Tensor:
    """All tokens share one row of memory."""
    return x[:1].clone().expand(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "head-major": head_major,
    "pitched": pitched,
    "overlapping": overlapping,
}
# What gets every layout: a written input must hold each element once, and each layout
# is compiled anew.
READ_ONLY = ("read_behind", "strided_views")


def partials(rank: int, layout: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(rank)
    o, lse = (torch.randn(4, 8, *d, generator=rng) for d in ((8,), ()))
    return LAYOUTS[layout](o), LAYOUTS[layout](lse)


class Storages:
    """What memory the backend gave out, and which of it was the caller's."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.seen: dict[int, Tensor] = {}
        run_direct = Collective.run_direct

        def watched(backend: Any, call: Any) -> Any:
            given = [call.partial_o.clone(), call.partial_lse.clone()]
            results = run_direct(backend, call)
            inputs = {
                x.untyped_storage().data_ptr()
                for x in (call.partial_o, call.partial_lse)
            }
            for result in results:
                place = result.untyped_storage().data_ptr()
                if place in inputs or place in self.seen:
                    self.wrong.append("a result shares memory")
                self.seen[place] = result  # alive, so that no address comes twice
            if not torch.equal(given[0], call.partial_o):
                self.wrong.append("an input was written")
            return results

        Collective.run_direct = watched  # type: ignore[method-assign]


def every_program(rank: int, num_ranks: int) -> dict[str, Any]:
    storages, found = Storages(), {}
    for name, program in PROGRAMS.items():
        torch._dynamo.reset()
        options = {"post_grad_custom_pre_pass": DcpFusionPass()}
        call = torch.compile(program, fullgraph=True, options=options)
        for layout in LAYOUTS:
            if layout != "contiguous" and name not in READ_ONLY:
                continue
            wanted_args, args = partials(rank, layout), partials(rank, layout)
            wanted, got = program(*wanted_args), call(*args)
            again = call(*partials(rank, layout))
            try:
                torch.testing.assert_close(got, wanted)
                torch.testing.assert_close(again, wanted)
                torch.testing.assert_close(args, wanted_args)
                found[name, layout] = [x.stride() for x in _leaves(got)] == [
                    x.stride() for x in _leaves(wanted)
                ]
            except AssertionError as error:
                found[name, layout] = str(error)
    found["wrong"] = storages.wrong
    return found


def _leaves(tree: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    return run_ranks(every_program, 2, env=env, timeout_s=280.0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_place_users_and_views_see_what_eager_sees(ranks, name):
    for seen in ranks:
        of_name = {key[1]: value for key, value in seen.items() if key[0] == name}
        assert len(of_name) == (len(LAYOUTS) if name in READ_ONLY else 1)
        assert of_name == dict.fromkeys(of_name, True)


def test_results_are_new_memory_each_time_and_inputs_stay(ranks):
    assert [seen["wrong"] for seen in ranks] == [[], []]

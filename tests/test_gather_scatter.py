"""Merges spelled as all-gather, correction, reduce-scatter: fused when asked for.

Axes: N ranks, B tokens, H heads, h = H/N, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from harness import Captured, captured, fake_world, normalised
from torch import Tensor
from versions import since_2_13

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.compiler import gather_scatter
from dcp_inductor.merge import a2a_lse_reduce_reference

N, B, H, D = 4, 3, 8, 16
ALLOWED = Config(ag_rs=True)


@dataclass(frozen=True)
class Spelling:
    """One way to write the merge; each field is one place of it.

    own: the LSE of this rank, from the local and the gathered ones ``[N, B, H]``.
    weight: from the unnormalised weights ``[N, B, H]`` and that of this rank. part: the
    corrected partial as it is handed to the reduce-scatter. late: the result in fp32.
    """

    power: Callable[[Tensor], Tensor] = torch.exp2
    own: Callable[[Tensor, Tensor], Tensor] = lambda lse, lses: lse
    weight: Callable[[Tensor, Tensor], Tensor] = lambda all_, own: own / all_.sum(0)
    part: Callable[[Tensor], Tensor] = lambda part: part.transpose(0, 1)
    late: Callable[[Tensor], Tensor] = lambda out: out.transpose(0, 1)
    reduction: str = "sum"
    scatter_dim: int = 0
    lse_group: str = "4"
    sent: Callable[[Tensor], Tensor] = lambda lse: lse
    further: Callable[[Tensor, Tensor], Tensor | None] = lambda lses, out: None

    def function(self, groups: dict[str, Any]) -> Callable[..., Any]:
        lse_group, group = groups[self.lse_group], groups["4"]

        def merge(o: Tensor, lse: Tensor) -> Any:
            lses = funcol.all_gather_tensor(self.sent(lse), 0, lse_group)
            lses = lses.view(N, *lse.shape)
            top = lses.amax(0)
            top = torch.where(top == -torch.inf, 0.0, top)
            own = self.power(self.own(lse, lses) - top)
            weight = self.weight(self.power(lses - top), own)
            part = self.part(o.float() * weight.nan_to_num(0.0).unsqueeze(-1))
            out = funcol.reduce_scatter_tensor(
                part.contiguous(), self.reduction, self.scatter_dim, group
            )
            further = self.further(lses, out)
            out = self.late(out).to(o.dtype)
            return out if further is None else (out, further)

        return merge


PLAIN = Spelling()


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


def partials(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    o = torch.randn(N, B, H, D, generator=rng).to(dtype)
    return o, torch.randn(N, B, H, generator=rng) * 4


def compiled(
    spelling: Spelling,
    groups: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    config: Config = ALLOWED,
    dynamic: bool = False,
) -> Captured:
    o, lse = partials(0, dtype)
    args = o[0].clone(), lse[0].clone()
    if dynamic:
        for tensor in args:
            torch._dynamo.mark_dynamic(tensor, 0)
    return captured(spelling.function(groups), args, config=config)


def assert_one_op(found: Captured, lse_mode: str = "base2") -> None:
    assert found.reasons == []
    assert (found.num_ops, found.num_collectives) == (1, 0)
    (finding,) = found.report.findings
    assert (finding.lse_mode, finding.num_ranks) == (lse_mode, N)


# --- what fuses -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lse_mode", ["base2", "basee"])
def test_fuses_with_equal_numbers(groups, dtype, lse_mode):
    power = torch.exp2 if lse_mode == "base2" else torch.exp
    found = compiled(replace(PLAIN, power=power), groups, dtype)
    assert_one_op(found, lse_mode)
    o, lse = partials(1, dtype)
    lse[0, 0] = -torch.inf
    lse[:, 1] = -torch.inf
    inputs = [*zip(o, lse, strict=True)]
    original, fused = found.run(inputs, before=True), found.run(inputs)
    tolerance = torch.finfo(dtype).eps
    for rank in range(N):
        wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=lse_mode)
        assert torch.equal(fused[rank][0], wanted)
        torch.testing.assert_close(
            original[rank][0], wanted, rtol=4 * tolerance, atol=4 * tolerance
        )


def test_a_dynamic_batch(groups):
    found = compiled(PLAIN, groups, dynamic=True)
    assert_one_op(found)
    rng = torch.Generator().manual_seed(3)
    o, lse = torch.randn(N, 7, H, D, generator=rng), torch.randn(N, 7, H, generator=rng)
    fused = found.run([*zip(o, lse, strict=True)])
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=2, lse_mode="base2")
    assert torch.equal(fused[2][0], wanted)


def test_layers_of_one_graph_are_proved_once(groups):
    merge = PLAIN.function(groups)

    def layers(o: Tensor, lse: Tensor) -> Tensor:
        first = merge(o, lse)
        return merge(first.repeat(1, N, 1) * 1.5, lse)

    o, lse = partials(0)
    found = captured(layers, (o[0], lse[0]), config=ALLOWED)
    assert (found.num_ops, found.num_collectives) == (2, 0)
    assert [finding.from_memo for finding in found.report.findings][1:] == [True]


def test_beside_an_all_to_all_and_other_gathers(groups):
    """Hidden states that are gathered and scattered are none of it."""
    merge, group = PLAIN.function(groups), groups["4"]

    def layer(o: Tensor, lse: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = funcol.all_gather_tensor(x.bfloat16(), 0, group) * 2
        hidden = funcol.reduce_scatter_tensor(hidden, "sum", 0, group)
        return merge(o, lse), hidden

    o, lse = partials(0)
    found = captured(layer, (o[0], lse[0], torch.randn(4, 4)), config=ALLOWED)
    assert (found.num_ops, len(found.report.findings)) == (1, 1)
    assert found.num_collectives == 4, "with their waits"


REST = {
    "half of it": replace(PLAIN, late=lambda out: out.transpose(0, 1) * 0.5),
    "the fp32 sum is used too": replace(PLAIN, further=lambda lses, out: out + 1),
}


@pytest.mark.parametrize("case", REST)
def test_what_follows_the_merge_stays(groups, case):
    found = compiled(REST[case], groups, torch.bfloat16)
    assert_one_op(found)
    inputs = [*zip(*partials(2, torch.bfloat16), strict=True)]
    original, fused = found.run(inputs, before=True), found.run(inputs)
    for was, now in zip(original, fused, strict=True):
        for before, after in zip(was, now, strict=True):
            torch.testing.assert_close(after, before, rtol=2**-8, atol=2**-10)


def test_sizes_that_only_the_run_knows_do_no_harm(groups):
    """A gather and a reduce-scatter of data-dependent length (experts' tokens)."""
    group = groups["4"]

    def layer(x: Tensor) -> Tensor:
        rows = x[x.sum(1) > 0]
        gathered = funcol.all_gather_tensor(rows, 0, group)
        return funcol.reduce_scatter_tensor(gathered * 2, "sum", 0, group)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = captured(layer, (torch.randn(8, 4),), config=ALLOWED)
    assert (found.num_ops, found.reasons) == (0, [])


@since_2_13("Dynamo doesn't trace all_gather_tensor's last step")
def test_other_fp32_gathers_upstream(groups):
    """The partial output itself may be made from gathered data."""
    merge, group = PLAIN.function(groups), groups["4"]

    def layer(q: Tensor, lse: Tensor) -> Tensor:
        o = funcol.all_gather_tensor(q, 1, group).sigmoid()
        return merge(o, lse)

    _, lse = partials(0)
    args = torch.randn(B, H // N, D), lse[0]
    found = captured(layer, args, config=ALLOWED)
    assert (found.num_ops, found.num_collectives) == (1, 2), "the gather and its wait"


# --- the rank in the graph: NOTE [own rank] -------------------------------------------


def reads_rank(place: int) -> Spelling:
    return replace(PLAIN, own=lambda lse, lses: lses[place])


@pytest.fixture
def as_rank(monkeypatch) -> Callable[[int | None], None]:
    """Make this process another rank, for the compiler."""

    def become(rank: int | None) -> None:
        monkeypatch.setattr(gather_scatter, "rank_in_group", lambda name: rank)

    return become


def test_every_rank_gets_the_same_graph(groups, as_rank):
    after = set()
    for rank in range(N):
        as_rank(rank)
        found = compiled(reads_rank(rank), groups)
        assert_one_op(found)
        after.add(normalised(found.after))
    assert len(after) == 1


@pytest.mark.parametrize("rank", range(N))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_another_ranks_lse_is_refused(groups, as_rank, rank, step):
    as_rank(rank)
    found = compiled(reads_rank((rank + step) % N), groups)
    assert found.num_ops == 0
    assert f"this one's, which is {rank}" in found.reasons[0]


def test_a_rank_that_isnt_known_is_refused(groups, as_rank):
    as_rank(None)
    assert compiled(reads_rank(0), groups).num_ops == 0
    assert compiled(PLAIN, groups).num_ops == 1, "where none is needed"


def test_every_rank_tries_as_many_regions_whatever_may_mean_its_rank(
    groups, as_rank, monkeypatch
):
    """A rank whose number stands often in the graph finds the right place as well."""
    passed = gather_scatter._passed

    def with_decoys(node: torch.fx.Node, rank: int) -> list[str]:
        found = [*passed(node, rank)]
        return ["dim"] * 20 + found if found else found

    monkeypatch.setattr(gather_scatter, "_passed", with_decoys)
    as_rank(1)
    assert_one_op(compiled(reads_rank(1), groups))


# --- what doesn't ---------------------------------------------------------------------


def test_a_sum_that_cant_be_simulated_is_refused_with_the_reason(groups):
    """torch has no fp8 sum on the CPU."""
    fp8 = torch.float8_e4m3fn
    spelling = replace(PLAIN, part=lambda part: part.transpose(0, 1).to(fp8))
    found = compiled(spelling, groups, fp8)
    assert found.num_ops == 0
    (reason,) = found.reasons
    assert "reduce_scatter of float8_e4m3fn, can't be run on the CPU" in reason


def halves(part: Tensor) -> Tensor:
    return part.transpose(0, 1).roll(1, 0)


NEAR_MISSES = {
    "mean": (replace(PLAIN, reduction="avg"), "takes the avg"),
    "max": (replace(PLAIN, reduction="max"), "takes the max"),
    "scattered along D": (
        replace(PLAIN, part=lambda part: part, scatter_dim=2, late=lambda out: out),
        "",
    ),
    "LSEs of another group": (replace(PLAIN, lse_group="other 4"), "different groups"),
    "not normalised": (replace(PLAIN, weight=lambda all_, own: own), "isn't the LSE"),
    "one rank left out": (
        replace(PLAIN, weight=lambda all_, own: own / all_[1:].sum(0)),
        "",
    ),
    "a temperature": (
        replace(PLAIN, power=lambda x: torch.exp2(x * 0.99)),
        "isn't the LSE merge",
    ),
    "an epsilon": (
        replace(PLAIN, weight=lambda all_, own: own / (all_.sum(0) + 1e-3)),
        "isn't the LSE merge",
    ),
    "heads of the next rank": (
        replace(PLAIN, part=lambda part: part.transpose(0, 1).roll(H // N, 0)),
        "",
    ),
    "heads moved": (replace(PLAIN, part=halves), ""),
    "LSEs changed on the way": (
        replace(PLAIN, sent=lambda lse: lse * 1.0 + 0.0 * lse.roll(1, 1) + 1),
        "",
    ),
    "gathered LSEs are returned": (
        replace(PLAIN, further=lambda lses, out: lses),
        "view, inside the merge, is returned",
    ),
    "a sum of LSEs is returned": (
        replace(PLAIN, further=lambda lses, out: lses.exp2().sum(0)),
        "view, inside the merge, is also read by exp2",
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_miss_is_refused(groups, case):
    spelling, reason = NEAR_MISSES[case]
    found = compiled(spelling, groups, torch.bfloat16)
    assert found.num_ops == 0
    assert len(found.reasons) == 1
    assert reason in found.reasons[0], found.reasons
    assert normalised(found.before) == normalised(found.after)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _attended(x: Tensor, weight: Tensor) -> Tensor:
    q = x @ weight
    return torch.softmax(q @ q.T, -1) @ q


# What stands between the gather and the reduce-scatter of tensor and sequence
# parallelism: of gathered x [N*4, 16], a weight [16, 16] as large as what is scattered,
# and a residual [16, 16].
UNRELATED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "nothing": lambda x, weight, residual: x * 2,
    "a norm": lambda x, weight, residual: _normed(x),
    "a residual": lambda x, weight, residual: x + residual,
    "a linear layer": lambda x, weight, residual: x @ weight,
    "an MLP": lambda x, weight, residual: torch.nn.functional.silu(x @ weight) @ weight,
    "attention": lambda x, weight, residual: _attended(x, weight) + residual,
    "a softmax of its own": lambda x, weight, residual: torch.softmax(x, -1),
}


@pytest.mark.parametrize("reduction", ["sum", "avg"])
@pytest.mark.parametrize("case", UNRELATED)
def test_pairs_of_other_parallelism_are_none_of_it(groups, case, reduction):
    """Not a word, and on_miss="raise" compiles."""
    group = groups["4"]

    def layer(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        gathered = funcol.all_gather_tensor(x, 0, group)
        out = UNRELATED[case](gathered, weight, residual)
        return funcol.reduce_scatter_tensor(out, reduction, 0, group)

    args = torch.randn(4, 16), torch.randn(16, 16), torch.randn(16, 16)
    for ag_rs in (True, False):
        config = Config(ag_rs=ag_rs, on_miss="raise")
        found = captured(layer, args, config=config)
        assert (found.num_ops, found.report.findings) == (0, ())


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_a_wrong_correction_is_an_error_where_misses_are(groups, reduction):
    wrong = replace(PLAIN, reduction=reduction, weight=lambda all_, own: own)
    with pytest.raises(Exception, match="FusionMissed"):
        compiled(wrong, groups, config=replace(ALLOWED, on_miss="raise"))


def test_without_leave_it_stays_and_says_how_to_get_it(groups):
    found = compiled(PLAIN, groups, config=Config())
    assert found.num_ops == 0
    assert "DCP_INDUCTOR_AG_RS=1" in found.reasons[0]


def test_narrow_lses_arent_taken_for_an_exchange(groups):
    spelling = replace(PLAIN, sent=lambda lse: lse.bfloat16())
    assert compiled(spelling, groups).report.findings == ()


def test_a_partial_that_changes_before_the_scatter_is_refused(groups, monkeypatch):
    """The op would read it at the scatter's place; the correction read it before."""
    look = DcpFusionPass.__call__

    def change_then_look(self: DcpFusionPass, graph: torch.fx.Graph) -> None:
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        (o,) = [node for node in inputs if node.meta["val"].dim() == 3]
        scatter = next(n for n in graph.nodes if "reduce_scatter" in str(n.target))
        with graph.inserting_before(scatter):
            change = graph.call_function(torch.ops.aten.mul_.Scalar, (o, 2.0))
            change.meta["val"] = o.meta["val"]
        look(self, graph)

    monkeypatch.setattr(DcpFusionPass, "__call__", change_then_look)
    found = compiled(replace(PLAIN, late=lambda out: out), groups)
    assert found.num_ops == 0
    (reason,) = found.reasons
    assert "mutates a tensor between pack and merge" in reason

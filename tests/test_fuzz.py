"""Random shapes, dtypes, strides and special values: the op against an oracle of its
own, and fused graphs against what they were made of.

Random spellings and random changes to them are test_mutated_corpus.py's. fuzzing.py
says how many examples are tried, and docs/reliability.md what they have found.

Axes: N ranks, B tokens, H heads, h = H/N, D head dim.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, cast

import corpus
import hypothesis.strategies as st
import pytest
import torch
from fuzzing import fixed, many
from harness import Captured, captured, fake_world, run_ranks_in_lockstep
from hypothesis import given
from test_mutated_corpus import BASES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from dcp_inductor import op as dcp_op
from dcp_inductor.merge import LSE_MODES, PARTIAL_DTYPES, LseMode
from dcp_inductor.runtime.backends import collective
from dcp_inductor.runtime.call import ExchangeCall, check_partials

# ------------------------------------------------------------- special values

# What a share of the elements is replaced by; None is an ordinary one.
LSE_SPECIALS: dict[str, float] = {
    "empty": -torch.inf,
    "+inf": torch.inf,
    "nan": torch.nan,
    "zero": 0.0,
    "negative zero": -0.0,
    "subnormal": 1e-42,
    "huge": 1e30,
    "sentinel": -1e30,
}
O_SPECIALS: dict[str, float] = {
    "inf": torch.inf,
    "nan": torch.nan,
    "negative zero": -0.0,
    "subnormal": 1e-42,
    "huge": 1e30,
    "tiny": -1e-30,
}
LAYOUTS = ("contiguous", "head-major", "pitched", "every second", "repeated")


@dataclass(frozen=True)
class Case:
    """One exchange: its sizes, and how its data is drawn from ``seed``."""

    num_ranks: int
    num_tokens: int
    heads_per_rank: int
    head_dim: int
    dtype: torch.dtype
    lse_mode: LseMode
    o_layout: str
    lse_layout: str
    spread: float
    center: float
    lse_specials: tuple[str, ...]
    o_specials: tuple[str, ...]
    seed: int

    @property
    def num_heads(self) -> int:
        return self.num_ranks * self.heads_per_rank


cases = st.builds(
    Case,
    num_ranks=st.integers(2, 5),
    num_tokens=st.integers(1, 9),
    heads_per_rank=st.integers(1, 3),
    head_dim=st.integers(1, 17),
    dtype=st.sampled_from(PARTIAL_DTYPES),
    lse_mode=st.sampled_from(LSE_MODES),
    o_layout=st.sampled_from(LAYOUTS),
    lse_layout=st.sampled_from((*LAYOUTS, "trailing 1")),
    spread=st.sampled_from([0.0, 0.01, 1.0, 20.0, 300.0, 1e6]),
    center=st.sampled_from([0.0, 1.0, -150.0, 90.0, 1e4]),
    lse_specials=st.lists(st.sampled_from([*LSE_SPECIALS]), max_size=3).map(tuple),
    o_specials=st.lists(st.sampled_from([*O_SPECIALS]), max_size=2).map(tuple),
    seed=st.integers(0, 2**32 - 1),
)


def sprinkled(
    x: Tensor, specials: tuple[str, ...], of: dict[str, float], rng: torch.Generator
) -> Tensor:
    """``x`` with a fifth of its elements replaced by each special in turn."""
    for name in specials:
        x = torch.where(torch.rand(x.shape, generator=rng) < 0.2, of[name], x)
    return x


def drawn(case: Case) -> tuple[Tensor, Tensor]:
    """``[N, B, H, D]`` in the case's dtype and ``[N, B, H]`` fp32, contiguous."""
    rng = torch.Generator().manual_seed(case.seed)
    rows = (case.num_ranks, case.num_tokens, case.num_heads)
    o = torch.randn(*rows, case.head_dim, generator=rng)
    lse = case.center + case.spread * torch.randn(rows, generator=rng)
    o = sprinkled(o, case.o_specials, O_SPECIALS, rng).to(case.dtype)
    return o, sprinkled(lse, case.lse_specials, LSE_SPECIALS, rng)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values as ``x`` ``[B, H, ...]`` in another layout in memory."""
    if layout == "head-major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "pitched":
        space = torch.zeros(x.shape[1], x.shape[0] + 3, *x.shape[2:]).to(x.dtype)
        space[:, : x.shape[0]] = x.transpose(0, 1)
        return space[:, : x.shape[0]].transpose(0, 1)
    if layout == "every second":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "trailing 1":
        return x.unsqueeze(-1)
    if layout == "repeated" and bool((x == x[:1]).all()):
        return x[:1].expand(x.shape)
    return x.contiguous()


# ------------------------------------------------------------- the op

# fp32's smallest normal number; an exponential below it may be 0.
_SMALLEST = 2.0**-126
# Of an exponential whose argument is rounded to fp32 and at most 104 in size.
_WEIGHT_ERROR = 2 * 104 * 2.0**-23


@dataclass(frozen=True)
class Wanted:
    """What a rank gets, in fp64. size: of the terms that out is the sum of. open: where
    a number that isn't finite has a weight that fp32 may round to 0 or not."""

    out: Tensor
    lse: Tensor
    size: Tensor
    open: Tensor


def oracle(o: Tensor, lse: Tensor, rank: int, case: Case) -> Wanted:
    """The merge of all ranks' partials, spelled on its own."""
    kept = slice(rank * case.heads_per_rank, (rank + 1) * case.heads_per_rank)
    o, lse = o[:, :, kept].double(), lse[:, :, kept].double()
    log = 1.0 if case.lse_mode == "base2" else torch.tensor(2.0).double().log()
    lse = torch.where(lse.isnan() | (lse == torch.inf), -torch.inf, lse)
    top = lse.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp2((lse - top) / log)
    # What fp32 can't hold is no weight, and what has none isn't selected.
    weight = torch.where(weight < 2.0**-151, 0.0, weight)
    faint = ((weight > 0) & (weight < 2 * _SMALLEST)).unsqueeze(-1)
    terms = torch.where(weight.unsqueeze(-1) > 0, o * weight.unsqueeze(-1), 0.0)
    total = weight.sum(0)
    safe = torch.where(total > 0, total, 1.0).unsqueeze(-1)
    merged = torch.where(total > 0, top + log * total.log2(), -torch.inf)
    undecided = (faint & ~o.isfinite()).any(0)
    return Wanted(terms.sum(0) / safe, merged, terms.abs().sum(0) / safe, undecided)


def exchanged(case: Case, o: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Backend ``collective`` on all ranks, its all-to-all done here."""
    calls = []
    for rank in range(case.num_ranks):
        group = types.SimpleNamespace(
            size=lambda: case.num_ranks, rank=lambda rank=rank: rank
        )
        given = laid_out(o[rank], case.o_layout), laid_out(lse[rank], case.lse_layout)
        check_partials(*given, case.num_ranks)
        squeezed = given[1].squeeze(-1) if given[1].dim() == 3 else given[1]
        calls.append(
            ExchangeCall(
                given[0],
                squeezed,
                cast(ProcessGroup, group),
                "fuzz",
                case.lse_mode,
                True,
            )
        )
    sent = [collective._packed(call) for call in calls]
    return [
        collective._merged(call, sent[rank], torch.stack([s[rank] for s in sent]))
        for rank, call in enumerate(calls)
    ]


def _check_op(case: Case) -> None:
    o, lse = drawn(case)
    before = o.clone(), lse.clone()
    results = exchanged(case, o, lse)
    eps = max(torch.finfo(case.dtype).eps, 2.0**-23)
    for rank, (out, merged) in enumerate(results):
        wanted = oracle(o, lse, rank, case)
        assert out.is_contiguous()
        assert merged.is_contiguous()
        assert (out.dtype, merged.dtype) == (case.dtype, torch.float32)
        biggest = o.double().nan_to_num(0, 0, 0).abs().max()
        allowed = (4 * eps + _WEIGHT_ERROR) * wanted.size + 4 * _SMALLEST * biggest
        out = torch.where(wanted.open, wanted.out.to(case.dtype), out)
        allowed += torch.finfo(case.dtype).tiny
        _assert_near(out, wanted.out.to(case.dtype), allowed)
        _assert_near(merged, wanted.lse, 2.0**-21 * wanted.lse.abs() + 1e-5)
    assert all(map(_same_bits, (o, lse), before)), "the partials are left as they are"


def _assert_near(got: Tensor, wanted: Tensor, allowed: Tensor) -> None:
    got, wanted = got.double(), wanted.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    near = (got - wanted).abs() <= allowed
    assert bool((same | near).all()), (got, wanted)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@fixed(2500)
@given(case=cases)
def test_the_op_is_the_oracle(case: Case):
    _check_op(case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@many(2500)
@given(case=cases)
def test_the_op_is_the_oracle_long(case: Case):
    _check_op(case)


# ------------------------------------------------------------- its fake


def _check_fake(case: Case, with_lse: bool) -> None:
    """The fake of a case is what the real op gives, strides and all."""
    o, lse = (x[0] for x in drawn(case))
    given = laid_out(o, case.o_layout), laid_out(lse, case.lse_layout)
    merged = dcp_op._without_peers(given[0], lse, case.num_ranks, case.lse_mode)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
        fake = dcp_op._fake_with_lse(*fakes, "any", case.num_ranks, case.lse_mode)
    for real, stated in zip(merged, fake, strict=True):
        assert real.shape == stated.shape
        assert real.stride() == stated.stride()
        assert (real.dtype, real.device) == (stated.dtype, stated.device)
        assert real.storage_offset() == stated.storage_offset() == 0
        for x in given:
            assert real.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@fixed(150)
@given(case=cases, with_lse=st.booleans())
def test_the_fake_has_the_real_strides(case: Case, with_lse: bool):
    _check_fake(case, with_lse)


# ------------------------------------------------------------- fused graphs


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


_CAPTURED: dict[corpus.Entry, Captured] = {}
# A NaN or +inf LSE is empty to the op and whatever the spelling makes of it to a graph.
_GRAPH_LSE_SPECIALS = [name for name in LSE_SPECIALS if name not in ("nan", "+inf")]


def _graph(entry: corpus.Entry, groups: dict[str, Any]) -> Captured:
    if entry not in _CAPTURED:
        o = torch.zeros(entry.num_tokens, entry.num_heads, entry.head_dim)
        args = corpus.arguments(entry, o, o[..., 0])
        found = captured(corpus.exchange(entry, groups[entry.group_key]), args)
        assert found.num_ops == 1
        _CAPTURED[entry] = found
    return _CAPTURED[entry]


def _check_graph(groups: dict[str, Any], entry: corpus.Entry, case: Case) -> None:
    """Where the graph before the pass is finite, the one after it agrees."""
    found = _graph(entry, groups)
    rng = torch.Generator().manual_seed(case.seed)
    rows = (entry.num_ranks, entry.num_tokens, entry.num_heads)
    o = torch.randn(*rows, entry.head_dim, generator=rng)
    lse = case.center + case.spread * torch.randn(rows, generator=rng)
    o = sprinkled(o, case.o_specials, O_SPECIALS, rng)
    specials = tuple(s for s in case.lse_specials if s in _GRAPH_LSE_SPECIALS)
    lse = sprinkled(lse, specials, LSE_SPECIALS, rng)
    flat = [
        found.flat_inputs(corpus.arguments(entry, *pair))
        for pair in zip(o, lse, strict=True)
    ]
    new = run_ranks_in_lockstep(found.after, flat)
    old = run_ranks_in_lockstep(found.before, flat)
    size = (
        float(lse[lse.isfinite()].abs().clamp(max=2e6).max())
        if lse.isfinite().any()
        else 0.0
    )
    for rank in range(entry.num_ranks):
        for got, wanted in zip(new[rank], old[rank], strict=True):
            _assert_same_where_finite(got, wanted, size)


def _assert_same_where_finite(got: Any, wanted: Any, size: float) -> None:
    if not isinstance(wanted, Tensor) or not wanted.dtype.is_floating_point:
        assert bool(torch.as_tensor(got == wanted).all())
        return
    kept = wanted.isfinite()
    got, value = got[kept].double(), wanted[kept].double()
    if not value.numel():
        return
    assert bool(got.isfinite().all()), "finite before, not finite after"
    tolerance = max(8 * torch.finfo(wanted.dtype).eps, 2e-5) + 8 * 2.0**-24 * size
    assert bool(((got - value).abs() <= tolerance * value.abs().max()).all())


@fixed(60)
@given(entry=st.sampled_from(BASES), case=cases)
def test_a_fused_graph_has_its_numbers(groups, entry: corpus.Entry, case: Case):
    _check_graph(groups, entry, case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@many(100)
@given(entry=st.sampled_from(BASES), case=cases)
def test_a_fused_graph_has_its_numbers_long(groups, entry: corpus.Entry, case: Case):
    _check_graph(groups, entry, case)

"""Every spelling of the corpus becomes one op, and the numbers are merge.py's.

Most run in one process, harness.NOTE [lockstep]; some are compiled to the end and run
on real processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import corpus
import pytest
import torch
import torch.distributed as dist
from corpus import Entry
from harness import Captured, captured, fake_world
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.utils import counters

from dcp_inductor import DcpFusionPass
from dcp_inductor.compiler.fusion_pass import COUNTER

ENTRIES = corpus.entries()
EPS = {
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-2,
    torch.float8_e5m2: 2.0**-1,
}

MakeLse = Callable[[tuple[int, int], torch.Generator], Tensor]
Partials = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


def _ordinary(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * 3


def _far(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * 30


def _large(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * 2 + 70


def _some_empty(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    lse = torch.randn(shape, generator=rng)
    return torch.where(torch.rand(shape, generator=rng) < 0.3, -torch.inf, lse)


LSES: tuple[MakeLse, ...] = (_ordinary, _far, _large, _some_empty)


def partials(entry: Entry, num_tokens: int, make_lse: MakeLse, seed: int) -> Partials:
    """Each rank's [B, H, D] and [B, H]."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(entry.num_ranks):
        o = torch.randn(num_tokens, entry.num_heads, entry.head_dim, generator=rng)
        lse = make_lse((num_tokens, entry.num_heads), rng)
        made.append((o, lse))
    return made


def batches(entry: Entry) -> tuple[int, ...]:
    """The numbers of tokens to run an entry with."""
    if not entry.dynamic:
        return (entry.num_tokens,)
    queries = corpus.NUM_QUERIES if entry.layout == "bqhd" else 1
    return tuple(queries * b for b in (2, 9, 33))


def mark_batch(entry: Entry, o: Tensor, lse: Tensor) -> None:
    """Tell Dynamo which axes are symbolic in a dynamic entry's arguments."""
    if entry.dynamic:
        batch = int(entry.layout == "hbd")
        torch._dynamo.mark_dynamic(o, batch)
        torch._dynamo.mark_dynamic(lse, batch or int(entry.lse_layout == "transposed"))


def flat(outputs) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(outputs))


def assert_merged(entry: Entry, outputs, wanted, ulps: float, *, finite: bool) -> None:
    """Equal within ``ulps`` of each output's dtype; where finite only, if asked."""
    for got, value in zip(flat(outputs), flat(wanted), strict=True):
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        eps = ulps * EPS[value.dtype]
        got, value = got.double(), value.double()
        if finite:
            kept = got.isfinite()
            got, value = got[kept], value[kept]
        torch.testing.assert_close(got, value, rtol=eps, atol=2 * eps)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_spelling_fuses(entry: Entry, groups):
    args = corpus.arguments(entry, *partials(entry, entry.num_tokens, _ordinary, 0)[0])
    mark_batch(entry, *args)
    found = captured(corpus.exchange(entry, groups[entry.group_key]), args)
    assert found.reasons == []
    assert (found.num_ops, found.num_collectives) == (1, 0)
    (finding,) = found.report.findings
    assert finding.lse_mode == entry.lse_mode
    assert finding.num_ranks == entry.num_ranks
    assert finding.with_lse == bool(entry.with_lse)
    check_numbers(entry, found)


def check_numbers(entry: Entry, found: Captured) -> None:
    """Fused and unfused, on fresh data, against merge.py."""
    for seed, (b, make_lse) in enumerate(itertools.product(batches(entry), LSES)):
        made = partials(entry, b, make_lse, seed + 1)
        args = [corpus.arguments(entry, *pair) for pair in made]
        fused, unfused = found.run(args), found.run(args, before=True)
        assert found.num_graphs == 1, "another batch compiles nothing new"
        for rank in range(entry.num_ranks):
            wanted = corpus.expected(entry, made, rank)
            assert_merged(entry, fused[rank], wanted, 0.25, finite=False)
            # The program's own rounding: a running merge rounds once a rank.
            assert_merged(entry, unfused[rank], wanted, 16.0, finite=True)


@pytest.mark.parametrize("case", corpus.SEVERAL, ids=str)
def test_every_exchange_of_a_graph_fuses(case: corpus.Several, groups):
    rng = torch.Generator().manual_seed(3)

    def args() -> tuple[Tensor, Tensor]:
        o = torch.randn(3, case.num_heads, 8, generator=rng)
        lse = torch.randn(3, case.num_heads, generator=rng)
        if case.head_major:
            o, lse = (x.transpose(0, 1).contiguous() for x in (o, lse))
        return o, lse

    found = captured(case.make(groups), args())
    assert found.reasons == []
    assert (found.num_ops, found.num_collectives) == (case.num_ops, 0)
    inputs = [args() for _ in range(2)]
    fused, unfused = found.run(inputs), found.run(inputs, before=True)
    for rank in range(2):
        for new, old in zip(flat(fused[rank]), flat(unfused[rank]), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


def test_names_are_unique():
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len({*names})


# ------------------------------------------------------------- real processes

_REAL = {
    2: (
        "pack: bytes tail",
        "wire: in place, two",
        "layout: b(hd)",
        "partials: pitched",
        "then: twice",
        "head-major, two, transposed",
        "several tokens, buffer, running",
        "fp8, two, LSE used",
        "dynamic: head-major, two, LSE",
        "dynamic: computed, matmul",
    ),
    4: ("dynamic: flat",),
}


@pytest.mark.parametrize("num_ranks", [*_REAL])
def test_compiled_spellings_on_real_processes(num_ranks: int, tmp_path):
    names = _REAL[num_ranks]
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    results = run_ranks(run_entries, num_ranks, names, timeout_s=280.0, env=env)
    assert results == [[(name, 1, "") for name in names]] * num_ranks


def run_entries(
    rank: int, num_ranks: int, names: tuple[str, ...]
) -> list[tuple[str, int, str]]:
    """On one rank: (name, fused exchanges, what is wrong with the numbers)."""
    known = {entry.name: entry for entry in ENTRIES}
    return [(name, *_run_entry(known[name], rank)) for name in names]


def _run_entry(entry: Entry, rank: int) -> tuple[int, str]:
    torch._dynamo.reset()
    before = counters["inductor"][COUNTER]
    options = {"post_grad_custom_pre_pass": DcpFusionPass()}
    fn = torch.compile(
        corpus.exchange(entry, dist.group.WORLD), fullgraph=True, options=options
    )
    wrong = ""
    with torch.no_grad():
        for num_tokens in {entry.num_tokens: None, **dict.fromkeys(batches(entry))}:
            for seed, make_lse in enumerate(LSES):
                made = partials(entry, num_tokens, make_lse, seed)
                args = corpus.arguments(entry, *made[rank])
                mark_batch(entry, *args)
                outputs = fn(*args)
                try:
                    wanted = corpus.expected(entry, made, rank)
                    assert_merged(entry, outputs, wanted, 2.0, finite=False)
                except AssertionError as error:
                    wrong = wrong or str(error)
    return counters["inductor"][COUNTER] - before, wrong

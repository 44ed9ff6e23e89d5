"""Every spelling of the corpus becomes one op, and the numbers are merge.py's."""

from __future__ import annotations

import itertools

import corpus
import pytest
import torch
from corpus import Entry
from harness import Captured, captured, fake_world
from torch import Tensor

ENTRIES = corpus.entries()
EPS = {
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-2,
    torch.float8_e5m2: 2.0**-1,
}


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


def _ordinary(shape, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * 3


def _far(shape, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * 30


def _large(shape, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) * 2 + 70


def _some_empty(shape, rng: torch.Generator) -> Tensor:
    lse = torch.randn(shape, generator=rng)
    return torch.where(torch.rand(shape, generator=rng) < 0.3, -torch.inf, lse)


LSES = (_ordinary, _far, _large, _some_empty)


def partials(entry: Entry, num_tokens: int, make_lse, seed: int):
    """Each rank's [B, H, D] and [B, H]."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(entry.num_ranks):
        o = torch.randn(num_tokens, entry.num_heads, entry.head_dim, generator=rng)
        lse = make_lse((num_tokens, entry.num_heads), rng)
        made.append((o, lse))
    return made


def compiled(entry: Entry, groups) -> Captured:
    (pair, *_) = partials(entry, entry.num_tokens, _ordinary, 0)
    args = corpus.arguments(entry, *pair)
    if entry.dynamic:
        batch = 1 if entry.layout == "hbd" else 0
        torch._dynamo.mark_dynamic(args[0], batch)
        lse_batch = 1 if entry.lse_layout == "transposed" else batch
        torch._dynamo.mark_dynamic(args[1], lse_batch)
    return captured(corpus.exchange(entry, groups[entry.group_key]), args)


def flat(outputs) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(outputs))


def check_numbers(entry: Entry, found: Captured) -> None:
    """Fused and unfused, on fresh data, against merge.py."""
    sizes = (entry.num_tokens,)
    if entry.dynamic:
        q = corpus.NUM_QUERIES if entry.layout == "bqhd" else 1
        sizes = tuple(q * b for b in (2, 9, 33))
    for seed, (b, make_lse) in enumerate(itertools.product(sizes, LSES)):
        made = partials(entry, b, make_lse, seed + 1)
        args = [corpus.arguments(entry, *pair) for pair in made]
        after, before = found.run(args), found.run(args, before=True)
        assert found.num_graphs == 1, "another batch compiles nothing new"
        for rank in range(entry.num_ranks):
            wanted = flat(corpus.expected(entry, made, rank))
            for new, old, value in zip(after[rank], before[rank], wanted, strict=True):
                assert new.shape == value.shape == old.shape
                assert new.dtype == value.dtype == old.dtype
                new, old, value = new.double(), old.double(), value.double()
                eps = EPS[entry.dtype] if value is wanted[0] else EPS[torch.float32]
                eps = EPS[entry.dtype]
                torch.testing.assert_close(new, value, rtol=eps / 4, atol=eps / 64)
                finite = old.isfinite()
                torch.testing.assert_close(
                    old[finite], value[finite], rtol=4 * eps, atol=8 * eps
                )


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_spelling_fuses(entry: Entry, groups):
    found = compiled(entry, groups)
    assert found.reasons == []
    assert (found.num_ops, found.num_collectives) == (1, 0)
    (finding,) = found.report.findings
    assert finding.lse_mode == entry.lse_mode
    assert finding.num_ranks == entry.num_ranks
    assert finding.with_lse == bool(entry.with_lse)
    check_numbers(entry, found)


def test_names_are_unique():
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len({*names})

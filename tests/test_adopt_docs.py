"""docs/adopt.md does what it says: its code is run on two ranks, its reasons exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import fake_world
from ranks import run_ranks

import dcp_inductor
from dcp_inductor.merge import merge

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adopt.md").read_text()
HEADING = "## A transformers model"
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
TENSORS = ("q", "keys", "values", "out", "partial_o", "partial_lse", "own")


def code_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


@torch.no_grad()
def the_page(rank: int, num_ranks: int) -> dict[str, Any]:
    """Everything above the heading, in order, as one program."""
    torch.manual_seed(rank)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.compile_threads = 1
    page: dict[str, Any] = {}
    for block in code_of(PAGE.split(HEADING)[0]):
        exec(block, page)
    args = (page["partial_o"], page["partial_lse"], page["group"])
    tensors = {
        "eager": page["decode"](*page["args"]),
        "exchanged": page["exchange"](*args),
        **{name: page[name] for name in TENSORS},
    }
    return {
        "report": str(page["report"]),
        "fused": page["report"].fused,
        **{name: tensor.tolist() for name, tensor in tensors.items()},
    }


@pytest.fixture(scope="module")
def ranks():
    return [
        {
            name: torch.tensor(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        for found in run_ranks(the_page, 2)
    ]


def test_the_exchange_of_the_page_fuses(ranks):
    for found in ranks:
        assert found["fused"] == 1, found["report"]
        assert "graph break:" not in found["report"]


def test_compiled_eager_and_op_agree(ranks):
    for found in ranks:
        torch.testing.assert_close(found["out"], found["eager"])
        torch.testing.assert_close(found["own"], found["exchanged"])


def test_the_op_is_the_merge(ranks):
    o, lse = (
        torch.stack([found[name] for found in ranks])
        for name in ("partial_o", "partial_lse")
    )
    whole, _ = merge(o, lse, lse_mode="basee")
    torch.testing.assert_close(torch.cat([found["own"] for found in ranks], 1), whole)


def test_decode_is_attention_over_all_tokens(ranks):
    """Of three tokens rank 0 has two and rank 1 one; queries differ by rank here."""
    owners, slots = (0, 1, 0), (0, 0, 1)
    held = [*zip(owners, slots, strict=True)]
    values = torch.stack([ranks[r]["values"][:, slot] for r, slot in held], 1)
    scores = [
        torch.einsum("bhd,bd->bh", ranks[r]["q"], ranks[r]["keys"][:, slot]) / 4
        for r, slot in held
    ]
    share = torch.stack(scores, -1).softmax(-1)
    want = torch.einsum("bhs,bsd->bhd", share, values)
    got = torch.cat([found["out"] for found in ranks], 1)
    torch.testing.assert_close(got, want)


REASONS = re.findall(r"^\| `(.+?)`", PAGE, re.M)
# What an author may write instead of a piece of the page's code, by the reason.
MISTAKES = {
    "heads are interleaved": (
        ("b, n, h // n, d).transpose(0, 1)", "b, h // n, n, d).permute(2, 0, 1, 3)"),
        ("b, n, h // n).transpose(0, 1)", "b, h // n, n).permute(2, 0, 1)"),
    ),
    "it isn't the LSE merge": (("(got_lse - top)", "((got_lse - top) * 2)"),),
    "it holds the number": (("-torch.inf, 0.0, top", "-torch.inf, -1e3, top"),),
    "not fp32": (
        (
            "transpose(0, 1).contiguous()\n    got",
            "transpose(0, 1).bfloat16()\n    got",
        ),
    ),
    "the received buffer": (("return ((got_o", "return got_lse, ((got_o"),),
}


@pytest.mark.parametrize("reason", MISTAKES)
def test_a_mistake_is_refused_for_the_reason_of_the_table(reason):
    assert reason in REASONS
    code = "\n".join(code_of(PAGE)[:2])
    for right, wrong in MISTAKES[reason]:
        assert right in code
        code = code.replace(right, wrong)
    page: dict[str, Any] = {}
    with fake_world() as groups:
        exec(code, page)
        q, kv = torch.randn(2, 8, 16), torch.randn(2, 5, 16)
        args = (q, kv, kv, torch.tensor(3), page["rank"], groups["2"])
        (refused, *_) = dcp_inductor.explain(page["decode"], *args).refused
    assert reason in refused.reason


def test_each_reason_of_the_table_is_one_of_the_compiler():
    assert len(REASONS) > 5
    source = "".join(
        path.read_text() for path in (ROOT / "dcp_inductor/compiler").glob("*.py")
    )
    for reason in REASONS:
        assert reason in re.sub(r'"\s*f?"', "", source), reason


@torch.no_grad()
def the_model(rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """The last section, and what the model says by itself."""
    import torch.distributed as dist

    page: dict[str, Any] = {"torch": torch, "group": dist.group.WORLD}
    (block,) = code_of(PAGE.split(HEADING)[1])
    exec(block, page)
    model = page["model"]
    model.set_attn_implementation("sdpa")
    whole = model.generate(page["prompt"], max_new_tokens=8)
    return page["tokens"].tolist(), whole.tolist()


@pytest.mark.transformers
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers isn't installed")
def test_the_model_of_the_page_generates():
    for sharded, whole in run_ranks(the_model, 2):
        assert sharded == whole

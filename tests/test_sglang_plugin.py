"""The sglang plugin's start in the warm-up of runners: all ranks alike, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sglang_host import real_comm
from sglang_starts import BROKEN, start_on_rank

from dcp_inductor.integrations import sglang
from dcp_inductor.integrations.sglang_plan import Plan
from dcp_inductor.runtime import agreement

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    real_comm()


REFUSALS = {
    "not compiled": "without --enable-torch-compile",
    "ag_rs": "DCP_INDUCTOR_AG_RS=1 allows it",
    "ag_rs with symmetric memory": "--enable-symm-mem breaks the compiled graph",
    "an unknown backend": "--dcp-comm-backend is new",
    "another FlashInfer": "takes (partial_o, lse, group) here",
    "stages that warm up together": "SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP",
    "no compiled batch": "no decode batch is captured",
    "no graphs": "no decode batch is captured",
    "graphs of prefill alone": "no decode batch is captured",
    "pdmux": "--enable-pdmux captures on several streams",
}


@pytest.fixture(scope="module")
def started() -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks ended up with, by what was asked of it. One spawn for all:
    importing sglang takes most of the time."""
    env = {"DCP_INDUCTOR_TIMEOUT_S": "8", "SGLANG_LOG_LEVEL": "error"}
    return run_ranks(start_on_rank, 2, env=env)


def test_all_ranks_reserve_and_install(started):
    for found in (ranks["all well"] for ranks in started):
        assert found["passes"] == 1
        ((name, geometry, backend),) = found["reserved"]
        assert (name, backend) == ("dcp:0", "collective")
        assert geometry["max_tokens"] == 16 * 3, "the widest compiled batch"
        assert (geometry["num_heads"], geometry["head_dim"]) == (8, 64)
        assert geometry["dtype"] == torch.bfloat16
    first, second = (ranks["all well"]["lines"] for ranks in started)
    (line,) = first
    assert "fusing DCP exchanges, backend collective, 2 ranks, capacity 48" in line
    assert second == []


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_with_the_reason(started, name):
    for rank, found in enumerate(ranks[name] for ranks in started):
        assert (found["passes"], found["reserved"]) == (0, [])
        assert len(found["lines"]) == (rank == 0)
        assert all(REFUSALS[name] in line for line in found["lines"])


@pytest.mark.parametrize("name", BROKEN)
def test_one_rank_that_cant_start_keeps_all_from_fusing(started, name):
    for found in (ranks[name] for ranks in started):
        assert (found["passes"], found["reserved"]) == (0, [])
    (line,) = started[0][name]["lines"]
    assert "MemoryError: no memory on this rank (rank 1)" in line


NEEDS_NOTHING = "a draft model without MLA", "a draft as wide", "a narrow draft"


@pytest.mark.parametrize("name", NEEDS_NOTHING)
def test_a_draft_that_needs_nothing_changes_nothing(started, name):
    """No memory, no line; what its target has stays."""
    for found in (ranks[name] for ranks in started):
        assert (found["passes"], found["reserved"], found["lines"]) == (1, [], [])


@pytest.mark.parametrize(
    ("name", "width", "head_dim"),
    [("a wide draft", 16 * 4, 64), ("a draft of another head dim", 16 * 3, 32)],
)
def test_a_draft_that_needs_more_reserves_it_beside(started, name, width, head_dim):
    for rank, found in enumerate(ranks[name] for ranks in started):
        assert found["passes"] == 1
        ((_, geometry, _),) = found["reserved"]
        assert (geometry["max_tokens"], geometry["head_dim"]) == (width, head_dim)
        assert len(found["lines"]) == (rank == 0)
        for line in found["lines"]:
            assert "fusing DCP exchanges of the draft model, backend" in line
            assert f"capacity {width} tokens of 8 heads of {head_dim}" in line


def test_a_draft_whose_start_fails_compiles_unfused(started):
    """Nothing is reserved for what it would compile."""
    for found in (ranks["a draft that can't start"] for ranks in started):
        assert (found["passes"], found["reserved"]) == (0, [])
        (line,) = found["lines"]
        assert "of the draft model stay unfused" in line


@pytest.mark.parametrize("name", ["slower than sglang", "slower than sglang, eager"])
def test_a_backend_without_a_kernel_of_its_own_stays_out_of_gpus(started, name):
    for rank, found in enumerate(ranks[name] for ranks in started):
        assert (found["passes"], found["eager"]) == (0, [])
        assert len(found["lines"]) == (rank == 0)
        assert all(
            "only the backend collective runs" in line for line in found["lines"]
        )


def test_a_backend_without_a_kernel_of_its_own_serves_where_it_is_asked_for(started):
    for found in (ranks["slower than sglang, asked for"] for ranks in started):
        assert found["passes"] == 1


def test_speculation_that_adapts_reserves_for_its_longest_step(started):
    for found in (ranks["speculation that adapts"] for ranks in started):
        ((_, geometry, _),) = found["reserved"]
        assert geometry["max_tokens"] == 16 * 5


def test_what_one_rank_alone_has_reserved_doesnt_count(monkeypatch):
    plan = Plan(
        "dcp:0",
        "1",
        2,
        16,
        8,
        64,
        torch.bfloat16,
        "cpu",
        "a2a",
        compiled=True,
        eager=False,
    )
    reserved = SimpleNamespace(geometry=SimpleNamespace(max_tokens=64))
    monkeypatch.setattr(sglang, "_reserved", lambda plan: reserved)

    def agree(group: Any, topic: str, mine: Any, timeout_s: float) -> list[Any]:
        return [mine, {**mine, "reserved": 0}]

    monkeypatch.setattr(agreement, "agree", agree)
    assert sglang._voted(None, lambda: plan) == (plan, 0)


def test_an_eager_targets_plan_outlives_its_drafts(started):
    """And each geometry has its own, as wide as its widest."""
    target, other = (64, 48 * 3), (32, 48)
    for ranks in started:
        assert ranks["eager, allowed"]["eager"] == [target]
        assert ranks["an eager draft of another head dim"]["eager"] == [other, target]
        assert ranks["a narrow eager draft"]["eager"] == [other, target]
        failed = ranks["an eager draft that can't start"]
        assert failed["eager"] == [other, target]
        (line,) = failed["lines"]
        assert "no memory on this rank" in line


def test_one_rank_without_its_eager_hook_keeps_all_from_fusing(started):
    for rank, ranks in enumerate(started):
        found = ranks["eager, one rank without its hook"]
        assert (found["passes"], found["eager"], found["reserved"]) == (0, [], [])
        assert len(found["lines"]) == (rank == 0)
        for line in found["lines"]:
            assert "hook registry hasn't put it on" in line
            assert "(rank 1)" in line


def test_fi_a2a_starts(started):
    for found in (ranks["fi_a2a"] for ranks in started):
        assert (found["passes"], found["eager"]) == (1, [])


def test_ag_rs_starts_where_it_is_allowed(started):
    for found in (ranks["ag_rs, allowed"] for ranks in started):
        assert (found["passes"], found["eager"]) == (1, [])


@pytest.mark.parametrize(
    ("name", "tokens"), [("eager, allowed", 48 * 3), ("eager without graphs", 64 * 3)]
)
def test_eager_decode_starts_without_a_compiler(started, name, tokens):
    """As wide as what is captured, or as the requests that the server holds."""
    for found in (ranks[name] for ranks in started):
        assert (found["passes"], found["eager"]) == (0, [(64, tokens)])
    (line,) = started[0][name]["lines"]
    assert f"capacity {tokens} tokens" in line


def test_ranks_that_differ_in_being_eager_stay_unfused(started):
    for found in (ranks["one rank is eager"] for ranks in started):
        assert (found["passes"], found["eager"]) == (0, [])
        (line,) = found["lines"]
        assert "stay unfused" in line
        assert "eager=True" in line


def test_a_rank_without_the_plugin_is_an_error_in_time_not_a_hang(started):
    found = started[0]["no plugin"]
    assert found["passes"] == 0
    (line,) = found["lines"]
    assert "Rank(s) 1 of group" in line


def test_a_server_without_dcp_says_nothing(started):
    for found in (ranks["no DCP"] for ranks in started):
        assert (found["passes"], found["reserved"], found["lines"]) == (0, [], [])

"""Compiled artifacts are shared by all ranks, and nothing of one rank is in them.

One pair of processes goes through every phase; the tests look at what it saw. A cold
and a warm start of processes, and what the key is made of, are test_pass.py's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from decoders import packed
from harness import fake_world
from ranks import run_ranks
from torch._dynamo.utils import counters

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.compiler import fusion_pass
from dcp_inductor.compiler.fusion_pass import COUNTER
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime import selection, workspace

HIT, MISS = {"hit": 1, "miss": 0}, {"hit": 0, "miss": 1}


def model(o: torch.Tensor, lse: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """An exchange with work before and behind it, so that kernels are cached too."""
    return packed(o * 2, lse, num_ranks) + 1


def compile_and_check(rank: int, config: Config | None = None) -> dict[str, Any]:
    """Compile and run on this rank's partials; what the caches and the pass did."""
    counters.clear()
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": DcpFusionPass(config or Config())}
    call = torch.compile(model, fullgraph=True, options=options)
    rng = torch.Generator().manual_seed(3)
    o = torch.randn(2, 3, 4, 8, generator=rng)
    lse = torch.randn(2, 3, 4, generator=rng) * 4
    out = call(o[rank], lse[rank], 2)
    wanted, _ = a2a_lse_reduce_reference(o * 2, lse, rank=rank, lse_mode="base2")
    torch.testing.assert_close(out, wanted + 1)
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    return {
        "fused": inductor[COUNTER],
        "aot": {what: aot[f"autograd_cache_{what}"] for what in ("hit", "miss")},
        "fx": {what: inductor[f"fxgraph_cache_{what}"] for what in ("hit", "miss")},
        "bypass": inductor["fxgraph_cache_bypass"] + aot["autograd_cache_bypass"],
    }


def use_folder(folder: str) -> Path:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return Path(folder)


def in_turn(rank: int, folder: str, first: int) -> dict[str, Any]:
    """``first`` compiles while the other is nowhere near; then both start warm."""
    path = use_folder(folder)
    if rank != first:
        deadline = time.monotonic() + 200
        while not [*path.glob("aotautograd/*/*")]:
            assert time.monotonic() < deadline, "the first rank has compiled nothing"
            time.sleep(0.05)
    return {"cold": compile_and_check(rank), "warm": compile_and_check(rank)}


def changes(rank: int, folder: str) -> dict[str, Any]:
    """In a folder that is warm: what misses, and what doesn't."""
    use_folder(folder)
    found = {"nothing": compile_and_check(rank)}
    found["config"] = compile_and_check(rank, Config(timeout_s=29.0))
    for name, what in (("library", "source_hash"), ("versions", "_versions")):
        with mock.patch.object(fusion_pass, what, return_value="another"):
            found[name] = compile_and_check(rank)
    return found


def copied_artifacts(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0's artifacts, loaded by both ranks into empty folders of their own."""
    use_folder(f"{folder}/made_by_{rank}")
    torch.compiler._cache.CacheArtifactManager.clear()
    compile_and_check(rank)
    artifacts = torch.compiler.save_cache_artifacts() if rank == 0 else None
    sent = [artifacts[0] if artifacts else None]
    dist.broadcast_object_list(sent, src=0)
    use_folder(f"{folder}/loaded_by_{rank}")
    torch.compiler.load_cache_artifacts(sent[0])
    return compile_and_check(rank)


def names_of_artifacts(folder: str) -> list[str]:
    """Keys of entries and hashes of generated sources, which their names are."""
    path = Path(folder)
    found = [p.parent.name for p in path.glob("aotautograd/*/*")]
    found += [p.name for p in path.glob("fxgraph/*/*")]
    found += [p.name for p in path.glob("*/*.py")]
    return sorted(found)


def every_phase(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for first in range(num_ranks):
        seen[f"rank {first} first"] = in_turn(rank, f"{folder}/first_{first}", first)
        dist.barrier()
    seen["changes"] = changes(rank, f"{folder}/first_0")
    dist.barrier()
    seen["copied"] = copied_artifacts(rank, folder)
    seen["names"] = names_of_artifacts(f"{folder}/made_by_{rank}")
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("caches"))
    return run_ranks(every_phase, 2, folder, timeout_s=280.0)


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_share_a_folder_in_either_order_of_arrival(ranks, first):
    for rank, seen in enumerate(ranks):
        cold, warm = seen[f"rank {first} first"].values()
        assert cold["aot"] == (MISS if rank == first else HIT)
        assert warm["aot"] == HIT
        assert (cold["bypass"], warm["bypass"]) == (0, 0)


def test_the_counter_is_right_after_a_hit(ranks):
    for seen in ranks:
        runs = [run for first in (0, 1) for run in seen[f"rank {first} first"].values()]
        assert [run["fused"] for run in runs] == [1] * 4


@pytest.mark.parametrize("changed", ["config", "library", "versions"])
def test_what_changes_a_verdict_misses_both_caches(ranks, changed):
    for seen in ranks:
        assert seen["changes"]["nothing"]["aot"] == HIT
    first, second = (seen["changes"][changed] for seen in ranks)
    assert first["fx"]["miss"] + second["fx"]["miss"] >= 1
    assert first["aot"]["miss"] + second["aot"]["miss"] >= 1


def test_artifacts_of_rank_0_run_on_every_rank(ranks):
    for seen in ranks:
        assert seen["copied"]["aot"] == HIT
        assert seen["copied"]["fused"] == 1


def test_ranks_that_compile_apart_make_the_same_artifacts(ranks):
    first, second = (seen["names"] for seen in ranks)
    assert first == second
    assert len(first) >= 3


def test_compiling_allocates_and_agrees_on_nothing(monkeypatch):
    """Neither the pass nor a lowering: they don't run on a cache hit."""

    def refuse(*args: Any) -> None:
        raise AssertionError("asked for while compiling")

    ran = []

    def run(call: Any, *more: Any) -> Any:
        ran.append(call.site)
        return call.partial_o[:, :2].clone(), call.partial_lse[:, :2].clone()

    monkeypatch.setattr(workspace, "_reserve", refuse)
    monkeypatch.setattr(selection, "agree", refuse)
    monkeypatch.setattr(workspace, "run", run)
    before = workspace.reservations()
    with fake_world() as groups:
        for name in ("set", "get", "add", "check", "compare_set"):
            monkeypatch.setattr(dist.Store, name, refuse, raising=False)
        options = {
            "post_grad_custom_pre_pass": DcpFusionPass(Config()),
            "fx_graph_cache": False,
        }
        call = torch.compile(packed, fullgraph=True, options=options)
        call(torch.randn(3, 4, 8), torch.randn(3, 4), 2, groups["2"].group_name)
    assert len(ran) == 1
    assert workspace.reservations() == before

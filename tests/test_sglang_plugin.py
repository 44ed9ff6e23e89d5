"""The sglang plugin's start in the warm-up of runners: all ranks alike, or none."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from sglang_host import flashinfer_of, runner_of, sglang_module, start_parallel

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    sglang_module("srt.layers.dcp.comm")


def small_mla(num_ranks: int, kv_lora_rank: int = 64) -> Any:
    """What the plugin reads of an MLA model of 8 heads."""
    attention = torch.nn.Module()
    attention.kv_lora_rank = kv_lora_rank
    attention.num_local_heads = 8 // num_ranks
    attention.dcp_size = num_ranks
    return torch.nn.Sequential(torch.nn.Identity(), attention)


# One spawn for all of them: importing sglang takes most of the time. In this order: the
# last leaves the ranks at different rounds of their votes.
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
BROKEN = (
    "integrations.sglang.plan_for",
    "integrations.sglang_plan._unfit_streams",
    "compiler.fusion_pass.DcpFusionPass.__init__",
)


@pytest.fixture(scope="module")
def started() -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks ended up with, by what was asked of it."""
    env = {"DCP_INDUCTOR_TIMEOUT_S": "8", "SGLANG_LOG_LEVEL": "error"}
    return run_ranks(start_on_rank, 2, env=env)


def start_on_rank(rank: int, num_ranks: int) -> dict[str, dict[str, Any]]:
    start_parallel(
        rank,
        num_ranks,
        cuda_graph_config=graphs_of("full"),
        torch_compile_max_bs=16,
    )
    found = {}
    for name, scenario in _scenarios(rank, num_ranks).items():
        draft = DRAFTS.get(name)
        # As a GPU's: the group's is gloo's here, so the backend is collective.
        slower = Runner(kv_lora_rank=16, device="cuda")
        target = slower if name.startswith("slower") else Runner()
        with scenario:
            runner = _runner(num_ranks, draft or target, is_draft=draft is not None)
            found[name] = _warmed_up(runner, again=draft is not None)
    return found


@dataclass(frozen=True)
class Runner:
    """What differs between runners."""

    tokens_per_request: int = 3
    kv_lora_rank: int = 64
    device: str = "cpu"


# Run after a target of the default; in this order.
DRAFTS = {
    "a draft model without MLA": Runner(),
    "a draft as wide": Runner(),
    "a narrow draft": Runner(tokens_per_request=1),
    "a wide draft": Runner(tokens_per_request=4),
    "a draft of another head dim": Runner(kv_lora_rank=32),
    "a draft that can't start": Runner(),
    "an eager draft of another head dim": Runner(1, kv_lora_rank=32),
    "a narrow eager draft": Runner(tokens_per_request=1),
    "an eager draft that can't start": Runner(tokens_per_request=9),
}


def _runner(num_ranks: int, like: Runner, is_draft: bool) -> Any:
    model = small_mla(num_ranks, like.kv_lora_rank)
    tokens, device = like.tokens_per_request, like.device
    return runner_of(model, torch.bfloat16, tokens, device, is_draft)


def _scenarios(rank: int, num_ranks: int) -> dict[str, Any]:
    """What is different from a server that fuses, as context managers."""
    runtime = sglang_module("srt.runtime_context")
    envs = sglang_module("srt.environ").envs
    base = sglang_module("srt.model_executor.runner.base_runner").BaseRunner
    last = rank == num_ranks - 1
    parallel, graph = runtime.get_parallel(), runtime.get_exec().graph
    capture = runtime.get_flags().capture
    skipped = mock.patch.object(base, "_pre_initialize_fi_a2a_workspace", mock.Mock())
    broken = mock.Mock(side_effect=MemoryError("no memory on this rank"))
    broken_there = mock.patch("dcp_inductor.runtime.workspace.choose", broken)
    without_decode = graphs_of("disabled")

    def eager(*more: Any, compiled: bool = False) -> Any:
        return _all(
            mock.patch.dict(os.environ, DCP_INDUCTOR_EAGER_DECODE="1"),
            capture.override(enable_torch_compile=compiled),
            *more,
        )

    return {
        "no DCP": parallel.override(dcp_enabled=False),
        "not compiled": capture.override(enable_torch_compile=False),
        "ag_rs": parallel.override(dcp_comm_backend="ag_rs"),
        "ag_rs with symmetric memory": _all(
            parallel.override(dcp_comm_backend="ag_rs"),
            runtime.get_exec().comm.override(enable_symm_mem=True),
            mock.patch.dict(os.environ, DCP_INDUCTOR_AG_RS="1"),
        ),
        "an unknown backend": parallel.override(dcp_comm_backend="new"),
        "another FlashInfer": _all(
            parallel.override(dcp_comm_backend="fi_a2a"),
            flashinfer_of(lambda partial_o, lse, group: None),
        ),
        "stages that warm up together": _all(
            parallel.override(pp_size=2, pp_group=SimpleNamespace(world_size=2)),
            envs.SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP.override(True),
        ),
        "no compiled batch": graph.override(torch_compile_max_bs=0),
        "no graphs": graph.override(cuda_graph_config=None),
        "graphs of prefill alone": graph.override(cuda_graph_config=without_decode),
        "pdmux": runtime.get_disagg().override(enable_pdmux=True),
        **{
            name: mock.patch(f"dcp_inductor.{name}", broken) if last else nullcontext()
            for name in BROKEN
        },
        "all well": nullcontext(),
        "a draft model without MLA": mock.patch(
            "dcp_inductor.integrations.sglang_plan._is_mla", return_value=False
        ),
        "a draft as wide": nullcontext(),
        "a narrow draft": nullcontext(),
        "a wide draft": nullcontext(),
        "a draft of another head dim": nullcontext(),
        "a draft that can't start": mock.patch(
            "dcp_inductor.runtime.agreement.agree", broken
        ),
        "speculation that adapts": runtime.get_spec().override(
            max_speculative_num_draft_tokens=5
        ),
        "slower than sglang": nullcontext(),
        "slower than sglang, eager": eager(),
        "slower than sglang, asked for": mock.patch.dict(
            os.environ, DCP_INDUCTOR_BACKEND="collective"
        ),
        "fi_a2a": _all(
            parallel.override(dcp_comm_backend="fi_a2a"),
            flashinfer_of(fi_exchange),
        ),
        "ag_rs, allowed": _all(
            parallel.override(dcp_comm_backend="ag_rs"),
            mock.patch.dict(os.environ, DCP_INDUCTOR_AG_RS="1"),
        ),
        "eager, allowed": eager(),
        "an eager draft of another head dim": eager(),
        "a narrow eager draft": eager(),
        "an eager draft that can't start": eager(broken_there),
        "eager without graphs": eager(graph.override(cuda_graph_config=without_decode)),
        "eager, one rank without its hook": eager(
            _unhooked() if last else nullcontext(), compiled=True
        ),
        "one rank is eager": mock.patch.dict(
            os.environ, {"DCP_INDUCTOR_EAGER_DECODE": "1"} if last else {}
        ),
        "no plugin": skipped if last else nullcontext(),
    }


def graphs_of(backend: str) -> Any:
    """Decode graphs of five batches, if any."""
    graphs = sglang_module("srt.model_executor.cuda_graph_config")
    decode = graphs.PhaseConfig(backend=backend, bs=[1, 2, 4, 16, 48])
    return graphs.CudaGraphConfig(decode=decode)


@contextmanager
def _unhooked() -> Iterator[None]:
    """As if sglang's registry had not put the hook on its function."""
    comm = sglang_module("srt.layers.dcp.comm")
    original = inspect.unwrap(comm.dcp_a2a_lse_reduce)
    with mock.patch.object(comm, "dcp_a2a_lse_reduce", original):
        yield


@contextmanager
def _all(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _warmed_up(runner: Any, again: bool) -> dict[str, Any]:
    """Warm up as sglang does, with the hook in place; again: for a second model."""
    from dcp_inductor.integrations import sglang as plugin
    from dcp_inductor.integrations import sglang_eager
    from dcp_inductor.integrations.inductor import installed_passes
    from dcp_inductor.runtime.workspace import reservations

    if not again:
        plugin.stop()
    plugin.register()
    sglang_module("srt.plugins.hook_registry").HookRegistry.apply_hooks()
    lines: list[str] = []
    logger = logging.getLogger("dcp_inductor.integrations")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    logger.addHandler(handler)
    before = [id(r) for _, r in reservations()]
    runner._pre_initialize_fi_a2a_workspace()
    logger.removeHandler(handler)
    return {
        "passes": len(installed_passes()),
        "eager": sorted(
            (p.head_dim, p.max_tokens) for p in sglang_eager._serving.values()
        ),
        "reserved": [
            (name, vars(r.geometry), r.backend.name)
            for name, r in reservations()
            if id(r) not in before
        ],
        "lines": lines,
    }


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


def fi_exchange(partial_o, softmax_stats, workspace, cp_rank, cp_size, out=None):
    """With FlashInfer's first parameters."""


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

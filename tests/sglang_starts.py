"""The plugin's starts on a rank of test_sglang_plugin.py, each asked for otherwise.

Real: sglang's groups, over gloo, its runner's warm-up and its hook registry. Stood in:
the models and what else a runner has.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang_host import (
    flashinfer_of,
    plugin_lines,
    real_comm,
    runner_of,
    sglang_module,
    start_parallel,
)

# Where one rank has no memory.
BROKEN = (
    "integrations.sglang.plan_for",
    "integrations.sglang_plan._unfit_streams",
    "compiler.fusion_pass.DcpFusionPass.__init__",
)


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


def start_on_rank(rank: int, num_ranks: int) -> dict[str, dict[str, Any]]:
    """What the rank ended up with, by scenario."""
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


def _runner(num_ranks: int, like: Runner, is_draft: bool) -> Any:
    model = small_mla(num_ranks, like.kv_lora_rank)
    tokens, device = like.tokens_per_request, like.device
    return runner_of(model, torch.bfloat16, tokens, device, is_draft)


def small_mla(num_ranks: int, kv_lora_rank: int = 64) -> Any:
    """What the plugin reads of an MLA model of 8 heads."""
    attention = torch.nn.Module()
    attention.kv_lora_rank = kv_lora_rank
    attention.num_local_heads = 8 // num_ranks
    attention.dcp_size = num_ranks
    return torch.nn.Sequential(torch.nn.Identity(), attention)


def _scenarios(rank: int, num_ranks: int) -> dict[str, Any]:
    """What is different from a server that fuses, as context managers; in this order:
    the last leaves the ranks at different rounds of their votes."""
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
    comm = real_comm()
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
    before = [id(r) for _, r in reservations()]
    with plugin_lines() as lines:
        runner._pre_initialize_fi_a2a_workspace()
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


def fi_exchange(partial_o, softmax_stats, workspace, cp_rank, cp_size, out=None):
    """With FlashInfer's first parameters."""

"""The sglang plugin: found by sglang's own loader; all ranks start alike or none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from sglang_host import flashinfer_of, runner_of, sglang_module, start_parallel

import dcp_inductor

pytestmark = pytest.mark.sglang

ROOT = Path(dcp_inductor.__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    sglang_module("srt.layers.dcp.comm")


# --- loading --------------------------------------------------------------------------

RUNNERS = "sglang.srt.model_executor.runner.base_runner"
HEAD = f"""
import sys
import torch  # sglang imports it everywhere
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
def hooked():
    import importlib
    runner = importlib.import_module({RUNNERS!r}).BaseRunner
    hook = HookRegistry._hooks.get(
        {RUNNERS!r} + ".BaseRunner._pre_initialize_fi_a2a_workspace", [])
    wrapped = hasattr(runner._pre_initialize_fi_a2a_workspace, "__wrapped__")
    assert bool(hook) == wrapped, (hook, wrapped)
    return len(hook)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the metadata of an install, as pyproject.toml says."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."sglang.srt.plugins"]\n')[1]
    info = tmp_path / "dcp_inductor-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dcp-inductor\n")
    lines = section.split("\n\n")[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{lines}\n")
    return tmp_path


def in_a_process(installed: Path, code: str, **env: str) -> None:
    path = os.pathsep.join([str(installed), str(ROOT), *sys.path])
    subprocess.run(
        [sys.executable, "-c", HEAD + code],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


def test_hooks_the_warm_up_of_runners(installed):
    in_a_process(installed, "load_plugins(); assert hooked() == 1")


def test_hooks_runners_that_were_imported_before(installed):
    code = f"import {RUNNERS}; load_plugins(); assert hooked() == 1"
    in_a_process(installed, code)


def test_loading_stays_light(installed):
    """A detokenizer loads plugins, and never a model runner or a compiler."""
    code = f"""
known = set(sys.modules)
load_plugins()
new = set(sys.modules) - known
assert "dcp_inductor.integrations.sglang" in new
heavy = [m for m in new if m.startswith(("torch._inductor", "dcp_inductor.compiler"))]
assert not heavy and {RUNNERS!r} not in sys.modules, heavy
"""
    in_a_process(installed, code)


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_PLUGINS", "another"), ("DCP_INDUCTOR", "0")]
)
def test_switches(installed, name, value):
    code = "load_plugins(); assert hooked() == 0"
    in_a_process(installed, code, **{name: value})


def test_a_broken_hook_leaves_the_import_alone(installed):
    code = """
import dcp_inductor.integrations.sglang as plugin
def broken():
    raise RuntimeError("broken")
plugin._hook = broken
load_plugins()
assert hooked() == 0
"""
    in_a_process(installed, code)


# --- starting -------------------------------------------------------------------------


def small_mla(num_ranks: int) -> Any:
    """What the plugin reads of an MLA model of 8 heads."""
    attention = torch.nn.Module()
    attention.kv_lora_rank = 64
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
    graphs = sglang_module("srt.model_executor.cuda_graph_config")
    decode = graphs.PhaseConfig(backend=graphs.Backend.FULL, bs=[1, 2, 4, 16, 48])
    start_parallel(
        rank,
        num_ranks,
        cuda_graph_config=graphs.CudaGraphConfig(decode=decode),
        torch_compile_max_bs=16,
    )
    return {
        name: _warmed_up(num_ranks, scenario, again=name.startswith("a draft"))
        for name, scenario in _scenarios(rank, num_ranks).items()
    }


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
        "pdmux": runtime.get_disagg().override(enable_pdmux=True),
        **{
            name: mock.patch(f"dcp_inductor.{name}", broken) if last else nullcontext()
            for name in BROKEN
        },
        "all well": nullcontext(),
        "a draft model without MLA": mock.patch(
            "dcp_inductor.integrations.sglang_plan._is_mla", return_value=False
        ),
        "fi_a2a": _all(
            parallel.override(dcp_comm_backend="fi_a2a"),
            flashinfer_of(fi_exchange),
        ),
        "ag_rs, allowed": _all(
            parallel.override(dcp_comm_backend="ag_rs"),
            mock.patch.dict(os.environ, DCP_INDUCTOR_AG_RS="1"),
        ),
        "eager, allowed": _all(
            capture.override(enable_torch_compile=False),
            mock.patch.dict(os.environ, DCP_INDUCTOR_EAGER_DECODE="1"),
        ),
        "eager without graphs": _all(
            capture.override(enable_torch_compile=False),
            graph.override(cuda_graph_config=None),
            mock.patch.dict(os.environ, DCP_INDUCTOR_EAGER_DECODE="1"),
        ),
        "one rank is eager": mock.patch.dict(
            os.environ, {"DCP_INDUCTOR_EAGER_DECODE": "1"} if last else {}
        ),
        "no plugin": skipped if last else nullcontext(),
    }


@contextmanager
def _all(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _warmed_up(num_ranks: int, scenario: Any, again: bool) -> dict[str, Any]:
    """Warm up as sglang does, with the hook in place; again: for a second model."""
    from dcp_inductor.integrations import sglang as plugin
    from dcp_inductor.integrations import sglang_eager
    from dcp_inductor.integrations.inductor import installed_passes
    from dcp_inductor.runtime.workspace import reservations

    if not again:
        plugin._uninstall()
    plugin.register()
    sglang_module("srt.plugins.hook_registry").HookRegistry.apply_hooks()
    lines: list[str] = []
    logger = logging.getLogger("dcp_inductor.integrations")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    logger.addHandler(handler)
    with scenario:
        runner = runner_of(small_mla(num_ranks), torch.bfloat16, 3)
        runner._pre_initialize_fi_a2a_workspace()
    logger.removeHandler(handler)
    plan = sglang_eager._serving
    return {
        "passes": len(installed_passes()),
        "eager": None if plan is None else plan.max_tokens,
        "reserved": [
            (name, vars(r.geometry), r.backend.name) for name, r in reservations()
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


def test_a_runner_without_exchanges_undoes_nothing(started):
    for ranks in started:
        assert ranks["a draft model without MLA"]["passes"] == 1


def fi_exchange(partial_o, softmax_stats, workspace, cp_rank, cp_size, out=None):
    """With FlashInfer's first parameters."""


def test_fi_a2a_starts(started):
    for found in (ranks["fi_a2a"] for ranks in started):
        assert (found["passes"], found["eager"]) == (1, None)


def test_ag_rs_starts_where_it_is_allowed(started):
    for found in (ranks["ag_rs, allowed"] for ranks in started):
        assert (found["passes"], found["eager"]) == (1, None)


@pytest.mark.parametrize(
    ("name", "tokens"), [("eager, allowed", 48 * 3), ("eager without graphs", 64 * 3)]
)
def test_eager_decode_starts_without_a_compiler(started, name, tokens):
    """As wide as what is captured, or as the requests that the server holds."""
    for found in (ranks[name] for ranks in started):
        assert (found["passes"], found["eager"]) == (0, tokens)
    (line,) = started[0][name]["lines"]
    assert f"capacity {tokens} tokens" in line


def test_ranks_that_differ_in_being_eager_stay_unfused(started):
    for found in (ranks["one rank is eager"] for ranks in started):
        assert (found["passes"], found["eager"]) == (0, None)
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

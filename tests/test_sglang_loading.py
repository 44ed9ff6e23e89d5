"""The sglang plugin in sglang's own loader, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_host import real_comm

import dcp_inductor

pytestmark = pytest.mark.sglang

ROOT = Path(dcp_inductor.__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    real_comm()


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


def test_the_eager_hook_is_on_sglangs_function(installed):
    """Also where it is imported under its own name, and with the op there."""
    code = """
load_plugins()
import sglang.srt.layers.dcp as dcp
from dcp_inductor.integrations import sglang_eager
from unittest import mock
assert sglang_eager.objection() is None
sglang_eager.serve(mock.Mock(
    host_group="dcp:0", num_heads=2, head_dim=3, dtype=torch.float32, max_tokens=9))
with mock.patch.object(torch.ops.dcp_inductor, "a2a_lse_reduce", lambda *args: "op"):
    group = mock.Mock(unique_name="dcp:0", world_size=1)
    assert dcp.dcp_a2a_lse_reduce(torch.ones(1, 2, 3), torch.ones(1, 2), group) == "op"
"""
    in_a_process(installed, code, DCP_INDUCTOR_EAGER_DECODE="1")


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

"""sglang's real DeepseekV2ForCausalLM: one fused exchange for each batch size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_host import real_comm

import dcp_inductor

pytestmark = pytest.mark.sglang

HERE = Path(__file__).parent
ROOT = Path(dcp_inductor.__file__).parents[1]
BATCHES = ("4", "2", "1")
# Batch sizes of their own, so that Dynamo compiles anew.
DIFFERENT = ("3,symm_mem", "5,ag_rs", "6,fi_a2a")
SCENARIOS = BATCHES + DIFFERENT
OP = "dcp_inductor.a2a_lse_reduce.default"


@pytest.fixture(scope="module")
def traced() -> dict[str, list[dict[str, Any]]]:
    """Every compiled graph with an exchange, by scenario; in a process of its own: the
    model patches much of it."""
    real_comm()
    path = os.pathsep.join([str(ROOT), str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, str(HERE / "sglang_model_worker.py"), *SCENARIOS],
        env={**os.environ, "PYTHONPATH": path, "SGLANG_LOG_LEVEL": "error"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_graph_with_one_fused_exchange_for_all_layers(traced, scenario):
    (graph,) = traced[scenario]
    assert (graph["fused"], graph["lse_modes"]) == (1, ["base2"]), graph["findings"]
    assert graph["nodes"].count(OP) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_of_the_exchange_is_left(traced, scenario):
    (graph,) = traced[scenario]
    left = ("triton_kernel", "auto_functionalized", "copy_", "scatter", "view", "fi_")
    for trace in left:
        assert not any(trace in target for target in graph["nodes"])


def test_a_batch_of_one_goes_on_into_the_output_projection(traced):
    """Its matrix products have one row, which Inductor writes as sums."""
    (one,), (four,) = traced["1"], traced["4"]
    assert any("sum" in target for target in one["nodes"][one["nodes"].index(OP) :])
    assert len(one["nodes"]) > len(four["nodes"]) == 5

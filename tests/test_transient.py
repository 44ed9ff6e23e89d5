"""A refusal that says nothing of the graph is remembered and cached nowhere."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import packed
from harness import fake_world
from torch import Tensor
from torch._dynamo.utils import counters

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.compiler import proof, transient
from dcp_inductor.compiler.fusion_pass import COUNTER
from dcp_inductor.compiler.proof import forget_proofs
from dcp_inductor.compiler.simulate import CantSimulate
from dcp_inductor.compiler.transient import Transient, Unsaved, is_transient
from dcp_inductor.report import Finding, GraphReport, Miss


def cant_simulate(cause: Exception) -> CantSimulate:
    """As simulate.py raises it."""
    error = CantSimulate(f"node: {cause}")
    error.__cause__ = cause
    return error


TRANSIENT = {
    "a busy interpreter": lambda: cant_simulate(Transient("took more than 480 s")),
    "short of memory in a node": lambda: cant_simulate(MemoryError("1 GiB")),
    "short of memory in the proof": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
    ),
    "the GPU's memory": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "a bug": lambda: ZeroDivisionError("division by zero"),
}
LASTING = {
    "an op without CPU": lambda: cant_simulate(NotImplementedError("aten::x")),
    "too much shared memory": lambda: cant_simulate(
        RuntimeError("out of resource: shared memory, Required: 300000")
    ),
}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Inductor's caches, empty; the process knows no proof."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    forget_proofs()
    with fake_world():
        yield tmp_path
    forget_proofs()


def compiled(group_name: str) -> tuple[Finding | None, dict[str, int]]:
    """What the pass found, None if a cache had the graph, and what was counted."""
    reports: list[GraphReport] = []
    counters.clear()
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": DcpFusionPass(Config(), reports.append)}
    call = torch.compile(packed, fullgraph=True, options=options)
    call(torch.randn(3, 4, 8), torch.randn(3, 4), 2, group_name)
    finding = reports[0].findings[0] if reports else None
    inductor = counters["inductor"]
    names = {"hit": "fxgraph_cache_hit", "fused": COUNTER, "left": transient.COUNTER}
    return finding, {short: int(inductor[name]) for short, name in names.items()}


def failing(error: Callable[[], Exception]) -> Callable[[Any], Any]:
    def judge(region: Any) -> Any:
        raise error()

    return judge


@pytest.mark.parametrize("what", TRANSIENT)
def test_the_next_start_proves_again(caches, monkeypatch, caplog, what):
    """Also where a process of another rank finds what this one has saved."""
    with monkeypatch.context() as once, caplog.at_level(logging.WARNING):
        once.setattr(proof, "_judge", failing(TRANSIENT[what]))
        finding, counted = compiled("2")
    assert finding is not None
    assert finding.transient
    assert not finding.fused
    assert counted == {"hit": 0, "fused": 0, "left": 1}
    assert "this rank alone may be leaving an exchange" in caplog.text
    assert "may pass, so this graph is saved in no cache" in caplog.text
    if what != "a bug":
        assert "compile again with more memory free" in finding.reason

    finding, counted = compiled("2")
    assert finding is not None
    assert finding.fused
    assert not finding.from_memo
    assert counted == {"hit": 0, "fused": 1, "left": 0}
    assert compiled("2") == (None, {"hit": 1, "fused": 1, "left": 0})


@pytest.mark.parametrize("what", LASTING)
def test_what_lasts_is_remembered_and_cached(caches, monkeypatch, what):
    with monkeypatch.context() as once:
        once.setattr(proof, "_judge", failing(LASTING[what]))
        finding, _ = compiled("2")
    assert finding is not None
    assert (finding.fused, finding.transient) == (False, False)
    assert compiled("2") == (None, {"hit": 1, "fused": 0, "left": 0})
    with torch.compiler.config.patch(force_disable_caches=True):
        again, _ = compiled("2")
    assert again == finding, "the process's memo"


def test_no_other_region_is_fused_in_its_place(caches, monkeypatch):
    """Peers fuse the first; the second would be another call to them."""
    judge, judged = proof._judge, []

    def first_fails(region: Any) -> Any:
        judged.append(region)
        if len(judged) == 1:
            raise MemoryError
        return judge(region)

    monkeypatch.setattr(proof, "_judge", first_fails)
    regions = []
    monkeypatch.setattr(
        "dcp_inductor.compiler.fusion_pass._to_try",
        lambda proposed: regions.extend(proposed) or [*proposed, *proposed],
    )
    finding, _ = compiled("2")
    assert finding is not None
    assert not finding.fused
    assert len(judged) == 1
    assert regions


def test_equal_layers_run_into_the_clock_once(caches, monkeypatch):
    judged, reports = [], []

    def busy(region: Any) -> Any:
        judged.append(region)
        raise Transient("took more than 480 s")

    def layers(o: Tensor, lse: Tensor) -> Tensor:
        return packed(o, lse, 2, "2") + packed(o + 1, lse, 2, "2")

    monkeypatch.setattr(proof, "_judge", busy)
    for times in (1, 2):
        torch._dynamo.reset()
        options = {"post_grad_custom_pre_pass": DcpFusionPass(Config(), reports.append)}
        call = torch.compile(layers, fullgraph=True, options=options)
        call(torch.randn(3, 4, 8), torch.randn(3, 4))
        assert [f.transient for f in reports[-1].findings] == [True, True]
        assert len(judged) == times


def test_a_count_that_isnt_saved_stays_one():
    count: Any = 0 + Unsaved(1)
    count += 2
    assert (int(count), int(count - 1), int(1 + count)) == (3, 2, 4)
    for kept in (count, count - 1, 1 + count, copy.copy(count), copy.deepcopy(count)):
        with pytest.raises(TypeError, match="saved in no cache"):
            pickle.dumps({"delta": kept})


def test_what_is_transient():
    for error in TRANSIENT.values():
        assert is_transient(error()) == (not isinstance(error(), ZeroDivisionError))
    assert not any(is_transient(error()) for error in LASTING.values())


@pytest.mark.parametrize(
    "text",
    [
        "std::bad_alloc",
        "[Errno 12] Cannot allocate memory",
        "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
        "cuda runtime error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
    ],
)
def test_short_memory_by_other_names(text):
    assert is_transient(RuntimeError(text))


def test_a_report_says_which_refusals_are_transient():
    finding = Finding("all_to_all", "0", 2, False, "busy", transient=True)
    assert Miss("busy", "all_to_all", True).at("x").transient
    from dcp_inductor.report import Report

    report = Report([GraphReport((finding,), 1, 1)])
    assert [miss.transient for miss in report.refused] == [True]

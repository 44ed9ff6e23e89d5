"""User Triton kernels in a proof: run in a child process, and read as text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from versions import interprets

triton = pytest.importorskip("triton", reason="user kernels are Triton's")
import triton.language as tl  # noqa: E402

from dcp_inductor.compiler import (  # noqa: E402
    interpreter,
    interpreter_child,
    kernel_source,
    opaque,
)
from dcp_inductor.compiler.transient import is_transient  # noqa: E402

SCALE = tl.constexpr(2.0)
UNKNOWN = object()


@triton.jit
def _scaled(x, y):
    return x * SCALE + y


@triton.jit
def rows(x_ptr, y_ptr, out_ptr, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    at = row * stride + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at).to(tl.float32)
    largest = tl.max(x, axis=0)
    out = _scaled(x, tl.load(y_ptr + row)) - largest
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty))


@triton.jit
def branches(x_ptr, out_ptr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    at = row * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at)
    if tl.load(x_ptr + row * WIDTH) > 0:
        x = x * 2
    for _ in range(0, row):
        x += 1
    tl.store(out_ptr + at, x)


@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).no_such_method())


@triton.jit
def reads_unknown(x_ptr):
    tl.store(x_ptr, UNKNOWN)


@triton.jit
def square(x_ptr, out_ptr, B, N: tl.constexpr):
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + tl.program_id(0) * N * N + tile)
    y = tl.trans(x) + tl.sum(x, axis=1)[:, None]
    tl.store(out_ptr + tl.program_id(0) * N * N + tile, tl.reshape(y, (N, N)))


def call(
    kernel: Any, grid: tuple[int, ...], written: list[str], **given: Any
) -> dict[str, Any]:
    """The keywords of a kernel's node."""
    side_table = opaque.kernel_side_table
    tensors = {name: v for name, v in given.items() if isinstance(v, Tensor)}
    constants = {name: v for name, v in given.items() if name not in tensors}
    return {
        "kernel_idx": side_table.add_kernel(kernel),
        "constant_args_idx": side_table.add_constant_args(constants),
        "grid": [grid],
        "tma_descriptor_metadata": {},
        "kwargs": tensors,
        "tensors_to_clone": written,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_a_kernel_with_nested_functions_and_globals(dtype):
    wide = torch.randn(6, 40).to(dtype)
    x, y = wide[:, 4:20], torch.randn(6)
    out = torch.empty(6, 40, dtype=dtype)[:, :16]
    given = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "stride": 40, "WIDTH": 16}
    got = opaque.run(call(rows, (2, 3), ["out_ptr"], **given))["out_ptr"]
    wanted = x.float() * 2 + y[:, None] - x.float().amax(1, keepdim=True)
    torch.testing.assert_close(got, wanted.to(dtype))
    assert got.stride() == out.stride()


@interprets
def test_runs_one_by_one_where_programs_take_different_ways():
    x = torch.randn(5, 8)
    out = torch.empty(5, 8)
    got = opaque.run(call(branches, (5,), ["out_ptr"], x_ptr=x, out_ptr=out, WIDTH=8))
    wanted = torch.where(x[:, :1] > 0, x * 2, x) + torch.arange(5.0)[:, None]
    torch.testing.assert_close(got["out_ptr"], wanted)


def test_blocks_of_two_dimensions():
    x = torch.randn(700, 4, 4)
    given = {"x_ptr": x, "out_ptr": torch.empty_like(x), "B": 700, "N": 4}
    got = opaque.run(call(square, (700,), ["out_ptr"], **given))["out_ptr"]
    torch.testing.assert_close(got, x.mT + x.sum(2, keepdim=True))


@interprets
def test_what_isnt_written_stays():
    out = torch.full((4, 8), 7.0)
    got = opaque.run(
        call(branches, (2,), ["out_ptr"], x_ptr=-torch.ones(4, 8), out_ptr=out, WIDTH=8)
    )["out_ptr"]
    assert torch.equal(got[2:], out[2:])
    assert torch.equal(out, torch.full((4, 8), 7.0)), "inputs are left alone"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (broken, "can't be interpreted: .*no_such_method"),
        (reads_unknown, "reads the global UNKNOWN, a object"),
        (triton.autotune([triton.Config({})], key=[])(rows), "is autotuned"),
    ],
)
def test_a_kernel_that_cant_run_has_a_reason(kernel, reason):
    with pytest.raises(opaque.CantRun, match=reason):
        opaque.run(call(kernel, (1,), ["x_ptr"], x_ptr=torch.ones(4)))


def launch() -> dict[str, Any]:
    """A small launch that works."""
    x = torch.ones(4, 8)
    return call(branches, (4,), ["out_ptr"], x_ptr=x, out_ptr=x.clone(), WIDTH=8)


def assert_ran(results: dict[str, Tensor]) -> None:
    assert torch.equal(results["out_ptr"], 2 + torch.arange(4.0)[:, None].expand(4, 8))


def cant_run(request: dict[str, Any]) -> tuple[bool, str]:
    """Whether a launch may run another time, and why it doesn't now."""
    with pytest.raises(opaque.CantRun) as caught:
        opaque.run(request)
    passing = isinstance(caught.value, opaque.CantRunNow)
    assert passing == is_transient(caught.value)
    return passing, str(caught.value)


@triton.jit
def endless(x_ptr):
    while tl.load(x_ptr) == 1.0:
        tl.store(x_ptr, 1.0)


@triton.jit
def goes_astray(x_ptr):
    tl.store(x_ptr + (1 << 50), 1.0)


@interprets
@pytest.mark.parametrize(
    ("kernel", "most"), [(endless, 2000), (branches, 3900)], ids=["loop", "programs"]
)
def test_work_is_bounded_by_steps_and_not_by_time(monkeypatch, kernel, most):
    monkeypatch.setattr(interpreter, "MOST_STEPS", most)
    monkeypatch.setattr(interpreter, "_LIMITS_S", (60.0,))
    request = call(endless, (1,), ["x_ptr"], x_ptr=torch.ones(1))
    if kernel is branches:
        x = torch.ones(40, 8)
        given = {"x_ptr": x, "out_ptr": x.clone(), "WIDTH": 8}
        request = call(branches, (40,), ["out_ptr"], **given)
    passing, reason = cant_run(request)
    assert not passing
    limit = f"it takes more than {most:,} steps of the interpreter a launch"
    assert reason == f"can't be interpreted: {limit}"
    assert_ran(opaque.run(launch()))


@interprets
@pytest.mark.parametrize("limits_s", [(0.0, 60.0), (0.0, 0.0)])
def test_a_launch_that_takes_too_long_gets_more_time_once(monkeypatch, limits_s):
    monkeypatch.setattr(interpreter, "_LIMITS_S", limits_s)
    if limits_s[1]:
        assert_ran(opaque.run(launch()))
        return
    assert cant_run(launch()) == (True, "took more than 0 s in Triton's interpreter")
    monkeypatch.undo()
    assert_ran(opaque.run(launch()))


@interprets
@pytest.mark.parametrize("times", [1, 2])
def test_an_interpreter_that_somebody_ends_is_started_again(monkeypatch, times):
    ended = []
    exchange = interpreter.Child._exchange

    def killed(child: Any, request: Any, limit_s: float) -> Any:
        if len(ended) < times:
            ended.append(child.process.pid)
            child.process.kill()
        return exchange(child, request, limit_s)

    monkeypatch.setattr(interpreter.Child, "_exchange", killed)
    if times == 1:
        assert_ran(opaque.run(launch()))
        return
    passing, reason = cant_run(launch())
    assert passing
    assert reason == "was in Triton's interpreter when that ended by signal 9"
    assert len({*ended}) == 2


@pytest.mark.parametrize(
    ("triton", "numpy", "told"),
    [("3.6.0", "2.4.1", True), ("3.6.0", "2.3.5", False), ("3.8.0", "2.5.0", False)],
)
def test_versions_that_dont_go_together_are_named(monkeypatch, triton, numpy, told):
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr("numpy.__version__", numpy)
    advice = interpreter._advice()
    assert ("Triton 3.6.0's interpreter fails with NumPy 2.4.1" in advice) == told
    assert bool(advice) == told


def test_an_interpreter_that_reads_no_more_is_given_up(monkeypatch):
    """A request larger than a pipe, to a process that somebody has stopped."""
    start = interpreter.Child._start

    def stopped(child: Any) -> None:
        start(child)
        child.process.send_signal(signal.SIGSTOP)

    interpreter.CHILD.stop()
    monkeypatch.setattr(interpreter.Child, "_start", stopped)
    monkeypatch.setattr(interpreter, "_LIMITS_S", (0.5, 0.5))
    child, request = interpreter.CHILD, {"most": b"x" * (1 << 22)}
    child._start()
    with pytest.raises(TimeoutError):
        child._exchange(request, 0.5)
    child.stop()
    passing, reason = cant_run(launch())
    assert passing
    assert "took more than 0 s" in reason
    interpreter.CHILD.stop()


def test_a_kernel_that_crashes_twice_is_refused_for_good():
    request = call(goes_astray, (1,), ["x_ptr"], x_ptr=torch.ones(4))
    assert cant_run(request) == (False, "ended Triton's interpreter by SIGSEGV")


def test_an_interpreter_that_cant_start_is_no_verdict(monkeypatch):
    interpreter.CHILD.stop()

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(interpreter.tempfile, "TemporaryDirectory", full)
    passing, reason = cant_run(launch())
    assert passing
    assert "found no process to be interpreted in: No space left" in reason


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "short"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "short"),
        (ValueError("no such shape"), "failed"),
    ],
    ids=str,
)
def test_the_child_tells_short_memory_from_a_kernels_fault(monkeypatch, error, kind):
    def run(**request: Any) -> Any:
        raise RuntimeError("wrapped by the interpreter") from error

    monkeypatch.setattr(interpreter_child, "run", run)
    assert interpreter_child.answer_to(1000)[0] == kind


@interprets
def test_short_memory_is_tried_again_in_a_fresh_process(monkeypatch):
    asked = []
    exchange = interpreter.Child._exchange

    def short(child: Any, request: Any, limit_s: float) -> Any:
        asked.append(child.process.pid)
        if len(asked) == 1:
            return "short", "MemoryError"
        return exchange(child, request, limit_s)

    monkeypatch.setattr(interpreter.Child, "_exchange", short)
    assert_ran(opaque.run(launch()))
    assert len({*asked}) == 2


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is said to be there; tests set what running on it does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return monkeypatch


def on_gpu(error: Exception | None) -> Callable[[Any], Any]:
    def run(request: Any) -> Any:
        if error is not None:
            raise error
        return "from the GPU"

    return run


@interprets
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "triton"],
)
def test_where_the_gpu_has_no_room_a_kernel_is_interpreted(gpu, error):
    gpu.setattr(opaque, "_run_on_gpu", on_gpu(error))
    assert_ran(opaque.run(launch()))
    tma = launch() | {"tma_descriptor_metadata": {"x_ptr": None}}
    passing, reason = cant_run(tma)
    assert passing
    assert "its GPU is out of memory" in reason
    assert "takes TMA descriptors" in reason


def test_what_triton_refuses_is_the_kernels_and_what_else_fails_is_raised(gpu):
    error = triton.runtime.errors.OutOfResources(300_000, 200_000, "shared memory")
    gpu.setattr(opaque, "_run_on_gpu", on_gpu(error))
    passing, reason = cant_run(launch())
    assert not passing
    assert "can't run on this GPU: OutOfResources: out of resource" in reason
    gpu.setattr(opaque, "_run_on_gpu", on_gpu(RuntimeError("an illegal access")))
    with pytest.raises(RuntimeError, match="an illegal access"):
        opaque.run(launch())


@interprets
def test_during_a_capture_a_kernel_is_interpreted(gpu):
    gpu.setattr(opaque, "_run_on_gpu", on_gpu(None))
    assert opaque.run(launch()) == "from the GPU"
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert_ran(opaque.run(launch()))


def test_this_process_keeps_its_triton():
    before = {name: getattr(tl, name) for name in ("load", "reduce", "range", "dot")}
    x = torch.ones(1, 8)
    opaque.run(call(branches, (1,), ["out_ptr"], x_ptr=x, out_ptr=x.clone(), WIDTH=8))
    assert {name: getattr(tl, name) for name in before} == before


def test_the_child_ends_with_its_parent():
    code = (
        "import torch, test_opaque as t\n"
        "given = dict(x_ptr=torch.ones(8), out_ptr=torch.ones(8), WIDTH=8)\n"
        "t.opaque.run(t.call(t.branches, (1,), ['out_ptr'], **given))\n"
        "print(t.interpreter.CHILD.process.pid, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert _within(10.0, lambda: not _alive(child))


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --- what a kernel's text tells -------------------------------------------------------


@triton.jit
def plain(x_ptr, out_ptr, stride, size):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = x_ptr + row * stride + head // 4 * size
    tl.store(out_ptr + row, tl.load(at) + head % 2)


@triton.jit
def compares(x_ptr, out_ptr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, tl.where(row > 3, 0.0, tl.load(x_ptr + row)))


@triton.jit
def divides(x_ptr, out_ptr):
    row = tl.program_id(0)
    row //= 2
    tl.store(out_ptr + row, tl.load(x_ptr))


@triton.jit
def stores(x_ptr, out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def bounded(x_ptr, out_ptr, size):
    total = 0.0
    for i in range(0, size):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)


@triton.jit
def through_a_loop(x_ptr, out_ptr):
    at = 0
    for _ in range(2):
        if at > 0:
            tl.store(out_ptr, 1.0)
        at = tl.program_id(0)


@pytest.mark.parametrize(
    ("kernel", "axes", "names", "found"),
    [
        (plain, {0}, {"stride", "size"}, None),
        (plain, {1}, set(), "its place"),
        (compares, {0}, set(), "row > 3"),
        (compares, set(), set(), None),
        (divides, {0}, set(), "its place"),
        (stores, {0}, set(), "tl.store"),
        (bounded, set(), {"size"}, "range"),
        (bounded, set(), set(), None),
        (through_a_loop, {0}, set(), "at > 0"),
    ],
)
def test_looks_at_place(kernel, axes, names, found):
    said = kernel_source.looks_at_place(kernel, axes, names)
    assert said is None if found is None else found in said


def test_numbers_of_a_kernel_and_what_it_calls():
    @triton.jit
    def thresholds(x_ptr):
        x = tl.load(x_ptr)
        tl.store(x_ptr, tl.where(x > 1000, 0.25, _scaled(x, 1e-6)))

    assert {1000.0, 0.25, 1e-6, 2.0} <= {*kernel_source.numbers(thresholds)}


def test_identity_follows_text_and_globals():
    def kernel_with(constant: float) -> Any:
        factor = tl.constexpr(constant)

        @triton.jit
        def kernel(x_ptr):
            tl.store(x_ptr, tl.load(x_ptr) * factor)

        return kernel

    first, same, other = (kernel_with(c) for c in (1.0, 1.0, 2.0))
    assert kernel_source.identity(first) == kernel_source.identity(same)
    assert kernel_source.identity(first) != kernel_source.identity(other)
    assert kernel_source.identity(rows) != kernel_source.identity(branches)

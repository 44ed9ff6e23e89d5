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

triton = pytest.importorskip("triton", reason="user kernels are Triton's")
import triton.language as tl  # noqa: E402

from dcp_inductor.compiler import kernel_source, opaque  # noqa: E402

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


def test_a_kernel_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(opaque, "_TIMEOUT_S", 0.0)
    x = torch.ones(4, 8)
    request = call(branches, (4,), ["out_ptr"], x_ptr=x, out_ptr=x.clone(), WIDTH=8)
    with pytest.raises(opaque.CantRun, match="took more than 0 s"):
        opaque.run(request)
    monkeypatch.undo()
    assert opaque.run(request)["out_ptr"].shape == (4, 8)


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
        "print(t.opaque._CHILD.process.pid, flush=True)\n"
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

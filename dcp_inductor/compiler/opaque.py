"""User Triton kernels in a region: which nodes they are, and how a proof runs them.

A kernel is a black box: what it does is seen by running it, never read off its name or
its code. On a machine with a GPU it runs there; elsewhere in Triton's interpreter, in
a child process (NOTE [child] of interpreter_child.py).
"""

from __future__ import annotations

import atexit
import inspect
import operator
import os
import pickle
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from torch.fx import Node

from dcp_inductor.compiler import kernel_source
from dcp_inductor.compiler.kernel_source import CantRead

# One launch in the interpreter, its start included; a proof makes tens of them.
_TIMEOUT_S = 120.0
_LENGTH = struct.Struct("<Q")


class CantRun(Exception):
    """The kernel can't be run here; str() says why."""


def is_kernel(node: Node) -> bool:
    """True for the call of a user kernel, whose value is a dict of what it wrote."""
    return node.target is triton_kernel_wrapper_functional


def is_opaque(node: Node) -> bool:
    """True for the call of a user kernel, and for one of its results."""
    if node.target is operator.getitem:
        return is_kernel(node.args[0])  # type: ignore[arg-type]
    return is_kernel(node)


def describe(node: Node) -> str:
    """All that decides what a call computes, besides its tensors and sizes."""
    call: dict[str, Any] = node.kwargs
    kernel = _kernel(call)
    try:
        text = kernel_source.identity(kernel_source.jit_function(kernel))
    except CantRead:
        text = f"unreadable {id(kernel)}"
    written = tuple(call["tensors_to_clone"])
    return f"{text} {sorted(_constants(call).items(), key=str)} {written}"


def numbers(node: Node) -> list[float]:
    """The numbers in a kernel's text, and those passed to it."""
    call: dict[str, Any] = node.kwargs
    try:
        found = kernel_source.numbers(kernel_source.jit_function(_kernel(call)))
    except CantRead:
        found = []
    given = [*_constants(call).values(), *call["kwargs"].values()]
    return [*found, *(value for value in given if isinstance(value, float))]


def parameters_of(node: Node, value: int) -> list[str]:
    """Which parameters of a kernel's call are passed the integer ``value``; strides
    are left out by their names, as no guess is needed where something is one."""
    call: dict[str, Any] = node.kwargs
    given = {**_constants(call), **call["kwargs"]}
    return [
        name
        for name, number in given.items()
        if type(number) is int and number == value and "stride" not in name.lower()
    ]


def looks_at_place(node: Node) -> str | None:
    """What a kernel does with a row's place in a dynamic batch, or None."""
    call: dict[str, Any] = node.kwargs
    (grid,) = call["grid"]
    axes = {axis for axis, size in enumerate(grid) if _symbolic(size)}
    names = {name for name, value in call["kwargs"].items() if _symbolic(value)}
    kernel = _kernel(call)
    try:
        function = kernel_source.jit_function(kernel)
        return kernel_source.looks_at_place(function, axes, names)
    except CantRead as error:
        return str(error)


def run(
    call: dict[str, Any], changed: dict[str, int] | None = None
) -> dict[str, Tensor]:
    """What a kernel writes: the node's value, for its keywords with CPU tensors and
    integers in them. Raises CantRun.

    changed: numbers passed in place of the graph's. It is a guess that one of them may
    be changed, and a wrong one leads out of the tensors; so then the kernel runs where
    that does no harm, in the child process.
    """
    try:
        kernel = kernel_source.jit_function(_kernel(call))
        if torch.cuda.is_available() and not changed:
            return _run_on_gpu(call)
        return _interpret(kernel, call, changed or {})
    except CantRead as error:
        raise CantRun(f"{error}") from error


def _kernel(call: Any) -> Any:
    return kernel_side_table.get_kernel(call["kernel_idx"])


def _constants(call: Any) -> dict[str, Any]:
    return kernel_side_table.get_constant_args(call["constant_args_idx"])


def _symbolic(value: Any) -> bool:
    value = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(value, SymInt)


def _run_on_gpu(call: dict[str, Any]) -> dict[str, Tensor]:
    if torch.cuda.is_current_stream_capturing():
        raise CantRun("can't run while a CUDA graph is being captured")
    there = {
        name: _moved(value, "cuda") if isinstance(value, Tensor) else value
        for name, value in call["kwargs"].items()
    }
    results = triton_kernel_wrapper_functional(**{**call, "kwargs": there})
    return {name: _moved(value, "cpu") for name, value in results.items()}


def _moved(tensor: Tensor, device: str) -> Tensor:
    """On ``device``, with its strides."""
    return _window(tensor).to(device).as_strided(tensor.shape, tensor.stride())


def _window(tensor: Tensor) -> Tensor:
    """The storage elements from the tensor's first to its last."""
    extent = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.as_strided((extent,), (1,))


def _interpret(
    kernel: Any, call: dict[str, Any], changed: dict[str, int]
) -> dict[str, Tensor]:
    if call["tma_descriptor_metadata"]:
        raise CantRun("takes TMA descriptors, which need a GPU")
    parameters = inspect.signature(kernel.fn).parameters
    given = {
        name: value
        for name, value in {**_constants(call), **call["kwargs"], **changed}.items()
        if name in parameters
    }
    tensors = {name: v for name, v in given.items() if isinstance(v, Tensor)}
    (grid,) = call["grid"]
    if callable(grid):
        raise CantRun("has a grid that is a function")
    answer = _CHILD.ask(
        kernel,
        {
            "name": kernel.fn.__name__,
            "grid": (*grid, 1, 1)[:3],
            "numbers": {n: v for n, v in given.items() if n not in tensors},
            "tensors": {
                name: (_bytes(v), v.dtype, tuple(v.shape), v.stride())
                for name, v in tensors.items()
            },
            "results": [*call["tensors_to_clone"]],
        },
    )
    return {name: _filled(tensors[name], data) for name, data in answer.items()}


def _bytes(tensor: Tensor) -> bytes:
    return _window(tensor).contiguous().view(torch.uint8).numpy().tobytes()


def _filled(like: Tensor, data: bytes) -> Tensor:
    if not data:
        return torch.empty_like(like)
    flat = torch.frombuffer(bytearray(data), dtype=like.dtype)
    return flat.as_strided(like.shape, like.stride())


class _Child:
    """The interpreter's process: started when needed, ended with this one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, kernel: Any, request: dict[str, Any]) -> dict[str, bytes]:
        """Run one launch. Raises CantRun."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            assert self.folder is not None
            module = kernel_source.write_files(kernel, Path(self.folder.name))
            request = {"folder": self.folder.name, "module": module, **request}
            try:
                kind, answer = self._exchange(request)
            except Exception as error:
                self.stop()
                raise CantRun(_trouble(error)) from error
        if kind == "failed":
            raise CantRun(f"can't be interpreted: {answer}")
        return answer

    def stop(self) -> None:
        """End the process, and remove its files."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()
            self.process = None
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def _start(self) -> None:
        self.stop()
        self.folder = tempfile.TemporaryDirectory(prefix="dcp_inductor_")
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from dcp_inductor.compiler.interpreter_child import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _exchange(self, request: dict[str, Any]) -> tuple[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        self.process.stdin.write(_LENGTH.pack(len(data)) + data)
        self.process.stdin.flush()
        deadline = time.monotonic() + _TIMEOUT_S
        fd = self.process.stdout.fileno()
        (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
        return pickle.loads(_read(fd, length, deadline))


def _read(fd: int, length: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        part = os.read(fd, min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _trouble(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"took more than {_TIMEOUT_S:.0f} s in Triton's interpreter"
    if isinstance(error, (EOFError, OSError)):
        return "ended Triton's interpreter"
    return f"can't be sent to Triton's interpreter: {type(error).__name__}: {error}"


_CHILD = _Child()
atexit.register(_CHILD.stop)

"""User Triton kernels in a region: which nodes they are, and how a proof runs them.

A kernel is a black box: what it does is seen by running it, never read off its name or
its code. On a machine with a GPU it runs there; elsewhere, and where the GPU has no
room for it now, in Triton's interpreter, in a child process (interpreter.py).
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from torch.fx import Node

from dcp_inductor.compiler import kernel_source
from dcp_inductor.compiler.interpreter import CHILD, CantRun, CantRunNow
from dcp_inductor.compiler.kernel_source import CantRead
from dcp_inductor.compiler.transient import out_of_memory


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
        if not torch.cuda.is_available() or changed:
            return _interpret(kernel, call, changed or {})
        return _run_where_there_is_room(kernel, call)
    except CantRead as error:
        raise CantRun(f"{error}") from error


def _run_where_there_is_room(kernel: Any, call: dict[str, Any]) -> dict[str, Tensor]:
    """On the GPU, or interpreted: how much memory is free, or whether a graph is being
    captured, is nothing of the kernel's."""
    try:
        if not torch.cuda.is_current_stream_capturing():
            return _run_on_gpu(call)
        kept = "a CUDA graph is being captured"
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if type(error).__module__.startswith("triton."):
            # Its compiler's, and what a card can't hold; the driver's have no type.
            raise CantRun(f"can't run on this GPU: {what}") from error
        if not out_of_memory(error):
            raise
        kept = f"its GPU is out of memory ({what})"
    try:
        return _interpret(kernel, call, {})
    except CantRun as error:
        raise CantRunNow(f"can't run now, {kept}, and {error}") from error


def _kernel(call: Any) -> Any:
    return kernel_side_table.get_kernel(call["kernel_idx"])


def _constants(call: Any) -> dict[str, Any]:
    return kernel_side_table.get_constant_args(call["constant_args_idx"])


def _symbolic(value: Any) -> bool:
    value = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(value, SymInt)


def _run_on_gpu(call: dict[str, Any]) -> dict[str, Tensor]:
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
    answer = CHILD.ask(
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

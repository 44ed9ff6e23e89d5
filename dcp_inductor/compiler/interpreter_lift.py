"""Triton's interpreter over many programs at once. Only for interpreter_child.py.

NOTE [lift]
Triton's interpreter runs a kernel program by program, some milliseconds each; a proof
needs tens of thousands. Here the kernel's Python runs once for a batch of programs:
every value gets a leading axis of programs (1 where all programs hold the same), and
the program id is an array. Types stay those of one program, so Triton's own semantics
go through unchanged; what depends on shapes is redefined below.

What can't be lifted raises CantLift, and the caller runs program by program: branches
and loop bounds that differ between the programs of a batch, atomics, scans, custom
reductions, and every builder method that isn't known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from dcp_inductor.compiler.interpreter_meter import METER

_BATCH = 512

# Elementwise on data of any shape, or without data: lifted as they are.
_AS_THEY_ARE = (
    " si_to_fp ui_to_fp fp_to_si fp_to_ui fp_ext fp_trunc int_cast fp_to_fp bitcast "
    " fadd fmul fdiv frem fsub fneg mul precise_divf sdiv udiv srem urem add sub shl "
    " lshr ashr minsi minui minimumf minnumf maxsi maxui maximumf maxnumf icmpSLE "
    " icmpSLT icmpSGE icmpSGT icmpULE icmpULT icmpUGE icmpUGT icmpEQ icmpNE fcmpOLT "
    " fcmpOGT fcmpOLE fcmpOGE fcmpOEQ fcmpONE fcmpULT fcmpUGT fcmpULE fcmpUGE "
    " fcmpUEQ fcmpUNE and xor or int_to_ptr ptr_to_int idiv umulhi clampf select fma "
    " fabs cos exp exp2 iabs floor ceil log log2 precise_sqrt sqrt sin erf rsqrt dot "
    " join split addptr barrier load store "
)


class CantLift(Exception):
    """The kernel, or this batch of it, has to run program by program."""


def batches(grid: tuple[int, int, int]) -> Iterator[np.ndarray[Any, Any]]:
    """Program ids ``[3, n]``, n up to a batch, in launch order."""
    ids = np.indices(grid, dtype=np.int32).reshape(3, -1)
    for start in range(0, ids.shape[1], _BATCH):
        yield ids[:, start : start + _BATCH]


@contextlib.contextmanager
def lifted(grid: tuple[int, int, int], ids: np.ndarray[Any, Any]) -> Iterator[None]:
    """Inside, one run of an interpreted kernel stands for the programs ``ids``."""
    builder = interpreter.interpreter_builder
    kept = dict(builder.__dict__)
    patched = {
        "ReduceOps": _LiftedReduce,
        "ScanOps": _NoScan,
        "_patch_lang_tensor": _patch_tensor,
    }
    originals = {name: getattr(interpreter, name) for name in patched}
    try:
        builder.__dict__.update(_builder_methods(builder, grid, ids))
        for name, value in patched.items():
            setattr(interpreter, name, value)
        yield
    finally:
        builder.__dict__.clear()
        builder.__dict__.update(kept)
        for name, value in originals.items():
            setattr(interpreter, name, value)


def _builder_methods(
    builder: Any, grid: tuple[int, int, int], ids: np.ndarray[Any, Any]
) -> dict[str, Any]:
    methods: dict[str, Any] = {
        name: _refusing(name)
        for name in dir(builder)
        if name.startswith("create_")
        and f" {name.removeprefix('create_')} " not in _AS_THEY_ARE
    }
    methods |= {
        f"create_{name}": METER.counted(method) for name, method in _LIFTED.items()
    }
    methods["create_get_program_id"] = lambda axis: _handle(ids[axis], tl.int32)
    methods["create_get_num_programs"] = lambda axis: _handle(
        np.array([grid[axis]], np.int32), tl.int32
    )
    # As a GPU runs it: overflow checks are a debug option.
    methods["options"] = interpreter.InterpreterOptions(sanitize_overflow=False)
    return methods


def _refusing(name: str) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise CantLift(name)

    return method


def _handle(data: np.ndarray[Any, Any], dtype: Any) -> Any:
    return interpreter.TensorHandle(data, dtype)


def _splat(ret_ty: Any, arg: Any) -> Any:
    lanes = arg.data.reshape(-1, *[1] * len(ret_ty.shape))
    data = np.broadcast_to(lanes, (lanes.shape[0], *ret_ty.shape))
    return _handle(data, arg.dtype.scalar)


def _broadcast(arg: Any, shape: Any) -> Any:
    data = np.broadcast_to(arg.data, (arg.data.shape[0], *shape))
    return _handle(data, arg.dtype.scalar)


def _masked_load(
    ptrs: Any, mask: Any, other: Any, cache: Any, evict: Any, volatile: Any
) -> Any:
    element = ptrs.get_element_ty()
    np_dtype = interpreter._get_np_dtype(element)
    filler = np.zeros(1, np_dtype) if other is None else other.data
    where, kept, rest = _same_shape(ptrs.data, mask.data, filler)
    return _handle(
        interpreter._interpreter.load(where, kept, rest, np_dtype),
        element,
    )


def _masked_store(ptrs: Any, value: Any, mask: Any, cache: Any, evict: Any) -> Any:
    where, what, kept = _same_shape(ptrs.data, value.data, mask.data)
    return interpreter._interpreter.store(where, what, kept)


def _same_shape(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [np.ascontiguousarray(array) for array in np.broadcast_arrays(*arrays)]


def _cat(lhs: Any, rhs: Any) -> Any:
    lanes = max(lhs.data.shape[0], rhs.data.shape[0])
    both = [np.broadcast_to(x.data, (lanes, *x.data.shape[1:])) for x in (lhs, rhs)]
    return _handle(np.concatenate(both, axis=1), lhs.dtype.scalar)


_LIFTED: dict[str, Any] = {
    "make_range": lambda ret_ty, start, stop: _handle(
        np.arange(start, stop, dtype=np.int32)[None], tl.int32
    ),
    "splat": _splat,
    "broadcast": _broadcast,
    "masked_load": _masked_load,
    "masked_store": _masked_store,
    "cat": _cat,
    "unsplat": lambda arg: _handle(
        arg.data.reshape(arg.data.shape[0], -1)[:, 0], arg.dtype.scalar
    ),
    "reshape": lambda arg, shape, allow_reorder: _handle(
        arg.data.reshape(arg.data.shape[0], *shape), arg.dtype.scalar
    ),
    "trans": lambda arg, perm: _handle(
        np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar
    ),
    "expand_dims": lambda arg, axis: _handle(
        np.expand_dims(arg.data, axis + 1 if axis >= 0 else axis), arg.dtype.scalar
    ),
}


def _uniform(tensor: Any) -> Any:
    """The one value that a scalar has in all programs."""
    data = tensor.handle.data.reshape(-1)
    if tensor.type.is_block() or not (data == data[0]).all():
        raise CantLift("its programs take different ways")
    return data[0]


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _ORIGINAL_PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(_uniform(self)))
    scope.set_attr(tensor, "__bool__", lambda self: bool(_uniform(self)))
    scope.set_attr(tensor, "T", property(_transposed))


_ORIGINAL_PATCH_TENSOR = interpreter._patch_lang_tensor


def _transposed(tensor: Any) -> Any:
    shape = [*tensor.type.shape]
    shape[-1], shape[-2] = shape[-2], shape[-1]
    data = np.swapaxes(tensor.handle.data, -1, -2)
    return tl.core.tensor(
        _handle(data, tensor.handle.dtype), tl.core.block_type(tensor.dtype, shape)
    )


class _LiftedReduce(interpreter.ReduceOps):
    """Reductions by a known function, along an axis of each program."""

    def apply_impl(self, input: Any) -> Any:
        known: dict[Any, Any] = {
            tl.standard._sum_combine: np.sum,
            tl.standard._elementwise_max: np.nanmax,
            tl.standard._elementwise_min: np.nanmin,
        }
        if len(input) != 1 or self.combine_fn not in known:
            raise CantLift("a custom reduction")
        data = input[0].handle.data
        inner = tuple(range(1, data.ndim))
        axis = inner if self.axis is None else inner[self.axis]
        result = known[self.combine_fn](data, axis=axis, keepdims=self.keep_dims)
        result = result.astype(interpreter._get_np_dtype(input[0].dtype))
        dtype = input[0].dtype
        shape = [*result.shape[1:]]
        kind = tl.block_type(dtype, shape) if shape else dtype
        return tl.core.tensor(_handle(result, dtype.scalar), kind)


class _NoScan:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise CantLift("a scan")

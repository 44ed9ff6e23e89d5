"""The process that interprets user Triton kernels, for interpreter.py of its parent.

Reads pickled requests on stdin, each with its length before it, and answers on stdout.
Ends when stdin does, when its parent is gone, or when nothing came for a while.

NOTE [child]
Triton's interpreter patches ``triton.language`` and leaves it patched, which spoils
every later compilation of its process; so it gets a process of its own. Kernels come
as files of source (kernel_source.py), so none of the parent's modules is imported.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import struct
import sys
import threading
import time
from typing import Any, BinaryIO

from dcp_inductor.compiler.interpreter_meter import METER, TooMuchWork
from dcp_inductor.compiler.transient import is_transient

_IDLE_S = 120.0
_LENGTH = struct.Struct("<Q")


def main() -> None:
    """Serve until one of the ends above."""
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not get between the answers
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    _prepare()
    requests = sys.stdin.buffer
    while select.select([requests], [], [], _IDLE_S)[0]:
        request = read_message(requests)
        if request is None:
            return
        write_message(answers, answer_to(**request))


def answer_to(most_steps: int, **request: Any) -> tuple[str, Any]:
    """ "done" with what was written, "failed" for a reason of the kernel's, or "short"
    of memory."""
    METER.start(most_steps)
    try:
        return "done", run(**request)
    except TooMuchWork as error:
        return "failed", f"{error}"
    except Exception as error:
        kind = "short" if is_transient(error) else "failed"
        return kind, f"{type(error).__name__}: {error}"


def read_message(stream: BinaryIO) -> Any:
    """The next message, or None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(stream.read(*_LENGTH.unpack(head)))


def write_message(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def run(
    folder: str,
    module: str,
    name: str,
    grid: tuple[int, int, int],
    numbers: dict[str, Any],
    tensors: dict[str, tuple[Any, ...]],
    results: list[str],
) -> dict[str, bytes]:
    """Launch a kernel; the storage of each of ``results`` afterwards.

    tensors: (bytes of the storage, dtype, shape, stride) by parameter.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)
    kernel = getattr(importlib.import_module(module), name)
    for launch in (_launch_lifted, _launch_one_by_one):
        storages = {key: bytearray(parts[0]) for key, parts in tensors.items()}
        given = {
            key: _tensor(storages[key], *tensors[key][1:]) for key in tensors
        } | numbers
        try:
            launch(kernel, grid, given)
        except Exception as error:
            if launch is _launch_lifted and not is_transient(error):
                continue
            raise
        return {key: bytes(storages[key]) for key in results}
    raise AssertionError("program by program is the last way")


def _launch_lifted(kernel: Any, grid: tuple[int, int, int], given: Any) -> None:
    from dcp_inductor.compiler.interpreter_lift import batches, lifted

    for ids in batches(grid):
        with lifted(grid, ids):
            kernel[(1, 1, 1)](**given)


def _launch_one_by_one(kernel: Any, grid: tuple[int, int, int], given: Any) -> None:
    kernel[grid](**given)


def _tensor(storage: bytearray, dtype: Any, shape: Any, stride: Any) -> Any:
    import torch

    if not storage:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(storage, dtype=dtype).as_strided(shape, stride)


def _prepare() -> None:
    import numpy as np
    from triton.runtime import interpreter

    np.seterr(all="ignore")
    interpreter._convert_float = _convert_float
    METER.attach(interpreter.InterpreterBuilder)


def _convert_float(data: Any, source: Any, result: Any, rounding: Any) -> Any:
    """Casts between floats as torch rounds them; Triton's own truncates bf16 and
    loses the carry of fp8. Bits in, bits out."""
    import numpy as np
    import torch

    dtypes = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e5": torch.float8_e5m2,
        "fp8e4nv": torch.float8_e4m3fn,
    }
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    given, wanted = dtypes[source.scalar.name], dtypes[result.scalar.name]
    raw = np.ascontiguousarray(data)
    values = torch.frombuffer(raw.tobytes(), dtype=given).to(wanted)
    as_bytes = values.view(torch.uint8).numpy()
    return as_bytes.view(bits[wanted.itemsize]).reshape(raw.shape)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)

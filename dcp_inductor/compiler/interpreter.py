"""The process in which user kernels are interpreted, as its parent sees it.

What runs in it is interpreter_child.py; what is asked of it, opaque.py's.

NOTE [two tries]
How long a launch takes, and whether the process lives through it, depends on the
machine too. So what went wrong once is tried again, in a fresh process and with more
time. A kernel that crashes twice by itself is refused; whatever else went wrong twice
is transient. Kernels that are too much work are told by their steps (NOTE [steps] of
interpreter_meter.py), long before the clock.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.torch_version import TorchVersion

from dcp_inductor.compiler import kernel_source
from dcp_inductor.compiler.interpreter_meter import MOST_STEPS
from dcp_inductor.compiler.kernel_source import CantRead
from dcp_inductor.compiler.transient import Transient

# One launch, the start of the process included; a proof makes tens of launches.
_LIMITS_S = (120.0, 480.0)
_LENGTH = struct.Struct("<Q")
# What a kernel does to its process by going out of its tensors. SIGKILL is others'.
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
)


class CantRun(Exception):
    """The kernel can't be run here; str() says why."""


class CantRunNow(CantRun, Transient):
    """The kernel may run another time, or on another rank."""


def _advice() -> str:
    """What to do where this installation's interpreter is known to fail."""
    import triton

    found, numpy = triton.__version__, np.__version__
    if TorchVersion(found) >= "3.7" or TorchVersion(numpy) < "2.4":
        return ""
    return (
        f". Triton {found}'s interpreter fails with NumPy {numpy}; it works with "
        "'numpy<2.4', or with Triton 3.8"
    )


class Child:
    """The interpreter's process: started when needed, ended with this one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, kernel: Any, request: dict[str, Any]) -> dict[str, bytes]:
        """Run one launch. Raises CantRun, CantRunNow, CantRead."""
        with self.lock:
            troubles: list[CantRun] = []
            for limit_s in _LIMITS_S:
                try:
                    return self._try(kernel, request, limit_s)
                except (_Crashed, CantRunNow) as trouble:
                    self.stop()
                    troubles.append(trouble)
                except (CantRun, CantRead):
                    raise
                except Exception as error:
                    self.stop()
                    raise CantRun(
                        "can't be sent to Triton's interpreter: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            passing = [one for one in troubles if isinstance(one, CantRunNow)]
            raise passing[-1] if passing else CantRun(f"{troubles[-1]}")

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

    def _try(
        self, kernel: Any, request: dict[str, Any], limit_s: float
    ) -> dict[str, bytes]:
        try:
            if self.process is None or self.process.poll() is not None:
                self._start()
            assert self.folder is not None
            folder = self.folder.name
            module = kernel_source.write_files(kernel, Path(folder))
            request = {"folder": folder, "module": module, **request}
            request["most_steps"] = MOST_STEPS
            kind, answer = self._exchange(request, limit_s)
        except TimeoutError as error:
            raise CantRunNow(
                f"took more than {limit_s:.0f} s in Triton's interpreter"
            ) from error
        except (EOFError, OSError) as error:
            raise self._ended(error) from error
        if kind == "short":
            raise CantRunNow(f"found too little memory to be interpreted: {answer}")
        if kind == "failed":
            raise CantRun(f"can't be interpreted: {answer}{_advice()}")
        return answer

    def _ended(self, error: Exception) -> CantRun:
        """Why the process is gone, as far as its end tells."""
        if self.process is None:
            return CantRunNow(f"found no process to be interpreted in: {error}")
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return CantRunNow(f"lost Triton's interpreter: {error}")
        if -code in _CRASHES:
            name = signal.Signals(-code).name
            return _Crashed(f"ended Triton's interpreter by {name}")
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return CantRunNow(f"was in Triton's interpreter when that ended by {how}")

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
            bufsize=0,  # Else closing flushes, into a pipe whose reader may be gone.
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def _exchange(self, request: dict[str, Any], limit_s: float) -> tuple[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        deadline = time.monotonic() + limit_s
        _write(self.process.stdin.fileno(), _LENGTH.pack(len(data)) + data, deadline)
        fd = self.process.stdout.fileno()
        (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
        return pickle.loads(_read(fd, length, deadline))


class _Crashed(CantRun):
    """The kernel ended its process by itself."""


def _write(fd: int, data: bytes, deadline: float) -> None:
    """All of ``data`` to a pipe that doesn't block, whose reader may have stopped."""
    rest = memoryview(data)
    while rest:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([], [fd], [], left)[1]:
            raise TimeoutError
        rest = rest[os.write(fd, rest[: 1 << 20]) :]


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


CHILD = Child()
atexit.register(CHILD.stop)

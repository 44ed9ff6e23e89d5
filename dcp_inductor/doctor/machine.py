"""Versions, cards, links and symmetric memory, as this process sees them.

Looks without a GPU, a driver or triton too. Nothing is allocated on a card, and the
process's symmetric-memory backend is read, not set.

NOTE [multicast]
torch's own has_multicast_support() counts as a use of symmetric memory, after which
its backend can't be changed any more; so the driver is asked.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import itertools
import platform

import torch

import dcp_inductor
from dcp_inductor.doctor.checkup import Card, Link

# CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h.
_MULTICAST = 132


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; nothing of it is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """By name; None for what isn't there."""
    return {
        "dcp_inductor": dcp_inductor.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _triton(),
        "CUDA": torch.version.cuda,
        "NCCL": _nccl(),
    }


def _triton() -> str | None:
    """As the kernel's backend looks for it: what can be imported counts."""
    found = importlib.util.find_spec("triton") is not None
    return (version_of("triton") or "unknown") if found else None


def _nccl() -> str | None:
    """Of torch's build; a CPU build has none."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def num_cards() -> int:
    """Cards that can be used; 0 also without a driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cards() -> list[Card]:
    """Every card that this process sees."""
    found = []
    for index in range(num_cards()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Card(
                index,
                properties.name,
                f"{properties.major}.{properties.minor}",
                properties.total_memory >> 20,
                _multicast(index),
            )
        )
    return found


def _multicast(index: int) -> bool | None:
    """Whether the driver says so: NOTE [multicast]. None where it doesn't answer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    card, answer = ctypes.c_int(), ctypes.c_int()
    answered = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(card), index) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(answer), _MULTICAST, card) == 0
    )
    return bool(answer.value) if answered else None


def links() -> list[Link]:
    """Every pair of cards."""
    pairs = [*itertools.combinations(range(num_cards()), 2)]
    nvlinks = _nvlinks() if pairs else None
    return [
        Link(
            (a, b),
            torch.cuda.can_device_access_peer(a, b)
            and torch.cuda.can_device_access_peer(b, a),
            None if nvlinks is None else nvlinks[a][b],
        )
        for a, b in pairs
    ]


def _nvlinks() -> list[list[int]] | None:
    """NVLinks between each two cards, as torch counts them; None if it can't."""
    try:
        from torch._C import _distributed_c10d as c10d
        from torch._C._autograd import DeviceType

        detect = getattr(c10d, "_detect_dma_connectivity")  # noqa: B009
        matrix: list[list[int]] = detect(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, AttributeError, RuntimeError):
        return None
    fits = len(matrix) >= num_cards() and all(len(r) >= num_cards() for r in matrix)
    return matrix if fits else None


def symmetric_memory() -> str:
    """Which implementation torch would use, in words."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        return f"none: {error}"
    name = _symmetric_memory.get_backend(torch.device("cuda"))
    if name is None:
        return "none in this build of torch"
    if not num_cards():
        return f"torch's {name}, but no GPU"
    return f"torch's {name}"

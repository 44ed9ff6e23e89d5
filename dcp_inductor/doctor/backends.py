"""Which backend would serve an exchange on this machine, and what its slots take.

The reasons and the sizes are the backends' own, asked as reserve() asks them; what only
a process group can show, other hosts and groups above all, is left to reserve().
"""

from __future__ import annotations

import torch

from dcp_inductor.config import Config
from dcp_inductor.doctor.checkup import BackendState, Need, Reserved
from dcp_inductor.doctor.machine import num_cards
from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.runtime.backends import BACKENDS, Backend
from dcp_inductor.runtime.backends.preference import in_order
from dcp_inductor.runtime.backends.symm_mem import blocked_by_places, place
from dcp_inductor.runtime.call import Geometry
from dcp_inductor.runtime.workspace import reservations


def states(need: Need, config: Config) -> list[BackendState]:
    """A row for each backend; the first that can run is taken."""
    geometry = Geometry(
        need.num_ranks,
        need.max_tokens,
        need.num_heads,
        need.head_dim,
        getattr(torch, need.dtype),
    )
    found: list[BackendState] = []
    for backend in in_order(BACKENDS, geometry, _capability(need.num_ranks)):
        why_not = _why_not(backend, geometry, config)
        slot_bytes = _slot_bytes(backend, geometry)
        num_slots = geometry.num_slots if backend.needs_buffers else 0
        found.append(
            BackendState(
                backend.name,
                backend.needs_buffers,
                why_not,
                why_not is None and not any(state.taken for state in found),
                slot_bytes,
                num_slots,
                None if slot_bytes is None else slot_bytes * num_slots,
            )
        )
    return found


def _capability(num_ranks: int) -> tuple[int, int] | None:
    """Of the cards that the ranks would have, or None where they differ."""
    found = {
        torch.cuda.get_device_capability(index)
        for index in range(min(num_ranks, num_cards()))
    }
    return found.pop() if len(found) == 1 else None


def _why_not(backend: Backend, geometry: Geometry, config: Config) -> str | None:
    """Every reason that can be seen from here, or None."""
    if config.backend not in ("auto", backend.name):
        return f"DCP_INDUCTOR_BACKEND={config.backend} asks for another"
    device = torch.device("cuda", 0) if num_cards() else torch.device("cpu")
    reasons: list[str | None] = []
    if backend.needs_buffers and not num_cards():
        reasons.append("no GPU is seen")
    else:
        reasons.append(backend.unavailable(None, device))
        reasons.append(_blocked_here(geometry.cp_size, backend))
    reasons.append(backend.declines(geometry))
    if config.backend == "auto":
        reasons.append(backend.only_if_asked())
    return "; ".join(filter(None, reasons)) or None


def _blocked_here(num_ranks: int, backend: Backend) -> str | None:
    """Why this machine's first cards can't be the ranks of one group."""
    if not backend.needs_buffers:
        return None
    if num_cards() < num_ranks:
        return f"{num_ranks} ranks need a GPU each, and this process sees {num_cards()}"
    places = [place(torch.device("cuda", index)) for index in range(num_ranks)]
    return blocked_by_places(places)


def _slot_bytes(backend: Backend, geometry: Geometry) -> int | None:
    """None for a geometry that it declines, and where its package isn't installed."""
    if backend.declines(geometry) is not None:
        return None
    try:
        return backend.slot_bytes(geometry)
    except BackendUnavailable:
        return None


def reserved() -> list[Reserved]:
    """The living reservations of this process."""
    return [
        Reserved(
            group,
            found.backend.name,
            found.geometry.max_tokens,
            found.geometry.num_heads,
            found.geometry.head_dim,
            str(found.geometry.dtype).removeprefix("torch."),
            found.geometry.lanes,
            0 if found.buffers is None else found.geometry.num_slots,
            found.nbytes,
        )
        for group, found in reservations()
    ]

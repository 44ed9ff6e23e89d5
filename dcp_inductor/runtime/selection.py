"""Which backend a reservation gets: the first that works on every rank, on all of them.

What a backend needs is its own; what ranks say to each other goes through agreement.py.

NOTE [votes]
The steps are votes: nobody goes on to a step that can hang before all ranks have said
that the step before it worked for them, so an error on one rank is an error on all. A
backend that says BackendUnavailable only when its workspaces are made is passed over by
all ranks, unless it was asked for by name.

What a rank finds out about itself and its machine, an exception included, is stated
first; what follows from it is worked out of all ranks' statements alone, so that no
rank looks again and comes to another end than its peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from dcp_inductor.config import Config
from dcp_inductor.errors import BackendUnavailable, RanksDisagree
from dcp_inductor.logs import runtime as log
from dcp_inductor.runtime import backends
from dcp_inductor.runtime.agreement import agree, first_objection, require_equal
from dcp_inductor.runtime.backends import Backend, Buffers
from dcp_inductor.runtime.backends.preference import in_order
from dcp_inductor.runtime.backends.symm_mem import blocked_by_places, place
from dcp_inductor.runtime.call import Geometry
from dcp_inductor.version import library_identity

T = TypeVar("T")


def choose(
    group: ProcessGroup, geometry: Geometry, device: torch.device, config: Config
) -> tuple[Backend, Buffers | None]:
    """The first backend that works on every rank, and its workspaces.

    Raises, on all ranks alike, BackendUnavailable if the one that is asked for can't
    run or turns out not to, RanksDisagree if a rank is missing or asks for something
    else.
    """
    candidates = _agree_on_backends(group, geometry, device, config)
    for backend in candidates:
        if not backend.needs_buffers:
            return backend, None
        try:
            return backend, _buffers(backend, group, geometry, device, config)
        except BackendUnavailable as error:
            if backend is candidates[-1]:
                raise
            log.warning("group %s: backend passed over: %s", group.group_name, error)
    raise AssertionError("there is a candidate")


def _buffers(
    backend: Backend,
    group: ProcessGroup,
    geometry: Geometry,
    device: torch.device,
    config: Config,
) -> Buffers:
    buffers = _vote(
        group,
        f"reserve() of {backend.name} workspaces",
        lambda: backend.allocate(group, geometry, device),
        config,
    )
    _vote(group, f"connecting {backend.name} workspaces", buffers.connect, config)
    return buffers


def _agree_on_backends(
    group: ProcessGroup, geometry: Geometry, device: torch.device, config: Config
) -> list[Backend]:
    """Those that every rank can run and that are asked for, best first."""
    mine = _statement(group, geometry, device, config)
    stated = agree(group, "the first exchange or reserve()", mine, config.timeout_s)
    trouble = first_objection(
        stated, "trouble", lambda rank, why: f"rank {rank}: {why}"
    )
    if trouble is not None:
        raise RanksDisagree(
            f"Looking at what group {group.group_name!r} can exchange on failed on "
            f"{trouble}. No rank goes on; see that rank's log and its card."
        )
    require_equal(
        group, stated, ["library", "torch", "config", "geometry", "device type"]
    )
    taken: list[Backend] = []
    blockers: list[str] = []
    for backend in in_order(backends.BACKENDS, geometry, _common_capability(stated)):
        wanted = config.backend in ("auto", backend.name)
        reason = _blocked(backend, stated) if wanted else "not asked for"
        if reason is None:
            taken.append(backend)
        elif not taken:
            blockers.append(f"{backend.name}: {reason}")
    if not taken:
        raise BackendUnavailable(
            f"Config(backend={config.backend!r}) was asked for on group "
            f"{group.group_name!r}, but it can't run there: {'; '.join(blockers)}. "
            "Use backend='auto', or remove the blocker."
        )
    if blockers:
        log.info("backends passed over: %s", "; ".join(blockers))
    return taken


def _statement(
    group: ProcessGroup, geometry: Geometry, device: torch.device, config: Config
) -> dict[str, Any]:
    """What this rank is, has and can run; or what kept it from finding out."""
    try:
        mine: dict[str, Any] = {
            "trouble": "",
            "library": library_identity(),
            "torch": str(torch.__version__),
            "config": repr(config),
            "geometry": repr(geometry),
            "device type": device.type,
            "place": place(device),
            "capability": _capability(device),
        }
        for backend in backends.BACKENDS:
            objection, identity = _look_at(backend, group, device, geometry, config)
            mine[backend.name] = objection
            mine[f"identity of {backend.name}"] = identity
        return mine
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"}


def _capability(device: torch.device) -> list[int] | None:
    if device.type != "cuda":
        return None
    return [*torch.cuda.get_device_capability(device)]


def _common_capability(stated: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Of all ranks' cards, or None where they differ."""
    found = {tuple(statement["capability"] or ()) for statement in stated}
    (first, *others) = found
    return (first[0], first[1]) if first and not others else None


def _look_at(
    backend: Backend,
    group: ProcessGroup,
    device: torch.device,
    geometry: Geometry,
    config: Config,
) -> tuple[str, str]:
    """Why this rank can't run the backend, or "", and what it is; a failing look is a
    reason too, since an exception here would leave the other ranks waiting."""
    try:
        reason = backend.unavailable(group, device) or backend.declines(geometry)
        if reason is None and config.backend != backend.name:
            reason = backend.only_if_asked()
        return reason or "", backend.identity()
    except Exception as error:
        return f"asking it failed with {type(error).__name__}: {error}", ""


def _blocked(backend: Backend, stated: list[dict[str, Any]]) -> str | None:
    reason = first_objection(
        stated, backend.name, lambda rank, why: f"{why} (rank {rank})"
    )
    identities = {statement[f"identity of {backend.name}"] for statement in stated}
    if reason is None and len(identities) > 1:
        reason = f"the ranks have different ones installed: {sorted(identities)}"
    if reason is None and backend.needs_buffers:
        reason = blocked_by_places([statement["place"] for statement in stated])
    return reason


def _vote(group: ProcessGroup, step: str, action: Callable[[], T], config: Config) -> T:
    """Do a step on all ranks; raise on all of them, alike, if it failed on one."""
    error: BaseException | None = None
    result: Any = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    text = "" if error is None else f"{type(error).__name__}: {error}"
    # A backend that turns out not to work is passed over; anything else is an error.
    other = error is not None and not isinstance(error, BackendUnavailable)
    stated = agree(group, step, {"error": text, "other": other}, config.timeout_s)
    failed = first_objection(stated, "error", lambda rank, why: f"rank {rank}: {why}")
    if failed is not None and not any(statement["other"] for statement in stated):
        raise BackendUnavailable(f"{step} failed on {failed}") from error
    if failed is not None:
        raise RanksDisagree(
            f"{step} failed on {failed}. No rank uses it; free memory on that rank, "
            "reserve fewer tokens, or set Config(backend='collective')."
        ) from error
    return result

"""The sglang plugin: fused DCP exchanges in servers that run --enable-torch-compile.

sglang finds ``register`` by its entry point and calls it in each of its processes;
what is served, how and when is sglang's. Written for SGLang 0.5.23.

NOTE [one start]
The pass is installed by the hook below and nowhere else, once all ranks of the DCP
group have said that they can and a workspace is reserved. It runs in a rank's warm-up:
after the KV cache is sized, before anything that holds an exchange is compiled or
captured. A rank that can't, says so in the vote, and then no rank fuses: one fused
rank among unfused ones would wait for them forever. Whatever goes wrong is logged, and
the server serves unfused.

NOTE [several runners]
A process with a draft model has a runner for it too, which comes here after its
target's. Ranks vote again. What is reserved serves every model whose exchanges are of
the same heads, head dim and dtype, and no wider; anything else is reserved beside it,
and what the target has stays. So a draft that needs nothing adds no memory and no
line. A draft whose start fails takes the pass out, since what it would compile has no
workspace; what was compiled, and eager decode of what is reserved, go on.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcp_inductor.config import Config
from dcp_inductor.integrations import (
    sglang_eager,
    sglang_flashinfer,
    sglang_hooks,
)
from dcp_inductor.integrations.on_import import when_imported
from dcp_inductor.integrations.sglang_plan import Plan, plan_for
from dcp_inductor.logs import integrations as log
from dcp_inductor.report import Miss

if TYPE_CHECKING:
    from dcp_inductor.runtime.workspace import Reservation

_RUNNERS = "sglang.srt.model_executor.runner.base_runner"
_SLOWER = (
    "only the backend collective runs here, which is slower on GPUs than sglang's own "
    "exchange; dcp-inductor doctor says why the others don't, and "
    "DCP_INDUCTOR_BACKEND=collective fuses with it"
)
_TARGET = f"{_RUNNERS}.BaseRunner._pre_initialize_fi_a2a_workspace"


def register() -> None:
    """The entry point: hook the warm-up of model runners, once a process.

    Imports nothing of sglang that the process doesn't import itself: tokenizers and
    detokenizers load plugins too.
    """
    config = Config.from_env()
    if not config.enabled:
        log.info("dcp_inductor is switched off (DCP_INDUCTOR=0)")
        return
    when_imported(_RUNNERS, _hook)
    if config.eager_decode:
        when_imported(sglang_eager.MODULE, sglang_eager.hook)


@functools.cache
def _hook() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    sglang_hooks.bind(_TARGET, after_workspaces, HookType.AFTER)


def after_workspaces(result: Any, runner: Any) -> None:
    """Runs after BaseRunner._pre_initialize_fi_a2a_workspace, on every rank."""
    whose = _whose(runner)
    try:
        started = start(runner)
    except Exception as error:
        _stop_compiling()
        log.warning("dcp_inductor: DCP exchanges%s stay unfused: %s", whose, error)
        log.debug("the start of dcp_inductor failed", exc_info=True)
        return
    try:
        if isinstance(started, Miss):
            text = f"dcp_inductor: DCP exchanges{whose} stay unfused: %s"
            _say(text, started, quietly=bool(whose))
        elif started is not None:
            _say(f"dcp_inductor: fusing DCP exchanges{whose}, %s", _described(started))
    except Exception:  # All is settled by now: a line that fails changes nothing.
        log.exception("dcp_inductor has started, and can't say how")


def _whose(runner: Any) -> str:
    draft = getattr(runner.model_runner, "is_draft_worker", False)
    return " of the draft model" if draft else ""


def _stop_compiling() -> None:
    """Fuse nothing that is compiled from now on."""
    sglang_flashinfer.hide()
    inductor = sys.modules.get("dcp_inductor.integrations.inductor")
    if inductor is not None:
        inductor.uninstall()


def stop() -> None:
    """Undo what this process's starts have installed. Workspaces and graphs that were
    compiled stay."""
    _stop_compiling()
    sglang_eager.stop()


def _say(text: str, what: object, quietly: bool = False) -> None:
    """One line a DCP group: at info level on its first rank."""
    from sglang.srt.runtime_context import get_parallel

    first = get_parallel().dcp_group.rank_in_group == 0
    log.log(logging.INFO if first and not quietly else logging.DEBUG, text, what)


def start(runner: Any) -> Reservation | Miss | None:
    """Agree with the other ranks, reserve, install the pass.

    Returns what is reserved; Miss where no rank will fuse; None for a server without
    DCP, and where all that a runner needs was reserved for another. Raises
    RanksDisagree on all ranks alike.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not parallel.dcp_enabled:
        return None
    voted = _voted(parallel.dcp_group.device_group, lambda: _prepared(runner))
    if isinstance(voted, Miss):
        return voted
    plan, reserved_tokens = voted
    enough = reserved_tokens >= plan.max_tokens
    reservation = _reserved(plan) if enough else _reserve(plan)
    assert reservation is not None, "all ranks have said that they have it"
    if _is_slower(reservation, plan):
        _stop_compiling()
        return Miss(_SLOWER)
    _serve(plan)
    return None if enough else reservation


def _reserve(plan: Plan) -> Reservation:
    from dcp_inductor.runtime.groups import alias_group
    from dcp_inductor.runtime.workspace import reserve

    alias_group(plan.host_group, plan.torch_group)
    return reserve(
        plan.host_group,
        max_tokens=plan.max_tokens,
        num_heads=plan.num_heads,
        head_dim=plan.head_dim,
        dtype=plan.dtype,
        device=plan.device,
    )


def _reserved(plan: Plan) -> Reservation | None:
    """What exchanges of a plan's heads, head dim and dtype run on by now."""
    from dcp_inductor.runtime.groups import resolve_group
    from dcp_inductor.runtime.workspace import known_of

    known = known_of(plan.host_group, resolve_group(plan.torch_group))
    wanted = (plan.num_heads, plan.head_dim, plan.dtype)
    for kind, found in known.of_kind.items():
        if kind[:3] == wanted:
            return found[-1]
    return None


def _is_slower(reservation: Reservation, plan: Plan) -> bool:
    """True where the op would run on GPUs without any kernel of its own, unasked. The
    backend is the same on all ranks, and so is this."""
    on_gpus = plan.device is None
    without_kernel = reservation.backend.name == "collective"
    asked = Config.from_env().backend == "collective"
    return on_gpus and without_kernel and not asked


def _serve(plan: Plan) -> None:
    """What stands after the votes, and was tried before them."""
    from dcp_inductor.integrations.inductor import install

    if plan.compiled:
        install()
    if plan.backend == "fi_a2a":
        sglang_flashinfer.show(plan.host_group)
    if plan.eager:
        sglang_eager.serve(plan)


def _voted(group: Any, action: Callable[[], Plan | Miss]) -> tuple[Plan, int] | Miss:
    """The action's plan, and for how many tokens all ranks have reserved already; or
    the first rank's reason against it, on all ranks."""
    from dcp_inductor.runtime.agreement import agree, first_objection, require_equal

    reserved = 0
    try:
        mine = action()
        known = _reserved(mine) if isinstance(mine, Plan) else None
        reserved = 0 if known is None else known.geometry.max_tokens
    except Exception as error:
        mine = Miss(f"{type(error).__name__}: {error}")
    reason = mine.reason if isinstance(mine, Miss) else ""
    plan = "" if isinstance(mine, Miss) else repr(mine)
    timeout_s = Config.from_env().timeout_s
    statement = {"refusal": reason, "plan": plan, "reserved": reserved}
    stated = agree(group, "dcp_inductor's start in sglang", statement, timeout_s)
    objection = first_objection(
        stated, "refusal", lambda rank, why: f"{why} (rank {rank})"
    )
    if objection is not None:
        return Miss(objection)
    require_equal(group, stated, ["plan"])
    assert isinstance(mine, Plan), "a miss is an objection"
    return mine, min(rank["reserved"] for rank in stated)


def _prepared(runner: Any) -> Plan | Miss:
    """The plan; all that can fail on one rank alone is tried here, before the vote."""
    plan = plan_for(runner, Config.from_env())
    if isinstance(plan, Miss):
        return plan
    if plan.compiled:
        from dcp_inductor.integrations import inductor

        inductor.DcpFusionPass()
    if plan.backend == "fi_a2a":
        sglang_flashinfer.check()
    objection = sglang_eager.objection() if plan.eager else None
    if objection is not None:
        return Miss(f"DCP_INDUCTOR_EAGER_DECODE is set, but {objection}")
    return plan


def _described(reservation: Reservation) -> str:
    geometry = reservation.geometry
    num_slots = 0 if reservation.buffers is None else geometry.num_slots
    return (
        f"backend {reservation.backend.name}, {geometry.cp_size} ranks, capacity "
        f"{geometry.max_tokens} tokens of {geometry.num_heads} heads of "
        f"{geometry.head_dim} ({geometry.dtype}), {num_slots} slots, "
        f"{reservation.nbytes / 2**20:.1f} MiB"
    )

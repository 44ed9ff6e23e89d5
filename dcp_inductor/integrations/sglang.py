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
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcp_inductor.config import Config
from dcp_inductor.integrations import sglang_eager, sglang_flashinfer
from dcp_inductor.integrations.on_import import when_imported
from dcp_inductor.integrations.sglang_plan import Plan, plan_for
from dcp_inductor.logs import integrations as log
from dcp_inductor.report import Miss

if TYPE_CHECKING:
    from dcp_inductor.runtime.workspace import Reservation

_RUNNERS = "sglang.srt.model_executor.runner.base_runner"
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
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, after_workspaces, HookType.AFTER)
    HookRegistry.apply_hooks()


def after_workspaces(result: Any, runner: Any) -> None:
    """Runs after BaseRunner._pre_initialize_fi_a2a_workspace, on every rank."""
    try:
        started = start(runner)
    except Exception as error:
        _uninstall()
        log.warning("dcp_inductor: DCP exchanges stay unfused: %s", error)
        log.debug("the start of dcp_inductor failed", exc_info=True)
        return
    try:
        if isinstance(started, Miss):
            _say("dcp_inductor: DCP exchanges stay unfused: %s", started)
        elif started is not None:
            _say("dcp_inductor: fusing DCP exchanges, %s", _described(started))
    except Exception:  # All is settled by now: a line that fails changes nothing.
        log.exception("dcp_inductor has started, and can't say how")


def _uninstall() -> None:
    """Undo what an earlier runner of this process installed."""
    sglang_eager.serve(None)
    sglang_flashinfer.hide()
    inductor = sys.modules.get("dcp_inductor.integrations.inductor")
    if inductor is not None:
        inductor.uninstall()


def _say(text: str, what: object) -> None:
    """One line a server: at info level on its first rank."""
    from sglang.srt.runtime_context import get_parallel

    log.log(logging.INFO if get_parallel().tp_rank == 0 else logging.DEBUG, text, what)


def start(runner: Any) -> Reservation | Miss | None:
    """Agree with the other ranks, reserve, install the pass.

    None for a server without DCP, Miss where no rank will fuse. Raises RanksDisagree
    on all ranks alike.
    """
    from sglang.srt.runtime_context import get_parallel

    from dcp_inductor.integrations.inductor import install
    from dcp_inductor.runtime.groups import alias_group
    from dcp_inductor.runtime.workspace import reserve

    parallel = get_parallel()
    if not parallel.dcp_enabled:
        return None
    plan = _voted(parallel.dcp_group.device_group, lambda: _prepared(runner))
    if isinstance(plan, Miss):
        return plan
    alias_group(plan.host_group, plan.torch_group)
    reservation = reserve(
        plan.host_group,
        max_tokens=plan.max_tokens,
        num_heads=plan.num_heads,
        head_dim=plan.head_dim,
        dtype=plan.dtype,
        device=plan.device,
    )
    if plan.compiled:
        install()
    if plan.backend == "fi_a2a":
        sglang_flashinfer.show(plan.host_group)
    sglang_eager.serve(plan if plan.eager else None)
    return reservation


def _voted(group: Any, action: Callable[[], Plan | Miss]) -> Plan | Miss:
    """The action's plan, or the first rank's reason against it, on all ranks."""
    from dcp_inductor.runtime.agreement import agree, first_objection, require_equal

    try:
        mine = action()
    except Exception as error:
        mine = Miss(f"{type(error).__name__}: {error}")
    reason = mine.reason if isinstance(mine, Miss) else ""
    plan = "" if isinstance(mine, Miss) else repr(mine)
    timeout_s = Config.from_env().timeout_s
    statement = {"refusal": reason, "plan": plan}
    stated = agree(group, "dcp_inductor's start in sglang", statement, timeout_s)
    objection = first_objection(
        stated, "refusal", lambda rank, why: f"{why} (rank {rank})"
    )
    if objection is not None:
        return Miss(objection)
    require_equal(group, stated, ["plan"])
    return mine


def _prepared(runner: Any) -> Plan | Miss:
    """The plan; all that can fail on one rank alone is tried here, before the vote."""
    from dcp_inductor.compiler.fusion_pass import DcpFusionPass

    DcpFusionPass()
    plan = plan_for(runner, Config.from_env())
    if isinstance(plan, Plan) and plan.backend == "fi_a2a":
        sglang_flashinfer.check()
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

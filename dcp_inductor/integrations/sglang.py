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
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dcp_inductor.config import Config
from dcp_inductor.logs import integrations as log
from dcp_inductor.report import Miss

if TYPE_CHECKING:
    import torch

    from dcp_inductor.runtime.workspace import Reservation

_RUNNERS = "sglang.srt.model_executor.runner.base_runner"
_TARGET = f"{_RUNNERS}.BaseRunner._pre_initialize_fi_a2a_workspace"


@dataclass(frozen=True)
class Plan:
    """What a server's exchanges will need; equal on all ranks of the DCP group.

    max_tokens: B of the widest compiled decode batch. num_heads: H before the
    exchange. host_group and torch_group: sglang's and torch's name of the group.
    device: None for the current CUDA device.
    """

    host_group: str
    torch_group: str
    num_ranks: int
    max_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str | None


def register() -> None:
    """The entry point: hook the warm-up of model runners, once a process.

    Imports nothing of sglang that the process doesn't import itself: tokenizers and
    detokenizers load plugins too.
    """
    if not Config.from_env().enabled:
        log.info("dcp_inductor is switched off (DCP_INDUCTOR=0)")
        return
    when_imported(_RUNNERS, _hook)


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
    if isinstance(started, Miss):
        _say("dcp_inductor: DCP exchanges stay unfused: %s", started)
    elif started is not None:
        _say("dcp_inductor: fusing DCP exchanges, %s", _described(started))


def _uninstall() -> None:
    """Undo what an earlier runner of this process installed."""
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
    install()
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
    return plan_for(runner)


def plan_for(runner: Any) -> Plan | Miss:
    """What the compiled decode batches of a runner need, or why nothing is fused."""
    from sglang.srt.runtime_context import get_parallel

    for refuses in (_unfit_settings, _unfit_streams):
        miss = refuses()
        if miss is not None:
            return miss
    max_tokens = _widest_compiled_batch(runner)
    if max_tokens is None:
        return Miss("no decode batch is captured from a compiled model")
    attention = next(filter(_is_mla, runner.model_runner.model.modules()), None)
    if attention is None:
        return Miss("the model has no MLA attention that exchanges heads")
    group = get_parallel().dcp_group
    device = runner.model_runner.device
    return Plan(
        group.unique_name,
        group.device_group.group_name,
        group.world_size,
        max_tokens,
        attention.num_local_heads * attention.dcp_size,
        attention.kv_lora_rank,
        runner.model_runner.dtype,
        None if device == "cuda" else device,
    )


def _unfit_settings() -> Miss | None:
    from sglang.srt.runtime_context import get_flags, get_parallel

    if not get_flags().capture.enable_torch_compile:
        return Miss(
            "the server runs without --enable-torch-compile, so no graph is compiled"
        )
    backend = get_parallel().dcp_comm_backend
    if backend != "a2a":
        return Miss(
            f"--dcp-comm-backend is {backend}; torch.compile sees the exchange of a2a"
        )
    return None


def _unfit_streams() -> Miss | None:
    """A workspace serves one capture stream."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_parallel

    if get_disagg().enable_pdmux:
        return Miss("--enable-pdmux captures on several streams at once")
    if get_parallel().pp_size > 1 and envs.SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP.get():
        return Miss(
            "SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP warms pipeline stages up beside each "
            "other"
        )
    return None


def _widest_compiled_batch(runner: Any) -> int | None:
    """Tokens of the largest decode batch that sglang compiles and captures."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import (
        get_batch_sizes_to_capture,
    )
    from sglang.srt.runtime_context import get_exec

    if get_exec().graph.cuda_graph_config is None:
        return None
    model_runner = runner.model_runner
    tokens_per_request: int = model_runner.decode_num_tokens_per_req()
    _, compiled = get_batch_sizes_to_capture(
        model_runner,
        tokens_per_request,
        gathered_buffer_required=any(model_runner.decode_graph_gather_requirements()),
    )
    return max(compiled) * tokens_per_request if compiled else None


def _is_mla(module: Any) -> bool:
    return (
        hasattr(module, "kv_lora_rank")
        and hasattr(module, "num_local_heads")
        and getattr(module, "dcp_size", 1) > 1
    )


def _described(reservation: Reservation) -> str:
    geometry = reservation.geometry
    num_slots = 0 if reservation.buffers is None else geometry.num_slots
    return (
        f"backend {reservation.backend.name}, {geometry.cp_size} ranks, capacity "
        f"{geometry.max_tokens} tokens of {geometry.num_heads} heads of "
        f"{geometry.head_dim} ({geometry.dtype}), {num_slots} slots, "
        f"{reservation.nbytes / 2**20:.1f} MiB"
    )


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if module ``name`` is imported, else right after it is."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(MetaPathFinder):
    """Finds its one module as everybody would, and acts once it has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                try:
                    self.action()
                except Exception:
                    log.exception("dcp_inductor: its hook on %s failed", self.name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

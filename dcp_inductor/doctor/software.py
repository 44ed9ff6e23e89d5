"""Inductor's hooks and caches, and the hosts that are installed, as they stand.

Hosts are found by their metadata; none is imported.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch._functorch.config as functorch_config
from torch._inductor import config as inductor_config

from dcp_inductor.doctor.checkup import Hook, Host
from dcp_inductor.doctor.machine import version_of
from dcp_inductor.integrations.inductor import passes_in
from dcp_inductor.runtime.backends.flashinfer_op import installed_op

_HOOKS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
PLUGIN_GROUP = "sglang.srt.plugins"


def hooks() -> list[Hook]:
    """The hooks that this torch has."""
    return [
        Hook(name, [_name(one) for one in passes_in(name)])
        for name in _HOOKS
        if hasattr(inductor_config, name)
    ]


def _name(graph_pass: Any) -> str:
    """``module.name`` of a function, or of an object's class."""
    named = graph_pass if hasattr(graph_pass, "__qualname__") else type(graph_pass)
    return f"{named.__module__}.{named.__qualname__}"


def caches() -> dict[str, str]:
    """Which of torch.compile's caches are on, and where they are."""
    off = inductor_config.force_disable_caches
    switches = {
        "FX graphs": inductor_config.fx_graph_cache,
        "AOTAutograd": functorch_config.enable_autograd_cache,
        "remote": inductor_config.fx_graph_remote_cache,
    }
    found = {"folder": _cache_folder()}
    for name, switch in switches.items():
        found[name] = "off (all are disabled)" if off else _switch(switch)
    return found


def _switch(value: bool | None) -> str:
    return "by torch's default" if value is None else ("on" if value else "off")


def _cache_folder() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        return cache_dir()
    except OSError as error:
        return f"can't be made: {error}"


def hosts() -> list[Host]:
    """Those that this package meets, installed or not."""
    return [
        _host("sglang", "sglang", _sglang),
        _host("FlashInfer", "flashinfer-python", _flashinfer),
    ]


def _host(name: str, distribution: str, note: Callable[[], str]) -> Host:
    version = version_of(distribution)
    return Host(name, version, "" if version is None else note())


def _sglang() -> str:
    return (
        "this package is registered as its plugin"
        if plugin_registered()
        else "this package isn't registered as its plugin"
    )


def plugin_registered() -> bool:
    """Whether sglang would find the plugin: an entry point of an installed package."""
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    return any(entry.value.startswith("dcp_inductor.") for entry in found)


def _flashinfer() -> str:
    """What its exchange does, whatever the version."""
    op = installed_op()
    if isinstance(op, str):
        return op
    switch = "switches" if op.sets_backend else "leaves"
    inputs = "packed inputs" if op.needs_packed else "strided views"
    return f"its exchange {switch} torch's symmetric memory and takes {inputs}"

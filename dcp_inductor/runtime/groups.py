"""From the group name that stands in a graph to the process group of this process.

Graphs hold names, since a compiled artifact is shared by all ranks. A host that uses
names of its own (sglang's "dcp:0") registers them here; torch's own need nothing.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dcp_inductor.errors import UnknownGroup

_ALIASES: dict[str, str] = {}


def alias_group(host_name: str, torch_name: str) -> None:
    """Make ``host_name`` mean the process group that torch calls ``torch_name``."""
    _ALIASES[host_name] = torch_name


def forget_alias(host_name: str) -> None:
    """Undo ``alias_group``; a name that isn't registered is left alone."""
    _ALIASES.pop(host_name, None)


def group_name_of(group: ProcessGroup | str | None) -> str:
    """The name by which the op calls ``group``; None means the default group."""
    if isinstance(group, str):
        return group
    _check_initialised("a2a_lse_reduce")
    world: ProcessGroup | None = dist.group.WORLD
    chosen = world if group is None else group
    assert chosen is not None, "torch.distributed is initialised"
    return chosen.group_name


def resolve_group(group_name: str) -> ProcessGroup:
    """The process group called ``group_name``. Raises UnknownGroup."""
    torch_name = _ALIASES.get(group_name, group_name)
    try:
        return dist.distributed_c10d._resolve_process_group(torch_name)  # type: ignore[arg-type]
    except (AttributeError, RuntimeError, ValueError, KeyError, TypeError) as error:
        _check_initialised(f"group {group_name!r}")
        raise UnknownGroup(
            f"No process group of this process is called {group_name!r}; it has "
            f"{known_groups()}. The exchange needs the group that holds one KV cache "
            "shard a rank: pass the ProcessGroup itself or its group_name, or register "
            "the host's name with dcp_inductor.alias_group."
        ) from error


def known_groups() -> list[str]:
    """Every name of this process's groups, torch's and hosts', sorted."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return sorted({*_ALIASES, *dist.distributed_c10d._world.pg_names.values()})


def _check_initialised(what: str) -> None:
    if not dist.is_available():
        raise UnknownGroup(
            f"{what} was asked for, but this torch is built without "
            "torch.distributed; the exchange needs a build with it."
        )
    if not dist.is_initialized():
        raise UnknownGroup(
            f"{what} was asked for before any process group exists. Call "
            "torch.distributed.init_process_group() first."
        )

"""sglang's own DCP functions, traced on a machine without a GPU. For test_sglang_*.py.

NOTE [no GPU]
Dynamo takes a Triton kernel for one only if ``has_triton()``; which arguments it writes
is read off its IR, which needs a target. Without a target torch warns, takes every
argument for written, and gives another graph; so a target is set, and a test holds the
pack's node to just its two destinations.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import pytest
import torch
import torch.utils._triton
from torch import Tensor
from torch.fx import Node

GROUP = "dcp:0"


def sglang_module(name: str) -> Any:
    """A module of sglang, or a skip that says what is missing."""
    pytest.importorskip("triton", reason="sglang's kernels are Triton's")
    try:
        return importlib.import_module(f"sglang.{name}")
    except Exception as error:
        pytest.skip(
            f"sglang isn't importable here ({type(error).__name__}: {error}); "
            "install the packages of .ci/sglang.txt with --no-deps"
        )


@contextlib.contextmanager
def triton_target() -> Iterator[None]:
    """A Hopper for Triton's front end, NOTE [no GPU]."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def is_active(self) -> bool:
            return True

        def get_device_interface(self) -> Any:
            return torch.cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils._triton, "has_triton", lambda *args, **kwargs: True)
        patch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
        yield


def group_of(num_ranks: int) -> Any:
    """A GroupCoordinator as far as the traced functions look at it."""
    coordinator = sglang_module("srt.distributed.parallel_state").GroupCoordinator
    group = object.__new__(coordinator)
    group.world_size = num_ranks
    group.rank_in_group = 0
    group.unique_name = GROUP
    group.pynccl_comm = None
    return group


def run_on_ranks(captured: Any, args: Sequence[Any], before: bool = False) -> list[Any]:
    """The outputs of a captured graph on all ranks in lockstep, kernels interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_call", _with_hosts(harness._call))
        return captured.run(args, before=before)


def _with_hosts(call: Callable[..., Any]) -> Callable[..., Any]:
    from dcp_inductor.compiler import opaque

    def with_hosts(node: Node, calls: list[tuple[Any, Any]]) -> list[Any]:
        if opaque.is_kernel(node):
            return [opaque.run(kwargs) for _, kwargs in calls]
        if getattr(node.target, "__name__", "").startswith("auto_functionalized"):
            sent = [kwargs["input"] for _, kwargs in calls]
            return [[None, received] for received in _all_to_all(sent)]
        return call(node, calls)

    return with_hosts


def _all_to_all(sent: list[Tensor]) -> list[Tensor]:
    chunks = [tensor.chunk(len(sent)) for tensor in sent]
    return [torch.cat([row[rank] for row in chunks]) for rank in range(len(sent))]


def start_parallel(
    rank: int, num_ranks: int, *, backend: str = "gloo", **settings: Any
) -> Any:
    """sglang's own groups, TP = DCP = all ranks; the module that holds them.

    settings: of sglang's ServerArgs.
    """
    state = sglang_module("srt.distributed.parallel_state")
    context = sglang_module("srt.runtime_context")
    server_args = sglang_module("srt.server_args")
    settings = {
        "model_path": "dummy",
        "tp_size": num_ranks,
        "dcp_size": num_ranks,
        "dcp_comm_backend": "a2a",
        "enable_torch_compile": True,
        "device": "cuda",
        **settings,
    }
    context.publish(
        server_args.ServerArgs(**settings),
        role="test",
        ranks=context.SpawnRanks(world_rank=rank),
    )
    state.is_cuda = lambda: True  # initialize_model_parallel checks the platform
    state.init_distributed_environment(
        world_size=num_ranks, rank=rank, local_rank=rank, backend=backend
    )
    make = state.init_model_parallel_group
    quiet = dict.fromkeys(
        (
            "use_pynccl",
            "use_custom_allreduce",
            "use_mscclpp",
            "use_torch_symm_mem_allreduce",
            "use_message_queue_broadcaster",
        ),
        False,
    )
    state.init_model_parallel_group = lambda *args, **kwargs: make(
        *args, **{**kwargs, **quiet}
    )
    state.initialize_model_parallel(backend=backend)
    return state

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
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import torch.utils._triton
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from dcp_inductor.integrations import sglang_flashinfer

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


def real_comm() -> Any:
    """sglang's module of the DCP exchanges, or a skip."""
    return sglang_module("srt.layers.dcp.comm")


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


def group_of(num_ranks: int, rank: int = 0) -> Any:
    """A GroupCoordinator as far as the traced functions look at it."""
    coordinator = sglang_module("srt.distributed.parallel_state").GroupCoordinator
    group = object.__new__(coordinator)
    group.world_size = num_ranks
    group.rank_in_group = rank
    group.unique_name = GROUP
    group.pynccl_comm = group.ca_comm = group.hpu_communicator = None
    group.use_symmetric_memory = lambda *args, **kwargs: contextlib.nullcontext()
    group.is_allocation_symmetric = lambda: False
    return group


def run_on_ranks(captured: Any, args: Sequence[Any], before: bool = False) -> list[Any]:
    """The outputs of a captured graph on all ranks in lockstep, kernels interpreted."""
    with _hosts_ops({}):
        return captured.run(args, before=before)


def captured_on_cuda(
    fn: Callable[..., Any], args: Sequence[Any], **options: Any
) -> Any:
    """harness.captured for CUDA tensors of the shapes of ``args``, which nobody has:
    sglang's all-gather and reduce-scatter ask where a tensor is."""
    patch = inductor_config.patch(joint_graph_constant_folding=False)
    with FakeTensorMode(), patch:
        there = [torch.empty(a.shape, dtype=a.dtype, device="cuda") for a in args]
        for tensor, given in zip(there, args, strict=True):
            for dim in getattr(given, "_dynamo_dynamic_indices", ()):
                torch._dynamo.mark_dynamic(tensor, dim)
        return harness.captured(fn, there, **options)


def run_as_ranks(
    graph: Graph,
    inputs: Sequence[Sequence[Any]],
    moves: Mapping[Any, Callable[[list[Any]], list[Any]]] | None = None,
) -> list[Any]:
    """A graph on all ranks in lockstep, on the CPU, one of captured_on_cuda too; where
    its correction is passed its rank, each rank passes its own.

    moves: exchanges that sglang has beside its own, by op: from the arguments of all
    ranks to what each gets.
    """
    with _hosts_ops(moves or {}):
        return harness.run_ranks_in_lockstep(graph, inputs)


@contextlib.contextmanager
def _hosts_ops(
    moves: Mapping[Any, Callable[[list[Any]], list[Any]]],
) -> Iterator[None]:
    """The harness runs sglang's kernels and exchanges, and those of ``moves``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_call", _with_hosts(harness._call, moves))
        yield


def _with_hosts(
    call: Callable[..., Any], moves: Mapping[Any, Callable[[list[Any]], list[Any]]]
) -> Callable[..., Any]:
    from dcp_inductor.compiler import opaque

    def with_hosts(node: Node, calls: list[tuple[Any, Any]]) -> list[Any]:
        if node.target in moves:
            return moves[node.target]([args for args, _ in calls])
        if opaque.is_kernel(node):
            own = "lse_idx" in str(opaque._constants(node.kwargs))
            return [
                opaque.run(kwargs, {"lse_idx": rank} if own else None)
                for rank, (_, kwargs) in enumerate(calls)
            ]
        if getattr(node.target, "__name__", "").startswith("auto_functionalized"):
            sent = [kwargs["input"] for _, kwargs in calls]
            moved = _MOVES[calls[0][0][0]._schema.name](sent)
            return [[None, received] for received in moved]
        here = {"device": torch.device("cpu")}
        if "device" in node.kwargs:
            calls = [(args, {**kwargs, **here}) for args, kwargs in calls]
        return call(node, calls)

    return with_hosts


def _all_to_all(sent: list[Tensor]) -> list[Tensor]:
    chunks = [tensor.chunk(len(sent)) for tensor in sent]
    return [torch.cat([row[rank] for row in chunks]) for rank in range(len(sent))]


_MOVES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "sglang::reg_all_to_all_single": _all_to_all,
    "sglang::reg_all_gather_into_tensor": lambda sent: [torch.cat(sent)] * len(sent),
    "sglang::reg_reduce_scatter_tensor": lambda sent: [
        *torch.stack(sent).sum(0).chunk(len(sent))
    ],
}


def start_parallel(
    rank: int,
    num_ranks: int,
    *,
    backend: str = "gloo",
    pynccl: bool = False,
    **settings: Any,
) -> Any:
    """sglang's own groups, TP = DCP = all ranks; the module that holds them.

    pynccl: with sglang's NCCL communicators. settings: of sglang's ServerArgs.
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
            "use_custom_allreduce",
            "use_mscclpp",
            "use_torch_symm_mem_allreduce",
            "use_message_queue_broadcaster",
        ),
        False,
    )
    state.init_model_parallel_group = lambda *args, **kwargs: make(
        *args, **{**kwargs, **quiet, "use_pynccl": pynccl}
    )
    state.initialize_model_parallel(backend=backend)
    return state


@contextlib.contextmanager
def _imported(modules: dict[str, Any]) -> Iterator[None]:
    """These modules in place of those of their names. mock.patch.dict would also
    forget whatever else is imported meanwhile, of torch too."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextlib.contextmanager
def flashinfer_of(exchange: Callable[..., Any]) -> Iterator[Any]:
    """A FlashInfer that has nothing but this exchange, and sglang's state for it."""
    comm = real_comm()
    package: Any = types.ModuleType("flashinfer")
    package.comm = types.ModuleType("flashinfer.comm")
    module: Any = types.ModuleType("flashinfer.comm.dcp_alltoall")
    package.comm.dcp_alltoall = module
    module.decode_cp_a2a_alltoall = exchange
    modules = {m.__name__: m for m in (package, package.comm, module)}
    with (
        _imported(modules),
        mock.patch.object(comm, "init_fi_a2a_workspace", return_value=None),
        mock.patch.object(
            comm, "_FI_A2A_STATE", {"workspace": torch.zeros(1), "cp_rank": 0}
        ),
    ):
        yield module
        sglang_flashinfer.hide()


@contextlib.contextmanager
def plugin_lines() -> Iterator[list[str]]:
    """What the plugin logs meanwhile, at INFO and above."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("dcp_inductor.integrations")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def runner_of(
    model: Any,
    dtype: torch.dtype,
    tokens_per_request: int = 1,
    device: str = "cpu",
    is_draft: bool = False,
) -> Any:
    """What the plugin's hook reads of a runner of ``model``."""
    runtime = sglang_module("srt.runtime_context")
    base = sglang_module("srt.model_executor.runner.base_runner").BaseRunner

    class Runner(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.model_runner = SimpleNamespace(
                model=model,
                dtype=dtype,
                device=device,
                req_to_token_pool=SimpleNamespace(size=64),
                server_args=runtime.get_server_args(),
                is_draft_worker=is_draft,
                decode_num_tokens_per_req=lambda num_draft_tokens=None: (
                    num_draft_tokens or tokens_per_request
                ),
                decode_graph_gather_requirements=lambda: (False, False),
            )

    Runner.__abstractmethods__ = frozenset()
    return Runner()


def on_cpu(state: Any) -> None:
    """Let CPU tensors through sglang's collective ops, which are CUDA's.

    state: the module of start_parallel().
    """
    library = torch.library.Library("sglang", "FRAGMENT")
    for op, method in (
        ("reg_all_to_all_single", "_all_to_all_single"),
        ("reg_all_gather_into_tensor", "_all_gather_into_tensor"),
        ("reg_reduce_scatter_tensor", "_reduce_scatter_tensor"),
        ("inplace_all_reduce", "_all_reduce_in_place"),
    ):

        def call(*args: Any, method: str = method) -> None:
            *tensors, group_name = args
            getattr(state._groups[group_name](), method)(*tensors)

        library.impl(op, call, "CPU")
    _KEPT.append(library)


_KEPT: list[Any] = []


@contextlib.contextmanager
def interpret_kernels() -> Iterator[None]:
    """Triton kernels launched here run in Triton's interpreter, in this process.

    It leaves triton.language patched for good: trace and compile before.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                JITFunction,
                "__call__",
                lambda inner, *a, **k: InterpretedFunction(inner.fn)(*a, **k),
            )
            return InterpretedFunction(self.fn)[grid](*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield

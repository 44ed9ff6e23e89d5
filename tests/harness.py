"""Compiles a function with the pass on and runs its graphs on N ranks in one process.

What to compile is in corpus.py and near_misses/; what must come out is the tests'.

NOTE [lockstep]
``captured`` stops Inductor after its post-grad passes and keeps the graph from before
and after the pass. ``Captured.run`` evaluates such a graph node by node on all ranks:
a collective takes its input from every rank, the op is merge.py's reference over the
op inputs of all ranks. Nothing of the package but merge.py takes part in the numbers.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.merge import LSE_MODES, a2a_lse_reduce_reference
from dcp_inductor.report import GraphReport

c10d = torch.ops._c10d_functional
ops = torch.ops.dcp_inductor

_OPS = (ops.a2a_lse_reduce.default, ops.a2a_lse_reduce_with_lse.default)
_WORLD = 8


@contextlib.contextmanager
def fake_world() -> Iterator[dict[str, Any]]:
    """Groups that send nothing, for compiling alone.

    Keys: "1" to "8" by size, "other 2" and "other 4" of other ranks of those sizes.
    This process is rank 0 of all.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD)
    try:
        groups = {str(n): dist.new_group([*range(n)]) for n in (1, 2, 3, 4, 6)}
        groups["8"] = dist.group.WORLD
        groups["other 2"] = dist.new_group([0, 5])
        groups["other 4"] = dist.new_group([0, 2, 4, 6])
        yield groups
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


@dataclass
class Captured:
    """One compiled function: its graph before and after the pass, and the report."""

    call: Callable[..., Any]
    before: Graph | None = None
    after: Graph | None = None
    report: GraphReport | None = None
    num_graphs: int = 0
    _inputs: list[Any] = field(default_factory=list, repr=False)

    def flat_inputs(self, args: Sequence[Any]) -> list[Any]:
        """What the compiled graph gets when the function is called with ``args``."""
        with torch.no_grad(), contextlib.suppress(_Recorded):
            self.call(*args)
        return self._inputs

    def run(
        self, args_of_ranks: Sequence[Sequence[Any]], before: bool = False
    ) -> list[list[Any]]:
        """The graph's outputs on every rank, the ranks in lockstep."""
        graph = self.before if before else self.after
        assert graph is not None, "captured() calls the function once"
        flat = [self.flat_inputs(args) for args in args_of_ranks]
        return run_ranks_in_lockstep(graph, flat)

    @property
    def num_ops(self) -> int:
        return sum(node.target in _OPS for node in self.after.nodes)

    @property
    def num_collectives(self) -> int:
        return sum(_is_collective(node) for node in self.after.nodes)

    @property
    def reasons(self) -> list[str]:
        return [f.reason for f in self.report.findings if not f.fused]


class _Recorded(Exception):
    """Raised in place of running a compiled graph."""


class _Tap:
    """The fusion pass between two looks at the graph."""

    def __init__(self, captured: Captured, config: Config | None = None) -> None:
        self.captured = captured
        self.fusion = DcpFusionPass(config or Config(), self._listen)

    def _listen(self, report: GraphReport) -> None:
        self.captured.report = report

    def __call__(self, graph: Graph) -> None:
        self.captured.num_graphs += 1
        self.captured.before = copied(graph)
        self.fusion(graph)
        self.captured.after = copied(graph)


def captured(
    fn: Callable[..., Any],
    args: Sequence[Any],
    edit: Callable[[Graph], None] | None = None,
    allow_scalars: bool = False,
    config: Config | None = None,
    num_graphs: int = 1,
) -> Captured:
    """Compile ``fn`` for ``args`` up to the post-grad passes.

    edit: changes the graph before the pass sees it. config: of the pass. num_graphs: of
    which the function's own comes last, behind those that its higher-order ops run.
    """
    result = Captured(call=lambda *_: None)
    tap = _Tap(result, config)

    def graph_pass(graph: Graph) -> None:
        if edit is not None:
            edit(graph)
        tap(graph)

    def inner(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        compile_fx.view_to_reshape(gm)
        fake_mode = torch._guards.detect_fake_mode(example_inputs)
        with torch._inductor.virtualized.V.set_fake_mode(fake_mode):
            compile_fx.FakeTensorProp(gm, fake_mode).propagate(*example_inputs)
            compile_fx._recursive_post_grad_passes(
                gm, is_inference=kwargs.get("is_inference", False)
            )
        return record

    def record(*inputs: Any) -> Any:
        if len(inputs) == 1 and isinstance(inputs[0], list):
            inputs = tuple(inputs[0])
        result._inputs = [*inputs]
        raise _Recorded

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        patch = {
            "post_grad_custom_pre_pass": graph_pass,
            "force_disable_caches": True,
        }
        with inductor_config.patch(patch):
            return compile_fx.compile_fx(gm, example_inputs, inner_compile=inner)

    torch._dynamo.reset()
    result.call = torch.compile(fn, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=allow_scalars):
        result.flat_inputs(args)
    assert result.num_graphs == num_graphs, "one function, one graph"
    return result


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> Captured:
    """As ``captured``, for a pure function of static shapes, without Dynamo and AOT.

    Several times faster; the graph is Inductor's but for what Dynamo, AOTAutograd and
    the joint-graph passes would have made of it.
    """
    result = Captured(call=lambda *_: None)

    def record(*inputs: Any) -> None:
        result._inputs = [*inputs]

    def leaves(*inputs: Any) -> list[Any]:
        return torch.utils._pytree.tree_leaves(fn(*inputs))

    result.call = record
    with torch.no_grad():
        gm = make_fx(leaves, select_decomp_table(), tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    _Tap(result)(gm.graph)
    return result


def copied(graph: Graph) -> Graph:
    """A copy that later passes don't reach, with the constants of its module."""
    new = Graph(graph.owning_module)
    new.output(new.graph_copy(graph, {}))
    return new


def run_ranks_in_lockstep(
    graph: Graph,
    inputs: Sequence[Sequence[Any]],
    lses: list[Tensor] | None = None,
) -> list[Any]:
    """The outputs of ``graph`` on each rank; inputs are left as they are.

    lses: every LSE that the op is called with is appended.
    """
    num_ranks = len(inputs)
    given = [iter(copy.deepcopy([*rank_inputs])) for rank_inputs in inputs]
    values: list[dict[Node, Any]] = [{} for _ in inputs]
    for node in graph.nodes:
        if node.op == "placeholder":
            for rank in range(num_ranks):
                values[rank][node] = next(given[rank])
            continue
        if node.op == "output":
            return [map_arg(node.args[0], known.__getitem__) for known in values]
        if node.op == "get_attr":
            constant = operator.attrgetter(node.target)(graph.owning_module)
            results = [constant.clone() for _ in values]
        else:
            calls = [
                map_arg((node.args, node.kwargs), known.__getitem__) for known in values
            ]
            if node.target in _OPS and lses is not None:
                lses.extend(args[1] for args, _ in calls)
            results = _call(node, calls)
        for known, result in zip(values, results, strict=True):
            known[node] = result
    raise AssertionError("a graph has an output")


def _call(node: Node, calls: list[tuple[Any, Any]]) -> list[Any]:
    """One node on all ranks."""
    if node.target in _OPS:
        merged = _merge_of_all([args for args, _ in calls])
        return merged if node.target is _OPS[1] else [out for out, _ in merged]
    if node.target is c10d.all_to_all_single.default:
        return _all_to_all([args[0] for args, _ in calls], calls[0][0][1])
    if node.target is c10d.all_reduce.default:
        assert calls[0][0][1] == "sum"
        return [torch.stack([args[0] for args, _ in calls]).sum(0) for _ in calls]
    if node.target is c10d.all_gather_into_tensor.default:
        return [torch.cat([args[0] for args, _ in calls]) for _ in calls]
    if node.target is c10d.reduce_scatter_tensor.default:
        assert calls[0][0][1] == "sum"
        total = torch.stack([args[0] for args, _ in calls]).sum(0)
        return [*total.chunk(len(calls))]
    if node.target is c10d.wait_tensor.default:
        return [args[0] for args, _ in calls]
    assert not _is_collective(node), f"lockstep can't run {node.target}"
    return [node.target(*args, **kwargs) for args, kwargs in calls]


def _merge_of_all(calls: list[Any]) -> list[tuple[Tensor, Tensor]]:
    partial_o = torch.stack([args[0] for args in calls])
    lse = torch.stack([args[1] for args in calls]).reshape(partial_o.shape[:-1])
    assert calls[0][3] == len(calls), "the op is for as many ranks as run"
    assert partial_o.dim() == 4
    return [
        a2a_lse_reduce_reference(partial_o, lse, rank=rank, lse_mode=calls[0][4])
        for rank in range(len(calls))
    ]


def _all_to_all(sent: list[Tensor], output_splits: Sequence[int]) -> list[Tensor]:
    """Rank r's chunk p becomes rank p's chunk r. Uneven splits: as many each way."""
    assert len(output_splits) == len(sent), "the group has as many ranks as run"
    assert all(sum(output_splits) == tensor.shape[0] for tensor in sent)
    chunks = [tensor.split([*output_splits]) for tensor in sent]
    return [torch.cat([row[rank] for row in chunks]) for rank in range(len(sent))]


def _is_collective(node: Node) -> bool:
    if node.target is c10d.wait_tensor.default:
        return True
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d")


def normalised(graph: Graph) -> str:
    """Op names, numbered values and shapes: equal on every torch that we support.

    Group names are GROUP; symbols are numbered in order of appearance.
    """
    names: dict[Node, str] = {}
    lines = [_line(node, names) for node in graph.nodes]
    symbols: dict[str, str] = {}
    return re.sub(
        r"\b[su]\d+\b",
        lambda found: symbols.setdefault(found[0], f"s{len(symbols)}"),
        "\n".join(lines),
    )


_NOT_WRITTEN = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _line(node: Node, names: dict[Node, str]) -> str:
    names[node] = f"%{len(names)}"
    if node.op == "output":
        return f"return {_written(node.args[0], names)}"
    head = f"{names[node]}: {_described(node.meta.get('val'))} = "
    if node.op != "call_function":
        return head + {"placeholder": "input"}.get(node.op, node.op)
    arguments = [_written(value, names) for value in node.args]
    arguments += [
        f"{key}={_written(value, names)}"
        for key, value in node.kwargs.items()
        if key not in _NOT_WRITTEN
    ]
    name = getattr(node.target, "_opname", None) or node.target.__name__
    return f"{head}{name}({', '.join(arguments)})"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    return "size" if isinstance(value, (int, torch.SymInt)) else "tuple"


def _written(argument: Any, names: dict[Node, str]) -> str:
    if isinstance(argument, Node):
        return names[argument]
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_written(item, names) for item in argument) + "]"
    if isinstance(argument, str) and argument not in LSE_MODES:
        return "GROUP"
    if argument == sys.maxsize:
        return "end"
    return str(argument).removeprefix("torch.")

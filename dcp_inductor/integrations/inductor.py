"""install(), uninstall() and explain(): the pass in Inductor's global hook.

What the pass does is compiler/fusion_pass.py's.

NOTE [hook]
``post_grad_custom_pre_pass`` is one config slot that hosts share. torch 2.13 and later
take a list there; before, a list would be called like a function, so passes are
chained in one pass. Whatever is there stays there, and runs first. An
``options={"post_grad_custom_pre_pass": ...}`` of a single ``torch.compile`` call
replaces the global value for that call: then the pass has to be in that value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from dcp_inductor.compiler.fusion_pass import DcpFusionPass
from dcp_inductor.config import Config
from dcp_inductor.logs import integrations as log
from dcp_inductor.report import Report

_HOOK = "post_grad_custom_pre_pass"
_TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")


class PassChain(CustomGraphPass):
    """Several passes as one, for a torch whose hook takes only one."""

    def __init__(self, *passes: Callable[[Graph], None]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> Any | None:
        """Of all; None, which bypasses the caches, if one can't tell its own."""
        found = [
            getattr(graph_pass, "uuid", lambda: None)() for graph_pass in self.passes
        ]
        return None if any(uuid is None for uuid in found) else tuple(found)


def install(config: Config | None = None) -> DcpFusionPass | None:
    """Put the pass into Inductor's global hook, behind what is there.

    Every function that this process compiles afterwards is looked at; functions
    compiled before stay as they are. A second call replaces the pass of the first.
    Returns the pass, or None under ``DCP_INDUCTOR=0`` (nothing is touched then).
    """
    config = Config.from_env() if config is None else config
    if not config.enabled:
        uninstall()
        log.info("dcp_inductor is switched off; no pass is installed")
        return None
    fusion_pass = DcpFusionPass(config)
    _set_hook([*_others(), fusion_pass])
    return fusion_pass


def uninstall() -> None:
    """Take the pass out of the global hook; other passes stay. Idempotent."""
    others = _others()
    if others != installed_passes():
        _set_hook(others)


def installed_passes() -> list[Any]:
    """The passes in the global hook, in the order in which they run."""
    return passes_in(_HOOK)


def passes_in(hook: str) -> list[Any]:
    """The passes in any of Inductor's global hooks, in order."""
    value = getattr(inductor_config, hook)
    if value is None:
        return []
    if isinstance(value, PassChain):
        return [*value.passes]
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _others() -> list[Any]:
    return [p for p in installed_passes() if not isinstance(p, DcpFusionPass)]


def _set_hook(passes: list[Any]) -> None:
    value: Any = passes
    if len(passes) < 2:
        value = passes[0] if passes else None
    elif not _TAKES_LISTS:
        value = PassChain(*passes)
    setattr(inductor_config, _HOOK, value)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Compile ``fn`` for these arguments with the pass on, and say what it met.

    Nothing is computed and nothing is sent: a compiled graph returns zeros of the
    right shapes, so one rank can explain alone, on a machine without the others. With
    FakeTensor arguments (inside or outside their FakeTensorMode) no device is needed
    either. Python between graphs does run. ``fn`` may be compiled already; caches are
    neither read nor written.

    Returns a Report: ``.fused``, ``.refused``, ``.exchanges``, ``.graphs`` with the
    text before and after, ``str()`` for people.
    """
    report = Report()
    config = replace(Config.from_env(), on_miss="log")
    fusion_pass = DcpFusionPass(config, report.graphs.append)
    target = getattr(fn, "_torchdynamo_orig_callable", fn)
    torch._dynamo.reset()
    torch._dynamo.utils.counters["graph_break"].clear()
    try:
        with _only_post_grad(fusion_pass) as backend, _fake_mode_of(args, kwargs):
            torch.compile(target, backend=backend)(*args, **kwargs)
    finally:
        report.breaks = [
            reason.splitlines()[0]
            for reason in torch._dynamo.utils.counters["graph_break"]
        ]
        torch._dynamo.reset()
    return report


@contextlib.contextmanager
def _only_post_grad(fusion_pass: DcpFusionPass) -> Iterator[Callable[..., Any]]:
    """A Dynamo backend: Inductor up to and including its post-grad passes."""
    from torch._inductor import compile_fx

    def inner(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        compile_fx.view_to_reshape(gm)
        fake_mode = torch._guards.detect_fake_mode(example_inputs)
        with torch._inductor.virtualized.V.set_fake_mode(fake_mode):
            compile_fx.FakeTensorProp(gm, fake_mode).propagate(*example_inputs)
            compile_fx._recursive_post_grad_passes(
                gm, is_inference=kwargs.get("is_inference", False)
            )
        return _zeros_of(gm)

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        return compile_fx.compile_fx(gm, example_inputs, inner_compile=inner)

    patch: dict[str, Any] = {
        _HOOK: fusion_pass,
        # Folding runs factory ops on their device, which need not be here.
        "joint_graph_constant_folding": False,
        "force_disable_caches": True,
    }
    with inductor_config.patch(patch):
        yield backend


def _zeros_of(gm: GraphModule) -> Callable[..., list[Any]]:
    """Stands in for a compiled graph: zeros of its outputs' shapes, nothing run."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    places = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    names = {name: place for place, name in enumerate(places)}
    symbols = {
        str(node.meta["val"]): names[node.name]
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.SymInt)
    }

    def run(*args: Any) -> list[Any]:
        if len(args) == 1 and isinstance(args[0], list):
            args = tuple(args[0])
        known = {name: args[place] for name, place in symbols.items()}
        return [_zeros(value, known) for value in values]

    return run


def _zeros(value: Any, symbols: dict[str, int]) -> Any:
    if isinstance(value, torch.SymInt):
        return _size(value, symbols)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_size(size, symbols) for size in value.shape]
    stride = [_size(size, symbols) for size in value.stride()]
    empty = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return empty.zero_()


def _size(size: Any, symbols: dict[str, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    expr = size.node.expr
    return int(expr.subs({s: symbols[str(s)] for s in expr.free_symbols}))


def _fake_mode_of(args: Any, kwargs: Any) -> Any:
    """The FakeTensorMode of the arguments, entered, or nothing."""
    mode = torch._guards.detect_fake_mode(
        torch.utils._pytree.tree_leaves((args, kwargs))
    )
    return contextlib.nullcontext() if mode is None else mode

"""DcpFusionPass: find, prove, rewrite, report. Runs at post_grad_custom_pre_pass.

Who installs it into Inductor is integrations/inductor.py.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._logging import trace_structured
from torch._logging._internal import trace_log
from torch.fx import Graph, Node

from dcp_inductor.compiler import lowering, transient
from dcp_inductor.compiler.dataflow import Stale
from dcp_inductor.compiler.exchange import Exchange, find_exchanges
from dcp_inductor.compiler.gather_scatter import GatherScatterFinder, find_scatters
from dcp_inductor.compiler.nanlooks import asks_for_nan, question_behind
from dcp_inductor.compiler.proof import Proof, prove, retry_transients
from dcp_inductor.compiler.region import Proposal, Region, RegionFinder, names_of
from dcp_inductor.compiler.rewrite import rewrite
from dcp_inductor.config import Config
from dcp_inductor.errors import FusionMissed
from dcp_inductor.logs import passes as log
from dcp_inductor.op import ranks_in_groups
from dcp_inductor.report import Finding, GraphReport, Miss
from dcp_inductor.version import source_hash

COUNTER = "dcp_a2a_lse_reduce"
# A refusal costs a proof for each region proposed; the right one is among the first.
_MAX_REGIONS = 16


class DcpFusionPass(CustomGraphPass):
    """Rewrites each proved DCP exchange of a post-grad graph into one op.

    For ``torch.compile(options={"post_grad_custom_pre_pass": DcpFusionPass()})``; for
    every compilation of a process use ``dcp_inductor.install()``.

    config: None reads the environment, ``Config.from_env()``.
    listener: called with each graph's GraphReport; not part of the cache key.

    The verdict on a graph depends on the graph, the config and the versions alone,
    all of which are in ``uuid()``: never on a pointer or free memory, and with
    Config.ag_rs alone on this process's ranks in its groups, which then are in it too.
    """

    def __init__(
        self,
        config: Config | None = None,
        listener: Callable[[GraphReport], None] | None = None,
    ) -> None:
        self.config = Config.from_env() if config is None else config
        self.listener = listener
        lowering.register()

    def __call__(self, graph: Graph) -> None:
        if not self.config.enabled:
            return
        num_nodes = len(graph.nodes)
        if not (find_exchanges(graph) or find_scatters(graph)):
            self._tell(GraphReport((), num_nodes, num_nodes))
            return
        retry_transients()
        shown = self.listener is not None or _graphs_are_shown()
        before = _text(graph) if shown else ""
        findings = tuple(_settle(graph, self.config.ag_rs))
        after = _text(graph) if shown else ""
        report = GraphReport(findings, num_nodes, len(graph.nodes), before, after)
        graph.lint()
        _publish(report)
        self._tell(report)
        self._complain(report)

    def uuid(self) -> str:
        """Changes with anything that a verdict or a lowering depends on."""
        # NOTE [own rank] of gather_scatter.py: what a verdict reads of this process is
        # its rank in the group that the graph names. The world's rank doesn't tell it.
        ranks = ranks_in_groups() if self.config.ag_rs else ()
        key = (source_hash(), _versions(), self.config.key(), ranks)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "listener": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _tell(self, report: GraphReport) -> None:
        if self.listener is not None:
            self.listener(report)

    def _complain(self, report: GraphReport) -> None:
        """Act on ``Config.on_miss`` where an exchange stayed unfused."""
        if report.fused == len(report.findings) or self.config.on_miss == "log":
            return
        text = (
            f"{report.summary()}. The model stays right, and unfused there. "
            "dcp_inductor.explain shows the graph; docs/design.md says what is refused."
        )
        if self.config.on_miss == "raise":
            raise FusionMissed(text)
        warnings.warn(text, stacklevel=2)


class _Finders:
    """Every anchor of a graph, with the finder that proposes regions for its kind."""

    def __init__(self, graph: Graph, ag_rs: bool) -> None:
        self._all_to_all = RegionFinder(graph)
        self._scatter = GatherScatterFinder(graph, allowed=ag_rs)
        self.found = self._all_to_all.found + self._scatter.found

    def propose(self, exchange: Exchange) -> Proposal:
        if exchange.kind == "reduce_scatter":
            return self._scatter.propose(exchange)
        return self._all_to_all.propose(exchange)


def _settle(graph: Graph, ag_rs: bool) -> Iterator[Finding]:
    """A finding for each exchange: propose, prove, rewrite.

    Where a rewrite has changed what a proposal rests on, the graph is read again.
    """
    settled: set[Node] = set()
    finder = _Finders(graph, ag_rs)
    asks = any(map(asks_for_nan, graph.nodes))
    while True:
        fresh = [found for found in finder.found if found[0] not in settled]
        if not fresh:
            return
        node, exchange = fresh[0]
        if isinstance(exchange, Miss):
            settled.add(node)
            yield Finding(node.name, "", 0, False, exchange.reason)
            continue
        try:
            proposal = finder.propose(exchange)
        except Stale:
            finder = _Finders(graph, ag_rs)
            continue
        except Exception as error:  # As in _verdict: a bug is no dead compile.
            log.exception("reading the region of %s failed", node.name)
            settled.add(node)
            reason = f"internal error: {type(error).__name__}: {error}"
            yield Finding(node.name, exchange.group_name, 0, False, reason)
            continue
        settled.update(member.node for member in proposal.exchanges)
        yield _attempt(graph, proposal, asks)


def _attempt(graph: Graph, proposal: Proposal, asks: bool) -> Finding:
    """asks: something in the graph asks for NaN."""
    first = proposal.exchanges[0]
    finding = Finding(
        names_of(proposal.exchanges),
        first.group_name,
        _num_ranks(proposal),
        False,
    )
    miss = proposal.miss
    for region in _to_try(proposal.regions):
        verdict = _verdict(region)
        if asks and isinstance(verdict, Proof):
            verdict = _unasked(region, verdict)
        if isinstance(verdict, Proof):
            rewrite(graph, region, verdict)
            counters["inductor"][COUNTER] += 1
            return replace(
                finding,
                num_ranks=region.num_ranks,
                fused=True,
                lse_mode=verdict.lse_mode,
                error=verdict.error,
                tolerance=verdict.tolerance,
                with_lse=region.merged_lse is not None,
                from_memo=verdict.from_memo,
            )
        if verdict.transient:
            # Its peers may fuse this region; fusing the next would be another call.
            counters["inductor"][transient.COUNTER] += transient.Unsaved(1)
            return replace(finding, reason=verdict.reason, transient=True)
        miss = verdict if miss is None else miss
    assert miss is not None, "no region comes with a miss"
    return replace(finding, reason=miss.reason + proposal.hint)


def _to_try(regions: Iterable[Region]) -> Iterator[Region]:
    """The first regions, each with all its guesses at the rank (NOTE [own rank] of
    gather_scatter.py). How many numbers may mean the rank differs between ranks, so
    they aren't counted: one rank would give up before a region that the others fuse.
    """
    num_regions = 0
    for region in regions:
        num_regions += region.rank_site is None
        if num_regions > _MAX_REGIONS:
            return
        yield region


def _num_ranks(proposal: Proposal) -> int:
    """N of the exchange, as far as known: 0 where neither graph nor region says."""
    if proposal.regions:
        return proposal.regions[0].num_ranks
    return proposal.exchanges[0].num_ranks or 0


def _verdict(region: Region) -> Proof | Miss:
    """The proof's verdict; a bug in it is a refusal with a trace, no dead compile."""
    try:
        return prove(region)
    except Exception as error:
        log.exception("the proof of %s failed", region)
        reason = f"internal error in the proof: {type(error).__name__}: {error}"
        return Miss(reason, transient=True)


def _unasked(region: Region, proof: Proof) -> Proof | Miss:
    """NOTE [looks for NaN] of nanlooks.py."""
    if proof.finite:
        return proof
    question = question_behind((region.merged, region.merged_lse))
    if question is None:
        return proof
    return Miss(
        f"{question.name} looks for NaN or infinity behind the merge, which makes some "
        "where the op doesn't, as where all ranks are empty; guard the merge itself"
    )


def _publish(report: GraphReport) -> None:
    """One log line a graph; the graphs as tlparse artifacts and at debug level."""
    log.info("%s", report.summary())
    for finding in report.findings:
        if finding.transient:
            log.warning("this rank alone may be leaving an exchange: %s", finding)
        log.debug("%s", finding)
    for name, text in (("before", report.before), ("after", report.after)):
        trace_structured(
            "artifact",
            metadata_fn=lambda name=name: {  # type: ignore[misc]
                "name": f"dcp_inductor_{name}",
                "encoding": "string",
            },
            payload_fn=lambda text=text: text,  # type: ignore[misc]
        )
        log.debug("graph %s:\n%s", name, text)


def _graphs_are_shown() -> bool:
    """True if a debug log or a structured trace takes the text, which costs time."""
    return log.isEnabledFor(logging.DEBUG) or bool(trace_log.handlers)


def _text(graph: Graph) -> str:
    return graph.python_code("self", verbose=False).src


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = [("torch", str(torch.__version__)), ("git", str(torch.version.git_version))]
    for package in ("triton", "numpy", "flashinfer-python", "sglang"):
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, "none"))
    return tuple(found)

"""Merges spelled as all-gather of the LSEs, correction and reduce-scatter.

    partial_lse -> all_gather --+
                                +--> correction --> reduce_scatter --> merged
    partial_o ------------------+

sglang 0.5.23 calls it ``ag_rs``. Each rank weighs its own partial with all ranks' LSEs,
and the collective adds up. As in region.py, structure only proposes; proof.py runs all
of it, both collectives among it, on N ranks.

NOTE [own rank]
A correction needs its own rank's LSE. Where it takes it from the gathered ones, the
graph holds the rank as a number, and each rank's graph another. So a call that is
passed this process's rank is proposed with that number set free, and the proof runs it
with 0 on rank 0, 1 on rank 1 and so on: what is proved is the program, and not one
rank's copy of it. A number that isn't this process's rank stays what it is, and a
correction that reads another rank's LSE is refuted. The op that comes out holds no
rank. The verdict on a graph then depends on the rank in its group, so with Config.ag_rs
the pass's ``uuid()`` holds this process's rank in every group that a graph may name.
A program in which every rank reads rank 0's LSE is right on rank 0, where nothing tells
it from a right one; only the other ranks refuse it.

NOTE [whose scatter]
Sequence and tensor parallelism gather and reduce-scatter too, far more often than DCP,
and a user of on_miss="raise" wants none of it reported. So a pair is looked at where
gathered fp32 data goes through an exponential or a user kernel, through no matrix
product, and meets a tensor of this rank's own that is as large as what is scattered and
holds a whole number of elements for each gathered one: weights, and what they weigh.
Whether that is right is the proof's; any other pair is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from dcp_inductor.compiler.dataflow import DataFlow, Stale, is_pure_call, numel_of
from dcp_inductor.compiler.exchange import (
    Anchors,
    Exchange,
    read_collective,
    sent_by,
)
from dcp_inductor.compiler.movement import is_constant, is_size
from dcp_inductor.compiler.opaque import is_kernel, parameters_of
from dcp_inductor.compiler.pack import Sources, cuts
from dcp_inductor.compiler.region import (
    Proposal,
    RankSite,
    Region,
    check_partials,
    escape,
    like,
    mutated,
    no_merged,
    packs_more,
)
from dcp_inductor.compiler.symbols import assignments
from dcp_inductor.op import rank_in_group
from dcp_inductor.report import Miss

aten = torch.ops.aten

_OPT_IN = (
    "it gathers LSEs and reduce-scatters, and the fused form rounds differently: "
    "Config(ag_rs=True) or DCP_INDUCTOR_AG_RS=1 allows it"
)


# Ops that make weights of LSEs. A power of a constant is one, a square is none.
_EXPONENTIALS: frozenset[Any] = frozenset(
    {
        aten.exp.default,
        aten.exp2.default,
        aten.expm1.default,
        aten.logaddexp.default,
        aten.logaddexp2.default,
        aten.logsumexp.default,
        aten.pow.Scalar,
        aten.sigmoid.default,
        aten._softmax.default,
    }
)
# Ops that sum products with weights of a model: tensor and sequence parallelism.
_CONTRACTIONS: frozenset[Any] = frozenset(
    {
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.mm.default,
        aten._scaled_mm.default,
    }
)


def find_scatters(graph: Graph) -> Anchors:
    """Each reduce-scatter of what looks like partials weighted with gathered LSEs, in
    order: NOTE [whose scatter]."""
    return [
        (node, scatter)
        for node in graph.nodes
        for scatter in read_collective(node, "reduce_scatter")
        if _combined_gathers(node)
    ]


def _combined_gathers(scatter: Node) -> list[Node]:
    """The gathers behind a reduce-scatter that look like those of its LSEs."""
    behind = _behind(scatter)
    gathers = [node for node in behind if read_collective(node, "all_gather")]
    inside = {*behind}.difference(gathers)
    return [gather for gather in gathers if _looks_combined(gather, inside, scatter)]


def _looks_combined(gather: Node, behind: set[Node], scatter: Node) -> bool:
    """NOTE [whose scatter]. behind: what the reduce-scatter is computed from."""
    lse, sent = sent_by(gather), sent_by(scatter)
    if lse.meta["val"].dtype != torch.float32:
        return False
    between = _computed_from(gather, behind)
    weighted = any(n.target in _EXPONENTIALS or is_kernel(n) for n in between)
    if not weighted or any(node.target in _CONTRACTIONS for node in between):
        return False
    own = [
        source
        for node in between
        for source in node.all_input_nodes
        if source not in between and source is not gather and not is_constant(source)
    ]
    sizes = assignments((lse, sent, *own))[0]
    rows, numel = numel_of(lse, sizes), numel_of(sent, sizes)
    return (
        rows > 0
        and numel % rows == 0
        and any(numel_of(source, sizes) == numel for source in own)
    )


def _computed_from(gather: Node, behind: set[Node]) -> set[Node]:
    """Those of ``behind`` that gathered data is in."""
    found: set[Node] = set()
    todo = [gather]
    while todo:
        for user in todo.pop().users:
            if user in behind and user not in found and not is_size(user):
                found.add(user)
                todo.append(user)
    return found


def _behind(scatter: Node) -> list[Node]:
    """What a reduce-scatter is computed from, back to collectives and inputs; gathers
    among it are the last."""
    seen: dict[Node, None] = {}
    gathers: dict[Node, None] = {}
    todo = [*scatter.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in seen or node in gathers:
            continue
        if read_collective(node, "all_gather"):
            gathers[node] = None
            continue
        seen[node] = None
        if is_pure_call(node) or _is_result(node):
            todo += node.all_input_nodes
    return [*seen, *gathers]


def _is_result(node: Node) -> bool:
    """True for what a gather gives: a wait, or an item of a functionalized call."""
    return any(read_collective(source, "all_gather") for source in node.all_input_nodes)


class GatherScatterFinder:
    """Proposes regions that end in a reduce-scatter, of one graph as it was read.

    allowed: Config.ag_rs.
    """

    def __init__(self, graph: Graph, allowed: bool) -> None:
        self.allowed = allowed
        self.found = find_scatters(graph)
        self._flow = DataFlow(graph, self.found) if self.found else None

    def propose(self, scatter: Exchange) -> Proposal:
        """The regions around ``scatter``. Raises Stale."""
        if scatter.sent._erased:
            raise Stale(scatter.sent.name)
        if not self.allowed:
            return Proposal((scatter,), (), Miss(_OPT_IN))
        found: list[Region | Miss] = []
        hint = ""
        for gather in self._nearest_first(_combined_gathers(scatter.node)):
            if isinstance(gather, Miss):
                found.append(gather)
                continue
            unlike = _unlike(gather, scatter)
            if unlike is not None:
                found.append(unlike)
                continue
            search = self._search(gather, scatter)
            found += search.regions()
            hint = hint or search.hint()
        regions = tuple(region for region in found if isinstance(region, Region))
        if regions:
            return Proposal(regions[0].exchanges, regions, hint=hint)
        return Proposal((scatter,), (), next(m for m in found if isinstance(m, Miss)))

    def _search(self, gather: Exchange, scatter: Exchange) -> _Search:
        assert self._flow is not None, "it found this scatter"
        return _Search(self._flow, gather, scatter)

    def _nearest_first(self, gathers: list[Node]) -> list[Exchange | Miss]:
        """What each exchanges, or why it can't be taken; from the end of the graph."""
        assert self._flow is not None, "it found these"
        return [
            exchange
            for node in self._flow.in_order(gathers)[::-1]
            for exchange in read_collective(node, "all_gather")
        ]


def _unlike(gather: Exchange, scatter: Exchange) -> Miss | None:
    """A miss unless both collectives are of one group, of several ranks."""
    if gather.group_name != scatter.group_name:
        return Miss(
            "LSEs and payload travel over different groups: "
            f"{gather.group_name!r}, {scatter.group_name!r}"
        )
    if gather.num_ranks is None or gather.num_ranks != scatter.num_ranks:
        return Miss("its collectives differ in number of ranks")
    if gather.num_ranks < 2:
        return Miss("its group has one rank: nothing is exchanged")
    return None


class _Search:
    """Looks for regions between one all-gather and one reduce-scatter."""

    def __init__(self, flow: DataFlow, gather: Exchange, scatter: Exchange) -> None:
        self.flow = flow
        self.gather, self.scatter = gather, scatter
        self.between = self._between()

    def _between(self) -> list[Node]:
        """What is computed from gathered data on the way to the reduce-scatter."""
        found: set[Node] = set()
        for node in self.flow.in_order(_behind(self.scatter.node)):
            sources = {*node.all_input_nodes}
            gathered = sources & {*self.gather.received, *found}
            if gathered and node not in self.gather.received and not is_size(node):
                found.add(node)
        return self.flow.in_order(found)

    def regions(self) -> Iterator[Region | Miss]:
        """Every region, or why there is none."""
        own = self.flow.variables(
            source
            for node in self.between
            for source in node.all_input_nodes
            if source not in self.between and source not in self.gather.received
        )
        ways = cuts(self.flow, [self.gather.sent, *own])
        if isinstance(ways, Miss):
            yield ways
            return
        for cut in ways:
            for sources in cut:
                yield from self._with_sources(sources)

    def _with_sources(self, sources: Sources) -> Iterator[Region | Miss]:
        o, lse = sources.partial_o, sources.partial_lse
        made = self.flow.by_reads.get(frozenset({self.scatter}), [])
        candidates = [*self.scatter.received, *made]
        sizes = assignments((o, lse, *self.between, *candidates))[0]
        numels, num_ranks = (numel_of(o, sizes), numel_of(lse, sizes)), _n(self.scatter)
        miss = check_partials(o, lse, numels, num_ranks)
        if miss is not None:
            yield miss
            return
        ends = like(candidates, o, numels[0] // num_ranks, sizes)
        if not ends:
            yield no_merged(o, numels[0] // num_ranks, num_ranks)
        for end in ends:
            region = self._region(sources, end)
            if isinstance(region, Miss):
                yield region
            else:
                yield from self._with_ranks(region)

    def _region(self, sources: Sources, merged: Node) -> Region | Miss:
        """The region that ends at ``merged``, if nothing else leaves it."""
        between = [
            node
            for node in self.flow.with_constants(self.between)
            if node not in sources.pack
        ]
        after = self.flow.back((merged,))
        made = [*self.gather.received, *self.between, *self.scatter.received, *after]
        inside = {*made, *between, self.scatter.node}
        for node in made:
            for user in node.users:
                leaves = user not in inside and node is not merged
                if leaves and not self.flow.constant(node):
                    return escape(node, user, node in self.gather.received)
        region = Region(
            (self.gather, self.scatter),
            sources.partial_o,
            sources.partial_lse,
            sources.pack,
            (*between, *after),
            merged,
            None,
            num_between=len(between),
        )
        for miss in (mutated(self.flow, region), packs_more(region)):
            if miss is not None:
                return miss
        return region

    def _with_ranks(self, region: Region) -> Iterator[Region]:
        """The region as it stands, and with each number set free that may be this
        process's rank: NOTE [own rank]."""
        yield region
        rank = rank_in_group(region.group_name)
        if rank is None:
            return
        for node in self.between:
            for parameter in _passed(node, rank):
                yield replace(region, rank_site=RankSite(node, parameter))

    def hint(self) -> str:
        """How a number of the correction was taken that may mean a rank."""
        numbers = range(_n(self.gather))
        if not any(_passed(node, n) for node in self.between for n in numbers):
            return ""
        rank = rank_in_group(self.gather.group_name)
        mine = "isn't known here" if rank is None else f"is {rank}"
        return (
            f" (a number stands for a rank only where it is this one's, which {mine})"
        )


def _passed(node: Node, rank: int) -> Iterable[str]:
    """The parameters of a call that are passed ``rank`` and may mean it."""
    if is_kernel(node):
        return parameters_of(node, rank)
    if node.target is aten.select.int and node.args[2] == rank:
        return ("index",)
    return ()


def _n(exchange: Exchange) -> int:
    assert exchange.num_ranks is not None, "_unlike() has looked"
    return exchange.num_ranks

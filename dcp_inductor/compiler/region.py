"""From an exchange back to the two partials and forward to the merged result.

Structure only proposes here: nothing in this file knows what a merge looks like, it
follows data and counts elements. Whether the region means the merge is proof.py's.

    partial_o ---+                                            +--> merged
                 +-> movement -> exchange(s) -> anything -> --+
    partial_lse -+                                            +--> merged_lse (if used)
        (pack)                                  (combine)

NOTE [number of ranks]
A host's op names its group and not how many ranks are in it. Then N is what the sizes
propose: a merge over N ranks gives a result of 1/N of the elements of the partial
output, so each closed node with such a part of them proposes one N. The proof runs the
region for that N; at run time the op checks it against the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch.fx import Graph, Node

from dcp_inductor.compiler.dataflow import DataFlow, Stale, dtype_of, numel_of
from dcp_inductor.compiler.exchange import Exchange, find_exchanges
from dcp_inductor.compiler.movement import is_mover
from dcp_inductor.compiler.opaque import is_kernel, is_opaque
from dcp_inductor.compiler.pack import Sources, cuts
from dcp_inductor.compiler.symbols import Assignment, assignments
from dcp_inductor.merge import PARTIAL_DTYPES
from dcp_inductor.report import Miss

# A region is looked for among this many merged results and merged LSEs of one
# exchange; real combines have one of each within the first few candidates.
_MAX_CANDIDATES = 16
# A merged LSE is read from outside the merge, and made late in it.
_MAX_MERGED_LSE = 4


@dataclass(frozen=True)
class RankSite:
    """A number of the graph that is this rank's: ``parameter`` of the call ``node``."""

    node: Node
    parameter: str


@dataclass(frozen=True)
class Region:
    """A candidate for the op.

    pack and combine are in graph order; partial_o and partial_lse are in neither,
    merged and merged_lse are in combine, or received. merged_lse is None where nothing
    outside the region reads it. num_between: how many nodes of combine come before the
    last exchange (gather_scatter.py); the others come after all of them.
    """

    exchanges: tuple[Exchange, ...]
    partial_o: Node
    partial_lse: Node
    pack: tuple[Node, ...]
    combine: tuple[Node, ...]
    merged: Node
    merged_lse: Node | None
    num_between: int = 0
    rank_site: RankSite | None = None

    @property
    def num_ranks(self) -> int:
        num_ranks = self.exchanges[0].num_ranks
        assert num_ranks is not None, "a region is proposed for a number of ranks"
        return num_ranks

    @property
    def group_name(self) -> str:
        return self.exchanges[0].group_name

    @property
    def nodes(self) -> Iterator[Node]:
        """Every node whose value the region reads or makes, in graph order."""
        return chain(
            (self.partial_o, self.partial_lse),
            self.pack,
            (exchange.node for exchange in self.exchanges),
            self.combine,
        )

    @property
    def steps(self) -> Iterator[Node | Exchange]:
        """All of it but the partials, in an order in which it can run."""
        *first, last = self.exchanges
        between, after = (
            self.combine[: self.num_between],
            self.combine[self.num_between :],
        )
        return chain(self.pack, first, between, (last,), after)

    def __str__(self) -> str:
        return f"{names_of(self.exchanges)} on group {self.group_name!r}"


def names_of(exchanges: Iterable[Exchange]) -> str:
    """The collectives by name; one may make several exchanges."""
    names = dict.fromkeys(exchange.node.name for exchange in exchanges)
    return " and ".join(names)


@dataclass(frozen=True)
class Proposal:
    """The regions to try for a set of exchanges, best first; empty with a miss.

    hint: what to say behind the reason if none of the regions is proved.
    """

    exchanges: tuple[Exchange, ...]
    regions: tuple[Region, ...]
    miss: Miss | None = None
    hint: str = ""


@dataclass(frozen=True, order=True)
class _Ranked:
    """A miss with how much it tells: the most telling one is reported."""

    rank: int
    miss: Miss = field(compare=False)


_NOT_TWO, _NO_RESULT, _INNER_ESCAPE, _TELLING = range(4)


class RegionFinder:
    """Proposes regions for the exchanges of one graph, as it was read."""

    def __init__(self, graph: Graph) -> None:
        self._flow = DataFlow(graph, find_exchanges(graph))
        self.found = self._flow.found

    def propose(self, exchange: Exchange) -> Proposal:
        """The regions around ``exchange``, which may take other exchanges in.

        Raises Stale if a rewrite has changed what it would look at.
        """
        if exchange.sent._erased:
            raise Stale(exchange.sent.name)
        if exchange.num_ranks is not None and exchange.num_ranks < 2:
            miss = Miss("its group has one rank: nothing is exchanged")
            return Proposal((exchange,), (), miss)
        misses: list[_Ranked] = []
        together = [reads for reads in self._flow.by_reads if exchange in reads]
        for reads in sorted(together, key=len) or [frozenset({exchange})]:
            exchanges = tuple(sorted(reads, key=lambda e: self._flow.place[e.node]))
            found = list(self._regions(exchanges))
            regions = tuple(r for r in found if isinstance(r, Region))
            if regions:
                return Proposal(exchanges, regions)
            misses += (r for r in found if isinstance(r, _Ranked))
        return Proposal((exchange,), (), max(misses).miss)

    def _regions(self, exchanges: tuple[Exchange, ...]) -> Iterator[Region | _Ranked]:
        """Every region over just these exchanges, or why there is none."""
        groups = {exchange.group_name for exchange in exchanges}
        if len(groups) > 1:
            names = ", ".join(sorted(map(repr, groups)))
            yield _Ranked(
                _TELLING, Miss(f"payload and LSE travel over different groups: {names}")
            )
            return
        if len({exchange.num_ranks for exchange in exchanges}) > 1:
            yield _Ranked(_TELLING, Miss("its exchanges differ in number of ranks"))
            return
        ways = cuts(self._flow, [exchange.sent for exchange in exchanges])
        if isinstance(ways, Miss):
            yield _Ranked(_NOT_TWO, ways)
            return
        settled = -1
        for cut in ways:
            num_kernels = sum(map(is_kernel, cut[0].pack))
            if num_kernels == settled:
                continue
            found = [
                r for sources in cut for r in self._with_sources(exchanges, sources)
            ]
            yield from found
            if any(isinstance(r, Region) or r.rank > _NO_RESULT for r in found):
                settled = num_kernels

    def _with_sources(
        self, exchanges: tuple[Exchange, ...], sources: Sources
    ) -> Iterator[Region | _Ranked]:
        """The regions between these partials and any result, for each N proposed."""
        o = sources.partial_o
        closed = [
            node
            for reads, nodes in self._flow.by_reads.items()
            if reads <= {*exchanges}
            for node in nodes
        ]
        sizes = assignments((o, sources.partial_lse, *closed))[0]
        of_all = self._flow.by_reads.get(frozenset(exchanges), [])
        counts = _rank_counts(exchanges, o, of_all, sizes)
        if not counts:
            yield _Ranked(_NO_RESULT, _no_part(o))
        for num_ranks in counts:
            of_n = tuple(replace(e, num_ranks=num_ranks) for e in exchanges)
            yield from self._between(of_n, sources, of_all, closed, sizes)

    def _between(
        self,
        exchanges: tuple[Exchange, ...],
        sources: Sources,
        of_all: list[Node],
        closed: list[Node],
        sizes: Assignment,
    ) -> Iterator[Region | _Ranked]:
        """The regions from ``sources`` to results of the right size.

        of_all: closed nodes that read all the exchanges; closed: any of them.
        """
        o, lse = sources.partial_o, sources.partial_lse
        num_ranks = exchanges[0].num_ranks
        assert num_ranks is not None, "_with_sources() has put it there"
        numels = numel_of(o, sizes), numel_of(lse, sizes)
        miss = check_partials(o, lse, numels, num_ranks)
        if miss is not None:
            yield _Ranked(_NO_RESULT, miss)
            return
        merged = like(of_all, o, numels[0] // num_ranks, sizes)[:_MAX_CANDIDATES]
        maybe_lse = like(closed, lse, numels[1] // num_ranks, sizes)
        if not merged:
            yield _Ranked(_NO_RESULT, no_merged(o, numels[0] // num_ranks, num_ranks))
        for end in merged:
            yield self._closed_region(exchanges, sources, end, None)
        for end in merged:
            inside = {*self._flow.back((end,))}
            leaving = [
                n for n in maybe_lse if n is not end and not inside >= {*n.users}
            ]
            for end_lse in leaving[-_MAX_MERGED_LSE:][::-1]:
                yield self._closed_region(exchanges, sources, end, end_lse)

    def _closed_region(
        self,
        exchanges: tuple[Exchange, ...],
        sources: Sources,
        merged: Node,
        merged_lse: Node | None,
    ) -> Region | _Ranked:
        """The region that ends at ``merged``, if nothing else leaves it."""
        ends = [end for end in (merged, merged_lse) if end is not None]
        combine = self._flow.back(ends)
        results = [node for exchange in exchanges for node in exchange.received]
        inside = {*combine, *results, *ends}
        leaks = [
            (node, user)
            for node in chain(results, combine)
            if node not in ends and not self._flow.constant(node)
            for user in node.users
            if user not in inside
        ]
        for node, user in leaks:
            if user not in self._flow.reads:
                return _Ranked(
                    _TELLING, escape(node, user, node in self._flow.of_result)
                )
        if leaks:
            node, user = leaks[0]
            return _Ranked(
                _INNER_ESCAPE, escape(node, user, node in self._flow.of_result)
            )
        region = Region(
            exchanges,
            sources.partial_o,
            sources.partial_lse,
            sources.pack,
            tuple(combine),
            merged,
            merged_lse,
        )
        found = mutated(self._flow, region), self._too_early(region), packs_more(region)
        for miss in found:
            if miss is not None:
                return _Ranked(_TELLING, miss)
        return region

    def _too_early(self, region: Region) -> Miss | None:
        """A miss if a result is read before the last exchange, where the op will be."""
        last = self._flow.place[region.exchanges[-1].node]
        for end in (region.merged, region.merged_lse):
            for user in () if end is None else end.users:
                if self._flow.place[user] < last and user not in region.combine:
                    return Miss(f"{user.name} reads {end} before the last exchange")
        return None


def mutated(flow: DataFlow, region: Region) -> Miss | None:
    """A miss if a mutation stands between the pack and the merged result."""
    nodes = flow.variables(chain(region.pack, region.combine))
    places = [flow.place[n] for n in (*nodes, *(e.node for e in region.exchanges))]
    for node in flow.mutations:
        if min(places) < flow.place[node] < max(places):
            return Miss(f"{node.name} mutates a tensor between pack and merge")
    return None


def packs_more(region: Region) -> Miss | None:
    """A miss if a kernel of the pack makes something else too: it would have to stay
    beside the op."""
    exchanges = (exchange.node for exchange in region.exchanges)
    inside = {*region.pack, *exchanges, *region.combine}
    for node in filter(is_opaque, region.pack):
        for user in node.users:
            if user not in inside:
                return Miss(f"{node.name}, which packs, is also read by {user.name}")
    return None


def _rank_counts(
    exchanges: tuple[Exchange, ...], o: Node, of_all: list[Node], sizes: Assignment
) -> list[int]:
    """N of the exchanges, or what the sizes propose: NOTE [number of ranks]."""
    known = exchanges[0].num_ranks
    if known is not None:
        return [known]
    numel, dtype = numel_of(o, sizes), o.meta["val"].dtype
    parts = {numel_of(n, sizes) for n in of_all if dtype_of(n) == dtype} - {0}
    counts = {numel // part for part in parts if numel % part == 0}
    sent = [numel_of(exchange.sent, sizes) for exchange in exchanges]
    return sorted(n for n in counts if n > 1 and all(s % n == 0 for s in sent))


def _no_part(partial_o: Node) -> Miss:
    return Miss(
        f"nothing made from its result alone is of {dtype_of(partial_o)} and a whole "
        f"part of {partial_o.name}, which a merge of it over several ranks would be"
    )


def check_partials(
    partial_o: Node, partial_lse: Node, numels: tuple[int, int], num_ranks: int
) -> Miss | None:
    o, lse = partial_o.meta["val"], partial_lse.meta["val"]
    if numels[0] == 0:
        return Miss("the batch is empty")
    if lse.dtype != torch.float32:
        return Miss(f"the LSE {partial_lse.name} is {lse.dtype}, not fp32")
    if o.dtype not in PARTIAL_DTYPES:
        return Miss(f"the partial output {partial_o.name} is {o.dtype}")
    if numels[1] < 1 or numels[0] % numels[1]:
        return Miss(
            f"{partial_o.name} has {numels[0]} elements and {partial_lse.name} "
            f"{numels[1]}: an LSE belongs to each row of the partial output"
        )
    if numels[1] % num_ranks:
        return Miss(f"{numels[1]} rows can't be shared by {num_ranks} ranks")
    return None


def like(
    closed: list[Node], partial: Node, numel: int, sizes: Assignment
) -> list[Node]:
    """Closed nodes with ``numel`` elements and the dtype of ``partial``.

    A pure view of an earlier candidate stands for the same result and is left out.
    """
    dtype = partial.meta["val"].dtype
    found: list[Node] = []
    for node in closed:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != dtype:
            continue
        if numel_of(node, sizes) != numel:
            continue
        if is_mover(node) and any(source in found for source in node.all_input_nodes):
            continue
        found.append(node)
    return found


def no_merged(partial_o: Node, numel: int, num_ranks: int) -> Miss:
    dtype = partial_o.meta["val"].dtype
    return Miss(
        f"nothing made from its result alone has {numel} elements of {dtype}, which "
        f"the merge of {partial_o.name} over {num_ranks} ranks would have"
    )


def escape(node: Node, user: Node, received: bool) -> Miss:
    what = "the received buffer" if received else f"{node.name}, inside the merge,"
    reader = "returned" if user.op == "output" else f"also read by {user.name}"
    return Miss(f"{what} is {reader}")

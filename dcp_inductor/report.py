"""Report, Finding and Miss: what a pass met and what it decided, as values.

Who finds, proves and rewrites is compiler/; this file only holds and prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Miss:
    """A refusal, with its reason. Falsy, so ``found or miss`` chains read well.

    exchange: the collective's node, as ``all_to_all_single on group '0'``; "" until
    the pass has attached it. transient: this moment's and this machine's reason, not
    the graph's; another rank, or the next compilation, may fuse.
    """

    reason: str
    exchange: str = ""
    transient: bool = False

    def __bool__(self) -> bool:
        return False

    def at(self, exchange: str) -> Miss:
        """The same reason, attached to the exchange that was refused."""
        return Miss(self.reason, exchange, self.transient)

    def __str__(self) -> str:
        return f"{self.exchange}: {self.reason}" if self.exchange else self.reason


@dataclass(frozen=True)
class Finding:
    """One exchange of one graph: fused, or refused with a reason.

    exchange: which collectives, readable. group: its name in the graph.
    num_ranks: N; 0 where a host's op names a group alone and nothing was proposed for
    it. lse_mode, error, tolerance: of the proof, None where there was none; both are
    relative, on ordinary LSEs; probes beyond them have their own tolerance.
    from_memo: the same region was proved before in this process. transient: as a
    Miss is.
    """

    exchange: str
    group: str
    num_ranks: int
    fused: bool
    reason: str = ""
    lse_mode: str | None = None
    error: float | None = None
    tolerance: float | None = None
    with_lse: bool = False
    from_memo: bool = False
    transient: bool = False

    def __str__(self) -> str:
        size = f", {self.num_ranks} ranks" if self.num_ranks else ""
        head = f"{self.exchange}{size}"
        if not self.fused:
            return f"refused  {head}: {self.reason}"
        proof = f"{self.lse_mode}, error {self.error:.1e} of {self.tolerance:.1e}"
        known = ", proved before" if self.from_memo else ""
        lse = " with merged LSE" if self.with_lse else ""
        return f"fused    {head}{lse}: {proof}{known}"


@dataclass(frozen=True)
class GraphReport:
    """What the pass did to one graph. before and after are printed graphs, or ""."""

    findings: tuple[Finding, ...]
    num_nodes_before: int
    num_nodes_after: int
    before: str = ""
    after: str = ""

    @property
    def fused(self) -> int:
        return sum(finding.fused for finding in self.findings)

    def summary(self) -> str:
        """One line: how many of how many, and the reasons of the rest, counted."""
        line = f"fused {self.fused} of {len(self.findings)} exchanges"
        reasons: dict[str, int] = {}
        for finding in self.findings:
            if not finding.fused:
                reasons[finding.reason] = reasons.get(finding.reason, 0) + 1
        if reasons:
            line += "; left: " + "; ".join(
                f"{count} x {reason}" for reason, count in reasons.items()
            )
        return line


@dataclass
class Report:
    """What ``explain`` returns: every exchange of every graph of a function.

    graphs: one GraphReport a compiled graph, those without an exchange included.
    breaks: why Dynamo split the function into several graphs.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    @property
    def exchanges(self) -> list[Finding]:
        """Every exchange met, fused or not, in graph order."""
        return [finding for graph in self.graphs for finding in graph.findings]

    @property
    def fused(self) -> int:
        """How many exchanges became one op."""
        return sum(graph.fused for graph in self.graphs)

    @property
    def refused(self) -> list[Miss]:
        """The exchanges that were left as they are, each with its reason."""
        return [
            Miss(finding.reason, finding.exchange, finding.transient)
            for finding in self.exchanges
            if not finding.fused
        ]

    def __str__(self) -> str:
        nodes = sum(graph.num_nodes_before for graph in self.graphs)
        after = sum(graph.num_nodes_after for graph in self.graphs)
        lines = [
            f"{len(self.graphs)} graphs, {nodes} -> {after} nodes, "
            f"{len(self.exchanges)} exchanges, {self.fused} fused"
        ]
        lines += [f"  {finding}" for finding in self.exchanges]
        lines += [f"  graph break: {reason}" for reason in self.breaks]
        if not self.exchanges:
            lines.append(
                "  No exchange of a kind that the pass knows. It sees collectives that "
                "torch.compile captures; one inside an opaque op or behind a graph "
                "break is invisible."
            )
        return "\n".join(lines)

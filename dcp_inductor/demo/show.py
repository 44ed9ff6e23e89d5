"""The screen of the demo: its plan, the progress of the ranks, and the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from dcp_inductor.demo.messages import Accuracy, Progress, RankRecord, RunRecord
from dcp_inductor.demo.settings import DemoSettings
from dcp_inductor.report import Finding

_CAVEATS = {
    "gloo": "CPU times say nothing about GPUs.",
    "nccl": "The model is small and runs without CUDA graphs, so they hold the host's "
    "launches too.",
}
_BASES = {"basee": "base e", "base2": "base 2"}


def plan(console: Console, settings: DemoSettings, device_type: str) -> None:
    """What will run, before it does."""
    s, shape = settings, settings.shape
    console.print(Text("dcp-inductor demo", style="bold"))
    _say(
        console,
        f"{_count(s.num_ranks, 'rank')} on {device_type}; "
        f"{_count(s.num_layers, 'MLA layer')} of {shape.num_heads} heads, latent "
        f"{shape.latent_dim} + {shape.rope_dim}; {s.dtype}, LSE in "
        f"{_BASES[s.lse_mode]}; {s.num_steps} steps of "
        f"{_count(s.batch_size, 'sequence')}.",
    )
    if s.num_ranks == 1:
        _say(
            console,
            "One rank holds every head and the whole KV cache: nothing is exchanged, "
            "so there is nothing to fuse. --ranks 2 shows the exchange.",
        )
    else:
        _say(
            console,
            f"Token t of the KV cache lies on rank t % {s.num_ranks}; behind the "
            f"exchange each rank has {shape.num_heads // s.num_ranks} of the heads.",
        )


@contextlib.contextmanager
def progress(
    console: Console, settings: DemoSettings
) -> Iterator[Callable[[Progress], None]]:
    """A bar for each rank while the block runs; yields what to tell it."""
    bars = Bars(
        TextColumn("rank {task.fields[rank]}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    with bars:
        tasks = [
            bars.add_task("starting", rank=rank, total=None)
            for rank in range(settings.num_ranks)
        ]

        def listen(message: Progress) -> None:
            bars.update(
                tasks[message.rank],
                completed=message.done,
                total=message.total,
                description=message.doing,
            )

        yield listen


def result(
    console: Console,
    settings: DemoSettings,
    records: Sequence[RankRecord],
    problems: Sequence[str],
) -> None:
    """Findings, the two runs side by side, and the verdict."""
    first = records[0]
    if first.fused.findings:
        console.print(_findings(first.fused.findings))
    console.print(_runs(settings, records))
    _say(console, _about_errors(settings, first), style="dim")
    _say(console, _about_times(settings, first), style="dim")
    console.print()
    if problems:
        _say(console, "Not right:", style="bold red")
        for problem in problems:
            _say(console, f"- {problem}.", style="red")
    else:
        _say(console, _all_right(settings, first), style="bold green")


def _findings(findings: Sequence[Finding]) -> Table:
    table = _table("Exchanges that the pass found")
    for heading in ("exchange", "verdict", "proved base", "error / tolerance"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.exchange, *_verdict(finding))
    return table


def _verdict(finding: Finding) -> tuple[str | Text, ...]:
    if not finding.fused:
        return Text("refused", style="red"), "-", "-"
    assert finding.lse_mode is not None, "a fused exchange was proved"
    return (
        Text("fused", style="green"),
        _BASES[finding.lse_mode],
        f"{finding.error:.1e} / {finding.tolerance:.1e}",
    )


def _runs(settings: DemoSettings, records: Sequence[RankRecord]) -> Table:
    plain, fused = records[0].plain, records[0].fused
    table = _table("Decoding")
    table.add_column("")
    for run in (plain, fused):
        table.add_column(run.name)
    table.add_row("graph, nodes", *_num_nodes(fused))
    table.add_row("exchanges fused", "-", _num_fused(settings, fused))
    table.add_row("tokens", *map(_tokens, (plain, fused)))
    table.add_row("logit error / tolerance", *map(_error, (plain, fused)))
    table.add_row(
        "median time a step",
        f"{max(record.plain.median_ms for record in records):.2f} ms",
        f"{max(record.fused.median_ms for record in records):.2f} ms",
    )
    return table


def _num_nodes(fused: RunRecord) -> tuple[str, str]:
    if not fused.graphs:
        return "not looked at", "not looked at"
    before = sum(graph.num_nodes_before for graph in fused.graphs)
    after = sum(graph.num_nodes_after for graph in fused.graphs)
    return str(before), str(after)


def _num_fused(settings: DemoSettings, fused: RunRecord) -> str:
    if not settings.num_exchanges:
        return "none to fuse"
    num_fused = sum(finding.fused for finding in fused.findings)
    return f"{num_fused} of {settings.num_exchanges}"


def _accuracy(run: RunRecord) -> Accuracy:
    assert run.accuracy is not None, "rank 0 compares"
    return run.accuracy


def _tokens(run: RunRecord) -> Text:
    accuracy = _accuracy(run)
    if not accuracy.num_differing:
        return Text(f"all {accuracy.num_tokens} equal", style="green")
    if accuracy.only_ties and accuracy.within_rounding:
        return Text(f"equal up to {_ties(accuracy.num_differing)}", style="yellow")
    return Text(
        f"{accuracy.num_differing} of {accuracy.num_tokens} differ", style="red"
    )


def _error(run: RunRecord) -> Text:
    accuracy = _accuracy(run)
    style = "" if accuracy.within_rounding else "red"
    return Text(f"{accuracy.error:.1e} / {accuracy.tolerance:.1e}", style=style)


def _about_errors(settings: DemoSettings, first: RankRecord) -> str:
    fused = _accuracy(first.fused)
    text = (
        "Tokens and logits are held against one rank that has the whole cache, eager, "
        f"fp64, same weights, fed with the run's tokens. One rank in {settings.dtype} "
        f"is off by {fused.one_rank_error:.1e}; a run may be off by 3 times that."
    )
    gap = max(_accuracy(run).largest_gap for run in (first.plain, first.fused))
    if gap > 0:
        text += (
            f" A tie: in fp64 the logits of the two tokens are at most {gap:.1e} "
            f"apart, which {settings.dtype} doesn't tell apart."
        )
    return text


def _about_times(settings: DemoSettings, first: RankRecord) -> str:
    return (
        f"Times: {first.backend}, {first.device}; the median of {settings.num_steps} "
        f"steps on the slowest rank, both runs in turn. {_CAVEATS[first.backend]}"
    )


def _all_right(settings: DemoSettings, first: RankRecord) -> str:
    ties = sum(_accuracy(run).num_differing for run in (first.plain, first.fused))
    tokens = "equal up to ties" if ties else "equal"
    if not settings.num_exchanges:
        return f"All right: nothing to exchange, tokens {tokens}."
    return (
        f"All right: {settings.num_exchanges} of {settings.num_exchanges} exchanges "
        f"proved and fused on every rank, tokens {tokens}."
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def _ties(number: int) -> str:
    return "a tie" if number == 1 else f"{number} ties"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

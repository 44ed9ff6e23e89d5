"""The doctor's screen: a line of heading, then a block for each subject."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_inductor.doctor.checkup import BackendState, Checkup, Link, Reserved

_MIB = 2**20


def screen(console: Console, found: Checkup) -> None:
    """All of it; long lines wrap behind their label."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for label, lines in _blocks(found):
        for number, line in enumerate(lines):
            grid.add_row(label if number == 0 else "", line)
    console.print(Text(_heading(found), style="bold green" if found.fused else "bold"))
    console.print(grid)


def _heading(found: Checkup) -> str:
    taken = [state.name for state in found.backends if state.taken]
    if not taken:
        return f"No exchange could run: {found.asked_backend} was asked for."
    off = "" if found.enabled else " (but DCP_INDUCTOR=0: nothing is fused)"
    return f"Exchanges would run on {taken[0]}{off}."


def _blocks(found: Checkup) -> list[tuple[str, list[Text]]]:
    versions = ", ".join(
        f"{name} {version or '-'}" for name, version in found.versions.items()
    )
    return [
        ("versions", [Text(versions)]),
        ("cards", _cards(found) or [Text("none", "yellow")]),
        ("links", _links(found.links) or [Text("none")]),
        ("symmetric memory", [Text(found.symmetric_memory)]),
        ("backends", [_backend(state) for state in found.backends]),
        ("workspaces", _workspaces(found)),
        ("reserved now", [*map(_reserved, found.reserved)] or [Text("nothing")]),
        ("hooks", _hooks(found)),
        ("caches", [Text(", ".join(f"{k}: {v}" for k, v in found.caches.items()))]),
        ("hosts", _hosts(found)),
        ("next", [Text(f"- {sentence}") for sentence in found.next]),
    ]


def _cards(found: Checkup) -> list[Text]:
    """Equal cards on one line."""
    kinds: dict[str, list[int]] = {}
    for card in found.cards:
        multicast = {True: ", multicast", False: "", None: ""}[card.multicast]
        memory = f"{card.memory_mib / 1024:.0f} GiB"
        kind = f"{card.name}, capability {card.capability}, {memory}{multicast}"
        kinds.setdefault(kind, []).append(card.index)
    return [Text(f"{_numbers(which)}: {kind}") for kind, which in kinds.items()]


def _numbers(which: list[int]) -> str:
    return ", ".join(map(str, which))


def _links(links: list[Link]) -> list[Text]:
    """Equal links on one line."""
    kinds: dict[tuple[bool, int | None], list[str]] = {}
    for link in links:
        pair = "-".join(map(str, link.cards))
        kinds.setdefault((link.peer_access, link.nvlinks), []).append(pair)
    lines = []
    for (peer_access, nvlinks), pairs in kinds.items():
        count = "NVLinks not known" if nvlinks is None else f"{nvlinks} NVLinks"
        access = "peer access" if peer_access else "no peer access"
        style = "" if peer_access else "yellow"
        lines.append(Text(f"{access}, {count}: {', '.join(pairs)}", style))
    return lines


def _backend(state: BackendState) -> Text:
    if state.taken:
        return Text(f"{state.name}: taken", "green")
    if state.why_not is None:
        return Text(f"{state.name}: available")
    return Text(f"{state.name}: no, {state.why_not}", "yellow")


def _workspaces(found: Checkup) -> list[Text]:
    need = found.need
    lines = [
        Text(
            f"for {need.max_tokens} tokens, {need.num_heads} heads of "
            f"{need.head_dim}, {need.dtype}, {need.num_ranks} ranks, on each rank, of "
            "one lane and one capture stream:"
        )
    ]
    for state in found.backends:
        if state.total_bytes is None:
            text = "not known here"
        elif state.num_slots:
            text = (
                f"{state.num_slots} slots of {_mib(state.slot_bytes or 0)}, "
                f"together {_mib(state.total_bytes)}"
            )
        else:
            text = "none"
        lines.append(Text(f"{state.name}: {text}"))
    return lines


def _reserved(found: Reserved) -> Text:
    return Text(
        f"group {found.group}: {found.backend}, {found.max_tokens} tokens, "
        f"{found.num_heads} heads of {found.head_dim}, {found.dtype}, {found.lanes} "
        f"lane(s), {found.slots} slots, {_mib(found.total_bytes)}"
    )


def _hooks(found: Checkup) -> list[Text]:
    """The hooks in use; ours even when it is empty."""
    lines = [
        Text(f"{hook.name}: {', '.join(hook.passes)}")
        for hook in found.hooks
        if hook.passes
    ]
    return lines or [Text("no pass on any, in this process")]


def _hosts(found: Checkup) -> list[Text]:
    lines = []
    for host in found.hosts:
        note = f", {host.note}" if host.note else ""
        lines.append(Text(f"{host.name} {host.version or 'not installed'}{note}"))
    return lines


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"

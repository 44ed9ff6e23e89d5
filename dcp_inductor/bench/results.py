"""A result of the exchange benchmark: read, checked, held against the goals, as text.

Imports no torch and no rich: ranks print it, and so does a machine without a GPU.
How a result is measured is exchange.py's.

A stored result is JSON, times in microseconds a call:

    {"machine": {"card": .., "torch": .., "triton": .., "nccl": ..}, "ranks": N,
     "tables": {heads a rank: {B: {variant: us}}},
     "host_us": {heads a rank: {what: us}}}                                (optional)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_inductor.bench.settings import HEAD_DIM
from dcp_inductor.errors import BadInput

FLOORS = ("flag", "push")
# What the goals are about: the model's own code under torch.compile with the pass.
JUDGED = "pass"
_BASELINES: tuple[str, ...] = ("chain", "compiled")
_HOST_CALL, _HOST_LAUNCH = "generated call", "bare launch"

Row = dict[str, float]
Table = dict[int, Row]


@dataclass(frozen=True)
class Results:
    """tables, host_us: microseconds by heads a rank, the first also by B; variants
    keep the order in which they were measured."""

    machine: dict[str, str]
    ranks: int
    tables: dict[int, Table]
    host_us: dict[int, Row]

    @classmethod
    def of(cls, payload: Any) -> Results:
        """From a payload as measured or as parsed. Raises BadInput."""
        try:
            found = cls(
                {str(key): str(text) for key, text in payload["machine"].items()},
                int(payload["ranks"]),
                {
                    int(heads): {int(b): _row(row) for b, row in rows.items()}
                    for heads, rows in payload["tables"].items()
                },
                {int(h): _row(row) for h, row in payload.get("host_us", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(
                f"This is no result of the exchange benchmark: {_why(error)}. It has "
                "machine, ranks and tables, as `dcp-inductor bench --json FILE` "
                "writes them."
            ) from error
        found._check()
        return found

    @classmethod
    def read(cls, path: str) -> Results:
        """From a file. Raises BadInput that names it."""
        try:
            return cls.of(json.loads(Path(path).read_text()))
        except BadInput as error:
            raise BadInput(f"{path} was asked for. {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{path} was asked for and can't be read ({error}). Pass a file that "
                "`dcp-inductor bench --json FILE` has written."
            ) from error
        except json.JSONDecodeError as error:
            raise BadInput(
                f"{path} was asked for and is no JSON ({error}). Pass a file that "
                "`dcp-inductor bench --json FILE` has written."
            ) from error

    def write(self, path: str) -> None:
        """As ``read`` takes it. Raises BadInput where the file can't be."""
        payload: dict[str, Any] = {
            "machine": self.machine,
            "ranks": self.ranks,
            "tables": self.tables,
        }
        if self.host_us:
            payload["host_us"] = self.host_us
        try:
            Path(path).write_text(json.dumps(payload, indent=1))
        except OSError as error:
            raise BadInput(
                f"--json {path} was asked for and can't be written ({error}). Pass a "
                "path in a folder that exists."
            ) from error

    def _check(self) -> None:
        if not self.tables or not all(self.tables.values()):
            raise BadInput("This result of the exchange benchmark holds no row.")
        for heads, rows in self.tables.items():
            variants = {tuple(row) for row in rows.values()}
            if len(variants) != 1 or not all(variants):
                raise BadInput(
                    f"The rows of {heads} heads a rank hold different variants, so "
                    "they can't stand in one table. Measure them again in one run."
                )


def _row(row: Mapping[str, Any]) -> Row:
    times = {str(name): float(us) for name, us in row.items()}
    for name, us in times.items():
        if not 0 < us < float("inf"):
            raise ValueError(f"{name} took {us} us")
    return times


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def floor_us(row: Row) -> float | None:
    """The larger floor of a row; None where a floor wasn't measured."""
    if any(name not in row for name in FLOORS):
        return None
    return max(row[name] for name in FLOORS)


@dataclass(frozen=True)
class Goal:
    """``judged`` takes at most ``at_most`` times what ``against`` takes.

    against: a variant, or "floor". batch: at this B, or None for every B measured.
    """

    against: str
    at_most: float
    batch: int | None = None
    judged: str = JUDGED

    def __str__(self) -> str:
        where = "every B" if self.batch is None else f"B = {self.batch}"
        return (
            f"{self.judged} at most {ratio(self.at_most)} of {self.against} at {where}"
        )


# Set for two H200s, 16 and 64 heads a rank.
GOALS = (
    Goal("compiled", 1 / 6, 1),
    Goal("compiled", 1 / 4.5, 128),
    Goal("chain", 1 / 3.9, 1),
    Goal("chain", 1 / 3, 128),
    Goal("floor", 1.3),
    Goal("sglang compiled", 1 / 6, 1, "sglang pass"),
    Goal("sglang compiled", 1 / 4, 128, "sglang pass"),
)
HOST_GOAL_US = 8.0
MET, MISSED = "met", "MISSED"


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured; ``found`` is the worst of its rows, in words."""

    heads: int
    goal: str
    found: str
    met: bool


def verdicts(results: Results) -> list[Verdict]:
    """Every goal that the measured rows speak of, by heads a rank."""
    judged = []
    for heads, table in results.tables.items():
        for goal in GOALS:
            ratios = dict(_ratios(table, goal))
            if ratios:
                worst = max(ratios, key=ratios.__getitem__)
                found = f"{ratio(ratios[worst])} at B = {worst}"
                met = ratios[worst] <= goal.at_most
                judged.append(Verdict(heads, str(goal), found, met))
        host = results.host_us.get(heads, {})
        if _HOST_CALL in host and _HOST_LAUNCH in host:
            above = host[_HOST_CALL] - host[_HOST_LAUNCH]
            goal_text = f"host at most {HOST_GOAL_US:g} us above a bare launch"
            found = f"{above:.1f} us"
            judged.append(Verdict(heads, goal_text, found, above <= HOST_GOAL_US))
    return judged


def _ratios(table: Table, goal: Goal) -> Iterable[tuple[int, float]]:
    for b, row in table.items():
        if goal.batch not in (None, b) or goal.judged not in row:
            continue
        other = floor_us(row) if goal.against == "floor" else row.get(goal.against)
        if other is not None:
            yield b, row[goal.judged] / other


def ratio(number: float) -> str:
    """``1/4.5`` below one, ``1.30`` above."""
    return f"1/{1 / number:.1f}" if number < 1 else f"{number:.2f}"


def headings(table: Table) -> list[str]:
    """Of a table's columns: B, the variants, and ``JUDGED`` as a share of others."""
    row = next(iter(table.values()))
    return ["B", *row, *(f"of {other}" for other in _compared(row))]


def cells(table: Table) -> list[list[str]]:
    """A table's rows under ``headings``."""
    lines = []
    for b, row in table.items():
        ratios = [ratio(row[JUDGED] / us) for us in _compared(row).values()]
        lines.append([str(b), *(f"{us:.2f}" for us in row.values()), *ratios])
    return lines


def _compared(row: Row) -> Row:
    """What ``JUDGED`` is held against, where it was measured itself."""
    if JUDGED not in row:
        return {}
    compared: Row = {name: row[name] for name in _BASELINES if name in row}
    floor = floor_us(row)
    return compared if floor is None else {**compared, "floor": floor}


def title(heads: int) -> str:
    return f"{heads} heads a rank, D {HEAD_DIM}, bf16; us a call"


def origin(results: Results) -> str:
    """What every figure must be read with, on one line."""
    versions = ", ".join(
        text if key == "card" else f"{key} {text}"
        for key, text in results.machine.items()
    )
    return f"{results.ranks} ranks, {versions}"


def host_text(results: Results, heads: int) -> str:
    row = results.host_us.get(heads, {})
    return ", ".join(f"{what} {us:.1f}" for what, us in row.items())


def as_text(results: Results) -> str:
    """All of it in plain columns."""
    lines = [origin(results)]
    for heads, table in results.tables.items():
        grid = [headings(table), *cells(table)]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines += ["", title(heads)]
        lines += [
            "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))
            for line in grid
        ]
        if host := host_text(results, heads):
            lines.append(f"host us a call: {host}")
    for verdict in verdicts(results):
        word = MET if verdict.met else MISSED
        lines.append(
            f"{word}: {verdict.heads} heads a rank, {verdict.goal}: {verdict.found}"
        )
    return "\n".join(lines)

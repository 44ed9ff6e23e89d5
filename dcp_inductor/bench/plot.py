"""A result as a picture: microseconds a call over B, a line a variant, the floor.

Needs matplotlib, which nothing else imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_inductor.bench.results import (
    FLOORS,
    JUDGED,
    Results,
    Table,
    floor_us,
    origin,
)
from dcp_inductor.bench.settings import HEAD_DIM
from dcp_inductor.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by eyes of any kind, and by the marker in print.
_LINES = (
    ("#D55E00", "o"),
    ("#E69F00", "s"),
    ("#56B4E9", "^"),
    ("#999999", "v"),
    ("#CC79A7", "D"),
    ("#F0E442", "P"),
    ("#8C6D31", "X"),
)
_JUDGED_LINE = ("#009E73", "o")
_PANEL_INCHES = (6.4, 5.2)


def draw(results: Results, path: str) -> None:
    """One panel for each number of heads, both axes logarithmic. Raises BadInput."""
    from matplotlib.figure import Figure

    panels = len(results.tables)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * panels, height), layout="constrained", dpi=130)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for ax, (heads, table) in zip(axes, results.tables.items(), strict=True):
        _panel(ax, heads, table)
    axes[0].set_ylabel("us a call, CUDA graph")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    figure.suptitle(f"One exchange: {origin(results)}", fontsize=11)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadInput(
            f"--plot {path} was asked for and can't be written ({error}). Pass a path "
            "that can."
        ) from error


# Of the lines of one panel; ``_LINES`` times as many variants can be told apart.
_STYLES = ("-", ":", "-.", (0, (6, 2)))


def _panel(ax: Axes, heads: int, table: Table) -> None:
    batches = sorted(table)
    variants = [name for name in table[batches[0]] if name not in FLOORS]
    # When the colours run out they come again, in another style.
    looks = ((*line, style) for style in _STYLES for line in _LINES)
    for name in variants:
        judged = name == JUDGED
        color, marker, style = (*_JUDGED_LINE, "-") if judged else next(looks)
        ax.plot(
            batches,
            [table[b][name] for b in batches],
            color=color,
            marker=marker,
            linestyle=style,
            markersize=5,
            linewidth=2.4 if judged else 1.3,
            zorder=3 if judged else 2,
            label=name,
        )
    _floor(ax, batches, table)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(batches, [str(b) for b in batches])
    ticks = [n * 10**exponent for exponent in range(-1, 5) for n in (1, 2, 5)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    times = [us for row in table.values() for us in row.values()]
    ax.set_ylim(bottom=min(1.0, 0.7 * min(times)), top=1.3 * max(times))
    ax.set_xlabel("B, tokens")
    ax.set_title(f"{heads} heads a rank, D {HEAD_DIM}, bf16", fontsize=10)
    ax.grid(color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)


def _floor(ax: Axes, batches: list[int], table: Table) -> None:
    """The larger floor, dashed, and what no exchange can reach below it."""
    floors = [us for b in batches if (us := floor_us(table[b])) is not None]
    if len(floors) != len(batches):
        return
    ax.plot(batches, floors, color="black", linestyle="--", linewidth=1.2)
    label = "below the floor: max of flag, push"
    ax.fill_between(batches, floors, 1e-3, color="#BBBBBB", alpha=0.5, label=label)

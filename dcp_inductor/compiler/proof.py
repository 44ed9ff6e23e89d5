"""Judges a region: is it the LSE merge of merge.py, in which base and layout?

The region runs on N simulated ranks (simulate.py), on probes; its results are held
against merge.py in fp64. Nothing is read off the graph's spelling.

NOTE [probes]
Each row (token, head) gets one pattern of LSE over the ranks, the patterns of PATTERNS
in turn, so one run tries them all beside each other. Payloads come in two kinds:
- random: every element of every rank counts, in its place.
- columns: rank r holds 1 in the columns d = r mod N and 0 elsewhere, so that each
  element of the result is one rank's weight by itself. It is judged relative to that
  weight, however small: a temperature, a clamp or an epsilon that a sum would hide
  shows.
The error of an element is relative to the merge of the absolute values, the size up to
which its sum can round. Where the region's own result isn't finite (an unguarded -inf)
it has no meaning to keep, and the element is skipped; on ordinary rows it must be
finite.

NOTE [tolerance]
A region whose arithmetic is all fp32 is judged at fp32, before its cast to the dtype of
the partials; a region that computes narrower, or inside an opaque kernel, at its
narrowest dtype. An LSE of size L has an absolute rounding of eps * L, which becomes a
relative error of the weight, so tolerance grows with the LSE of the row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dcp_inductor.compiler.fingerprint import fingerprint
from dcp_inductor.compiler.headmap import HeadMap, read_head_map
from dcp_inductor.compiler.layout import Layout, apply, layouts
from dcp_inductor.compiler.movement import is_constant, is_mover, widens
from dcp_inductor.compiler.region import Region
from dcp_inductor.compiler.simulate import (
    CantSimulate,
    Outcome,
    Simulation,
    casts_down,
)
from dcp_inductor.compiler.symbols import assignments
from dcp_inductor.merge import LSE_MODES, LseMode, head_slice, merge
from dcp_inductor.report import Miss

_SEED = 20240229
# Relative, for LSE near 0: a few roundings of the narrowest dtype that computes.
_TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.float16: 3 * 2.0**-11,
    torch.bfloat16: 3 * 2.0**-8,
    torch.float8_e4m3fn: 1.5 * 2.0**-4,
    torch.float8_e5m2: 1.5 * 2.0**-3,
}
# Times |LSE| of the row: 8 roundings of an fp32 LSE.
_TOLERANCE_PER_LSE = 8 * 2.0**-24
# LSEs lie on this grid, so that differences of large ones are exact in fp32.
_GRID = 64.0


@dataclass(frozen=True)
class Proof:
    """The region is the merge: in this base, through these views.

    error: the largest relative error over all probes. tolerance: that of ordinary rows.
    """

    lse_mode: LseMode
    layout: Layout
    error: float
    tolerance: float
    from_memo: bool = False


_MEMO: dict[str, Proof | Miss] = {}


def prove(region: Region) -> Proof | Miss:
    """The verdict on a region, from the process's memo if an equal one was judged."""
    key = fingerprint(region)
    if key in _MEMO:
        known = _MEMO[key]
        return replace(known, from_memo=True) if isinstance(known, Proof) else known
    try:
        # A compilation may run under fake tensor or other modes; probes are real.
        with torch.no_grad(), _disable_current_modes():
            verdict = _judge(region)
    except CantSimulate as error:
        verdict = Miss(str(error))
    _MEMO[key] = verdict
    return verdict


def forget_proofs() -> None:
    """Empty the process's memo of verdicts."""
    _MEMO.clear()


def _judge(region: Region) -> Proof | Miss:
    sizes = assignments(region.nodes)
    simulations = [Simulation(region, assignment) for assignment in sizes]
    maps: list[HeadMap] = []
    for simulation in simulations:
        read = read_head_map(simulation)
        if isinstance(read, Miss):
            return read
        maps.append(read)
    miss: Miss | None = None
    for layout in layouts(maps, simulations):
        verdict = layout if isinstance(layout, Miss) else _try(layout, simulations)
        if isinstance(verdict, Proof):
            return verdict
        miss = verdict if miss is None else miss
    assert miss is not None, "layouts() yields at least one"
    return miss


def _try(layout: Layout, simulations: Sequence[Simulation]) -> Proof | Miss:
    """Settle the base on ordinary rows, then try every pattern with it."""
    tolerance = _tolerance(simulations[0].region)
    judges = [Judge(simulation, layout, tolerance) for simulation in simulations]
    first = {mode: judges[0].error(mode, 0, _ORDINARY) for mode in LSE_MODES}
    fits = [mode for mode, error in first.items() if error.ratio <= 1]
    if len(fits) != 1:
        return _no_base(first, fits)
    worst = first[fits[0]]
    for judge in judges:
        for shift in range(judge.num_runs()):
            error = judge.error(fits[0], shift, PATTERNS)
            if not error.ratio <= 1:
                return Miss(
                    f"it isn't the LSE merge: {error.where} is off by "
                    f"{error.relative:.2g}, tolerance {error.tolerance:.2g} ({fits[0]})"
                )
            worst = max(worst, error, key=lambda e: e.ratio)
    return Proof(fits[0], layout, worst.relative, worst.tolerance)


def _no_base(first: dict[LseMode, Error], fits: list[LseMode]) -> Miss:
    if fits:
        return Miss("both bases fit: its weights don't depend on the LSE")
    if all(math.isnan(error.relative) for error in first.values()):
        return Miss("it isn't the LSE merge: not finite on ordinary LSEs")
    errors = ", ".join(
        f"{mode} by {error.relative:.2g}" for mode, error in first.items()
    )
    return Miss(
        f"it isn't the LSE merge in either base: off in {errors}, tolerance "
        f"{min(error.tolerance for error in first.values()):.2g}"
    )


@dataclass(frozen=True)
class Error:
    """The worst element of a probe. ratio: relative / tolerance; NaN never passes."""

    relative: float
    tolerance: float
    where: str

    @property
    def ratio(self) -> float:
        return self.relative / self.tolerance


Pattern = Callable[[int, torch.Generator], Tensor]


def _on_grid(lse: Tensor) -> Tensor:
    return (lse * _GRID).round() / _GRID


def _random(num_ranks: int, rng: torch.Generator) -> Tensor:
    return _on_grid(torch.rand(num_ranks, generator=rng) * 8 - 4)


def _gaps(gap: float) -> Pattern:
    """LSEs ``gap`` apart, in random order of the ranks."""

    def pattern(num_ranks: int, rng: torch.Generator) -> Tensor:
        steps = torch.randperm(num_ranks, generator=rng) * -gap
        return _on_grid(steps + torch.rand(1, generator=rng))

    return pattern


def _around(center: float) -> Pattern:
    return lambda num_ranks, rng: center + _random(num_ranks, rng)


def _equal(num_ranks: int, rng: torch.Generator) -> Tensor:
    return _on_grid(torch.rand(1, generator=rng)).expand(num_ranks).clone()


def _with_empty(num_empty: Callable[[int], int]) -> Pattern:
    """Random LSEs with -inf on some ranks."""

    def pattern(num_ranks: int, rng: torch.Generator) -> Tensor:
        lse = _random(num_ranks, rng)
        lse[
            torch.randperm(num_ranks, generator=rng)[: num_empty(num_ranks)]
        ] = -torch.inf
        return lse

    return pattern


PATTERNS: dict[str, Pattern] = {
    "ordinary LSEs": _random,
    "equal LSEs": _equal,
    "LSEs 0.1 apart": _gaps(0.1),
    "LSEs 1 apart": _gaps(1.0),
    "LSEs 8 apart": _gaps(8.0),
    "LSEs 20 apart": _gaps(20.0),
    "LSEs 60 apart": _gaps(60.0),
    "LSEs near 150": _around(150.0),
    "LSEs near -150": _around(-150.0),
    "LSEs near 5000": _around(5000.0),
    "LSEs near -5000": _around(-5000.0),
    "one empty shard": _with_empty(lambda num_ranks: 1),
    "all but one shard empty": _with_empty(lambda num_ranks: num_ranks - 1),
    "all shards empty": _with_empty(lambda num_ranks: num_ranks),
}
_ORDINARY: dict[str, Pattern] = {"ordinary LSEs": _random}
_MUST_BE_FINITE = ("ordinary LSEs", "equal LSEs", "LSEs 0.1 apart", "LSEs 1 apart")


class Judge:
    """One layout of one simulation, held against merge.py."""

    def __init__(
        self, simulation: Simulation, layout: Layout, tolerance: float
    ) -> None:
        self.simulation = simulation
        self.layout = layout
        self.tolerance = tolerance
        self.num_ranks = simulation.region.num_ranks
        self.dtype: torch.dtype = simulation.region.partial_o.meta["val"].dtype
        self.num_rows = math.prod(simulation.lse_shape)
        self.head_dim = math.prod(simulation.o_shape) // self.num_rows
        self._results: dict[object, list[tuple[Tensor, Tensor, list[Outcome]]]] = {}

    @functools.cached_property
    def receivers(self) -> list[int]:
        """All ranks, or a few of many: combine is one code, and the head map of all
        receivers has been read."""
        n = self.num_ranks
        return sorted({*range(n)} if n <= 4 else {0, n // 2, n - 1})

    def num_runs(self) -> int:
        """Enough runs that rows meet every pattern, twice if rows are few."""
        seen = self.num_rows // self.num_ranks * len(self.receivers)
        return min(len(PATTERNS), max(1, -(-2 * len(PATTERNS) // seen)))

    def error(
        self, lse_mode: LseMode, shift: int, patterns: dict[str, Pattern]
    ) -> Error:
        """The worst element over both payloads; row j gets pattern j + shift."""
        names = [*patterns]
        row_pattern = (torch.arange(self.num_rows) + shift) % len(names)
        errors = [
            error
            for partial_o, lse, outcomes in self._probe(shift, patterns, row_pattern)
            for error in self._errors(
                lse_mode, partial_o, lse, outcomes, names, row_pattern
            )
        ]
        return max(errors, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)

    def _probe(
        self, shift: int, patterns: dict[str, Pattern], row_pattern: Tensor
    ) -> list[tuple[Tensor, Tensor, list[Outcome]]]:
        """Run both payloads; kept, since both bases are held against one run."""
        key = (shift, tuple(patterns))
        if key not in self._results:
            rng = torch.Generator().manual_seed(_SEED + shift)
            lse = self._lse([*patterns.values()], row_pattern, rng)
            lse = lse.reshape(self.num_ranks, *self.simulation.lse_shape)
            self._results = {
                key: [
                    (o, lse, self.simulation.run(o, lse, self.receivers))
                    for o in (self._columns(shift), self._payload(rng))
                ]
            }
        return self._results[key]

    def _lse(
        self, patterns: list[Pattern], row_pattern: Tensor, rng: torch.Generator
    ) -> Tensor:
        """``[N, rows]``: a few draws of each pattern, dealt to its rows in turn."""
        lse = torch.empty(self.num_ranks, self.num_rows)
        for place, pattern in enumerate(patterns):
            rows = (row_pattern == place).nonzero().flatten()
            draws = torch.stack([pattern(self.num_ranks, rng) for _ in range(8)], 1)
            lse[:, rows] = draws[:, torch.arange(len(rows)) % draws.shape[1]]
        return lse

    def _columns(self, shift: int) -> Tensor:
        """Rank r: 1 in the columns r mod N. Of few columns, other ranks' each run."""
        rank = torch.arange(self.num_ranks).reshape(-1, 1, 1)
        column = torch.arange(self.head_dim) + shift * self.head_dim
        ones = (column % self.num_ranks == rank).float()
        return self._shaped(ones.expand(-1, self.num_rows, -1))

    def _payload(self, rng: torch.Generator) -> Tensor:
        shape = (self.num_ranks, self.num_rows, self.head_dim)
        return self._shaped(torch.randn(shape, generator=rng))

    def _shaped(self, payload: Tensor) -> Tensor:
        shape = (self.num_ranks, *self.simulation.o_shape)
        return payload.reshape(shape).to(self.dtype)

    def _errors(
        self,
        lse_mode: LseMode,
        partial_o: Tensor,
        lse: Tensor,
        outcomes: list[Outcome],
        names: list[str],
        row_pattern: Tensor,
    ) -> Iterator[Error]:
        """One error a receiver, and one for its merged LSE if there is one."""
        layout = self.layout
        o_rows = torch.stack([apply(layout.o_in, o, o) for o in partial_o]).double()
        lse_rows = torch.stack(
            [apply(layout.lse_in, x, o) for x, o in zip(lse, partial_o, strict=True)]
        ).double()
        pattern = row_pattern.reshape(self.simulation.lse_shape)
        pattern = apply(layout.lse_in, pattern, partial_o[0])
        for receiver, outcome in zip(self.receivers, outcomes, strict=True):
            here = _Rows(
                head_slice(o_rows, receiver, self.num_ranks, dim=2),
                head_slice(lse_rows, receiver, self.num_ranks, dim=2),
                head_slice(pattern, receiver, self.num_ranks, dim=1),
                partial_o[0],
            )
            yield self._merged_error(lse_mode, here, outcome, names)
            if outcome.merged_lse is not None:
                yield self._lse_error(lse_mode, here, outcome.merged_lse, names)

    def _merged_error(
        self, lse_mode: LseMode, rows: _Rows, outcome: Outcome, names: list[str]
    ) -> Error:
        wide = self.tolerance == _TOLERANCE[torch.float32]
        got = outcome.merged_wide if wide else outcome.merged
        got = outcome.merged if got is None else got
        wanted, _ = merge(rows.partial_o, rows.lse, lse_mode=lse_mode)
        scale, _ = merge(rows.partial_o.abs(), rows.lse, lse_mode=lse_mode)

        full_shape = wanted.shape
        wanted, scale, tolerance, pattern = (
            apply(self.layout.out, x.expand(full_shape), rows.one_partial_o)
            for x in (
                wanted,
                scale,
                (self.tolerance + _TOLERANCE_PER_LSE * rows.largest_lse())[..., None],
                rows.pattern[..., None],
            )
        )
        relative = (got - wanted).abs() / scale.clamp(min=torch.finfo(self.dtype).tiny)
        return _worst(relative, got, tolerance, pattern, names)

    def _lse_error(
        self, lse_mode: LseMode, rows: _Rows, got: Tensor, names: list[str]
    ) -> Error:
        _, wanted = merge(rows.partial_o, rows.lse, lse_mode=lse_mode)
        assert self.layout.lse_out is not None, "the region has a merged LSE"
        tolerance = _TOLERANCE[torch.float32] + _TOLERANCE_PER_LSE * rows.largest_lse()
        wanted, tolerance, pattern = (
            apply(self.layout.lse_out, x, rows.one_partial_o)
            for x in (wanted, tolerance, rows.pattern)
        )
        worst = _worst((got - wanted).abs(), got, tolerance, pattern, names)
        return replace(worst, where=f"the merged LSE at {worst.where}")


@dataclass(frozen=True)
class _Rows:
    """What one receiver merges: ``[N, B, h, D]``, ``[N, B, h]`` and ``[B, h]``."""

    partial_o: Tensor
    lse: Tensor
    pattern: Tensor
    one_partial_o: Tensor

    def largest_lse(self) -> Tensor:
        """``[B, h]``: the largest finite size of an LSE among the ranks."""
        return torch.where(self.lse.isfinite(), self.lse.abs(), 0.0).amax(0)


def _worst(
    error: Tensor, got: Tensor, tolerance: Tensor, pattern: Tensor, names: list[str]
) -> Error:
    """The element of largest error / tolerance among those where ``got`` is finite."""
    skipped = ~got.isfinite()
    for name in _MUST_BE_FINITE:
        if name in names and bool((skipped & (pattern == names.index(name))).any()):
            return Error(math.nan, 1.0, f"{name} (not finite)")
    ratio = torch.where(skipped, 0.0, error / tolerance)
    place = int(ratio.nan_to_num(math.inf).argmax())
    return Error(
        float(torch.where(skipped, 0.0, error).flatten()[place]),
        float(tolerance.flatten()[place]),
        names[int(pattern.flatten()[place])],
    )


def _tolerance(region: Region) -> float:
    """That of the narrowest float that the region computes in, NOTE [tolerance]."""
    computed = [
        node.meta["val"].dtype
        for node in region.combine
        if isinstance(node.meta.get("val"), Tensor)
        and not (is_mover(node) or is_constant(node) or widens(node))
        and not (node is region.merged and casts_down(node))
    ]
    return max(_TOLERANCE.get(dtype, 0.0) for dtype in [*computed, torch.float32])

"""Judges a region: is it the LSE merge of merge.py, in which base and layout?

The region runs on N simulated ranks (simulate.py), on probes; its results are held
against merge.py in fp64. Nothing is read off the graph's spelling.

NOTE [error]
The error of an element is relative to the merge of the absolute values, the size up to
which its sum can round. Where the region's own result isn't finite (an unguarded -inf)
it has no meaning to keep, and the element is skipped, but noted (nanlooks.py); on
ordinary rows it must be finite. The probes are probes.py's.

NOTE [tolerance]
A region whose arithmetic is all fp32 is judged at fp32, before its cast to the dtype of
the partials; a region that computes narrower, or inside an opaque kernel, at its
narrowest dtype. An LSE of size L has an absolute rounding of eps * L, which becomes a
relative error of the weight, so tolerance grows with the LSE of the row, up to a half:
a row that is lost altogether shows at any size.
A region that subtracts a weight from 1, or a payload from another, rounds to eps of the
larger; there an error may also be eps of the largest payload of its element.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dcp_inductor.compiler.fingerprint import fingerprint
from dcp_inductor.compiler.headmap import HeadMap, read_head_map
from dcp_inductor.compiler.intact import changes_lse
from dcp_inductor.compiler.layout import Layout, apply, layouts
from dcp_inductor.compiler.movement import is_constant, is_mover, widens
from dcp_inductor.compiler.plain import not_plain
from dcp_inductor.compiler.probes import MUST_BE_FINITE, Probe, Prober
from dcp_inductor.compiler.region import Region
from dcp_inductor.compiler.simulate import (
    CantSimulate,
    Outcome,
    Simulation,
    casts_down,
)
from dcp_inductor.compiler.symbols import assignments
from dcp_inductor.compiler.transient import is_transient, what_to_do
from dcp_inductor.compiler.uniform import not_uniform
from dcp_inductor.merge import LSE_MODES, LseMode, head_slice, merge
from dcp_inductor.report import Miss

aten = torch.ops.aten

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
_LARGEST_TOLERANCE = 0.5
_SUBTRACTIONS: frozenset[Any] = frozenset(
    {aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor}
)
_LERPS: frozenset[Any] = frozenset({aten.lerp.Tensor, aten.lerp.Scalar})


@dataclass(frozen=True)
class Proof:
    """The region is the merge: in this base, through these views.

    error: the largest relative error on ordinary LSEs, and the tolerance there; every
    other probe held within its own. finite: it is NaN or infinite on none of them but
    where the op is; if not, NOTE [looks for NaN] of nanlooks.py.
    """

    lse_mode: LseMode
    layout: Layout
    error: float
    tolerance: float
    finite: bool
    from_memo: bool = False


_MEMO: dict[str, Proof | Miss] = {}
# Transient refusals of the graph that is being read.
_NOT_NOW: dict[str, Miss] = {}
# A proof sets what is the process's: two at once would restore each other's settings.
_ONE_AT_A_TIME = threading.RLock()


def prove(region: Region) -> Proof | Miss:
    """The verdict on a region, from the process's memo if an equal one was judged."""
    # A compilation may run under fake tensor or other modes; probes are real.
    with (
        _ONE_AT_A_TIME,
        torch.no_grad(),
        _disable_current_modes(),
        _one_thread(),
        _fp32_by_default(),
    ):
        key = fingerprint(region)
        known = _MEMO[key] if key in _MEMO else _NOT_NOW.get(key)
        if known is not None:
            return replace(known, from_memo=True) if isinstance(known, Proof) else known
        try:
            verdict = _judge(region)
        except Exception as error:
            if is_transient(error):
                _NOT_NOW[key] = Miss(what_to_do(error), transient=True)
                return _NOT_NOW[key]
            if not isinstance(error, CantSimulate):
                raise
            verdict = Miss(str(error))
        _MEMO[key] = verdict
    return verdict


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Probes are small; threads that wait for each other cost more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _fp32_by_default() -> Iterator[None]:
    """Probes are drawn in fp32, whatever a host that loads a bf16 model has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def forget_proofs() -> None:
    """Empty the process's memo of verdicts."""
    _MEMO.clear()
    retry_transients()


def retry_transients() -> None:
    """For each graph anew: in one graph, equal layers would all run into the clock."""
    _NOT_NOW.clear()


def _judge(region: Region) -> Proof | Miss:
    varying = not_uniform(region)
    if varying is not None:
        return varying
    sizes = assignments(region.nodes)
    simulations = [Simulation(region, assignment) for assignment in sizes]
    maps: list[HeadMap] = []
    for simulation in simulations:
        read = read_head_map(simulation)
        if isinstance(read, Miss):
            return read
        maps.append(read)
        changed = changes_lse(simulation)
        if changed is not None:
            return changed
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
    first = judges[0].ordinary()
    fits = [mode for mode, error in first.items() if error.ratio <= 1]
    if len(fits) != 1:
        return _no_base(first, fits)
    for judge in judges:
        for error in judge.all(fits[0]):
            if not error.ratio <= 1:
                return Miss(
                    f"it isn't the LSE merge: {error.where} is off by "
                    f"{error.relative:.2g}, tolerance {error.tolerance:.2g} ({fits[0]})"
                )
        one_sided = judge.simulation.coverage.one_sided()
        if one_sided is not None:
            return one_sided
    hidden = not_plain(simulations[0].region)
    if hidden is not None:
        return hidden
    ordinary = first[fits[0]]
    finite = all(judge.finite for judge in judges)
    return Proof(fits[0], layout, ordinary.relative, ordinary.tolerance, finite)


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


class Judge:
    """One layout of one simulation, held against merge.py.

    finite: so far the region was finite, or what merge.py is, on every probe.
    """

    def __init__(
        self, simulation: Simulation, layout: Layout, tolerance: float
    ) -> None:
        self.simulation = simulation
        self.layout = layout
        self.tolerance = tolerance
        self.rounding = 4 * 2.0**-24 if _subtracts(simulation.region) else 0.0
        self.num_ranks = simulation.region.num_ranks
        self.dtype: torch.dtype = simulation.region.partial_o.meta["val"].dtype
        num_rows = math.prod(simulation.lse_shape)
        head_dim = math.prod(simulation.o_shape) // num_rows
        self.prober = Prober(simulation.region, num_rows, head_dim)
        self.finite = True

    def ordinary(self) -> dict[LseMode, Error]:
        """The error of ordinary rows in each base; one run serves both."""
        runs = [(probe, self._run(probe)) for probe in self.prober.ordinary()]
        return {
            mode: _largest(e for run in runs for e in self._errors(mode, *run))
            for mode in LSE_MODES
        }

    def all(self, lse_mode: LseMode) -> Iterator[Error]:
        """The error of each probe."""
        for probe in self.prober.all():
            yield _largest(self._errors(lse_mode, probe, self._run(probe)))

    def _receivers(self, probe: Probe) -> list[int]:
        """All ranks, or a few of many: the code that merges is one."""
        n = self.num_ranks
        every = probe.every_receiver or n <= 4
        return [*range(n)] if every else [0, n // 2, n - 1]

    def _run(self, probe: Probe) -> list[Outcome]:
        return self.simulation.run(*self._inputs(probe), self._receivers(probe))

    def _inputs(self, probe: Probe) -> tuple[Tensor, Tensor]:
        o_shape = (self.num_ranks, *self.simulation.o_shape)
        lse_shape = (self.num_ranks, *self.simulation.lse_shape)
        return (
            probe.payload.reshape(o_shape).to(self.dtype),
            probe.lse.reshape(lse_shape),
        )

    def _errors(
        self, lse_mode: LseMode, probe: Probe, outcomes: list[Outcome]
    ) -> Iterator[Error]:
        """One error a receiver, and one for its merged LSE if there is one."""
        layout, names = self.layout, probe.names
        partial_o, lse = self._inputs(probe)
        o_rows = torch.stack([apply(layout.o_in, o, o) for o in partial_o]).double()
        lse_rows = torch.stack(
            [apply(layout.lse_in, x, o) for x, o in zip(lse, partial_o, strict=True)]
        ).double()
        pattern = probe.kind.reshape(self.simulation.lse_shape)
        pattern = apply(layout.lse_in, pattern, partial_o[0])
        for receiver, outcome in zip(self._receivers(probe), outcomes, strict=True):
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
        self, lse_mode: LseMode, rows: _Rows, outcome: Outcome, names: tuple[str, ...]
    ) -> Error:
        wide = self.tolerance == _TOLERANCE[torch.float32]
        got = outcome.merged_wide if wide else outcome.merged
        got = outcome.merged if got is None else got
        both = torch.cat([rows.partial_o, rows.partial_o.abs()], -1)
        wanted, scale = merge(both, rows.lse, lse_mode=lse_mode)[0].chunk(2, -1)
        wanted, scale, tolerance, pattern = (
            apply(self.layout.out, x.expand(wanted.shape), rows.one_partial_o)
            for x in (
                wanted,
                scale.maximum(self._smallest(rows)),
                rows.tolerance(self.tolerance).unsqueeze(-1),
                rows.pattern.unsqueeze(-1),
            )
        )
        self._note_finite(got, wanted)
        return _worst((got - wanted).abs() / scale, got, tolerance, pattern, names)

    def _note_finite(self, got: Tensor, wanted: Tensor) -> None:
        self.finite &= bool((got.isfinite() | (got == wanted)).all())

    def _smallest(self, rows: _Rows) -> Tensor:
        """What is smaller has an error relative to this: fp32 flushes a weight that is
        denormal, and what it weighs with it; differences round, NOTE [tolerance]."""
        absolute = self.rounding or torch.finfo(torch.float32).tiny
        largest = rows.partial_o.abs().amax(0) * (absolute / self.tolerance)
        return largest.clamp(min=torch.finfo(self.dtype).tiny)

    def _lse_error(
        self, lse_mode: LseMode, rows: _Rows, got: Tensor, names: tuple[str, ...]
    ) -> Error:
        _, wanted = merge(rows.partial_o, rows.lse, lse_mode=lse_mode)
        assert self.layout.lse_out is not None, "the region has a merged LSE"
        tolerance = rows.lse_tolerance()
        wanted, tolerance, pattern = (
            apply(self.layout.lse_out, x, rows.one_partial_o)
            for x in (wanted, tolerance, rows.pattern)
        )
        self._note_finite(got, wanted)
        worst = _worst((got - wanted).abs(), got, tolerance, pattern, names)
        return replace(worst, where=f"the merged LSE at {worst.where}")


@dataclass(frozen=True)
class _Rows:
    """What one receiver merges: ``[N, B, h, D]``, ``[N, B, h]`` and ``[B, h]``."""

    partial_o: Tensor
    lse: Tensor
    pattern: Tensor
    one_partial_o: Tensor

    def tolerance(self, ordinary: float) -> Tensor:
        """``[B, h]``: relative, of the merged result. NOTE [tolerance]."""
        return (ordinary + self._lse_rounding()).clamp(max=_LARGEST_TOLERANCE)

    def lse_tolerance(self) -> Tensor:
        """``[B, h]``: absolute, of the merged LSE."""
        return _TOLERANCE[torch.float32] + self._lse_rounding()

    def _lse_rounding(self) -> Tensor:
        largest = torch.where(self.lse.isfinite(), self.lse.abs(), 0.0).amax(0)
        return _TOLERANCE_PER_LSE * largest


def _largest(errors: Iterable[Error]) -> Error:
    return max(errors, key=lambda e: math.inf if math.isnan(e.ratio) else e.ratio)


def _worst(
    error: Tensor,
    got: Tensor,
    tolerance: Tensor,
    pattern: Tensor,
    names: tuple[str, ...],
) -> Error:
    """The element of largest error / tolerance among those where ``got`` is finite."""
    skipped = ~got.isfinite()
    for name in MUST_BE_FINITE:
        if name in names and bool((skipped & (pattern == names.index(name))).any()):
            return Error(math.nan, 1.0, f"{name} (not finite)")
    ratio = torch.where(skipped, 0.0, error / tolerance)
    place = int(ratio.nan_to_num(math.inf).argmax())
    return Error(
        float(torch.where(skipped, 0.0, error).flatten()[place]),
        float(tolerance.flatten()[place]),
        names[int(pattern.flatten()[place])],
    )


def _subtracts(region: Region) -> bool:
    """True for ``1 - weight``, ``payload - payload`` and lerp."""
    size = region.merged.meta["val"].numel()
    return any(
        node.target in _LERPS
        or (
            node.target in _SUBTRACTIONS
            and (len(node.all_input_nodes) == 1 or node.meta["val"].numel() == size)
        )
        for node in region.combine
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

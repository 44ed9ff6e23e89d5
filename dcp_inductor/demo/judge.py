"""What must hold for exit status 0, as a list of what doesn't. Shows nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dcp_inductor.config import Config
from dcp_inductor.demo.messages import Accuracy, RankRecord, RunRecord
from dcp_inductor.demo.settings import DemoSettings
from dcp_inductor.report import Finding


def problems(
    settings: DemoSettings, config: Config, records: Sequence[RankRecord]
) -> list[str]:
    """One sentence for each thing that isn't right; [] if all is."""
    first = records[0]
    return [
        *_unfused(settings, config, first.fused),
        *_disagreements(records),
        *_wrong(first.plain),
        *_wrong(first.fused),
    ]


def _unfused(settings: DemoSettings, config: Config, fused: RunRecord) -> Iterator[str]:
    wanted = settings.num_exchanges
    if wanted and not config.enabled:
        yield (
            f"0 of {wanted} exchanges were fused: DCP_INDUCTOR=0 switches the pass "
            "off. Unset it"
        )
        return
    found = fused.findings
    if len(found) != wanted:
        yield f"the pass found {len(found)} exchanges, and the model has {wanted}"
    for finding in found:
        if not finding.fused:
            yield f"{finding.exchange} stayed unfused: {finding.reason}"


def _disagreements(records: Sequence[RankRecord]) -> Iterator[str]:
    first = records[0]
    for other in records[1:]:
        for ours, theirs in ((first.plain, other.plain), (first.fused, other.fused)):
            if ours.tokens != theirs.tokens:
                yield f"{ours.name}: rank {other.rank} decoded other tokens than rank 0"
        if _verdicts(first.fused) != _verdicts(other.fused):
            yield f"rank {other.rank} fused other exchanges than rank 0"


def _verdicts(run: RunRecord) -> list[Finding]:
    return [replace(finding, error=None) for finding in run.findings]


def _wrong(run: RunRecord) -> Iterator[str]:
    accuracy = run.accuracy
    assert accuracy is not None, "rank 0 compares"
    if not accuracy.within_rounding:
        yield (
            f"{run.name}: a logit is off by {accuracy.error:.1e}; rounding explains "
            f"{accuracy.tolerance:.1e}"
        )
    if accuracy.num_differing and not accuracy.only_ties:
        yield f"{run.name}: {_differing(accuracy)}"


def _differing(accuracy: Accuracy) -> str:
    return (
        f"{accuracy.num_differing} of {accuracy.num_tokens} tokens differ from those "
        "of one rank that holds the whole cache, by up to "
        f"{accuracy.largest_gap:.1e} in the logit; rounding explains "
        f"{2 * accuracy.tolerance:.1e}"
    )

"""A region's identity: which regions may share a verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import packed
from harness import captured, fake_world

from dcp_inductor.compiler import fusion_pass
from dcp_inductor.compiler.fingerprint import fingerprint
from dcp_inductor.compiler.region import Region
from dcp_inductor.report import Miss


@pytest.fixture
def region(monkeypatch) -> Region:
    """The first that the pass would prove, over one all-to-all."""
    proposed: list[Region] = []

    def prove(found: Region) -> Any:
        proposed.append(found)
        return Miss("only looked at")

    monkeypatch.setattr(fusion_pass, "prove", prove)
    with fake_world() as groups:
        name = groups["2"].group_name
        args = torch.randn(3, 8, 16).bfloat16(), torch.randn(3, 8)
        captured(lambda o, lse: packed(o, lse, 2, name), args)
    return proposed[0]


@pytest.mark.parametrize("what", ["dtype", "shape", "stride"])
def test_what_is_received_is_in_it(region, what):
    """A host's buffer need not be of the dtype and shape that is sent."""
    (received,) = region.exchanges[0].received
    before = fingerprint(region)
    assert fingerprint(region) == before
    value = received.meta["val"]
    received.meta["val"] = {
        "dtype": lambda: value.view(torch.int16),
        "shape": lambda: value.flatten(),
        "stride": lambda: value.transpose(0, 1).contiguous().transpose(0, 1),
    }[what]()
    assert fingerprint(region) != before

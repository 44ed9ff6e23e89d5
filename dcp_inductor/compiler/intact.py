"""Do the LSEs cross the wire as they are? For packs that hold a user kernel.

What the merge makes of them is proof.py's.

NOTE [shifted LSE]
The proof runs this rank's pack for all ranks. What it adds to every LSE cancels in the
merge then, and is right only if every rank adds the same: a kernel that is passed a
number of its own rank would be proved on each rank by itself, and the op would drop the
number. So the bits of each LSE must be among the bits that a rank sends. Graph ops that
add stand outside of the region; a factor on the payload doesn't cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcp_inductor.compiler.opaque import is_opaque
from dcp_inductor.compiler.simulate import Simulation
from dcp_inductor.report import Miss

_BYTES = 4


def changes_lse(simulation: Simulation) -> Miss | None:
    """A miss if a pack with a user kernel sends other LSEs than it was given."""
    region = simulation.region
    kernels = [node for node in region.pack if is_opaque(node)]
    if not kernels:
        return None
    rng = torch.Generator().manual_seed(0)
    o_shape = (region.num_ranks, *simulation.o_shape)
    lse_shape = (region.num_ranks, *simulation.lse_shape)
    payload = torch.randn(o_shape, generator=rng)
    lse = torch.randn(lse_shape, generator=rng)
    simulation.run(payload.to(region.partial_o.meta["val"].dtype), lse, [0])
    for sent, given in zip(simulation.sent, lse, strict=True):
        words = torch.cat([_words(tensor) for tensor in sent])
        if not torch.isin(given.view(torch.int32), words).all():
            return Miss(f"{kernels[0].name}, a user kernel that packs, changes the LSE")
    return None


def _words(sent: Tensor) -> Tensor:
    """Every four bytes that follow one another, at any place, as int32."""
    data = sent.contiguous().view(-1).view(torch.uint8).to(torch.int64)
    count = data.numel() - _BYTES + 1
    shifted = [data[place : place + count] << (8 * place) for place in range(_BYTES)]
    return torch.stack(shifted).sum(0).to(torch.int32)

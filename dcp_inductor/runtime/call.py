"""One call of the op, checked: what every backend is handed.

Axes: B tokens, H heads before the exchange, N ranks (cp_size), D head dim.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.errors import BadInput
from dcp_inductor.merge import PARTIAL_DTYPES, LseMode
from dcp_inductor.runtime.caller import NO_CALLER, Caller


@dataclass(frozen=True)
class Geometry:
    """What a reservation is for; equal on all ranks.

    max_tokens: B of the largest call that runs in one piece. lanes: ordered streams
    that may be in flight beside each other. capture_domains: capture streams of a lane.
    """

    cp_size: int
    max_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    lanes: int = 1
    capture_domains: int = 1

    @property
    def rows(self) -> int:
        """(token, local head) pairs of the largest call."""
        return self.max_tokens * self.num_heads // self.cp_size

    @property
    def num_slots(self) -> int:
        """A slot a lane for eager calls, and one for each capture domain."""
        return self.lanes * (1 + self.capture_domains)


@dataclass(eq=False, slots=True)
class ExchangeCall:
    """partial_o ``[B, H, D]``, partial_lse ``[B, H]`` fp32, any strides, one device.

    site, caller and instance: which call of the program this is, its place in a
    compiled graph (0 outside of one), the function that makes it, and the number of the
    object that it is a method of; calls of several ranks that meet must have the same.
    """

    partial_o: Tensor
    partial_lse: Tensor
    group: ProcessGroup
    group_name: str
    lse_mode: LseMode
    with_lse: bool
    lane: int = 0
    site: int = 0
    caller: Caller = NO_CALLER
    instance: int = 0

    @property
    def cp_size(self) -> int:
        return self.group.size()

    @property
    def num_tokens(self) -> int:
        return self.partial_o.shape[0]

    @property
    def heads_per_rank(self) -> int:
        return self.partial_o.shape[1] // self.group.size()

    def narrow(self, start: int, length: int) -> ExchangeCall:
        """The same call for the tokens ``start`` to ``start + length``."""
        return replace(
            self,
            partial_o=self.partial_o.narrow(0, start, length),
            partial_lse=self.partial_lse.narrow(0, start, length),
        )


@functools.lru_cache(maxsize=4096)
def tag_of(site: int, caller: Caller, instance: int, *kind: object) -> int:
    """What calls of several ranks that meet have in common; a hash, 32 bits.

    kind: what else must be equal, of values that are written the same on all ranks.
    """
    return zlib.crc32(repr((site, str(caller), instance, *kind)).encode())


def check_partials(partial_o: Tensor, partial_lse: Tensor, cp_size: int) -> None:
    """Raise BadInput unless the two partials can be exchanged over cp_size ranks.

    Works on real and fake tensors: sizes that are symbolic are left to the run, so
    that a check never becomes a guard of the compiled graph.
    """
    if partial_o.dim() != 3:
        raise BadInput(
            f"partial_o has shape {tuple(partial_o.shape)}; the exchange takes "
            "[B, H, D]: tokens, all heads, head dim. Reshape it first; further token "
            "axes go into B."
        )
    if partial_o.dtype not in PARTIAL_DTYPES:
        raise BadInput(
            f"partial_o is {partial_o.dtype}; the exchange takes "
            f"{', '.join(str(dtype) for dtype in PARTIAL_DTYPES)}. Cast it before."
        )
    if partial_lse.dtype != torch.float32:
        raise BadInput(
            f"partial_lse is {partial_lse.dtype}; it must be torch.float32, since a "
            "weight is its exponential (at LSE 65, bf16 is off by 0.5). Ask the "
            "attention kernel for an fp32 LSE."
        )
    num_tokens, num_heads, _ = partial_o.shape
    lse_shape = tuple(partial_lse.shape)
    if partial_lse.dim() == 3 and partial_lse.shape[-1] == 1:
        lse_shape = lse_shape[:-1]
    if len(lse_shape) != 2 or any(
        map(_surely_differ, lse_shape, (num_tokens, num_heads))
    ):
        raise BadInput(
            f"partial_lse has shape {tuple(partial_lse.shape)} and partial_o "
            f"{tuple(partial_o.shape)}; one LSE belongs to each token and head, so "
            f"[B, H] or [B, H, 1] with B and H of partial_o is needed. Transpose an "
            "[H, B] LSE before the call."
        )
    if partial_o.device != partial_lse.device:
        raise BadInput(
            f"partial_o is on {partial_o.device} and partial_lse on "
            f"{partial_lse.device}; both must be on the device of the group."
        )
    if cp_size < 1 or (isinstance(num_heads, int) and num_heads % cp_size):
        raise BadInput(
            f"{num_heads} heads can't be shared by {cp_size} ranks: rank r keeps the "
            "heads r * H/N to (r + 1) * H/N, so H must be a multiple of N. Pad the "
            "heads or use another group size."
        )


def _surely_differ(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b

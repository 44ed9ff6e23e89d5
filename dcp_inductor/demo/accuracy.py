"""Holds a run's tokens and logits against one rank that holds the whole cache.

The one rank is the same decoder with N = 1, eager. It runs twice: in fp64, which is
taken as exact, and in the dtype of the run, which shows what rounding alone does.

Axes: S steps, B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcp_inductor.demo.messages import Accuracy
from dcp_inductor.demo.model import Decoder, first_tokens, new_caches
from dcp_inductor.demo.settings import DemoSettings


@torch.no_grad()
def judge_run(
    settings: DemoSettings, tokens: Tensor, logits: Tensor, dtype: torch.dtype
) -> Accuracy:
    """How right a run is that chose ``tokens [S, B]`` by ``logits [S, B, V]``."""
    device = tokens.device
    rounded = Decoder(settings, rank=0, num_ranks=1).to(device, dtype)
    one_rank = _replay(settings, rounded, tokens, dtype)
    exact = _replay(settings, rounded.to(torch.float64), tokens, torch.float64)
    return compare(tokens, logits, exact, one_rank)


def compare(
    tokens: Tensor, logits: Tensor, exact: Tensor, one_rank: Tensor
) -> Accuracy:
    """The numbers of ``judge_run``: tokens ``[S, B]``, three logits ``[S, B, V]``."""
    best = exact.argmax(-1)
    chosen = exact.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return Accuracy(
        num_tokens=tokens.numel(),
        num_equal=int((tokens == best).sum()),
        largest_gap=float((exact.amax(-1) - chosen).max()),
        error=float((logits.double() - exact).abs().max()),
        one_rank_error=float((one_rank.double() - exact).abs().max()),
    )


def _replay(
    settings: DemoSettings, decoder: Decoder, tokens: Tensor, dtype: torch.dtype
) -> Tensor:
    """Logits ``[S, B, V]`` of a decoder that is fed with ``tokens``."""
    device = tokens.device
    caches = new_caches(settings, 1, dtype, device)
    position = torch.zeros((), dtype=torch.int64, device=device)
    fed = torch.cat([first_tokens(settings).to(device).unsqueeze(0), tokens[:-1]])
    logits = []
    for step_tokens in fed:
        logits.append(decoder(step_tokens, caches, position)[1])
        position += 1
    return torch.stack(logits)

"""A small decoder with multi-head latent attention (MLA), for one token a step.

The KV cache is sharded by token: token t lies on rank t % N, in slot t // N. Which rank
this is stays a tensor, never a number in the graph, so that all ranks compile one
graph. With one rank this is the plain decoder that holds the whole cache.

Axes: N ranks, B sequences, H heads, h = H / N heads of this rank, L latent dim, R rope
dim, C = L + R, S slots of this rank's shard. "wide" is fp32, or fp64 for fp64 models.

NOTE [absorbed projections]
The cache holds one latent of L + R elements a token, shared by all heads (DeepSeek-V2,
arXiv 2405.04434). A head's key is its latent times w_kc; instead the query is taken
into the latent space (q w_kc^T), and attention runs there. Its output stays in the
latent space, [B, H, L], through the exchange; w_vc of the rank's own heads brings it
back.

NOTE [reductions]
Everything up to the exchange runs for all heads on every rank. Behind it a rank has its
own heads only, so the output projection gives a part of the sum: an all-reduce.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcp_inductor.demo.exchange import exchange
from dcp_inductor.demo.settings import DemoSettings, ModelShape

_WEIGHT_SEED = 20250611
_ROPE_BASE = 10000.0
_NORM_EPSILON = 1e-6
# Makes attention choose: with 1 the scores of random weights are all but equal.
_SCORE_GAIN = 4.0


class Decoder(nn.Module):
    """Embedding, layers, LM head. All ranks draw the same weights.

    rank, num_ranks: the place of this process; 0 of 1 holds the whole cache.
    """

    def __init__(self, settings: DemoSettings, rank: int, num_ranks: int) -> None:
        super().__init__()
        shape = settings.shape
        rng = torch.Generator().manual_seed(_WEIGHT_SEED)
        width = shape.hidden_dim
        self.embedding = _weight(rng, shape.vocab_size, width, fan_in=1)
        self.layers = nn.ModuleList(
            Layer(shape, rng, rank, num_ranks, settings.lse_mode)
            for _ in range(settings.num_layers)
        )
        self.w_logits = _weight(rng, width, shape.vocab_size, fan_in=width)

    def forward(
        self, tokens: Tensor, caches: list[Tensor], position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next tokens ``[B]`` and their wide logits ``[B, vocab]``.

        tokens: ``[B]`` int64. caches: a layer's shard each, ``[B, S, C]``; the token's
        latent is written into them. position: int64 scalar, how many tokens came
        before.
        """
        x = self.embedding[tokens]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, position)
        logits = _wide(_normed(x) @ self.w_logits)
        return logits.argmax(-1), logits


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm, with residuals."""

    def __init__(
        self,
        shape: ModelShape,
        rng: torch.Generator,
        rank: int,
        num_ranks: int,
        lse_mode: str,
    ) -> None:
        super().__init__()
        width, inner = shape.hidden_dim, shape.mlp_dim
        self.attention = LatentAttention(shape, rng, rank, num_ranks, lse_mode)
        self.w_up = _weight(rng, width, 2 * inner, fan_in=width)
        self.w_down = _weight(rng, inner, width, fan_in=inner)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """``[B, hidden]`` to ``[B, hidden]``."""
        x = x + self.attention(_normed(x), cache, position)
        gate, up = (_normed(x) @ self.w_up).chunk(2, dim=-1)
        return x + (nn.functional.silu(gate) * up) @ self.w_down


class LatentAttention(nn.Module):
    """MLA over a sharded cache, NOTE [absorbed projections]."""

    rank: Tensor

    def __init__(
        self,
        shape: ModelShape,
        rng: torch.Generator,
        rank: int,
        num_ranks: int,
        lse_mode: str,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.num_ranks = num_ranks
        self.lse_mode = lse_mode
        self.register_buffer("rank", torch.tensor(rank))
        heads, width = shape.num_heads, shape.hidden_dim
        latent, nope, value = shape.latent_dim, shape.nope_dim, shape.value_dim
        query_dim = heads * (nope + shape.rope_dim)
        self.w_q = _weight(rng, width, query_dim, fan_in=width)
        self.w_kv = _weight(rng, width, shape.cache_dim, fan_in=width)
        self.w_kc = _weight(rng, heads, nope, latent, fan_in=nope)
        w_vc = _weight(rng, heads, latent, value, fan_in=latent)
        w_o = _weight(rng, heads, value, width, fan_in=heads * value)
        local = slice(rank * heads // num_ranks, (rank + 1) * heads // num_ranks)
        self.w_vc = nn.Parameter(w_vc[local].clone(), requires_grad=False)
        self.w_o = nn.Parameter(w_o[local].flatten(0, 1).clone(), requires_grad=False)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """``[B, hidden]`` to ``[B, hidden]``; writes the token into ``cache``."""
        cos_sin = _cos_sin(position, self.shape.rope_dim, _wide(x).dtype)
        self._store(x, cache, position, cos_sin)
        queries = self._queries(x, cos_sin)
        partial_o, partial_lse = self._attend(queries, cache, position)
        merged = exchange(partial_o, partial_lse, self.num_ranks, self.lse_mode)
        values = torch.einsum("bhl,hlv->bhv", merged, self.w_vc)
        return self._summed(values.flatten(1) @ self.w_o)

    def _queries(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """``[B, H, C]``: of all heads, in the latent space."""
        shape = self.shape
        q = (x @ self.w_q).unflatten(1, (shape.num_heads, -1))
        nope, rope = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
        latent = torch.einsum("bhn,hnl->bhl", nope, self.w_kc)
        return torch.cat([latent, _rotated(rope, cos_sin)], dim=-1)

    def _store(
        self,
        x: Tensor,
        cache: Tensor,
        position: Tensor,
        cos_sin: tuple[Tensor, Tensor],
    ) -> None:
        """Put the token's latent into its slot, if this rank is the one to hold it."""
        latent, rope = (x @ self.w_kv).split(
            [self.shape.latent_dim, self.shape.rope_dim], dim=-1
        )
        entry = torch.cat([_normed(latent), _rotated(rope, cos_sin)], dim=-1)
        slot = (position // self.num_ranks).reshape(1)
        mine = position % self.num_ranks == self.rank
        kept = torch.where(mine, entry.unsqueeze(1), cache.index_select(1, slot))
        cache.index_copy_(1, slot, kept)

    def _attend(
        self, queries: Tensor, cache: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``[B, H, L]`` and its LSE ``[B, H]``, over this rank's tokens.

        An empty shard gives 0 and -inf.
        """
        shape = self.shape
        wide = _wide(cache)
        scale = _SCORE_GAIN / math.sqrt(shape.nope_dim + shape.rope_dim)
        scores = torch.einsum("bhc,bsc->bhs", _wide(queries) * scale, wide)
        slots = torch.arange(cache.shape[1], device=cache.device)
        held = slots * self.num_ranks + self.rank <= position
        scores = scores.masked_fill(~held, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weight = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
        total = weight.sum(-1)
        mean = torch.einsum("bhs,bsl->bhl", weight, wide[..., : shape.latent_dim])
        mean = mean / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
        lse = top.squeeze(-1) + torch.log(total)
        if self.lse_mode == "base2":
            lse = lse * math.log2(math.e)
        return mean.to(cache.dtype), lse

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, NOTE [reductions]."""
        if self.num_ranks > 1:
            dist.all_reduce(x)
        return x


def new_caches(
    settings: DemoSettings, num_ranks: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """An empty shard of each layer, ``[B, S, C]``, with room for every step."""
    num_slots = -(-settings.num_steps // num_ranks)
    size = (settings.batch_size, num_slots, settings.shape.cache_dim)
    return [
        torch.zeros(size, dtype=dtype, device=device)
        for _ in range(settings.num_layers)
    ]


def first_tokens(settings: DemoSettings) -> Tensor:
    """``[B]`` int64: what each sequence starts with."""
    return torch.arange(settings.batch_size) * 7 % settings.shape.vocab_size


def _weight(rng: torch.Generator, *size: int, fan_in: int) -> nn.Parameter:
    drawn = torch.randn(size, generator=rng) / math.sqrt(fan_in)
    return nn.Parameter(drawn, requires_grad=False)


def _cos_sin(
    position: Tensor, rope_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``[R/2]`` each: of the angles by which RoPE turns this position."""
    pairs = torch.arange(0, rope_dim, 2, dtype=dtype, device=position.device)
    angle = position * _ROPE_BASE ** -(pairs / rope_dim)
    return torch.cos(angle), torch.sin(angle)


def _rotated(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE on the last axis of ``x``, halves paired."""
    first, second = _wide(x).chunk(2, dim=-1)
    cos, sin = cos_sin
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def _normed(x: Tensor) -> Tensor:
    """RMSNorm without a weight, computed wide."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _NORM_EPSILON)
    return (wide * scale).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

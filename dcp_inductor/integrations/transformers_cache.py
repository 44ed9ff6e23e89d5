"""A KV cache of transformers of which each rank holds every N-th token.

What is attended over a shard, and with which mask, is transformers.py's. Written for
transformers 5.17 and 5.19.

Axes: N ranks, B sequences, K key-value heads, Q new tokens, S slots of this rank's
shard, E elements of a key or value.

NOTE [token t]
Token t of the padded batch lies on rank ``t % N``, in slot ``t // N``. With padding on
the left, tokens of all sequences share their column t; a pad takes a slot, as in every
static cache, and the mask hides it. Which rank this is stays a tensor, so that all
ranks compile one graph.

NOTE [two ways to read]
One new token (decode) is stored by the rank whose turn it is, and the layer gives that
rank's shard. Several new tokens (prefill) need all tokens before each of them: the
layer gives the new tokens themselves where the cache was empty, else the shards of all
ranks put together again, for this one layer and call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.cache_utils import StaticLayer

from dcp_inductor.errors import BadInput
from dcp_inductor.integrations.transformers_attention import gathered

_FIRST_INSIDE_COMPILE = (
    "The KV cache is filled for the first time inside a compiled forward. The ranks "
    "agree on its sizes through the host then, which can't be compiled: run prefill "
    "uncompiled, as generate() does, or call cache.early_initialization() before it."
)


class ShardedLayer(StaticLayer):
    """This rank's shard of one layer, NOTE [token t].

    num_tokens: of a sequence, the new ones included, that all shards together hold.
    rank: int64 scalar on the model's device. on_first: called with the first keys, when
    memory is taken, to let the ranks agree on their sizes.
    """

    def __init__(
        self,
        num_tokens: int,
        group: ProcessGroup,
        rank: Tensor,
        on_first: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.num_ranks = group.size()
        super().__init__(max_cache_len=-(-num_tokens // self.num_ranks))
        self.num_tokens = num_tokens
        self.group = group
        self.rank = rank
        self.on_first = on_first
        self.filled = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for the shard. Raises RanksDisagree through ``on_first``."""
        if self.on_first is not None:
            if torch.compiler.is_compiling():
                raise BadInput(_FIRST_INSIDE_COMPILE)
            self.on_first(key_states)
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[B, K, Q, E]`` and give what the new tokens attend over.

        NOTE [two ways to read]. Raises BadInput for more tokens than fit.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[2]
        if num_new == 1:
            self._store_one(key_states, value_states)
            self.filled = True
            return self.keys, self.values
        if num_new > self.num_tokens:
            raise BadInput(
                f"A prompt of {num_new} tokens was given to a KV cache of "
                f"{self.num_tokens}: a static cache can't grow. Pass the length of the "
                "prompt and the new tokens together as max_cache_len."
            )
        self._store_many(key_states, value_states)
        if not self.filled:
            self.filled = True
            return key_states, value_states
        return self._whole(self.keys), self._whole(self.values)

    def _store_one(self, key_states: Tensor, value_states: Tensor) -> None:
        slot = (self.cumulative_length // self.num_ranks).reshape(1)
        mine = self.cumulative_length % self.num_ranks == self.rank
        for shard, new in ((self.keys, key_states), (self.values, value_states)):
            kept = torch.where(mine, new, shard.index_select(2, slot))
            shard.index_copy_(2, slot, kept)
        self.cumulative_length.add_(1)

    def _store_many(self, key_states: Tensor, value_states: Tensor) -> None:
        num_new = key_states.shape[2]
        slots = torch.arange(self.max_cache_len, device=self.device)
        source = slots * self.num_ranks + self.rank - self.cumulative_length
        given = ((source >= 0) & (source < num_new)).view(-1, 1)
        source = source.clamp(0, num_new - 1)
        for shard, new in ((self.keys, key_states), (self.values, value_states)):
            shard.copy_(torch.where(given, new.index_select(2, source), shard))
        self.cumulative_length.add_(num_new)

    def _whole(self, shard: Tensor) -> Tensor:
        """All ranks' ``[B, K, S, E]`` in the order of tokens: ``[B, K, S * N, E]``."""
        return gathered(shard, self.group).permute(1, 2, 3, 0, 4).flatten(2, 3)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that the mask speaks of, 0), of all shards together."""
        if query_length > 1 and not self.filled:
            return query_length, 0
        return self.max_cache_len * self.num_ranks, 0

    def get_max_length(self) -> int:
        """Tokens of a sequence, over all ranks."""
        return self.num_tokens

    def reset(self) -> None:
        """Forget all tokens; memory stays."""
        super().reset()
        self.filled = False

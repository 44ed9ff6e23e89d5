"""An unmodified transformers model decodes with its KV cache sharded over ranks.

    dcp = shard(model, group)                    # every rank, once
    cache = dcp.cache(max_cache_len=4096)        # every rank, a batch
    model.generate(**prompts, past_key_values=cache)

The library's attention interface calls ``Sharded.attention`` in each layer, its mask
interface ``Sharded.mask``; the cache is the library's, with layers of
transformers_cache.py. Installing the pass, compiling and generating stay with the
caller. Written for transformers 5.17 and 5.19.

Axes: B sequences, H query heads, Q new tokens, S slots of a shard, D head dim, N ranks.

NOTE [who computes what]
Weights and projections are whole on every rank. In prefill (Q > 1) each rank attends
over the whole sequence and keeps its shard of the keys. In decode (Q = 1) each rank
attends with all H heads over its shard; the exchange gives it H/N merged heads, and an
all-gather brings the heads together, since the output projection is whole as well.

NOTE [who sees what]
The library's masks are functions of a token's index. In decode a rank asks them about
its own tokens, slot s is token ``s * N + rank``, so causality, padding on the left and
sliding windows hold on every shard; a layer with a sliding window keeps all tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, padding_mask_function, sdpa_mask

from dcp_inductor.errors import BadInput
from dcp_inductor.integrations.transformers_attention import (
    Attend,
    all_heads,
    attend,
    exchange,
    with_sinks,
)
from dcp_inductor.integrations.transformers_cache import ShardedLayer
from dcp_inductor.integrations.transformers_checks import (
    check_interface,
    check_model,
    check_options,
    checked_partials,
    other_cache,
    require_alike,
    try_attend,
)
from dcp_inductor.runtime.groups import group_name_of, resolve_group
from dcp_inductor.runtime.workspace import Reservation, reserve

_NUMBER = itertools.count()


def shard(
    model: PreTrainedModel,
    group: ProcessGroup | str | None = None,
    *,
    attend: Attend = attend,
) -> Sharded:
    """Let ``model`` decode over a KV cache that the ranks of ``group`` share out.

    All ranks of the group (None: the default group) call this with the same weights.
    The model's code and weights stay as they are; its attention implementation is set,
    and ``model.set_attn_implementation("sdpa")`` takes it back. attend: the attention
    over one shard; the default is plain torch (transformers_attention.py). Another
    must have its arguments and give its LSE in base e.

    Raises BadInput where the model can't: attention that doesn't go through the
    library's interface, heads that the ranks can't share, layers that keep something
    else than keys and values.
    """
    sharded = Sharded(model, resolve_group(group_name_of(group)), attend)
    AttentionInterface.register(sharded.name, sharded.attention)
    AttentionMaskInterface.register(sharded.name, sharded.mask)
    model.set_attn_implementation(sharded.name)
    check_interface(model, sharded.name)
    return sharded


class Sharded:
    """One model on one rank of one group; ``shard`` makes it.

    name: the attention implementation that the library knows it by.
    """

    def __init__(
        self, model: PreTrainedModel, group: ProcessGroup, attend: Attend
    ) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.group = group
        self.num_ranks = group.size()
        self.num_heads: int = self.config.num_attention_heads
        self.model_name = type(model).__name__
        check_model(model, self.config, self.num_ranks)
        self.device, self.dtype = model.device, model.dtype
        self.rank = torch.tensor(group.rank(), device=model.device)
        self.attend = attend
        self.name = f"dcp_{group.group_name}_{next(_NUMBER)}"
        try_attend(
            attend,
            self.model_name,
            self.num_heads,
            self._head_dims(),
            dtype=self.dtype,
            device=self.device,
        )

    def cache(self, max_cache_len: int) -> Cache:
        """An empty cache for one batch; all ranks make theirs together.

        max_cache_len: tokens of a sequence, prompt and new ones, over all ranks.
        Raises RanksDisagree where the ranks ask for different caches, here and, for
        the batch, in the first forward, before anything is exchanged.
        """
        num_layers: int = self.config.num_hidden_layers
        self._agree(
            "KV cache", {"length": max_cache_len, "number of layers": num_layers}
        )
        firsts: list[Callable[[Tensor], None] | None] = [self._agree_on_batch]
        firsts += [None] * (num_layers - 1)
        return Cache(
            layers=[
                ShardedLayer(max_cache_len, self.group, self.rank, first)
                for first in firsts
            ]
        )

    def reserve(self, max_batch: int) -> Reservation:
        """Make the fused op's workspace for decoding up to ``max_batch`` sequences.

        All ranks together, before a CUDA graph capture; ``dcp_inductor.reserve``.
        """
        return reserve(
            self.group,
            max_tokens=max_batch,
            num_heads=self.num_heads,
            head_dim=self._head_dims()[1],
            dtype=self.dtype,
            device=self.device,
        )

    def _head_dims(self) -> tuple[int, int]:
        """Elements of a head's key and of its value."""
        config = self.config
        if getattr(config, "kv_lora_rank", None):
            return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        dim = getattr(config, "head_dim", None)
        dim = dim or config.hidden_size // self.num_heads
        return dim, dim

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        **options: Any,
    ) -> Tensor | None:
        """Bool ``[B, 1, Q, tokens]``, of this rank's slots in decode; the library's
        arguments. NOTE [who sees what]."""
        sizes = {"batch_size": batch_size, "q_length": q_length, "q_offset": q_offset}
        if q_length > 1:
            return sdpa_mask(
                **sizes,
                kv_length=kv_length,
                kv_offset=kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                allow_is_causal_skip=allow_is_causal_skip and kv_length == q_length,
                **options,
            )
        seen = mask_function
        if attention_mask is not None:
            unknown = max(kv_length - attention_mask.shape[-1], 0)
            padding = torch.nn.functional.pad(attention_mask, (0, unknown))
            seen = and_masks(seen, padding_mask_function(padding))
        return sdpa_mask(
            **sizes,
            kv_length=kv_length // self.num_ranks,
            mask_function=self._of_own_tokens(seen),
            allow_is_causal_skip=False,
            **options,
        )

    def _of_own_tokens(self, seen: Any) -> Callable[..., Any]:
        def of_slot(batch: Any, head: Any, query: Any, slot: Any) -> Any:
            return seen(batch, head, query, slot * self.num_ranks + self.rank)

        return of_slot

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The library's attention function: ``[B, Q, H, D]`` and no weights.

        query ``[B, H, Q, E]``; key, value: what ShardedLayer.update gave, of fewer
        heads where they are grouped. s_aux: one sink a head. Raises BadInput for an
        option that it would have to ignore.
        """
        check_options(self.model_name, options)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if query.shape[2] > 1:
            if s_aux is None and softcap is None:
                return sdpa_attention_forward(
                    module, query, key, value, attention_mask, scaling=scaling
                )
            return _prefill(query, key, value, attention_mask, scaling, s_aux, softcap)
        if attention_mask is None or attention_mask.shape[-1] != key.shape[2]:
            shown = None if attention_mask is None else attention_mask.shape[-1]
            raise self._other_cache(f"{key.shape[2]} keys and a mask for {shown}")
        given = self.attend(query, key, value, attention_mask, scaling, softcap)
        partial_o, partial_lse = checked_partials(given, query, self.model_name)
        if s_aux is not None:
            here = torch.where(self.rank == 0, s_aux.float(), -torch.inf)
            partial_o, partial_lse = with_sinks(partial_o, partial_lse, here[:, None])
        own = exchange(partial_o.squeeze(2), partial_lse.squeeze(2), self.group)
        return all_heads(own, self.group).unsqueeze(1), None

    def _other_cache(self, found: str) -> BadInput:
        return other_cache(self.model_name, found, self.num_ranks)

    def _agree_on_batch(self, keys: Tensor) -> None:
        self._agree(
            "KV cache's first batch",
            {"number of sequences": keys.shape[0], "dtype": str(keys.dtype)},
        )

    def _agree(self, what: str, mine: dict[str, Any]) -> None:
        require_alike(self.group, f"{what} of {self.model_name}", mine)


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, None]:
    """Attention over whole sequences, where torch's own has no sinks or soft cap."""
    if attention_mask is None:
        num_new, device = query.shape[2], query.device
        attention_mask = torch.ones(num_new, num_new, device=device).tril().bool()
    o, lse = attend(query, key, value, attention_mask, scaling, softcap)
    if s_aux is not None:
        o, _ = with_sinks(o, lse, s_aux.float()[:, None])
    return o.transpose(1, 2).contiguous(), None

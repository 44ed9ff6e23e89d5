"""What a transformers model, its attention and its ranks must be like, and the errors.

Everything here is found out before the first exchange. What is done with a model that
passes is transformers.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.config import Config
from dcp_inductor.errors import BadInput, RanksDisagree
from dcp_inductor.merge import PARTIAL_DTYPES
from dcp_inductor.runtime.agreement import agree, first_difference

# What each of these layers sees, is in its mask; other kinds keep more than keys.
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Options that models pass to their attention and that are no business of it here: the
# mask has them already, or they are for other kernels, for losses, for outputs.
_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "sliding_window",
    "use_cache",
}
_OFF = {"dropout": 0.0, "is_causal": True, "output_attentions": False}
# Of the one key that an attention is tried on, and how far its LSE may be off.
_SCORE, _LSE_TOLERANCE = 2.0, 0.05


def check_model(model: Any, config: Any, num_ranks: int) -> None:
    """Raise BadInput for a model whose attention the ranks can't share.

    config: of the model's decoder.
    """
    asked = f"{type(model).__name__} was asked to decode with DCP"
    heads: int = config.num_attention_heads
    if heads % num_ranks:
        raise BadInput(
            f"{asked} over {num_ranks} ranks, but has {heads} attention heads: each "
            "rank gets as many merged heads as every other. Use a group whose size "
            "divides the heads."
        )
    if model.config.is_encoder_decoder:
        raise BadInput(
            f"{asked}, but it is an encoder-decoder: its cross attention keeps keys "
            "that aren't tokens of the decoded sequence. Use a decoder-only model."
        )
    kinds = {*(getattr(config, "layer_types", None) or ())}.difference(_LAYER_TYPES)
    if getattr(config, "num_kv_shared_layers", None):
        kinds.add("layers that share their keys")
    if kinds:
        raise BadInput(
            f"{asked}, but has {', '.join(sorted(kinds))}: only layers of "
            f"{', '.join(_LAYER_TYPES)} keep one key and one value a token and nothing "
            "else. Use a model that has these alone."
        )
    if model.dtype not in PARTIAL_DTYPES:
        known = ", ".join(str(dtype) for dtype in PARTIAL_DTYPES)
        raise BadInput(
            f"{asked} in {model.dtype}, and partial outputs are exchanged in {known}. "
            "Convert the model, for example with model.float()."
        )


def check_interface(model: Any, name: str) -> None:
    """Raise BadInput where the library didn't take ``name`` as the implementation."""
    if model.config.get_text_config(decoder=True)._attn_implementation != name:
        raise BadInput(
            f"{type(model).__name__} was asked to decode with DCP, but its attention "
            "doesn't go through transformers' attention interface: no log-sum-exp of "
            "its scores can be had, and partial outputs can't be merged without one. "
            "Use a model class that supports AttentionInterface, or spell the exchange "
            "in the model itself (docs/adopt.md)."
        )


def check_options(model_name: str, options: dict[str, Any]) -> None:
    """Raise BadInput for an option of an attention that would have to be ignored."""
    for name, option in options.items():
        if option is None or name in _WITHOUT_EFFECT:
            continue
        if name in _OFF and option == _OFF[name]:
            continue
        raise BadInput(
            f"{model_name} passes {name} to its attention, and decoding with DCP knows "
            "no such option: leaving it out could give other numbers. Switch it off, "
            "or use another model."
        )


def checked_partials(
    given: Any, query: Tensor, model_name: str
) -> tuple[Tensor, Tensor]:
    """What an attention over a shard gave for ``query``, if it has an LSE.

    Raises BadInput unless it is (output, LSE) with an LSE ``[B, H, Q]`` in fp32.
    """
    lse = given[1] if isinstance(given, tuple) and len(given) == 2 else None
    shape = query.shape[:3]
    if isinstance(lse, Tensor) and lse.dtype == torch.float32 and lse.shape == shape:
        return given
    have = f"{lse.dtype} {[*lse.shape]}" if isinstance(lse, Tensor) else "none"
    raise BadInput(
        f"The attention over a shard of {model_name} was asked for a log-sum-exp, "
        f"torch.float32 {[*shape]}, and gave {have}. Partial outputs can't be merged "
        "without it: return (output, LSE) from attend, the LSE in base e."
    )


def try_attend(
    attend: Callable[..., Any],
    model_name: str,
    num_heads: int,
    head_dims: tuple[int, int],
    **like: Any,
) -> None:
    """Raise BadInput unless the LSE of one key is its score, in base e.

    head_dims: elements of a key and of a value. like: dtype and device.
    """
    query = torch.ones(1, num_heads, 1, head_dims[0], **like)
    value = torch.ones(1, num_heads, 1, head_dims[1], **like)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=like["device"])
    with torch.no_grad():
        given = attend(query, query, value, mask, _SCORE / head_dims[0], None)
    found = checked_partials(given, query, model_name)[1].mean().item()
    if abs(found - _SCORE) < _LSE_TOLERANCE * _SCORE:
        return
    in_base_2 = abs(found / math.log2(math.e) - _SCORE) < _LSE_TOLERANCE * _SCORE
    which, cure = (", in base 2", ", times ln 2") if in_base_2 else ("", "")
    raise BadInput(
        f"The attention over a shard of {model_name} was asked for the log-sum-exp of "
        f"one score {_SCORE:g} and gave {found:.3f}{which}: shards would be weighted "
        f"wrongly. Return it in base e from attend{cure}."
    )


def other_cache(model_name: str, found: str, num_ranks: int) -> BadInput:
    """The error of a decode step over something else than a sharded cache."""
    return BadInput(
        f"{model_name} was asked to decode one token over its shard and found {found}: "
        f"that isn't a cache of {num_ranks} shards. Pass "
        "past_key_values=dcp.cache(max_cache_len), and no mask but the 2D padding mask."
    )


def require_alike(group: ProcessGroup, topic: str, mine: dict[str, Any]) -> None:
    """Raise RanksDisagree, on all ranks, unless every rank says the same of ``topic``.

    All ranks of the group call this; Config.timeout_s bounds the wait.
    """
    stated = agree(group, topic, mine, Config.from_env().timeout_s)
    difference = first_difference(stated, mine)
    if difference is not None:
        name, of_ranks = difference
        by_rank = ", ".join(f"rank {r}: {v}" for r, v in enumerate(of_ranks))
        raise RanksDisagree(
            f"The {topic} was asked for with another {name} on each rank "
            f"({by_rank}). Each of {len(of_ranks)} ranks holds its share of the "
            "tokens of the same sequences, so their caches must be alike: pass the "
            "same prompts and the same max_cache_len on all ranks."
        )

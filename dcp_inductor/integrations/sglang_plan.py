"""What the exchanges of an sglang server will need, read from its own settings.

Written for SGLang 0.5.23. Starting on such a plan is sglang.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_inductor.config import Config
from dcp_inductor.report import Miss

if TYPE_CHECKING:
    import torch

# Tokens of an eager decode batch without CUDA graphs that run in one piece; wider ones
# keep sglang's own exchange.
_EAGER_TOKENS = 512


@dataclass(frozen=True)
class Plan:
    """What a server's exchanges will need; equal on all ranks of the DCP group.

    max_tokens: B of the widest decode batch that is fused. num_heads: H before the
    exchange. host_group and torch_group: sglang's and torch's name of the group.
    device: None for the current CUDA device. compiled: the pass is wanted. eager: so
    is the hook of sglang_eager.py.
    """

    host_group: str
    torch_group: str
    num_ranks: int
    max_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str | None
    backend: str
    compiled: bool
    eager: bool


def plan_for(runner: Any, config: Config) -> Plan | Miss:
    """What the decode batches of a runner need, or why nothing is fused."""
    from sglang.srt.runtime_context import get_flags, get_parallel

    compiled = bool(get_flags().capture.enable_torch_compile)
    for miss in (_unfit_settings(compiled, config), _unfit_streams()):
        if miss is not None:
            return miss
    backend = get_parallel().dcp_comm_backend
    eager = config.eager_decode and backend == "a2a"
    max_tokens = _widest_batch(runner, eager)
    if max_tokens is None:
        return Miss("no decode batch is captured from a compiled model")
    attention = next(filter(_is_mla, runner.model_runner.model.modules()), None)
    if attention is None:
        return Miss("the model has no MLA attention that exchanges heads")
    group = get_parallel().dcp_group
    device = runner.model_runner.device
    return Plan(
        group.unique_name,
        group.device_group.group_name,
        group.world_size,
        max_tokens,
        attention.num_local_heads * attention.dcp_size,
        attention.kv_lora_rank,
        runner.model_runner.dtype,
        None if device == "cuda" else device,
        backend,
        compiled,
        eager,
    )


def _unfit_settings(compiled: bool, config: Config) -> Miss | None:
    from sglang.srt.runtime_context import get_parallel

    backend = get_parallel().dcp_comm_backend
    if not compiled and not (config.eager_decode and backend == "a2a"):
        return Miss(
            "the server runs without --enable-torch-compile, so no graph is compiled; "
            "DCP_INDUCTOR_EAGER_DECODE=1 fuses eager decode over a2a"
        )
    if backend == "ag_rs" and not config.ag_rs:
        return Miss(
            "--dcp-comm-backend is ag_rs, whose fused form rounds differently; "
            "DCP_INDUCTOR_AG_RS=1 allows it"
        )
    if backend == "ag_rs" and _symmetric_memory():
        return Miss(
            "--enable-symm-mem breaks the compiled graph between the collectives of "
            "--dcp-comm-backend ag_rs"
        )
    if backend not in ("a2a", "ag_rs", "fi_a2a"):
        return Miss(f"--dcp-comm-backend is {backend}, which isn't known here")
    return None


def _symmetric_memory() -> bool:
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    return bool(pynccl_allocator.is_symmetric_memory_enabled())


def _unfit_streams() -> Miss | None:
    """A workspace serves one capture stream."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_parallel

    if get_disagg().enable_pdmux:
        return Miss("--enable-pdmux captures on several streams at once")
    if get_parallel().pp_size > 1 and envs.SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP.get():
        return Miss(
            "SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP warms pipeline stages up beside each "
            "other"
        )
    return None


def _widest_batch(runner: Any, eager: bool) -> int | None:
    """Tokens of the largest decode batch that is fused; None if there is none.

    Compiled ones come from sglang's list of batches to compile and capture; eager ones
    also from those that it captures without compiling, or, where it captures nothing,
    from the requests that it holds at once.
    """
    model_runner = runner.model_runner
    widths = _tokens_per_request(model_runner)
    if _captures_decode():
        found = [
            max(batches) * width
            for width in widths
            if (batches := _captured_batches(model_runner, width, eager))
        ]
        return max(found, default=None)
    if not eager:
        return None
    requests: int = model_runner.req_to_token_pool.size
    return min(requests * max(widths), _EAGER_TOKENS)


def _tokens_per_request(model_runner: Any) -> list[int]:
    """Of a decode step: now, and where speculation adapts itself, at most."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    drafted = (None, max_speculative_num_draft_tokens())
    return [
        model_runner.decode_num_tokens_per_req(num_draft_tokens=number)
        for number in dict.fromkeys(drafted)
    ]


def _captures_decode() -> bool:
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config is not None and not (
        check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    )


def _captured_batches(model_runner: Any, width: int, eager: bool) -> list[int]:
    """Requests of each batch that is captured; without ``eager``, compiled too."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import (
        get_batch_sizes_to_capture,
    )

    captured, compiled = get_batch_sizes_to_capture(
        model_runner,
        width,
        gathered_buffer_required=any(model_runner.decode_graph_gather_requirements()),
    )
    return captured if eager else compiled


def _is_mla(module: Any) -> bool:
    return (
        hasattr(module, "kv_lora_rank")
        and hasattr(module, "num_local_heads")
        and getattr(module, "dcp_size", 1) > 1
    )

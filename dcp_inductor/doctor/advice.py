"""What to do next: a table of conditions, each with its sentence.

Every row whose condition holds is shown, in this order.
"""

from __future__ import annotations

from collections.abc import Callable

from dcp_inductor.doctor.checkup import Checkup

_PASS = "DcpFusionPass"
_HOOK = "post_grad_custom_pre_pass"

Row = tuple[Callable[[Checkup], bool], Callable[[Checkup], str]]


def advice(found: Checkup) -> list[str]:
    """The sentences that apply; at least one always does."""
    return [sentence(found) for holds, sentence in _ROWS if holds(found)]


def _no_gpu(found: Checkup) -> bool:
    return not found.cards


def _too_few(found: Checkup) -> bool:
    return 0 < len(found.cards) < found.need.num_ranks


def _no_triton(found: Checkup) -> bool:
    return bool(found.cards) and found.versions["triton"] is None


def _asked_in_vain(found: Checkup) -> bool:
    return not any(state.taken for state in found.backends)


def _asks_for_less(found: Checkup) -> bool:
    return found.asked_backend == "collective" and bool(found.cards)


def _others_on_hook(found: Checkup) -> bool:
    return any(hook.name == _HOOK and _others(hook.passes) for hook in found.hooks)


def _others(passes: list[str]) -> list[str]:
    return [name for name in passes if not name.endswith(_PASS)]


def _on_hook(found: Checkup) -> list[str]:
    return [name for hook in found.hooks if hook.name == _HOOK for name in hook.passes]


def _has_plugin_host(found: Checkup) -> bool:
    return any(host.name == "sglang" and host.version for host in found.hosts)


def _plugin_missing(found: Checkup) -> bool:
    return _has_plugin_host(found) and any("isn't" in host.note for host in found.hosts)


def _plugin_ready(found: Checkup) -> bool:
    return _has_plugin_host(found) and not _plugin_missing(found)


def _reserve_call(found: Checkup) -> str:
    need = found.need
    return (
        f"dcp_inductor.reserve(group, max_tokens={need.max_tokens}, "
        f"num_heads={need.num_heads}, head_dim={need.head_dim}, "
        f"dtype=torch.{need.dtype})"
    )


def _ready(found: Checkup) -> bool:
    return found.fused and found.enabled


_ROWS: tuple[Row, ...] = (
    (
        lambda found: not found.enabled,
        lambda found: "DCP_INDUCTOR=0 switches everything off. Unset it.",
    ),
    (
        _no_gpu,
        lambda found: (
            "This process sees no GPU, so exchanges run on `collective`. Run doctor "
            "where the model runs; if that is here, look at the driver and "
            "CUDA_VISIBLE_DEVICES, and at whether this torch is a CUDA build."
        ),
    ),
    (
        _no_triton,
        lambda found: (
            "Install triton, in the version that this torch was built for: the fused "
            "kernel is written in it."
        ),
    ),
    (
        _too_few,
        lambda found: (
            f"{found.need.num_ranks} ranks were asked about and {len(found.cards)} "
            f"GPUs are seen. Pass --ranks {len(found.cards)}, or make more visible."
            if len(found.cards) > 1
            else "One GPU is seen; an exchange needs two. Look at CUDA_VISIBLE_DEVICES."
        ),
    ),
    (
        _asked_in_vain,
        lambda found: (
            f"DCP_INDUCTOR_BACKEND={found.asked_backend} is set and can't run here, so "
            "the first exchange would raise. Unset it, or remove the reason above."
        ),
    ),
    (
        _asks_for_less,
        lambda found: (
            "DCP_INDUCTOR_BACKEND=collective is set. Unset it to let a fused backend "
            "run."
        ),
    ),
    (
        _others_on_hook,
        lambda found: (
            f"{', '.join(_others(_on_hook(found)))} is on {_HOOK} too; passes run in "
            "the order shown. torch.compile(options=...) of one function replaces all "
            "of them."
        ),
    ),
    (
        _plugin_missing,
        lambda found: (
            "sglang is installed and doesn't see this package: its entry point isn't "
            "registered. Install dcp_inductor with pip into the same environment."
        ),
    ),
    (
        _plugin_ready,
        lambda found: (
            "sglang needs nothing else: serve with --enable-torch-compile and decode "
            "context parallelism over `a2a`, and look for its line at start."
        ),
    ),
    (
        _ready,
        lambda found: (
            "Call dcp_inductor.install() before the model is compiled, and on every "
            f"rank, before a CUDA graph capture, {_reserve_call(found)}."
        ),
    ),
    (
        lambda found: True,
        lambda found: (
            "dcp-inductor explain MODULE:CALLABLE says of a function's exchanges "
            "whether they fuse; dcp-inductor demo shows it on a small model."
        ),
    ),
)

"""``dcp-inductor doctor``: its options and its exit status."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from rich.console import Console

from dcp_inductor.doctor.checkup import Need
from dcp_inductor.errors import BadInput

# torch's names of dtypes, by what the command line calls them.
DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# flag, field of Need, what it is
_SIZES = (
    ("--max-tokens", "max_tokens", "B of the widest exchange that runs in one piece"),
    ("--heads", "num_heads", "H, heads before the exchange, over all ranks"),
    ("--head-dim", "head_dim", "D"),
    ("--ranks", "num_ranks", "N; by default the GPUs that are seen, at least 2"),
)
NO_FUSED_BACKEND = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in fields(Need)}
    for flag, name, what in _SIZES:
        default = None if name == "num_ranks" else defaults[name]
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(
            flag, dest=name, type=int, default=default, help=f"{what}{shown}"
        )
    parser.add_argument(
        "--dtype",
        default="bf16",
        help=f"of the partials: {', '.join(DTYPES)} (default: bf16)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no screen")


def run(options: argparse.Namespace) -> int:
    """0 if a fused backend would run here, 2 if only `collective` can, or none."""
    _check(options)
    from dcp_inductor.doctor.examine import default_ranks, examine

    sizes = {name: getattr(options, name) for _, name, _ in _SIZES}
    if sizes["num_ranks"] is None:
        sizes["num_ranks"] = default_ranks()
    need = Need(**sizes, dtype=DTYPES[options.dtype])
    _check_heads(need)
    found = examine(need)
    console = Console()
    if options.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        from dcp_inductor.doctor.show import screen

        screen(console, found)
    return 0 if found.fused else NO_FUSED_BACKEND


def _check(options: argparse.Namespace) -> None:
    for flag, name, _ in _SIZES:
        value = getattr(options, name)
        least = 2 if name == "num_ranks" else 1
        if value is not None and value < least:
            raise BadInput(
                f"{flag} {value} was asked for; an exchange has at least {least}. Pass "
                "the size that the model will have."
            )
    if options.dtype not in DTYPES:
        raise BadInput(
            f"--dtype {options.dtype} was asked for, and the exchange takes "
            f"{', '.join(DTYPES)}. Pass one of these."
        )


def _check_heads(need: Need) -> None:
    if need.num_heads % need.num_ranks:
        next_fit = -(-need.num_heads // need.num_ranks) * need.num_ranks
        raise BadInput(
            f"--heads {need.num_heads} was asked for on {need.num_ranks} ranks; each "
            "rank keeps H/N heads, so H must be a multiple of N. Pass --heads "
            f"{next_fit}, or other --ranks."
        )

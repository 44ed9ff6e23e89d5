"""What the demo was asked for, checked; and the sizes of its model. Imports no torch.

Which device ``auto`` means on this machine is run.py's to find out.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_inductor.errors import BadInput

# The names of torch's dtypes, by what the command line calls them.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEVICES = ("auto", "cpu", "cuda")
LSE_MODES = ("basee", "base2")
# One host's usual GPUs. On CPUs every rank is a process that compiles.
MAX_RANKS = 8
_LEAST_HEADS = 16


@dataclass(frozen=True)
class DemoSettings:
    """One run of the demo. ``check`` raises BadInput for what can't be run.

    timeout_s: how long a rank may say nothing before the demo is ended.
    logs: a folder that keeps what each rank prints, or None.
    """

    num_ranks: int = 2
    num_layers: int = 2
    batch_size: int = 2
    num_steps: int = 12
    dtype: str = "fp32"
    device: str = "auto"
    lse_mode: str = "basee"
    timeout_s: float = 180.0
    logs: str | None = None

    def check(self) -> None:
        """Raise BadInput for a number or a word that the demo doesn't take."""
        for flag, number, most in (
            ("--ranks", self.num_ranks, MAX_RANKS),
            ("--layers", self.num_layers, 64),
            ("--batch", self.batch_size, 128),
            ("--steps", self.num_steps, 1024),
        ):
            if not 1 <= number <= most:
                raise BadInput(
                    f"{flag} {number} was asked for, and the demo takes 1 to {most}: "
                    "it is a small model on one machine. Pass a number in between."
                )
        for flag, word, words in (
            ("--dtype", self.dtype, tuple(DTYPES)),
            ("--device", self.device, DEVICES),
            ("--lse-mode", self.lse_mode, LSE_MODES),
        ):
            if word not in words:
                raise BadInput(
                    f"{flag} {word} was asked for, and the demo has "
                    f"{', '.join(words)}. Pass one of these."
                )
        if not self.timeout_s > 0:
            raise BadInput(
                f"--timeout {self.timeout_s:g} was asked for; a wait needs a positive "
                "number of seconds. Pass for example --timeout 180."
            )

    @property
    def shape(self) -> ModelShape:
        """The model's sizes for these ranks: a multiple of N heads, 16 or more."""
        heads_per_rank = -(-_LEAST_HEADS // self.num_ranks)
        return ModelShape(num_heads=heads_per_rank * self.num_ranks)

    @property
    def num_exchanges(self) -> int:
        """How many exchanges a decode step has: one a layer, none for one rank."""
        return self.num_layers if self.num_ranks > 1 else 0


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the decoder, those of DeepSeek-V3 divided by 8 or more.

    latent_dim: of the KV latent. rope_dim: of the key part that all heads share.
    nope_dim, value_dim: of a head's query without rope, and of its output.
    """

    num_heads: int
    hidden_dim: int = 256
    latent_dim: int = 64
    rope_dim: int = 16
    nope_dim: int = 32
    value_dim: int = 32
    mlp_dim: int = 512
    vocab_size: int = 512

    @property
    def cache_dim(self) -> int:
        """Elements that one token takes in the KV cache of a layer."""
        return self.latent_dim + self.rope_dim

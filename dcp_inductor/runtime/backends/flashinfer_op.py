"""What the installed FlashInfer's decode_cp_a2a_lse_reduce does, read from its files.

Nothing of FlashInfer is imported here: that takes seconds, and a process that doesn't
run the op shouldn't pay for having it installed. Version numbers decide nothing.
Running the op is flashinfer.py's.

NOTE [two ops]
Up to 0.7.4 the op (flashinfer#4929) sets torch's symmetric-memory backend to NCCL for
the whole process, needs NCCL's device communicators, and packed inputs. A coming one
(flashinfer#5726) takes any symmetric-memory backend and strided views, under the same
names and the same schema. So each of the three is looked for by itself:

    sets the backend        a call of ``set_backend`` in the Python module
    device communicators    NCCL_HAS_DEVCOMM in the CUDA source; torch defines it, or
                            what is behind it isn't compiled
    packed inputs           ``partial_o must be contiguous`` in the CUDA source

What can't be read counts as there: a wrong "no" would break others, a wrong "yes" only
costs speed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch

OP = "decode_cp_a2a_lse_reduce"
# Of the three functions that are called: their parameters, in order.
SIGNATURES: dict[str, tuple[str, ...]] = {
    OP: (
        *("partial_o", "partial_lse", "workspace", "cp_rank", "cp_size"),
        "lse_mode",
    ),
    f"{OP}_create_workspace": (
        *("max_tokens", "local_heads", "cp_size", "head_dim", "dtype", "group"),
    ),
    f"{OP}_workspace_size": (
        *("max_tokens", "local_heads", "cp_size", "head_dim", "dtype"),
    ),
}
# Of the torch op behind it, which is called directly: flashinfer.py, NOTE [stream].
SCHEMA = (
    "decode_cp_a2a_lse_reduce(Tensor partial_o, Tensor partial_lse, "
    "Tensor(a!) workspace, int cp_rank, int cp_size, bool is_lse_base_on_e, "
    "str group_name) -> Tensor"
)
_KERNEL = "csrc/dcp_lse_reduce.cu"
_KERNEL_HEADER = "include/flashinfer/comm/dcp_lse_reduce.cuh"
_INCLUDE = re.compile(r"#include <(torch/[^>]+)>")
_TORCH_INCLUDE = Path(torch.__file__).parent / "include"
DEVCOMM = "NCCL_HAS_DEVCOMM"
_DEVCOMM_HEADER = "torch/csrc/distributed/c10d/symm_mem/nccl_dev_cap.hpp"


@dataclass(frozen=True)
class InstalledOp:
    """What the op does, NOTE [two ops].

    module: the Python module that defines it. missing_headers: of torch, that its
    source includes and this torch doesn't have. sources: a hash of its files; two
    ranks whose hashes differ don't speak the same protocol.
    """

    module: str
    sets_backend: bool
    needs_devcomm: bool
    needs_packed: bool
    missing_headers: tuple[str, ...]
    sources: str


def installed_op() -> InstalledOp | str:
    """The op of the FlashInfer that would be imported, or why there is none."""
    try:
        spec = importlib.util.find_spec("flashinfer")
    except (ImportError, ValueError):  # a stub in sys.modules has no spec
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return "FlashInfer isn't installed"
    return op_in(Path(next(iter(spec.submodule_search_locations))))


@functools.cache
def op_in(package: Path) -> InstalledOp | str:
    """The op of the FlashInfer in this folder, or why there is none."""
    try:
        return _read(package)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return f"the installed FlashInfer can't be read: {error}"


def _read(package: Path) -> InstalledOp | str:
    path = _defining_file(package / "comm")
    if path is None:
        return f"the installed FlashInfer has no flashinfer.comm.{OP}"
    tree = ast.parse(path.read_text())
    if (difference := _difference(tree)) is not None:
        return difference
    kernel = package / "data" / _KERNEL
    source = kernel.read_text() if kernel.exists() else None
    return InstalledOp(
        f"flashinfer.comm.{path.stem}",
        _calls(tree, "set_backend"),
        source is None or DEVCOMM in source,
        source is None or "partial_o must be contiguous" in source,
        () if source is None else _missing_headers(source),
        _hash([path, kernel, package / "data" / _KERNEL_HEADER]),
    )


def _defining_file(folder: Path) -> Path | None:
    for path in sorted(folder.glob("*.py")):
        if f"def {OP}(" in path.read_text():
            return path
    return None


def _difference(tree: ast.Module) -> str | None:
    """What of the op's functions isn't as SIGNATURES has it, or None."""
    found = {
        node.name: tuple(arg.arg for arg in _parameters(node))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    for name, parameters in SIGNATURES.items():
        if name not in found:
            return f"the installed FlashInfer has no {name}"
        if found[name] != parameters:
            return (
                f"the installed FlashInfer's {name} takes "
                f"({', '.join(found[name])}); this backend knows "
                f"({', '.join(parameters)})"
            )
    return None


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    arguments = function.args
    more = [arguments.vararg, arguments.kwarg]
    return [
        *(*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs),
        *(one for one in more if one is not None),
    ]


def _calls(tree: ast.Module, name: str) -> bool:
    """Whether a function of this name is called anywhere, however it is reached."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(
        getattr(function, "attr", getattr(function, "id", None)) == name
        for function in called
    )


def _missing_headers(source: str) -> tuple[str, ...]:
    headers = _INCLUDE.findall(source)
    return tuple(name for name in headers if not (_TORCH_INCLUDE / name).exists())


@functools.cache
def torch_gives_devcomm(include: Path = _TORCH_INCLUDE) -> bool:
    """Whether this torch lets extensions have NCCL's device communicators.

    Its NCCL may have them and its headers not. A torch without this header has none.
    """
    try:
        return DEVCOMM in (include / _DEVCOMM_HEADER).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _hash(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]

"""The console script ``dcp-inductor``: a table of commands, and explain.

What a command needs it imports itself, so that ``--help`` doesn't wait for torch. Exit
statuses of every command: 0 all is right, 1 something isn't, 2 the input is unusable
(doctor: or no fused backend can run), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

import dcp_inductor
from dcp_inductor.bench import command as bench
from dcp_inductor.demo.settings import DEVICES, DTYPES, LSE_MODES, DemoSettings
from dcp_inductor.doctor import command as doctor
from dcp_inductor.errors import BadInput, DcpError

if TYPE_CHECKING:
    from dcp_inductor.report import Report

_PROG = "dcp-inductor"
# Of an error in a user's code; the last ones are theirs, or say what torch met.
_TRACE_FRAMES = 3


@dataclass(frozen=True)
class Command:
    """A row: ``run`` gets the parsed options and returns the exit status."""

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: that of the process) names."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except BadInput as error:
        _complain(str(error))
        return 2
    except DcpError as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Finds decode context parallelism's exchange in torch.compile "
        "graphs, proves it, and runs it as one fused op.",
    )
    parser.add_argument(
        "--version", action="version", version=f"{_PROG} {dcp_inductor.__version__}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name, help=command.summary, description=command.summary
        )
        command.add_options(one)
        one.set_defaults(run=command.run)
    return parser


def _complain(text: str) -> None:
    Console(stderr=True).print(Text(f"{_PROG}: {text}", style="red"), soft_wrap=True)


# flag, field of DemoSettings, what it is
_DEMO_OPTIONS = (
    ("--ranks", "num_ranks", "processes, one KV cache shard each"),
    ("--layers", "num_layers", "MLA layers, one exchange each"),
    ("--batch", "batch_size", "sequences"),
    ("--steps", "num_steps", "tokens to decode for each sequence"),
    ("--dtype", "dtype", ", ".join(DTYPES)),
    ("--device", "device", ", ".join(DEVICES) + "; auto: a GPU a rank, or the CPU"),
    ("--lse-mode", "lse_mode", ", ".join(LSE_MODES)),
    ("--timeout", "timeout_s", "seconds of silence after which ranks count as hung"),
)


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    defaults = DemoSettings()
    for flag, name, what in _DEMO_OPTIONS:
        default = getattr(defaults, name)
        parser.add_argument(
            flag,
            dest=name,
            type=type(default),
            default=default,
            help=f"{what} (default: {default})",
        )
    parser.add_argument(
        "--logs", metavar="DIR", help="keep what each rank prints, TORCH_LOGS too, here"
    )


def _demo(options: argparse.Namespace) -> int:
    settings = DemoSettings(
        **{field.name: getattr(options, field.name) for field in fields(DemoSettings)}
    )
    settings.check()
    from dcp_inductor.demo.run import run_demo

    return run_demo(settings, Console())


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:CALLABLE",
        help="a .py file or a dotted name, and what to call in it; it returns "
        "(fn, args) or (fn, args, kwargs)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="ranks of the stand-in process group, if MODULE makes none (default: 2)",
    )
    parser.add_argument(
        "--graphs", action="store_true", help="also print each graph before and after"
    )


def _explain(options: argparse.Namespace) -> int:
    """0 if there is an exchange and every one is fused, 1 if not."""
    if options.ranks < 1:
        raise BadInput(
            f"--ranks {options.ranks} was asked for; a process group has at least 1 "
            "rank. Pass for example --ranks 2."
        )
    from dcp_inductor.config import Config

    if not Config.from_env().enabled:
        raise BadInput(
            "explain was asked for, and DCP_INDUCTOR=0 switches the pass off: nothing "
            "would be looked at. Unset it."
        )
    make = _load(options.target)
    with _process_group(options.ranks):
        fn, args, kwargs = _call(options.target, make)
        report = _report(options.target, fn, args, kwargs)
    _show_report(report, with_graphs=options.graphs)
    return 0 if report.exchanges and not report.refused else 1


def _load(target: str) -> Callable[[], Any]:
    """The callable that ``MODULE:CALLABLE`` names. Raises BadInput."""
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise BadInput(
            f"{target!r} was asked for; explain needs MODULE:CALLABLE, for example "
            "model.py:example or package.model:example."
        )
    with _unusable(f"{module_name!r} can't be imported"):
        module = _import(module_name)
    made = getattr(module, name, None)
    if not callable(made):
        raise BadInput(
            f"{target!r} was asked for, and {module_name!r} has no callable {name!r}. "
            "Name a function that returns (fn, args) or (fn, args, kwargs)."
        )
    return made


def _import(name: str) -> ModuleType:
    """A .py file, with its folder on the path, or a dotted name seen from here."""
    path = Path(name)
    if path.suffix != ".py":
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(name)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _call(target: str, make: Callable[[], Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """``(fn, args, kwargs)`` of what ``make`` returns. Raises BadInput."""
    with _unusable(f"{target}() failed"):
        made = make()
    fits = (
        isinstance(made, tuple)
        and len(made) in (2, 3)
        and callable(made[0])
        and isinstance(made[1], (tuple, list))
        and (len(made) == 2 or isinstance(made[2], dict))
    )
    if not fits:
        raise BadInput(
            f"{target}() returned {type(made).__name__}; explain needs (fn, args) or "
            "(fn, args, kwargs), args a tuple and kwargs a dict. Return these."
        )
    fn, args, *rest = made
    return fn, tuple(args), rest[0] if rest else {}


def _report(target: str, fn: Any, args: tuple, kwargs: dict[str, Any]) -> Report:
    with warnings.catch_warnings():
        # explain() turns torch's caches off, and torch says so.
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        with _unusable(f"what {target}() returned can't be compiled"):
            return dcp_inductor.explain(fn, *args, **kwargs)


@contextlib.contextmanager
def _unusable(what: str) -> Iterator[None]:
    """Whatever a user's code raises becomes BadInput, with the end of its trace."""
    try:
        yield
    except Exception as error:
        trace = traceback.format_exc(limit=-_TRACE_FRAMES)
        raise BadInput(f"{what}.\n\n{trace}") from error


@contextlib.contextmanager
def _process_group(num_ranks: int) -> Iterator[None]:
    """Rank 0 of a group that sends nothing, unless there is a group already."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    # The import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _show_report(report: Report, *, with_graphs: bool) -> None:
    console = Console()
    console.print(Text(str(report)), soft_wrap=True)
    if not with_graphs:
        return
    for number, graph in enumerate(report.graphs):
        for when, text in (("before", graph.before), ("after", graph.after)):
            if text:
                console.rule(f"graph {number} {when}")
                console.print(Text(text), soft_wrap=True)


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "Decode with a small MLA model on N ranks, without and with the pass.",
        _add_demo_options,
        _demo,
    ),
    Command(
        "explain",
        "Say which exchanges of a function are fused, and why others aren't.",
        _add_explain_options,
        _explain,
    ),
    Command(
        "doctor",
        "Say what runs on this machine, what doesn't and why, and what to do next.",
        doctor.add_options,
        doctor.run,
    ),
    Command(
        "bench",
        "Measure one exchange between GPUs beside its floors, or show a stored result.",
        bench.add_options,
        bench.run,
    ),
)

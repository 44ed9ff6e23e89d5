"""``dcp-inductor bench``: its options, and what is done with a result.

Measuring is run.py's and exchange.py's; torch and matplotlib are imported where they
are needed only.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dcp_inductor.bench.results import MET, MISSED, Results, as_text
from dcp_inductor.bench.settings import BenchSettings
from dcp_inductor.errors import BadInput

_STYLES = {MET: "green", MISSED: "bold red"}
_PICTURES = (".png", ".svg", ".pdf")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of measuring have no default here, so that --from can refuse them."""
    defaults = BenchSettings()
    parser.add_argument(
        "--ranks",
        dest="num_ranks",
        type=int,
        help=f"GPUs to measure between, one rank each (default: {defaults.num_ranks})",
    )
    for flag, what, numbers in (
        ("--heads-per-rank", "H/N, a table each", defaults.heads_per_rank),
        ("--batches", "B, a row each", defaults.batches),
    ):
        text = " ".join(map(str, numbers))
        parser.add_argument(
            flag, type=int, nargs="+", metavar="N", help=f"{what} (default: {text})"
        )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        help=f"seconds that the ranks may take (default: {defaults.timeout_s:g})",
    )
    parser.add_argument(
        "--from",
        dest="stored",
        metavar="FILE",
        help="measure nothing: show what an earlier --json FILE holds",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw it here; needs matplotlib, the extra dcp-inductor[bench]",
    )


def run(options: argparse.Namespace) -> int:
    """0: shown, whatever the goals say. Raises BadInput, BenchFailed."""
    measuring = _measuring(options)
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        _check_folder(flag, path)
    _check_plot(options.plot)
    console = Console()
    if options.stored:
        results = Results.read(options.stored)
    else:
        from dcp_inductor.bench.run import measure

        results = measure(BenchSettings(**measuring), console)
    # What took minutes to measure is kept before anything else can fail.
    if options.json:
        results.write(options.json)
    _show(console, results)
    if options.plot:
        from dcp_inductor.bench.plot import draw

        draw(results, options.plot)
    for path in filter(None, (options.json, options.plot)):
        console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0


def _show(console: Console, results: Results) -> None:
    """Lines as they are: a narrow screen wraps them and cuts no number."""
    for line in as_text(results).splitlines():
        style = next((s for word, s in _STYLES.items() if line.startswith(word)), "")
        console.print(Text(line, style=style), soft_wrap=True)


def _measuring(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a measurement that were given. Raises BadInput beside --from."""
    names = ("num_ranks", "heads_per_rank", "batches", "timeout_s")
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if options.stored and given:
        flags = ", ".join(_flag(name) for name in given)
        raise BadInput(
            f"--from and {flags} were asked for; --from shows a stored result, and "
            "nothing is measured that they could change. Leave one of them out."
        )
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
    }


def _flag(name: str) -> str:
    known = {"num_ranks": "--ranks", "timeout_s": "--timeout"}
    return known.get(name, "--" + name.replace("_", "-"))


def _check_folder(flag: str, path: str | None) -> None:
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise BadInput(
            f"{flag} {path} was asked for, and there is no folder "
            f"{Path(path).parent}. Make it first."
        )


def _check_plot(path: str | None) -> None:
    """Before minutes of measuring, not after them."""
    if path is None:
        return
    if Path(path).suffix.lower() not in _PICTURES:
        raise BadInput(
            f"--plot {path} was asked for, and a picture's name ends in "
            f"{', '.join(_PICTURES)}. Pass for example --plot exchange.png."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            f"--plot {path} was asked for, and matplotlib isn't installed; nothing "
            "else here needs it, so it is an extra. "
            "pip install 'dcp-inductor[bench]', or leave --plot out: the table needs "
            "nothing."
        )

"""dcp-inductor bench: a stored result as table and picture, goals, and bad input.

Measuring itself needs GPUs; here stand-ins for the ranks succeed, fail and hang.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from dcp_inductor.bench import command, results, run
from dcp_inductor.bench.results import Results
from dcp_inductor.bench.settings import BenchSettings
from dcp_inductor.cli import main
from dcp_inductor.errors import BadInput

STORED = Path(__file__).parents[1] / "benchmarks" / "exchange_h200_x2.json"
ROW = {"chain": 40.0, "compiled": 12.0, "pass": 2.0, "flag": 1.6, "push": 1.0}
JUDGED_GREEN = (0x00, 0x9E, 0x73)


def payload(rows=None, **more):
    machine = {"card": "a card", "torch": "2.x"}
    return {"machine": machine, "ranks": 2, "tables": {"16": rows or {"1": ROW}}} | more


@pytest.fixture
def stored(tmp_path):
    def write(content):
        path = tmp_path / "stored.json"
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text)
        return str(path)

    return write


def test_a_stored_result_is_shown_and_written_again(tmp_path, capsys):
    again = tmp_path / "again.json"
    assert main(["bench", "--from", str(STORED), "--json", str(again)]) == 0
    text = capsys.readouterr().out
    content = json.loads(STORED.read_text())
    assert content["machine"]["card"] in text
    for heads, rows in content["tables"].items():
        assert f"{heads} heads a rank" in text
        for row in rows.values():
            assert f"{row['compiled']:.2f}" in text
    assert Results.read(str(again)) == Results.read(str(STORED))


def test_the_table_has_ratios_and_the_larger_floor(stored, capsys):
    assert main(["bench", "--from", stored(payload())]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if "compiled" in line).split()
    row = next(line for line in lines if line.split()[:1] == ["1"]).split()
    assert len(heading) == len(row) + 3  # "of chain" is two words
    assert row[-3:] == ["1/20.0", "1/6.0", "1.25"]


def test_a_result_without_the_pass_has_no_ratios(stored, capsys):
    rows = {"1": {"nccl": 12.0, "flag": 1.6}}
    assert main(["bench", "--from", stored(payload(rows))]) == 0
    text = capsys.readouterr().out
    assert "12.00" in text
    assert " of " not in text
    assert "met" not in text.lower().split()


@pytest.mark.parametrize("number", range(len(results.GOALS)))
def test_a_goal_is_met_at_its_bound_and_missed_above(number):
    goal = results.GOALS[number]
    batch = goal.batch or 4
    measured = ROW | {"sglang compiled": 20.0}
    floor = results.floor_us(ROW)
    other = floor if goal.against == "floor" else measured[goal.against]

    def verdict(share):
        row = measured | {goal.judged: other * share}
        judged = results.verdicts(Results.of(payload({str(batch): row})))
        return next(one for one in judged if one.goal == str(goal))

    assert verdict(goal.at_most * (1 - 1e-9)).met
    missed = verdict(goal.at_most * 1.01)
    assert not missed.met
    assert f"B = {batch}" in missed.found


def test_a_goal_of_every_batch_is_judged_by_the_worst():
    rows = {"1": ROW, "2": ROW | {"pass": 1.6 * 1.5}, "4": ROW}
    judged = results.verdicts(Results.of(payload(rows)))
    floor = next(one for one in judged if "every B" in one.goal)
    assert not floor.met
    assert floor.found == "1.50 at B = 2"


@pytest.mark.parametrize(("call_us", "met"), [(17.9, True), (18.1, False)])
def test_the_goal_of_host_time(call_us, met):
    host = {"16": {"bare launch": 10.0, "generated call": call_us}}
    judged = results.verdicts(Results.of(payload(host_us=host)))
    assert [one.met for one in judged if "host" in one.goal] == [met]


def has_color(path, color):
    image = pytest.importorskip("matplotlib.image").imread(path)
    assert image.std() > 0.01, "a blank picture"
    near = abs(image[..., :3] * 255 - torch.tensor(color).numpy()) < 2
    return bool(near.all(-1).any())


def test_the_picture_has_the_line_that_is_judged(tmp_path, stored, capsys):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "a.png")
    assert main(["bench", "--from", str(STORED), "--plot", path]) == 0
    assert path in capsys.readouterr().out.replace("\n", "")
    assert has_color(path, JUDGED_GREEN)
    without = {name: us for name, us in ROW.items() if name != "pass"}
    content = payload({"1": without, "2": without})
    assert main(["bench", "--from", stored(content), "--plot", path]) == 0
    assert not has_color(path, JUDGED_GREEN)


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    assert main(["bench", "--from", str(STORED), "--plot", "a.png"]) == 2
    assert "dcp-inductor[bench]" in capsys.readouterr().err
    assert main(["bench", "--from", str(STORED)]) == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is no JSON"),
        ("[]", "is no result"),
        ({"machine": {}, "ranks": 2}, "no 'tables'"),
        (payload() | {"tables": {}}, "holds no row"),
        (payload() | {"tables": {"16": {}}}, "holds no row"),
        (payload({"1": ROW | {"pass": 0.0}}), "pass took 0.0 us"),
        (payload({"1": ROW | {"pass": float("nan")}}), "pass took nan us"),
        (payload({"one": ROW}), "invalid literal"),
        (payload({"1": ROW, "2": {"nccl": 1.0}}), "different variants"),
    ],
)
def test_a_stored_result_that_is_none(stored, capsys, content, why):
    path = stored(content)
    assert main(["bench", "--from", path]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert path in err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--from", "nowhere.json"], "can't be read"),
        (["--from", str(STORED), "--ranks", "2"], "--from and --ranks"),
        (["--from", str(STORED), "--batches", "2"], "--from and --batches"),
        (["--from", str(STORED), "--plot", "nowhere/a.png"], "no folder"),
        (["--from", str(STORED), "--json", "nowhere/a.json"], "no folder"),
        (["--from", str(STORED), "--plot", "a.jpeg"], "ends in .png"),
        (["--ranks", "1"], "2 to 16 ranks"),
        (["--batches", "0"], "--batches 0"),
        (["--heads-per-rank", "-1"], "--heads-per-rank -1"),
        (["--timeout", "nan"], "--timeout nan"),
    ],
)
def test_bad_input(argv, why, capsys):
    assert main(["bench", *argv]) == 2
    assert why in capsys.readouterr().err


def test_a_machine_without_enough_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: True)
    assert main(["bench", "--ranks", "4"]) == 2
    err = capsys.readouterr().err
    assert "between 4 ranks was asked for" in err
    assert "sees 3 GPUs" in err
    assert "--from FILE" in err
    run.check_machine(BenchSettings(num_ranks=3))


def test_a_machine_without_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="triton isn't installed"):
        run.check_machine(BenchSettings())


@pytest.fixture
def ranks(monkeypatch):
    """Stands a script in for the ranks; ``path`` is where the result goes."""
    monkeypatch.setattr(run, "check_machine", lambda settings: None)

    def stand_in(code):
        def arguments(settings, path):
            return [sys.executable, "-c", f"path = {str(path)!r}\n{code}"]

        monkeypatch.setattr(run, "command", arguments)

    return stand_in


def test_what_the_ranks_measured_is_shown(ranks, tmp_path, capsys):
    ranks(f"open(path, 'w').write({json.dumps(payload())!r})")
    path = tmp_path / "kept.json"
    assert main(["bench", "--json", str(path)]) == 0
    assert "1/20.0" in capsys.readouterr().out
    assert Results.read(str(path)) == Results.of(payload())


def test_ranks_that_fail_are_quoted(ranks, capsys):
    ranks("import sys; print('rank 1: no links'); sys.exit(3)")
    assert main(["bench"]) == 1
    err = capsys.readouterr().err
    assert "exit status 3" in err
    assert "rank 1: no links" in err


def test_ranks_that_leave_no_result(ranks, capsys):
    ranks("print('done')")
    assert main(["bench"]) == 1
    assert "exit status 0" in capsys.readouterr().err


def test_ranks_that_hang_are_ended(ranks, tmp_path, capsys):
    pid_file = tmp_path / "pid"
    ranks(
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "print('meeting', flush=True)\ntime.sleep(600)"
    )
    assert main(["bench", "--timeout", "3"]) == 1
    err = capsys.readouterr().err
    assert "more than 3 s" in err
    assert "meeting" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_ranks_understand_their_command_line(tmp_path):
    pytest.importorskip("triton")
    from dcp_inductor.bench import exchange

    settings = BenchSettings(4, heads_per_rank=(8,), batches=(1, 3))
    arguments = run.command(settings, tmp_path / "r.json")
    assert arguments[arguments.index("--nproc-per-node") + 1] == "4"
    module = arguments.index("dcp_inductor.bench.exchange")
    parsed = exchange._parser().parse_args(arguments[module + 1 :])
    assert parsed.json == str(tmp_path / "r.json")
    assert (parsed.heads_per_rank, parsed.batches) == ([8], [1, 3])

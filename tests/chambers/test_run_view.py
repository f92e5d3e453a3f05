"""What ``chambers train`` displays while a run writes its folder."""

import io
from contextlib import closing

import pytest
from rich.console import Console

from chambers.run_status import read_run_state
from chambers.run_view import Lines, RunLog, following, live_view, run_lines
from federation.run_folder import LINK, LOG, SUMMARY
from strategies.participants import RefusedError
from tests.server_app.runs import serve
from tests.strategies.grids import SpyingGrid


@pytest.fixture
def log(tmp_path):
    with closing(RunLog(tmp_path / LOG)) as opened:
        yield opened


@pytest.fixture
def link(tmp_path, monkeypatch):
    """Path at which the ServerApp creates a link to the run's folder."""
    monkeypatch.setenv(LINK, str(tmp_path / "link"))
    return tmp_path / "link"


def run(values, tmp_path, change=lambda reply: reply):
    """Execute a run in this process; results are written below ``runs``."""
    config = values | {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path)}
    serve(config, SpyingGrid(config, change))


@pytest.mark.slow
def test_a_run_is_a_few_lines_and_its_log_is_beside_the_results(
    values, tmp_path, log, link, capsys
):
    log.write(b"\x1b[92mINFO\x1b[0m: before there was a folder\n")
    values |= {"evaluate.every": 3, "rounds": 3}
    with following(link, log, Lines()):
        run(values, tmp_path)
        log.write(b"INFO: afterwards\n")
    (directory,) = (tmp_path / "runs").iterdir()
    assert log.path == directory / LOG and not (tmp_path / LOG).exists()
    log.write(b"INFO: at the end\n")
    said = log.path.read_text().splitlines()
    assert said == [f"INFO: {words}" for words in ("before there was a folder", *SAID)]
    where, *lines = capsys.readouterr().out.splitlines()
    assert where == f"results and {LOG}: {directory}"
    heads = [line.partition(" in ")[0] for line in lines]
    rounds = [f"round {number} of 3: trained" for number in (1, 2, 3)]
    assert heads == ["base model: evaluated", *rounds, "round 3 of 3: evaluated"]
    assert "held-out loss (base) alpha " in lines[0] and "gamma " in lines[0]
    assert "training loss alpha " in lines[1]
    assert "held-out loss (global/personalised) alpha " in lines[-1]
    assert str(directory) in (directory / SUMMARY).read_text()


SAID = ("afterwards", "at the end")


def test_lines_are_printed_once_and_say_who_was_left_out(values, tmp_path, link, capsys):
    """If a run is resumed, only new lines are printed."""
    values["strategy"] = "fedjudge-base"
    problems = iter(["", "[red]\x1b[2J too hot"])

    def spoil(reply):
        config = reply.content["config"]
        if reply.metadata.message_type == "train" and config["name"] == "beta":
            config["problem"] = next(problems)
        return reply

    show = Lines()
    for rounds in (1, 2):
        resume = {"resume": str(link.resolve())} if rounds > 1 else {}
        run(values | {"rounds": rounds, "min-nodes": 2} | resume, tmp_path, spoil)
        show(read_run_state(link.resolve()))
        show(read_run_state(link.resolve()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 2 + 2 * 2
    assert lines[-2].startswith("round 2 of 2: trained in")
    assert lines[-2].endswith(r"; left out: beta ([red]\x1b[2J too hot)")
    Lines()(read_run_state(link.resolve()))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_losses_of_many_clients_are_averaged():
    clients = [f"client {number}" for number in range(5)]
    trained = [
        {"event": "train", "round": 1, "client": name, "loss": float(at)}
        for at, name in enumerate(clients)
    ]
    finished = {"event": "round", "round": 1, "participants": clients, "seconds": 3.0}
    lines = list(run_lines({"rounds": 2}, [finished, *trained]))
    assert lines == ["round 1 of 2: trained in 3 s; training loss 2.000, mean of 5 clients"]
    assert not list(run_lines({"rounds": 2}, [finished, *trained[:-1]])), "the round is incomplete"
    late = {"event": "late", "round": 1, "clients": ["client 5"], "participants": clients}
    assert list(run_lines({"rounds": 2}, [late])) == [
        "round 1 of 2: averaged again with late replies: client 5"
    ]


def test_the_live_view_shows_rounds_clients_and_losses(values, tmp_path, link):
    screen = Console(file=io.StringIO(), force_terminal=True, width=150, color_system=None)
    seen = []

    def watch(reply):
        seen.append(read_run_state(link.resolve()))
        return reply

    run(values | {"rounds": 2}, tmp_path, watch)
    with live_view(screen) as show:
        assert "starting Flower" in screen.file.getvalue()
        training = [each for each in seen if each.status.phase == "training"]
        show(training[-1])
        shown = screen.file.getvalue()
    assert "training of round 2 of 2" in shown and str(link.resolve()) in shown
    assert "Time left   about " in shown
    assert "after round 1: mean held-out loss base " in shown
    assert ", personalised " in shown


def test_a_refused_run_leaves_its_log_where_it_was(values, tmp_path, log, link, capsys):
    """The run's folder is deleted, so the log is not moved there."""
    with pytest.raises(RefusedError), following(link, log, Lines()):
        run(values | {"data.path": str(tmp_path / "nowhere")}, tmp_path)
    assert not link.is_dir() and log.path == tmp_path / LOG
    assert not capsys.readouterr().out


def test_a_log_goes_on_after_that_of_the_run_before(tmp_path, log):
    log.write(b"second\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOG).write_text("first\n")
    log.move_to(tmp_path / "run" / LOG)
    log.write(b"third\n")
    assert (tmp_path / "run" / LOG).read_text() == "first\nsecond\nthird\n"


def test_an_evaluation_that_computes_importance_says_so():
    loss = {"event": "evaluate", "client": "alpha", "model": "global", "loss": 1.0}
    ended = {"event": "evaluation", "seconds": 2.0}
    events = [event | {"round": number} for number in (1, 2) for event in (loss, ended)]
    config = {"rounds": 2, "strategy": "fedjudge-cl", "continual.importance": "server"}
    first, last = run_lines(config, events)
    assert first.startswith("round 1 of 2: evaluated, with importance J, in 2 s; held-out loss")
    assert last.startswith("round 2 of 2: evaluated in 2 s; ")

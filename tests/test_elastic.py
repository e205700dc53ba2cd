"""scripts/elastic.py goes on exactly when workers die, freeze and join, and drops strangers."""

import os
import re
import select
import shutil
import signal
import socket
import sys
import textwrap
import threading
from contextlib import contextmanager, suppress

import psutil
import pytest
import torch
from elastic_drill import run_round, train_plainly
from harness import ROOT, Running, free_port, run, wait_until

from scripts import elastic

STEPS = 150


@pytest.fixture(scope="module")
def plain():
    return train_plainly(STEPS)


ROUNDS = {
    # A forked child has copies of its worker's sockets, so the dead worker's neighbours learn of
    # its death from the coordinator alone.
    "kill": ("forked", ["kill", "kill rank 0", "join"]),
    "at a moment": ("plain", ["kill rank 0 in the opening", "step fails"]),
    "batch_norm": ("batch_norm", ["kill all but one", "step fails everywhere"]),
    "frozen": ("plain", ["stop rank 0", "kill the coordinator", "join"]),
}
LONG = [pytest.param(name, marks=pytest.mark.full) for name in [*ROUNDS][1:]]


@pytest.mark.parametrize("name", ["kill", *LONG])
def test_samples_and_weights_are_those_of_a_run_without_faults(name, plain):
    variant, faults = ROUNDS[name]
    result = run_round(0, plain, variant, faults, pace=0.03)
    assert not result.wrong, result.wrong
    assert sorted(result.faults) == sorted(faults)
    assert result.times or name not in ("kill", "at a moment")


def script(folder, *lines, worker=""):
    """Write a script that runs elastic.py with other constants, or with a worker of its own."""
    path = folder / "job.py"
    text = f"""
import os, sys, time, torch
sys.path.insert(0, {str(ROOT)!r})
from scripts import elastic
{{}}
class Own(elastic.Worker):
{{}}
if __name__ == "__main__":
    sys.exit(elastic.main(Own))
"""
    path.write_text(text.format("\n".join(lines), textwrap.indent(worker or "pass", "    ")))
    return path


SLOW = "def backward(self, *args):\n    time.sleep(0.02)\n    super().backward(*args)"


def start(path, *flags, token="token", nproc=2, steps=150, port=0):
    command = [sys.executable, path, "--nproc", str(nproc), "--steps", str(steps)]
    flags = ["--port", str(port), *flags]
    return Running(*command, *flags, cwd=path.parent, env={"ELASTIC_TOKEN": token})


def pids(running, number=2):
    """Return the workers that the launcher has started, as soon as they train."""
    running.wait_for(f": {number} workers")
    line = running.text().partition("workers: ")[2].partition("\n")[0]
    return [int(pid) for pid in line.split()]


@pytest.mark.full
def test_strangers_and_a_wrong_token_do_not_disturb_the_training(tmp_path):
    path, port = script(tmp_path, "elastic.ALONE = 2", worker=SLOW), free_port()
    with start(path, token="a-secret", port=port) as running:
        for pid in pids(running):
            command = " ".join(psutil.Process(pid).cmdline())
            assert "job.py" in command and "a-secret" not in command
        wrong = b"wrong waiting 9 9 999".ljust(elastic.MESSAGE)
        for words in (b"GET / HTTP/1.1\r\n\r\n", wrong, b"\xff\xfe", b""):
            with socket.create_connection(("localhost", port), 30) as stranger:
                stranger.sendall(words)
                with suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""
        join = [sys.executable, path, "--join", f"localhost:{port}"]
        ended = run(*join, cwd=tmp_path, env={"ELASTIC_TOKEN": "wrong"})
        assert ended.code == 1
        assert ended.stderr == f"error: nobody at localhost:{port} answers to this ELASTIC_TOKEN\n"
        assert running.wait().code == 0
        assert running.text().count("workers\n") == 1  # they have not even closed the group
        assert "a-secret" not in running.text() and "\none more: python" in running.text()


def test_workers_finish_without_a_coordinator(tmp_path):
    with start(script(tmp_path, worker=SLOW)) as running:
        pids(running)
        running.process.kill()
        wait_until(lambda: not running.processes())
    assert (tmp_path / "elastic.pt").exists()


def test_a_state_that_is_no_state_is_not_run(tmp_path):
    """Rank 0's state arrives as a file that torch loads with weights_only."""
    evil = "def state_dict(self):\n    return Evil()"
    lines = ["class Evil:", "    def __reduce__(self): return os.mkdir, ('evil',)"]
    with start(script(tmp_path, *lines, worker=evil)) as running:
        ended = running.wait()
    assert ended.code == 1 and "weights_only" in ended.stderr
    assert not (tmp_path / "evil").exists()


def test_a_joiner_takes_over_the_state_of_the_run(tmp_path):
    """It has a file with more steps than the run."""
    (tmp_path / "joiner").mkdir()
    path = script(tmp_path, worker=SLOW)
    with start(path, token="", steps=300) as running:
        running.wait_for(": 2 workers")
        said = re.search(r"one more: ELASTIC_TOKEN=(\S+) python (.+)", running.text())
        own = elastic.Worker.__new__(elastic.Worker)  # it connects to no coordinator
        own.build()
        own.step = 299
        torch.save(own.state_dict(), tmp_path / "joiner" / "elastic_snapshot.pt")
        join, env = [sys.executable, *said[2].split()], {"ELASTIC_TOKEN": said[1]}
        with Running(*join, cwd=tmp_path / "joiner", env=env) as joiner:
            running.wait_for(": 3 workers")
            assert "step 299" not in running.text() + joiner.text()
            assert joiner.wait().code == 0
        assert running.wait().code == 0


def test_a_bug_in_the_loop_ends_with_its_traceback(tmp_path):
    """One worker meets it. Then the one that is left does, too."""
    bug = """def backward(self, model, rank, world):
    if self.step == 5 and 1 in (rank, world): raise RuntimeError('mine')
    super().backward(model, rank, world)"""
    with start(script(tmp_path, worker=bug)) as running:
        ended = running.wait()
    assert ended.code == 1 and ended.stderr.endswith("error: no worker has finished\n")
    assert re.search(r"^(\[rank\d\]: )?RuntimeError: mine", ended.stderr, re.MULTILINE)
    assert "step 6" not in ended.stdout


@pytest.mark.full
def test_a_frozen_worker_is_left_out_and_comes_back(tmp_path):
    """The heartbeat finds it: the collectives would wait for a quarter of an hour."""
    line = "elastic.TIMEOUT = elastic.timedelta(seconds=900)"
    path = script(tmp_path, line, worker=SLOW)
    with start(path, nproc=3, steps=500) as running:
        pid, *_ = pids(running, 3)
        os.kill(pid, signal.SIGSTOP)
        running.wait_for(": 2 workers")
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: running.text().count(": 3 workers") == 2)
        assert running.wait().code == 0


@contextmanager
def coordinated():
    """Run a coordinator without local workers; it must end with True when a worker has finished."""
    done = []
    with socket.create_server(("", 0), backlog=1000) as server:
        thread = threading.Thread(
            target=lambda: done.append(elastic.Coordinator(server, [], 150).run())
        )
        thread.start()
        with talk(server.getsockname()[1], "waiting", 0, 0, 0) as worker:
            yield worker, server.getsockname()[1]
            elastic.send(worker, "finished")
        thread.join(30)
    assert done == [True]


def talk(port, *words):
    connection = socket.create_connection(("localhost", port), 30)
    elastic.send(connection, *words)
    return connection


def test_a_report_that_crosses_the_reply_does_not_end_the_group():
    """Otherwise the worker takes each reply for the one to its next report, for ever."""
    with coordinated() as (worker, _):
        word, group, *_ = elastic.receive(worker)
        elastic.send(worker, "waiting", 0, 0, 0)  # it was on its way when the reply was
        assert word == "open" and not select.select([worker], [], [], 1)[0]
        elastic.send(worker, "waiting", group, group, 5)  # this is after the reply
        assert elastic.receive(worker) == ["over", group]
        assert elastic.receive(worker)[:3] == ["open", group + 1, 0]


def test_nobody_starts_from_scratch_while_a_worker_lives_that_has_trained():
    """It may be in a long step when another one dies, and a joiner has come in the meantime."""
    with coordinated() as (worker, port):
        _, group, *_ = elastic.receive(worker)
        with talk(port, "waiting", 0, 0, 0) as other:
            assert elastic.receive(worker) == ["leave", group]
            elastic.send(worker, "waiting", group, 1, 40)
            while elastic.receive(worker)[0] != "open":
                pass
            other.shutdown(socket.SHUT_RDWR)  # it dies
        assert elastic.receive(worker) == ["over", group + 1]
        with talk(port, "waiting", 0, 0, 0) as joiner:
            for _ in range(6):  # longer than the last call
                elastic.send(worker, "busy")
                assert not select.select([joiner], [], [], 0.5)[0]
                elastic.send(joiner, "busy")
            elastic.send(worker, "waiting", group + 1, 1, 41)
            assert elastic.receive(worker)[:4] == ["open", group + 2, 0, 2]


@pytest.mark.full
def test_a_worker_that_hangs_does_not_keep_the_launcher(tmp_path):
    """Its thread still sends signs of life when the others have finished without it."""
    hang = "def backward(self, *args):\n    if self.step == 50 and args[1]: time.sleep(900)\n"
    hang += "    super().backward(*args)"
    path = script(tmp_path, "elastic.TIMEOUT = elastic.timedelta(seconds=3)", worker=hang)
    with start(path) as running:
        assert running.wait().code == 0
        wait_until(lambda: not running.processes())


def test_a_coordinator_to_which_nobody_comes_ends_with_one_line(tmp_path):
    with start(script(tmp_path, "elastic.ALONE = 1"), nproc=0) as running:
        ended = running.wait()
    assert ended.code == 1 and ended.stderr == "error: no worker has finished\n"


@pytest.mark.full
def test_the_script_of_the_page_survives_a_death_and_resumes(tmp_path):
    """After the death of all, its weights are still those of a run without a death."""
    page = (ROOT / "docs/elastic.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    path = tmp_path / "own.py"
    setup = f"import sys, time\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}]\n"
    code = code.replace("class Own", "elastic.SAVE_EVERY = 30\nclass Own")
    path.write_text(setup + code.replace("epoch, step =", "time.sleep(0.02); epoch, step ="))
    with start(path, nproc=3) as running:
        first, *others = pids(running, 3)
        os.kill(first, signal.SIGKILL)
        running.wait_for("saved elastic_snapshot.pt after epoch 4")
        for pid in others:
            os.kill(pid, signal.SIGKILL)
        ended = running.wait()
    assert ended.code == 1 and ended.stderr.endswith("error: no worker has finished\n")
    snapshot = tmp_path / "elastic_snapshot.pt"
    step = torch.load(snapshot)["step"]
    with start(path, nproc=2) as running:
        assert running.wait().code == 0
        assert step >= 60 and f"step {step}: 2 workers" in running.text()
    assert not snapshot.exists()
    weights = torch.load(tmp_path / "elastic.pt")
    (tmp_path / "undisturbed").mkdir()
    shutil.copy(path, tmp_path / "undisturbed")
    with start(tmp_path / "undisturbed" / path.name) as running:
        assert running.wait().code == 0
    for name, weight in torch.load(tmp_path / "undisturbed" / "elastic.pt").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0)

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
from elastic_drill import JOB, Record, check_steps, run_round, train_plainly
from harness import ROOT, SCRIPTS, Running, free_port, run, wait_until
from lines_of_code import lines_of_code

from scripts import elastic

SCRIPT = SCRIPTS / "elastic.py"
STEPS = 150


@pytest.fixture(scope="module")
def plain():
    return train_plainly(STEPS)


def test_it_is_one_short_file_beside_datautils():
    assert lines_of_code(SCRIPT.read_text()) <= 242


CALM = ["kill", "kill rank 0", "kill two", "join", "three join", "step fails"]
ROUNDS = {
    "kill": ("plain", ["kill", "kill rank 0", "join"]),
    "at a moment": ("plain", ["kill in the roll call", "kill in the opening"]),
    "half a step": ("plain", ["step of rank 0 fails", "step fails", "tear the take-over"]),
    "all but one": ("plain", ["kill all but one", "kill two", "join and die"]),
    "frozen": ("plain", ["stop", "stop rank 0"]),
    "coordinator": ("plain", ["kill the coordinator", "three join"]),
    "buckets": ("buckets", CALM),
    "unused": ("unused", CALM),
    "no_sync": ("no_sync", CALM),
    "batch_norm": ("batch_norm", [*CALM, "step fails everywhere"]),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_samples_and_weights_are_those_of_a_run_without_faults(name, plain):
    variant, faults = ROUNDS[name]
    result = run_round([*ROUNDS].index(name), plain, faults, 3, variant=variant)
    assert not result.wrong, result.wrong
    assert result.faults and result.groups > 1


@pytest.mark.full
def test_nobody_waits_for_the_children_of_a_dead_worker(plain):
    """They have copies of its sockets, so its neighbours learn from the coordinator alone."""
    result = run_round(0, plain, ["kill"], 3, variant="forked")
    assert not result.wrong, result.wrong
    assert result.times["alone"]


# Each mutant: a text that occurs once in the script, the new text, and what must provoke it.
TAKE_OVER = "self.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))"
STEP_ONLY = 'self.step = torch.load(io.BytesIO(content), weights_only=True)["step"]'
IN_PLACE = """step = torch.tensor(self.step)
        dist.broadcast(step, src=0)
        self.step = int(step)
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, src=0)
        file = io.BytesIO()"""
MUTANTS = {
    "a joiner keeps its own weights": (TAKE_OVER, STEP_ONLY, "plain", "join"),
    "a worker that has trained keeps its own weights": (
        TAKE_OVER,
        f"if self.group: {STEP_ONLY}\n        else: {TAKE_OVER}",
        *("plain", "step of rank 0 fails"),
    ),
    "ranks are not in the order of steps": (
        "sorted(waiting, key=lambda each: waiting[each], reverse=True)",
        "list(waiting)",
        *("plain", "step of rank 0 fails"),
    ),
    "connections are not cut": (
        *("connection.shutdown(socket.SHUT_RDWR)", "pass"),
        *("forked", "kill"),
    ),
    "the broadcast is in place": ("file = io.BytesIO()", IN_PLACE, "plain", "tear the take-over"),
    "a failed step stays in BatchNorm": (
        *("self.model.load_state_dict(buffers, strict=False)", "pass"),
        *("batch_norm", "step fails everywhere"),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_the_drill_finds_a_mutant(name, plain, tmp_path):
    old, new, variant, fault = MUTANTS[name]
    for file in (JOB, SCRIPT, ROOT / "datautils.py"):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    mutated = tmp_path / "scripts" / "elastic.py"
    text = mutated.read_text()
    assert text.count(old) == 1
    job = tmp_path / "drill" / JOB.name
    assert not run_round(1, plain, [fault], 3, variant=variant, job=job).wrong
    mutated.write_text(text.replace(old, new))
    assert run_round(1, plain, [fault], 3, variant=variant, job=job).wrong


def record(pid, kind, group, step, *more):
    return Record(pid, kind, 0.0, group, step, list(more))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({2: record(1, "try", 8, 1, 0, 2, [2])}, "step 1 of group 8 has read other samples"),
        ({4: record(1, "commit", 7, 0)}, "a step is missing"),
        ({1: record(1, "opens", 7, 2, 8, 0, 2)}, "begins with step 1, but 2 were done"),
        ({0: record(1, "try", 7, 0, 0, 1, [0, 1])}, "which nobody had reached"),
    ],
)
def test_the_drill_sees_what_is_wrong(changed, said):
    records = [
        record(1, "commit", 7, 0),
        record(1, "opens", 7, 1, 8, 0, 2),
        record(1, "try", 8, 1, 0, 2, [2]),
        record(2, "try", 8, 1, 1, 2, [3]),
        record(1, "commit", 8, 1),
        record(1, "try", 7, 0, 0, 1, [0, 1]),
    ]
    if not changed:
        assert check_steps(records, [[1, 0], [3, 2]]) == []
        return
    [(place, other)] = changed.items()
    batches = [[1, 0], [3, 2 + (place == 2)]]
    records[place] = other
    assert said in " ".join(check_steps(records, batches))


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


def test_strangers_are_dropped_and_the_training_goes_on(tmp_path):
    path, port = script(tmp_path, worker=SLOW), free_port()
    with start(path, port=port) as running:
        running.wait_for(": 2 workers")
        said = (
            b"GET / HTTP/1.1\r\n\r\n",
            b"x" * 500,
            b"wrong waiting 9 9 999".ljust(elastic.MESSAGE),
            b"\xff\xfe",
        )
        strangers = [socket.create_connection(("localhost", port), 30) for _ in [*said, b""]]
        for stranger, words in zip(strangers, [*said, b""], strict=True):
            stranger.sendall(words)
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
            stranger.close()
        assert running.wait().code == 0
        assert running.text().count("workers\n") == 1  # they have not even closed the group


def test_a_worker_with_a_wrong_token_ends_with_one_line(tmp_path):
    path, port = script(tmp_path, "elastic.ALONE = 2", worker=SLOW), free_port()
    with start(path, port=port) as running:
        running.wait_for(": 2 workers")
        join = [sys.executable, path, "--join", f"localhost:{port}"]
        ended = run(*join, cwd=tmp_path, env={"ELASTIC_TOKEN": "wrong"})
        assert ended.code == 1
        assert ended.stderr == f"error: nobody at localhost:{port} answers to this ELASTIC_TOKEN\n"
        assert running.wait().code == 0


def test_a_state_that_is_no_state_is_not_run(tmp_path):
    """Rank 0's state arrives as a file that torch loads with weights_only."""
    evil = "def state_dict(self):\n    return Evil()"
    lines = ["class Evil:", "    def __reduce__(self): return os.mkdir, ('evil',)"]
    with start(script(tmp_path, *lines, worker=evil)) as running:
        ended = running.wait()
    assert ended.code == 1 and "weights_only" in ended.stderr
    assert not (tmp_path / "evil").exists()


def test_the_state_survives_the_coordinator(tmp_path):
    path, port = script(tmp_path, "elastic.SAVE_EVERY = 15", worker=SLOW), free_port()
    with start(path, port=port) as running:
        one, _ = pids(running)
        running.wait_for("after epoch 2")
        running.process.kill()
        running.process.wait()
        os.kill(one, signal.SIGKILL)
        running.wait_for("\nstep ")  # the other one has noticed
        with start(path, port=port, nproc=0) as second:
            assert second.wait().code == 0
        wait_until(lambda: not running.processes())
        [step] = re.findall(r"^step (\d+): 1 workers", running.text(), re.MULTILINE)
        assert int(step) >= 30


def test_without_a_coordinator_a_worker_ends_with_one_line(tmp_path):
    path, port = script(tmp_path, "elastic.ALONE = 3", worker=SLOW), free_port()
    with start(path, port=port, steps=10**6) as running:
        one, _ = pids(running)
        running.process.kill()
        running.process.wait()
        os.kill(one, signal.SIGKILL)
        wait_until(lambda: not running.processes())
        assert f"error: nobody at localhost:{port} answers to this ELASTIC_TOKEN" in running.text()
        assert "Traceback" not in running.text()


def test_workers_finish_without_a_coordinator(tmp_path):
    with start(script(tmp_path, worker=SLOW)) as running:
        pids(running)
        running.process.kill()
        wait_until(lambda: not running.processes())
        assert "error" not in running.text()
    assert (tmp_path / "elastic.pt").exists()


def test_after_the_death_of_all_the_snapshot_goes_on(tmp_path):
    path = script(tmp_path, "elastic.SAVE_EVERY = 15", worker=SLOW)
    with start(path) as running:
        workers = pids(running)
        running.wait_for("saved elastic_snapshot.pt after epoch 3")
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        ended = running.wait()
    assert ended.code == 1 and ended.stderr.endswith("error: no worker has finished\n")
    step = torch.load(tmp_path / "elastic_snapshot.pt")["step"]
    with start(path) as running:
        ended = running.wait()
    assert ended.code == 0 and step >= 45
    assert f"step {step}: 2 workers" in ended.stdout
    assert not (tmp_path / "elastic_snapshot.pt").exists()
    (tmp_path / "undisturbed").mkdir()
    with start(script(tmp_path / "undisturbed")) as running:
        assert running.wait().code == 0
    weights = [torch.load(where / "elastic.pt") for where in (tmp_path, tmp_path / "undisturbed")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=1e-4, rtol=0)


def test_a_snapshot_of_another_run_does_not_replace_the_state_of_this_one(tmp_path):
    """A joiner finds a file with more steps than the run has taken."""
    (tmp_path / "joiner").mkdir()
    path, port = script(tmp_path, worker=SLOW), free_port()
    with start(path, port=port, steps=400) as running:
        running.wait_for(": 2 workers")
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict()
        state = {"step": 399, "model": model.state_dict(), "optimizer": optimizer}
        torch.save(state, tmp_path / "joiner" / "elastic_snapshot.pt")
        join = [sys.executable, path, "--join", f"localhost:{port}"]
        with Running(*join, cwd=tmp_path / "joiner", env={"ELASTIC_TOKEN": "token"}) as joiner:
            running.wait_for(": 3 workers")
            assert "step 399" not in running.text() + joiner.text()
            assert joiner.wait().code == 0
        assert running.wait().code == 0


BUG = "def backward(self, *args):\n    if self.step == 5{}: raise {}\n    super().backward(*args)"


@pytest.mark.parametrize("error", ["KeyError('mine')", "RuntimeError('mine')"])
@pytest.mark.parametrize("where", ["", " and args[1] == 1"])
def test_a_bug_in_the_loop_ends_with_its_traceback(tmp_path, error, where):
    """On all workers, or on one: then the one that is left meets it, too."""
    bug = BUG.format(where, error)
    bug += "\n    if args[2] == 1 and self.step == 5: raise " + error
    with start(script(tmp_path, worker=bug)) as running:
        ended = running.wait()
    assert ended.code == 1 and ended.stderr.endswith("error: no worker has finished\n")
    kind = error.partition("(")[0]
    assert re.search(rf"^(\[rank\d\]: )?{kind}: .?mine", ended.stderr, re.MULTILINE)
    assert "step 6" not in ended.stdout


def test_a_frozen_worker_is_left_out_and_comes_back(tmp_path):
    """The heartbeat finds it: the collectives would wait for a quarter of an hour."""
    line = "elastic.TIMEOUT = elastic.timedelta(seconds=900)"
    path = script(tmp_path, line, worker=SLOW)
    with start(path, nproc=3, steps=600) as running:
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


def test_who_joins_after_the_end_does_not_train_again():
    with coordinated() as (worker, port):
        word, _, *place, _, steps = elastic.receive(worker)
        assert [word, *place, steps] == ["open", 0, 1, 150]
        elastic.send(worker, "finished")
        with talk(port, "waiting", 0, 0, 0) as late:
            wait_until(lambda: select.select([worker, late], [], [], 0)[0])
            elastic.send(worker, "waiting", 0, 0, 0)  # as if its last barrier had failed
            worker.shutdown(socket.SHUT_RDWR)
            assert elastic.receive(late) == ["finished"]


def test_a_report_that_crosses_the_reply_does_not_end_the_group():
    """Otherwise the worker takes each reply for the one to its next report, for ever."""
    with coordinated() as (worker, _):
        word, group, *_ = elastic.receive(worker)
        elastic.send(worker, "waiting", 0, 0, 0)  # it was on its way when the reply was
        assert word == "open" and not select.select([worker], [], [], 1)[0]
        elastic.send(worker, "waiting", group, group, 5)  # this is after the reply
        assert elastic.receive(worker) == ["over", group]
        assert elastic.receive(worker)[:3] == ["open", group + 1, 0]


def test_rank_0_is_the_worker_that_has_trained_the_most_steps():
    with coordinated() as (worker, port):
        _, group, *_ = elastic.receive(worker)
        from_a_file, trained = [port, "waiting", 0, 0, 999], [port, "waiting", 0, 1, 39]
        with talk(*from_a_file), talk(*trained):
            assert elastic.receive(worker) == ["leave", group]
            elastic.send(worker, "waiting", group, 1, 40)
            while (message := elastic.receive(worker))[0] != "open":
                pass
            assert message[1:4] == [group + 1, 0, 3]


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


def test_a_flood_of_silent_strangers_ends_nothing():
    with coordinated() as (worker, port):
        strangers = [socket.create_connection(("localhost", port)) for _ in range(300)]
        assert elastic.receive(worker)[0] == "open"
        for stranger in strangers:
            stranger.close()


def test_a_given_token_is_not_printed_and_no_command_line_shows_it(tmp_path):
    with start(script(tmp_path, worker=SLOW), token="a-secret") as running:
        for pid in pids(running):
            command = " ".join(psutil.Process(pid).cmdline())
            assert "job.py" in command and "a-secret" not in command
        assert running.wait().code == 0
        assert "a-secret" not in running.text()
        assert "\none more: python" in running.text()


def test_the_printed_line_joins_a_run_of_other_steps(tmp_path):
    path = script(tmp_path, worker=SLOW)
    with start(path, token="", steps=200) as running:
        running.wait_for(": 2 workers")
        line = re.search("one more: ELASTIC_TOKEN=(.+) python (.+)", running.text())
        join = [sys.executable, *line[2].split()]
        with Running(*join, cwd=tmp_path, env={"ELASTIC_TOKEN": line[1]}) as joiner:
            running.wait_for(": 3 workers")
            assert joiner.wait().code == 0 and running.wait().code == 0


def test_a_joiner_that_cannot_join_gives_up_before_the_others(tmp_path):
    wider = "def build(self):\n    super().build()\n    self.model[2] = torch.nn.Linear(128, 11)"
    (tmp_path / "joiner").mkdir()
    path, port = script(tmp_path, worker=SLOW), free_port()
    with start(path, port=port, steps=300) as running:
        running.wait_for(": 2 workers")
        bad = script(tmp_path / "joiner", worker=wider)
        join = [sys.executable, bad, "--join", f"localhost:{port}"]
        ended = run(*join, cwd=tmp_path / "joiner", env={"ELASTIC_TOKEN": "token"})
        assert ended.code == 1 and "size mismatch" in ended.stderr
        assert running.wait().code == 0


def test_a_worker_that_hangs_does_not_keep_the_launcher(tmp_path):
    """Its thread still sends signs of life when the others have finished without it."""
    hang = "def backward(self, *args):\n    if self.step == 50 and args[1]: time.sleep(900)\n"
    hang += "    super().backward(*args)"
    path = script(tmp_path, "elastic.TIMEOUT = elastic.timedelta(seconds=3)", worker=hang)
    with start(path) as running:
        assert running.wait().code == 0
        wait_until(lambda: not running.processes())


def test_the_state_of_a_longer_run_is_refused(tmp_path):
    path = script(tmp_path, "elastic.SAVE_EVERY = 15", worker=SLOW)
    with start(path) as running:
        running.wait_for("after epoch 3")
        for process in running.processes():
            process.kill()
        running.wait()
    with start(path, steps=30) as running:
        ended = running.wait()
    assert ended.code == 1 and not (tmp_path / "elastic.pt").exists()
    assert re.search(r"the state has \d+ steps already, and the run --steps 30", ended.stderr)


def test_a_failed_update_is_not_taken_again(tmp_path):
    """A part of it may be in the weights, so the worker must not go on with them."""
    lines = ["def fail(*args): raise RuntimeError('out of memory')"]
    worker = "def build(self):\n    super().build()\n"
    worker += "    self.optimizer.register_step_post_hook(fail)"
    with start(script(tmp_path, *lines, worker=worker)) as running:
        ended = running.wait()
    assert ended.code == 1 and ended.stdout.count("\nstep 0:") <= 2
    assert "RuntimeError: out of memory" in ended.stderr


def test_a_coordinator_to_which_nobody_comes_ends_with_one_line(tmp_path):
    with start(script(tmp_path, "elastic.ALONE = 1"), nproc=0) as running:
        ended = running.wait()
    assert ended.code == 1 and ended.stderr == "error: no worker has finished\n"


def test_the_script_of_the_page_survives_a_death_and_resumes(tmp_path):
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
        running.wait()
    with start(path, nproc=2) as running:
        assert running.wait().code == 0
        assert "step 60: 2 workers" in running.text() or "step 90: 2 workers" in running.text()
    weights = torch.load(tmp_path / "elastic.pt")
    (tmp_path / "undisturbed").mkdir()
    shutil.copy(path, tmp_path / "undisturbed")
    with start(tmp_path / "undisturbed" / path.name) as running:
        assert running.wait().code == 0
    for name, weight in torch.load(tmp_path / "undisturbed" / "elastic.pt").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0)

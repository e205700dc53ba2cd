"""ParallelExecutor, parallelize_on_gpus: a result per device, workers reused and never leaked."""

import functools
import gc
import operator
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Running, run

from ddp_ref import ParallelExecutor, collectives, parallel_on_all_devices, parallelize_on_gpus
from ddp_ref.workers import process, serialization

Point = namedtuple("Point", "x y")
CPU = torch.device("cpu")


def _executor(*args, **kwargs) -> ParallelExecutor:
    """Return an executor without the warning about CPU workers, which has a test of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ParallelExecutor(*args, **kwargs)


def _pids(executor: ParallelExecutor) -> list[int]:
    return executor.run(lambda device: os.getpid())


@pytest.fixture(scope="module")
def two():
    """Return an executor with two CPU workers. The tests that kill no worker share it."""
    with pytest.MonkeyPatch.context() as patch, _executor_without_cuda(patch) as executor:
        _pids(executor)  # start the workers now: no_leaks fails a test that starts them
        yield executor


def _executor_without_cuda(patch: pytest.MonkeyPatch) -> ParallelExecutor:
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    return _executor(2)


def test_results_come_back_intact_and_in_device_order(two):
    def work(device, data, *, scale):
        weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        whole = torch.zeros(6)
        made = weight * 2
        made.sum().backward()
        return {
            "made": made,
            "worker": os.environ.get("OMP_NUM_THREADS"),
            "nested": [Point((data.to(device) * scale, weight), {"set": {1}}), None],
            "array": np.arange(6).reshape(2, 3),
            "view": torch.arange(1e7)[-2:],
            "leaf": torch.ones(3, requires_grad=True)[:2],
            "shared": [whole, whole.view(2, 3)],
        }

    results = two.run(work, torch.tensor([1, 2, 3]), scale=2)
    assert len(results) == len(two.devices) == 2
    for result in results:
        (data, weight), rest = result["nested"][0]
        assert type(result["nested"][0]) is Point and rest == {"set": {1}}
        assert data.dtype == torch.int64 and data.tolist() == [2, 4, 6]
        assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.bfloat16, (2, 3), True)
        assert weight.grad is None and result["made"].grad_fn is None
        assert result["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert result["leaf"].requires_grad and not result["view"].requires_grad
        whole, matrix = result["shared"]
        whole[5] = 1
        assert matrix[1, 2] == 1
        assert result["view"].tolist() == [9999998.0, 9999999.0]
        assert result["view"].untyped_storage().nbytes() == 8  # not the 40 MB of the whole tensor
    pids = _pids(two)
    assert len({*pids, os.getpid()}) == 3


def test_all_devices_work_at_the_same_time(two, tmp_path):
    def meet(device):
        (tmp_path / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline, "the other never came"
            time.sleep(0.01)

    assert two.run(meet) == [None, None]


class Model:
    def method(self, device, data):
        return str(device), data


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (lambda device, data: (str(device), data), (1,), {}),
        (lambda device, data: (str(device), data), (), {"data": 1}),
        (lambda data, device: (str(device), data), (1,), {}),
        (lambda data, device, more=0: (str(device), data + more), (0, 1), {}),
        (lambda data, *, device: (str(device), data), (1,), {}),
        (lambda device, *data: (str(device), *data), (1,), {}),
        (lambda *data, **named: (str(named["device"]), *data), (1,), {}),
        (lambda device, /, data: (str(device), data), (1,), {}),
        (Model().method, (1,), {}),
        (functools.partial(lambda device, one, two: (str(device), one * two), two=1), (1,), {}),
    ],
)
def test_the_device_fills_the_parameter_named_device(two, func, args, kwargs):
    assert two.run(func, *args, **kwargs) == [("cpu", 1)] * 2


def test_without_pass_device_the_function_gets_its_own_arguments_only():
    with _executor(1, pass_device=False) as executor:
        assert executor.run(operator.add, 1, 2) == [3]
        assert executor.run(lambda device: device, device="mine") == ["mine"]


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.fixture
def wait_for_both(monkeypatch):
    """Let a worker that fails later than the other one live on, however slow the machine is."""
    monkeypatch.setattr(process, "FAILURE_WINDOW", 20)


@pytest.mark.usefixtures("wait_for_both")
def test_an_exception_keeps_its_type_and_the_workers_live_on(two):
    class Local(ValueError):
        pass

    def fail(device, kind):
        if kind == "two arguments":
            raise TwoArguments(1, 2)
        raise Local("said so")

    before = _pids(two)
    with pytest.raises(Local, match="said so") as caught:
        two.run(fail, "local")
    (note,) = caught.value.__notes__
    assert note.startswith("raised on worker ") and 'raise Local("said so")' in note
    with pytest.raises(RuntimeError, match="TwoArguments: 1 and 2"):
        two.run(fail, "two arguments")
    with pytest.raises(TypeError, match="the result cannot be pickled"):
        two.run(lambda device: (n for n in ()))
    with pytest.raises(TypeError, match="func or an argument cannot be pickled"):
        two.run(lambda device, data: data, (n for n in ()))
    with pytest.raises(TypeError, match="device is passed by the executor"):
        two.run(lambda device: device, device=CPU)
    with pytest.raises(RuntimeError, match=r"worker \d on cpu exited with code 5, by sys.exit"):
        two.run(lambda device: sys.exit(5))
    assert _pids(two) == before


@pytest.mark.usefixtures("wait_for_both")
def test_a_result_that_cannot_be_unpickled_names_its_worker(two):
    class Broken:
        def __reduce__(self):
            return int, ("not a number",)

    before = _pids(two)
    with pytest.raises(
        TypeError, match=r"result of worker \d on cpu cannot be unpickled: ValueError"
    ):
        two.run(lambda device: Broken())
    assert _pids(two) == before


@pytest.mark.usefixtures("wait_for_both")
def test_an_exception_is_freed_without_the_garbage_collector(two):
    """A reference cycle would keep the results of the other devices in memory."""

    class Local(ValueError):  # unlike ValueError, it can have weak references
        pass

    def fail(device):
        raise Local

    gc.disable()
    try:
        two.run(fail)
    except Local as error:
        freed = weakref.ref(error)
    finally:
        gc.enable()
    assert freed() is None


def test_an_executor_that_is_dropped_leaves_neither_process_nor_thread():
    threads = set(threading.enumerate())
    executor = _executor(1)
    (pid,) = _pids(executor)
    (thread,) = set(threading.enumerate()) - threads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # subprocess warns that it still runs
        del executor
        gc.collect()
    with suppress(ChildProcessError):  # Popen may already have collected its exit code
        os.waitpid(pid, 0)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("device", "gpus", "arrives"),
    [
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda"),  # an argument arrives on the worker's own GPU, the current one
        ("cuda", 0, "cpu"),  # an argument arrives on a rank that sees no GPU
        ("cuda:1", 2, "cuda:1"),  # a result keeps its GPU
        ("cuda:1", 1, "cpu"),  # a result from a GPU that is not visible here
    ],
)
def test_where_a_tensor_arrives(device, gpus, arrives, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append(device) or self)
    assert bytes(collectives._restore(bytearray(b"abc"), device)) == b"abc"
    assert [*map(str, moved)] == [arrives]


def test_an_argument_goes_to_the_current_gpu_and_a_result_to_its_own(monkeypatch):
    """A result is pickled for the device of each tensor, an argument for the current device."""
    sent = []

    def reduce_storage(storage, device=None):
        sent.append(device)
        return torch.UntypedStorage, (storage.nbytes(),)

    monkeypatch.setattr(serialization, "reduce_storage", reduce_storage)
    value = {"nested": [torch.ones(2), torch.nn.Linear(1, 1)]}
    for keep_device, devices in [(True, ["cpu"] * 3), (False, [])]:
        sent.clear()
        serialization.dumps("the value", value, keep_device)
        assert sent == devices


def test_a_dead_worker_is_named_and_replaced(tmp_path):
    def die(device, kind):
        marker = tmp_path / kind
        marker.with_name(f"{kind}-{os.getpid()}").touch()
        if len(list(tmp_path.glob(f"{kind}-*"))) == 2:  # this is the second worker to come here
            os.kill(os.getpid(), signal.SIGKILL) if kind == "SIGKILL" else os._exit(3)
        os.system("sleep 1000")  # a child that must not be left behind either

    ends = {
        "SIGKILL": "was killed by SIGKILL: did it run out of memory",
        "exit": "exited with code 3: look at its output",
    }
    with _executor(2) as executor:
        for kind, end in ends.items():
            with pytest.raises(RuntimeError, match=rf"worker \d on [a-z0-9:]+ {end}"):
                executor.run(die, kind)
            assert executor.run(lambda device, data: data, 1) == [1, 1]
        first, second = _pids(executor)
        os.kill(first, signal.SIGKILL)  # between two calls
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        again = _pids(executor)
        assert again[0] != first and again[1] == second


def test_a_slow_device_is_not_waited_for_when_another_fails(tmp_path):
    def work(device):
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) == 1:
            os.system("sleep 1000")
        raise ValueError("the fast one")

    with _executor(2) as executor, pytest.raises(ValueError, match="the fast one"):
        executor.run(work)


@pytest.mark.parametrize("num_gpus", [0, -1, 1.5, "2"])
def test_a_bad_number_of_gpus_is_refused(num_gpus):
    with pytest.raises(ValueError, match="num_gpus must be None or an integer of at least 1"):
        ParallelExecutor(num_gpus)
    with pytest.raises(ValueError, match="num_gpus must be None or an integer of at least 1"):
        parallelize_on_gpus(num_gpus)


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="num_gpus=2, but 1 CUDA devices are visible"):
        ParallelExecutor(2)


def test_the_decorator_without_parentheses_is_refused():
    with pytest.raises(ValueError, match="num_gpus must be None or an integer"):

        @parallelize_on_gpus
        def forgotten(device):
            pass


@pytest.mark.parametrize("num_gpus", [None, 3])
def test_without_cuda_one_warning_says_what_runs_instead(num_gpus):
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    workers = num_gpus or min(2, cores or 1)
    with pytest.warns(UserWarning) as caught, ParallelExecutor(num_gpus) as executor:
        assert executor.devices == [CPU] * workers
    (warning,) = caught
    assert str(warning.message) == f"no CUDA device is visible: {workers} CPU workers instead"


def test_data_parallel_runs_the_whole_batch_without_cuda():
    @parallel_on_all_devices
    def forward(chunk, factor=1):
        """Say what it does."""
        return chunk * factor

    batch = torch.randn(8, 3)
    with pytest.warns(UserWarning, match="the whole batch runs on the CPU"):
        assert torch.equal(forward(batch, factor=2), batch * 2)
    assert (forward.__name__, forward.__doc__) == ("forward", "Say what it does.")


def test_data_parallel_takes_a_module_and_a_function(monkeypatch):
    """A module cannot be another module's `forward`. DataParallel is replaced: it needs GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda module: module)
    linear, batch = torch.nn.Linear(3, 2), torch.randn(8, 3)
    for func in (linear, lambda chunk: linear(chunk)):
        assert torch.equal(parallel_on_all_devices(func)(batch), linear(batch))


DOCUMENTED = """
import multiprocessing, torch
import numpy as np
from ddp_ref import ParallelExecutor, parallelize_on_gpus

print("the script runs")

@parallelize_on_gpus()
def process_on_gpu(device, data):
    return data.to(device) * 2

print(process_on_gpu(torch.tensor([1, 2, 3])))

@parallelize_on_gpus(num_gpus=2)
def another_gpu_function(device, x, y):
    return (x + y).to(device)

print(another_gpu_function(torch.tensor([1, 2]), torch.tensor([3, 4])))

@parallelize_on_gpus()
def matrix_multiply(device, size=1000, iterations=10):
    a = torch.randn(size, size, device=device)
    b = torch.randn(size, size, device=device)
    for _ in range(iterations):
        c = torch.matmul(a, b)
        a = c
    return c.cpu().numpy()

results = matrix_multiply(size=2000, iterations=ITERATIONS)
print(type(results[0]) is np.ndarray, results[0].shape, len(results))

def heavy_computation(device, data):
    data = data.to(device)
    result = data * 2
    return result

class Wrong(Exception):
    pass

def fail(device):
    raise Wrong

with ParallelExecutor(num_gpus=2) as executor:
    print(executor.run(heavy_computation, torch.tensor([1, 2, 3])))
    try:
        executor.run(fail)
    except Wrong:
        print("Wrong is Wrong")
print(multiprocessing.get_start_method(allow_none=True))
"""
SHOWN = """the script runs
[tensor([2, 4, 6]), tensor([2, 4, 6])]
[tensor([4, 6]), tensor([4, 6])]
True (2000, 2000) 2
[tensor([2, 4, 6]), tensor([2, 4, 6])]
Wrong is Wrong
None
"""


@pytest.mark.parametrize("iterations", [1, pytest.param(20, marks=pytest.mark.full)])
def test_the_documented_examples_run_in_a_script_without_a_guard(tmp_path, iterations):
    script = DOCUMENTED.replace("ITERATIONS", str(iterations))
    (tmp_path / "script.py").write_text(script)
    result = run(sys.executable, "script.py", cwd=tmp_path)
    assert (result.stdout, result.code) == (SHOWN, 0), result.stderr
    assert result.stderr.count("Warning") == result.stderr.count("no CUDA device is visible") == 2


BUSY = """
import os, warnings
from pathlib import Path
from ddp_ref import ParallelExecutor

def work(device):
    Path(f"ready-{os.getpid()}").touch()
    os.system("sleep 1000")

executor = ParallelExecutor(2)
"""


def _start(folder: Path, *lines: str) -> Running:
    (folder / "script.py").write_text("\n".join([BUSY, *lines]))
    return Running(sys.executable, "script.py", cwd=folder)


def _wait_until_busy(running: Running, folder: Path) -> None:
    deadline = time.monotonic() + 90
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline and running.process.poll() is None, running.text()
        time.sleep(0.05)


@pytest.mark.parametrize("whole_group", [False, True])
def test_an_interrupt_ends_the_call_and_the_executor_can_be_used_again(tmp_path, whole_group):
    lines = ["try:", "    executor.run(work)", "except KeyboardInterrupt:", "    print('felt')"]
    again = ["print(executor.run(lambda device: 'again'))"]
    with _start(tmp_path, *lines, *again) as running:  # no close(): the exit ends the workers
        _wait_until_busy(running, tmp_path)
        pid = running.process.pid
        os.killpg(pid, signal.SIGINT) if whole_group else os.kill(pid, signal.SIGINT)
        running.wait_for("felt", timeout=30)
        result = running.wait()
        assert (result.stdout, result.code) == ("felt\n['again', 'again']\n", 0), result.stderr


@pytest.mark.parametrize("doing", ["executor.run(work)", "import time; time.sleep(1000)"])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path, doing):
    first = "executor.run(lambda device: Path(f'ready-{os.getpid()}').touch())"
    with _start(tmp_path, first, doing) as running:
        _wait_until_busy(running, tmp_path)
        running.process.kill()
        deadline = time.monotonic() + 30
        while running.processes():
            assert time.monotonic() < deadline, running.processes()
            time.sleep(0.05)


def test_calls_from_two_threads_take_turns(two):
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(two.run, lambda x, device: x, number) for number in range(40)]
        assert [call.result(60) for call in calls] == [[number] * 2 for number in range(40)]


def test_an_executor_closed_during_a_call_raises_and_can_be_used_again():
    with _executor(1, pass_device=False) as executor:
        executor.run(abs, 1)
        closing = threading.Timer(3, executor.close)
        closing.start()
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            executor.run(time.sleep, 1000)
        closing.join()
        assert executor.run(abs, -2) == [2]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12+
def test_a_forked_process_needs_its_own_executor(two):
    """With the parent's executor, a fork could talk to its workers in the middle of a call."""
    pids = _pids(two)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            two.close()
            two.run(abs, 1)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "create one here" in os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert _pids(two) == pids  # the parent's workers are still there

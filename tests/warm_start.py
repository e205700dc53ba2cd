"""Start Python processes by forking one that has already imported torch.

A fresh interpreter needs two seconds of CPU time to import torch and scikit-learn, and the tests
start about a thousand of them. `install()` replaces `subprocess.Popen` in this process. A command
that runs this very interpreter is then forked from a template process, which takes about 0.1 s.
The result is a real process: its parent is the process that started it, it has its own session,
files, environment and arguments, and it exits or is killed like any other.

A forked process differs from a fresh one in these ways:
- All processes share one hash seed, and torch's objects have the same addresses in all of them. So
  a set has the same order in every rank. The tests that care start fresh ranks.
- The modules in PRELOADED are imported already, so a missing import of one of them goes unnoticed.
- The umask is pytest's, and a command that does not start a new session stays in pytest's.

A process that a fork cannot imitate starts as a fresh interpreter. That is so for a command with
interpreter options other than `-u`, for one that buffers its output, for an environment that
changes a variable that Python or a library reads when it starts (READ_AT_START), and for
`Running(..., fresh=True)` of harness.py. On systems other than Linux, every process starts fresh.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import itertools
import os
import pickle
import runpy
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing import process as multiprocessing_process, util
from pathlib import Path
from typing import Any

from harness import FRESH
from warm_shell import BEFORE_EACH_CELL, FOLDER, MESSAGE_SIZE, ignored_signals

PRELOADED = ("torch", "torch.distributed.run", "numpy", "sklearn.datasets", "cloudpickle", "psutil")
PRELOADED += ("torch._dynamo",)  # a second of CPU time, for the first optimizer of a process

# Prefixes of variables that are read only when a process starts. HANDLED: a fork imitates these.
READ_AT_START = ("PYTHON", "TORCH_", "LD_", "LC_", "LANG", "MALLOC_", "MKL_", "OPENBLAS_")
HANDLED = {"PYTHONPATH", "PYTHONUNBUFFERED"}
HANDLED |= {"PYTHONIOENCODING"}  # run_ranks sets it to what every process here has: utf-8
HANDLED |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}  # torchrun reads it when it makes a store
HANDLED |= {"TORCH_CPP_LOG_LEVEL"}  # a fork keeps the template's: that is only about warnings
HANDLED |= {"PYTHON"}  # only the Makefile reads it

SPACE = "_" * 2**14  # pads the template's arguments and environment, see `_show_to_others`
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_FDS = 64
PATIENCE = 60.0  # seconds to wait for a template on a busy machine

_FreshPopen = subprocess.Popen
_fresh_spawn = util.spawnv_passfds
_template: "Template | None" = None


@dataclass
class Start:
    """What a new process runs, and what it inherits."""

    arguments: list[str]  # without the interpreter
    environment: dict[str, str]
    folder: str
    new_session: bool
    descriptors: list[int]  # the numbers that the sent descriptors get in the new process
    ignored: list[int]  # signals
    depth: int = 0  # of its own template, if it may start processes; 0: no template


class Template:
    """A process that forks itself for each request, as seen by the process that asks it to."""

    def __init__(self, connection: socket.socket, depth: int, process: Any = None) -> None:
        self.process = process  # of the tests' own template
        self.connection = connection
        self.connection.settimeout(PATIENCE)
        self.depth = depth  # 1: used by the tests; 2: by what they start; 3: by what that starts
        self.owner = os.getpid()
        self.read_at_start = _read_at_start(dict(os.environ))
        self.lock = threading.Lock()

    def start(self, start: Start, descriptors: list[int]) -> int | None:
        """Fork the process and return its pid, or None if it must be started fresh."""
        if os.getpid() != self.owner or not self.can_fork(start):
            return None
        if self.may_start_others(start.arguments):
            start.depth = self.depth + 1
        request = pickle.dumps(astuple(start))
        if len(request) > MESSAGE_SIZE or len(descriptors) > MAX_FDS:
            return None
        with self.lock:
            # As a subreaper, this process becomes the parent of what the template's child forks.
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [request], descriptors)
                return int(self.connection.recv(64))
            except BaseException as error:
                self.connection.close()  # the next request must not get a late reply to this one
                if not isinstance(error, OSError | ValueError):
                    raise
                return None  # the template is gone: a test may have killed its process group
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)

    def may_start_others(self, arguments: list[str]) -> bool:
        """Return whether a process may start processes itself, so that it needs its own template.

        A rank of mp.spawn, a notebook's kernel and torchrun may, unless they are too deep. So may
        any script or module that a test starts itself, because it may be a launcher.
        """
        launchers = ("spawn_main", "ipykernel_launcher", "torch.distributed.run")
        if any(name in " ".join(arguments) for name in launchers):
            return self.depth <= 2
        return self.depth == 1 and "-c" not in arguments[:3]

    def can_fork(self, start: Start) -> bool:
        """Return whether a fork would behave like a fresh process that is started like this."""
        what, *_ = [*without_u(start.arguments), "a shell"]
        known = what in ("-c", "-m") or (what[-3:] == ".py" and Path(start.folder, what).is_file())
        unbuffered = "-u" in start.arguments[:1] or start.environment.get("PYTHONUNBUFFERED")
        same = _read_at_start(start.environment) == self.read_at_start
        if not (known and unbuffered and same):
            return False
        return Path(start.folder).is_dir() and FRESH not in start.environment


def without_u(arguments: list[str]) -> list[str]:
    """Drop the interpreter option `-u`, which a fork imitates."""
    return arguments[1:] if arguments[:1] == ["-u"] else arguments


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in HANDLED
    }


class Popen(_FreshPopen):
    """A subprocess.Popen that forks the template where it can."""

    def _execute_child(self, *args: Any) -> None:  # type: ignore[override]
        names = list(inspect.signature(_FreshPopen._execute_child).parameters)[1:]
        given = dict(zip(names, args, strict=True))
        pid = None if _template is None else _fork(_template, given)
        if pid is None:
            super()._execute_child(*args)
            return
        self.pid = pid
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))


def _fork(template: Template, given: dict[str, Any]) -> int | None:
    """Fork the process that Popen's arguments describe. Return its pid; None: start it fresh."""
    command = given["args"]
    unusual = given["shell"] or given["preexec_fn"] or not given["close_fds"]
    if unusual or isinstance(command, str | bytes | os.PathLike):
        return None
    executable, *arguments = map(os.fsdecode, command)
    if executable != sys.executable:
        return None
    streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    streams = [number if other == -1 else other for number, other in enumerate(streams)]
    variables = os.environ if given["env"] is None else given["env"]
    start = Start(
        arguments,
        {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
        os.path.abspath(given["cwd"] or "."),  # noqa: PTH100 - keeps symbolic links
        given["start_new_session"],
        [0, 1, 2, *given["pass_fds"]],
        ignored_signals(),
    )
    return template.start(start, [*streams, *given["pass_fds"]])


def _spawn(path: Any, command: list[Any], descriptors: Any) -> int:
    """Start a child of multiprocessing, as `multiprocessing.util.spawnv_passfds` does."""
    executable, *arguments = map(os.fsdecode, command)
    if _template is not None and os.fsdecode(path) == executable == sys.executable:
        kept = sorted({0, 1, 2, *descriptors})
        start = Start(arguments, dict(os.environ), str(Path.cwd()), False, kept, ignored_signals())
        pid = _template.start(start, kept)
        if pid is not None:
            return pid
    return _fresh_spawn(path, command, descriptors)


def install() -> None:
    """Make this process, and those that it starts, fork new processes wherever they can."""
    if sys.platform != "linux" or FRESH in os.environ:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.environ["PYTHONUNBUFFERED"] = "1"  # a fork has the template's streams
    environment = os.environ | {SPACE: "", "OMP_NUM_THREADS": "1"}
    process = _FreshPopen(
        [sys.executable, __file__, str(theirs.fileno()), SPACE[:4096]],
        env=environment,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    assert ours.recv(64), "the template did not start"
    _use(Template(ours, 1, process))


def uninstall() -> None:
    """Undo `install`, and wait until the template has exited."""
    global _template
    if _template is not None and _template.process is not None:
        _template.connection.close()
        _template.process.wait()
        _template = None


def _use(template: Template) -> None:
    global _template
    _template = template
    subprocess.Popen = Popen  # type: ignore[misc]
    if kernels := sys.modules.get("jupyter_client.launcher"):  # nbval has imported it already
        kernels.Popen = Popen  # type: ignore[attr-defined]
    util.spawnv_passfds = _spawn


# ---------------------------------------------------------------- in the template


def main() -> None:
    """Import what most tests need, then fork for each request. Only a fork returns from `serve`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the test's processes
    subprocess.Popen = Popen  # type: ignore[misc]  # before torchrun's code imports it
    ours = os.environ.pop("PYTHONPATH", "").split(os.pathsep)  # torch may be in one of them
    paths = [path for path in sys.path[1:] if path not in ours]  # each fork adds its own
    for name in PRELOADED:
        importlib.import_module(name)
    # With this callback of torch._dynamo, an uncaught KeyboardInterrupt exits with 1, not with 130.
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)  # type: ignore[attr-defined]
    sys.modules.pop("torch.distributed.run", None)  # `python -m` loads it again
    gc.freeze()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(b"ready")
    start = serve(connection)
    become(start, paths)
    while start.depth and (inner := with_template(start.depth)):
        start = inner
        become(start, paths)
    run(start.arguments)


def serve(connection: socket.socket) -> Start:
    """Fork a process for each request. In the new process, return what it is to run."""
    while True:
        try:
            request, received, _, _ = socket.recv_fds(connection, MESSAGE_SIZE, MAX_FDS)
        except ConnectionResetError:
            request = b""
        if not request:
            os._exit(0)  # the process that we fork for has exited
        template = os.getpid()
        middle = os.fork()
        if middle == 0:
            # The middle process exits, so the kernel hands its child to the nearest subreaper: the
            # process that sent the request, which is waiting for the reply.
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() in (middle, template):
                time.sleep(0.0005)
            start = Start(*pickle.loads(request))
            _show_to_others(start)
            connection.send(str(os.getpid()).encode())
            connection.close()  # before _place, which may give its number to another descriptor
            _place(received, start.descriptors)
            return start
        for descriptor in received:
            os.close(descriptor)
        os.waitpid(middle, 0)


def _show_to_others(start: Start) -> None:
    """Set up what others may look at, or send a signal to, as soon as they know the process.

    /proc/<pid>/cmdline and environ show what an interpreter was started with, and tests find their
    processes there. The template was started with SPACE to make room for longer commands.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # nohup has started the template, perhaps
        signal.signal(number, signal.SIG_DFL)
    for number in start.ignored:
        signal.signal(number, signal.SIG_IGN)
    if start.new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(start.environment)
    _overwrite("arg", map(os.fsencode, [sys.executable, *start.arguments]), b" ")
    _overwrite("env", (b"%b=%b" % variable for variable in os.environb.items()), b"\0")


def _overwrite(what: str, strings: Iterable[bytes], padding: bytes) -> None:
    """Overwrite the arguments or environment that the kernel shows for us. Cut what is too long."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = {"arg": 45, "env": 47}[what]  # proc(5): arg_start, arg_end, env_start, env_end
    begin, end = map(int, fields[first : first + 2])
    text = b"".join(string + b"\0" for string in strings)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin - 1, padding) + b"\0", end - begin)


def _place(received: list[int], wanted: list[int]) -> None:
    """Give each received descriptor its number, and close all others."""
    above = max([*wanted, *received]) + 1
    spare = [os.dup2(descriptor, above + k) for k, descriptor in enumerate(received)]
    for descriptor, number in zip(spare, wanted, strict=True):
        os.dup2(descriptor, number)  # inheritable, as after an exec
    for low, high in itertools.pairwise([*sorted(set(wanted)), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


def become(start: Start, paths: list[str]) -> None:
    """Turn this forked process into the requested one, up to its first line of code."""
    if signal.SIGINT not in start.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(start.folder)
    multiprocessing_process.ORIGINAL_DIR = start.folder  # type: ignore[attr-defined]
    added = [path for path in start.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(start.folder, path)) for path in added] + paths
    importlib.invalidate_caches()
    tempfile.tempdir = None  # torch._dynamo has asked for it; TMPDIR may be another one here
    # As if NumPy and torch were just imported. Python itself seeds `random` again after a fork.
    numpy, torch = sys.modules["numpy"], sys.modules["torch"]
    numpy.random.seed()
    torch.default_generator.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    torch.set_num_threads(int(threads) if threads else len(os.sched_getaffinity(0)))


def run(arguments: list[str]) -> None:
    """Run a script, `-m module` or `-c code` as the interpreter's command line does."""
    arguments = without_u(arguments)
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()  # PYTHONPATH may lead to one
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if arguments[:2] == ["-m", "ipykernel_launcher"] and FOLDER in os.environ:
        arguments.append(f"--IPKernelApp.exec_lines={BEFORE_EACH_CELL}")
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        path = str(Path(arguments[0]).absolute())
        sys.path.insert(0, str(Path(path).resolve().parent))
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def with_template(depth: int) -> Start | None:
    """Fork a template for this process, before this process runs any code of its own.

    Return None here. In each process that the template forks, return what that process is to run.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        _use(Template(ours, depth))
        return None
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _overwrite("arg", map(os.fsencode, [sys.executable, __file__]), b" ")
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    return serve(theirs)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.modules["warm_start"] = sys.modules["__main__"]  # stays when `run` replaces __main__
    main()

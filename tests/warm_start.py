"""Start Python processes by forking one that has imported torch already.

A fresh interpreter takes two seconds of a core to import torch and scikit-learn, and the tests
start about a thousand of them. `install()` replaces `subprocess.Popen` in this process: a command
that runs this very interpreter is forked from a template process instead, which takes 0.05 s. The
result is a real process of its own: its parent is whoever started it, it has its own session,
files, environment and signals, and it ends, or is killed, like any other.

What a fork cannot imitate starts afresh, as before: other interpreter options (`-W`, `-X`), other
`PYTHON...` variables, and `Running(..., fresh=True)` in harness.py. Two
things differ in a forked process: hashes of strings and addresses of torch's objects are the same
in all of them, so that a set has the same order in every rank (the tests of the collectives start
fresh ranks for that reason), and modules are already imported.

Linux only; elsewhere every process starts afresh.
"""

import ctypes
import gc
import importlib
import inspect
import io
import itertools
import os
import pickle
import runpy
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from typing import Any

from harness import FRESH

SPACE = "_" * 2**14  # an argument and a variable of the template's, see `_show_to_others`
PRELOADED = ("torch", "torch.distributed.run", "numpy", "sklearn.datasets", "cloudpickle", "psutil")
HANDLED = {
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONIOENCODING",
}  # of the variables that Python reads as it starts
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "MKL_", "OPENBLAS_", "MPL")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MESSAGE_SIZE = 2**20
MAX_FDS = 64
PATIENCE = 60.0  # seconds to wait for a template on a busy machine

_FreshPopen = subprocess.Popen
_fresh_spawn = util.spawnv_passfds
_template: "Template | None" = None


@dataclass
class Start:
    """What a new process is to run, and with what."""

    arguments: list[str]  # without the interpreter
    environment: dict[str, str]
    folder: str
    new_session: bool
    descriptors: list[int]  # the numbers that the descriptors sent along get there
    depth: int = 0  # of the template to be made for it, if it may start others; 0: none


class Template:
    """The process that is forked, seen from the one that starts processes."""

    def __init__(
        self,
        connection: socket.socket,
        depth: int,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.connection = connection
        self.connection.settimeout(PATIENCE)
        self.depth = depth  # 1: of the tests; 2: of what they start; 3: of what that starts
        self.process = process
        self.owner = os.getpid()
        self.lock = threading.Lock()

    def start(self, start: Start, descriptors: list[int]) -> int | None:
        """Return the new process's number, or None if it must be started afresh."""
        if os.getpid() != self.owner or not can_fork(start):
            return None
        if self.may_start_others(start.arguments):
            start.depth = self.depth + 1
        request = pickle.dumps(astuple(start))
        if len(request) > MESSAGE_SIZE or len(descriptors) > MAX_FDS:
            return None
        try:
            with self.lock, _adopting():
                socket.send_fds(self.connection, [request], descriptors)
                return int(self.connection.recv(64))
        except (OSError, ValueError):  # the template is gone: a test may have killed a group
            if self.process is not None:
                raise
            return None

    def may_start_others(self, arguments: list[str]) -> bool:
        """Tell whether a process is a launcher, a notebook's kernel or a rank of mp.spawn."""
        text = " ".join(arguments)
        if "spawn_main" in text or "ipykernel_launcher" in text:
            return self.depth <= 2
        return self.depth == 1 and "-c" not in arguments[:3]


class Popen(_FreshPopen):
    """subprocess.Popen that forks the template where it can."""

    def _execute_child(self, *args: Any) -> None:  # type: ignore[override]
        names = list(inspect.signature(_FreshPopen._execute_child).parameters)[1:]
        given = dict(zip(names, args, strict=True))
        pid = None if _template is None else self._fork(given)
        if pid is None:
            super()._execute_child(*args)
            return
        self.pid = pid
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))

    def _fork(self, given: dict[str, Any]) -> int | None:
        command = given["args"]
        plain = not given["shell"] and given["preexec_fn"] is None and given["close_fds"]
        if not plain or isinstance(command, str | bytes | os.PathLike):
            return None
        executable, *arguments = map(os.fsdecode, command)
        if given["executable"] not in (None, command[0], executable):
            return None
        if executable != sys.executable:
            return None
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [number if other == -1 else other for number, other in enumerate(streams)]
        start = Start(
            arguments,
            dict(os.environ) if given["env"] is None else decoded(given["env"]),
            str(Path(given["cwd"] or ".").resolve()),
            given["start_new_session"],
            [0, 1, 2, *given["pass_fds"]],
        )
        sys.audit("subprocess.Popen", executable, command, given["cwd"], given["env"])
        assert _template
        return _template.start(start, [*streams, *given["pass_fds"]])


def decoded(environment: dict[Any, Any]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}


def _spawn(path: Any, command: list[Any], descriptors: Any) -> int:
    """Start a child of multiprocessing, as `multiprocessing.util.spawnv_passfds` does."""
    executable, *arguments = map(os.fsdecode, command)
    if _template is not None and os.fsdecode(path) == executable == sys.executable:
        kept = sorted({0, 1, 2, *descriptors})
        start = Start(arguments, dict(os.environ), str(Path.cwd()), False, kept)
        pid = _template.start(start, kept)
        if pid is not None:
            return pid
    return _fresh_spawn(path, command, descriptors)


def install() -> None:
    """Have this process, and those that it starts, fork what they can."""
    if sys.platform != "linux" or FRESH in os.environ:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = _FreshPopen(
        [sys.executable, __file__, str(theirs.fileno()), SPACE],
        env=os.environ | {SPACE: "", "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is not for it: it ends with this process
    )
    theirs.close()
    assert ours.recv(64), "the template did not start"
    _use(Template(ours, 1, process))


def _use(template: Template) -> None:
    global _template
    _template = template
    subprocess.Popen = Popen  # type: ignore[misc]
    util.spawnv_passfds = _spawn


def can_fork(start: Start) -> bool:
    """Tell whether a forked process would be as a fresh one with these arguments would."""
    arguments, environment = without_options(start.arguments), start.environment
    runs_code = len(arguments) > 1 and arguments[0] in ("-c", "-m")
    if not (runs_code or (arguments and arguments[0].endswith(".py"))):
        return False
    return FRESH not in environment and _read_at_start(environment) == _read_at_start(
        dict(os.environ)
    )


def without_options(arguments: list[str]) -> list[str]:
    """Leave out the options of the interpreter that a forked process can do without."""
    return list(itertools.dropwhile(("-u", "-B").__contains__, arguments))


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in HANDLED
    }


# ---------------------------------------------------------------- in the template


def serve(connection: socket.socket) -> Start:
    """Fork a process for each request; return in the new process, with what it is to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        request, received, _, _ = socket.recv_fds(connection, MESSAGE_SIZE, MAX_FDS)
        if not request:
            os._exit(0)  # who would ask us has ended
        template = os.getpid()
        middle = os.fork()
        if middle == 0:
            # A child of a child that ends: the kernel gives it to whoever asked, as its own.
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() in (middle, template):
                time.sleep(0.0005)
            start = Start(*pickle.loads(request))
            _show_to_others(start)
            connection.send(str(os.getpid()).encode())
            connection.close()  # not later: its number may be another's then
            _place(received, start.descriptors)
            return start
        for descriptor in received:
            os.close(descriptor)
        os.waitpid(middle, 0)


def _place(received: list[int], wanted: list[int]) -> None:
    """Give each received descriptor its number, and close all others."""
    above = max([*wanted, *received]) + 1
    spare = [os.dup2(descriptor, above + k) for k, descriptor in enumerate(received)]
    for descriptor, number in zip(spare, wanted, strict=True):
        os.dup2(descriptor, number)  # inheritable, as after an exec
    for low, high in itertools.pairwise([*sorted(wanted), os.sysconf("SC_OPEN_MAX")]):
        if low + 1 < high:  # an empty range closes everything (Python 3.11)
            os.closerange(low + 1, high)


def become(start: Start, paths: list[str]) -> None:
    """Turn this forked process into the one that was asked for, up to its first line of code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(start.folder)
    _open_streams("-u" in start.arguments[:2] or bool(os.environ.get("PYTHONUNBUFFERED")))
    added = [path for path in start.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(start.folder, path)) for path in added] + paths
    importlib.invalidate_caches()
    _draw_anew()
    site.execsitecustomize()  # PYTHONPATH may hold one


def _show_to_others(start: Start) -> None:
    """Take on the session, arguments and variables of the new process: others look at them.

    /proc/<pid>/cmdline and environ show what an interpreter was started with, and tests find their
    processes there. SPACE has made room for any command.
    """
    if start.new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(start.environment)
    _show_command([sys.executable, *start.arguments])
    _overwrite("env", (b"%b=%b" % variable for variable in os.environb.items()))


def _show_command(command: list[str]) -> None:
    _overwrite("arg", map(os.fsencode, command))


def _overwrite(what: str, strings: Iterable[bytes]) -> None:
    """Write what fits of `strings` to where the kernel reads our arguments or environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = {"arg": 45, "env": 47}[what]  # proc(5): arg_start, arg_end, env_start, env_end
    begin, end = map(int, fields[first : first + 2])
    text = b"".join(string + b"\0" for string in strings)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _open_streams(unbuffered: bool) -> None:
    """Make standard input, output and error as Python makes them when it starts."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for number, name in enumerate(["stdin", "stdout", "stderr"]):
        default = getattr(sys, f"__{name}__")
        mode, size = ("rb", -1) if number == 0 else ("wb", 0 if unbuffered else -1)
        binary = open(number, mode, size, closefd=False)  # noqa: SIM115 - for good
        stream = io.TextIOWrapper(
            binary,
            encoding or default.encoding,
            "backslashreplace" if number == 2 else errors or default.errors,
            line_buffering=number == 2 or binary.isatty(),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _draw_anew() -> None:
    """Let what a fresh interpreter would draw from the system differ here, too."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def run(arguments: list[str]) -> None:
    """Run a script, `-m module` or `-c code` as the interpreter's command line does."""
    arguments = without_options(arguments)
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        sys.argv[0] = "-m"
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
    """Fork a template for this process, while it is still clean; return in what it forks, too."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        _use(Template(ours, depth))
        return None
    ours.close()
    _show_command([sys.executable, __file__])
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    return serve(theirs)


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of what our descendants leave behind: of the child of a child that ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main() -> None:
    """Load what every test needs, then fork; this goes on in the forked processes."""
    subprocess.Popen = Popen  # type: ignore[misc]  # before torchrun's code imports it
    paths = sys.path[1:]
    for _ in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        del paths[0]
    for name in PRELOADED:
        with suppress(ImportError):  # that is for the test to say
            importlib.import_module(name)
    sys.modules.pop("torch.distributed.run", None)  # `python -m` runs it as new
    gc.freeze()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(b"ready")
    start = serve(connection)
    become(start, paths)
    while start.depth and (inner := with_template(start.depth)):
        start = inner
        become(start, paths)
    run(start.arguments)


if __name__ == "__main__":
    sys.modules["warm_start"] = sys.modules["__main__"]  # kept, where `run` makes a new __main__
    main()

#!python -SI
"""Fork what a shell starts as `python` and `torchrun`, as warm_start.py does for Python.

Notebooks and pages type their commands into a shell. `serve()` makes a folder with two commands,
copies of this file, and names it in FOLDER. Where it leads PATH, a command asks the process that
called `serve` for a fork, hands its signals on to it, and exits as it does. If a fork cannot
imitate the command, it starts the interpreter.
"""

import os
import pickle
import select
import signal
import socket
import sys
from pathlib import Path
from threading import Thread

FOLDER = "DDP_TEST_COMMANDS"
# Puts the commands first again, after `%load_ext lesson` has changed PATH.
BEFORE_EACH_CELL = f"""get_ipython().events.register("pre_run_cell", lambda _: __import__("os").\
environ.update(PATH=__import__("os").path.expandvars("${FOLDER}:$PATH")))"""
MESSAGE_SIZE = 2**17  # bytes of a request, which must fit into the socket's buffer
HANDED_ON = signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def main() -> None:
    """Be a command."""
    command, *arguments = sys.argv
    folder, name = Path(command).parent, Path(command).name
    if name == "torchrun":
        arguments = ["-m", "torch.distributed.run", *arguments]
    ignored = ignored_signals()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(folder / "socket"))
    request = pickle.dumps((namespaces(), arguments, dict(os.environ), str(Path.cwd()), ignored))
    socket.send_fds(connection, [request], [0, 1, 2])
    pid = int(connection.recv(64))
    if not pid:
        os.execv(sys.executable, [sys.executable, *arguments])
    for each in {*HANDED_ON} - {*ignored}:
        signal.signal(each, lambda number, _: os.kill(pid, number))
    status = int(connection.recv(64))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in HANDED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


def ignored_signals() -> list[int]:
    """Return the signals that are ignored here: children inherit that.

    SIGPIPE and SIGXFSZ do not count: Python ignores them itself, but resets them for its children.
    """
    others = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    return [int(number) for number in others if signal.getsignal(number) is signal.SIG_IGN]


def namespaces() -> list[str]:
    """Return what differs on a node of the tests' Slurm cluster, or behind a slowed network."""
    return [str(Path("/proc/self/ns", kind).readlink()) for kind in ("net", "uts", "mnt", "pid")]


def serve() -> None:
    """Answer the commands, until this process exits. Only Linux can fork them."""
    if sys.platform != "linux":
        return
    import tempfile  # not above, because a command should start fast

    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    text = Path(__file__).read_text().replace("#!python", f"#!{sys.executable}", 1)
    for name in ("python", "torchrun"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "socket"))
    listener.listen()

    def accept() -> None:
        while True:
            Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    Thread(target=accept, daemon=True).start()
    os.environ[FOLDER] = str(folder)


def stop() -> None:
    """Remove the folder."""
    import shutil

    shutil.rmtree(os.environ.pop(FOLDER, ""), ignore_errors=True)


def answer(connection: socket.socket) -> None:
    """Fork what a command asks for, and tell it how that ends. Kill it if the command is killed."""
    import warm_start

    with connection:
        request, streams, _, _ = socket.recv_fds(connection, MESSAGE_SIZE, 3)
        theirs, arguments, environment, folder, ignored = pickle.loads(request)
        start = warm_start.Start(arguments, environment, folder, False, [0, 1, 2], ignored)
        template = warm_start._template
        pid = template.start(start, streams) if template and theirs == namespaces() else None
        for stream in streams:
            os.close(stream)
        connection.send(str(pid or 0).encode())
        if pid is None:
            return
        ended = os.pidfd_open(pid)
        if connection in select.select([connection, ended], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        connection.send(str(status).encode())


if __name__ == "__main__":
    main()

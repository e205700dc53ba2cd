"""Train with DDP while workers die, freeze, leave and join. The others go on; nobody restarts.

python scripts/elastic.py --nproc 3     # then kill -9 a worker in another terminal
ELASTIC_TOKEN=... python scripts/elastic.py --join HOST:PORT     # one more worker, from anywhere

No sample is lost or read twice, and the weights are those of a run without faults.
"""

import argparse
import io
import os
import queue
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import datautils

GLOBAL_BATCH, EPOCH = 96, 15  # samples per step, however many workers there are; steps per epoch
SNAPSHOT, SAVE_EVERY = Path("elastic_snapshot.pt"), 10 * EPOCH  # steps
# The longest that a worker may let the others wait: in a step, and while a group opens.
TIMEOUT, OPENING = timedelta(seconds=10), timedelta(seconds=2)
BEAT, FROZEN = 0.5, 4.0  # seconds from one sign of life to the next, and until a worker is out
# Seconds that a new group waits for late workers, and that coordinator and workers wait if there
# is nobody else.
LAST_CALL, ALONE = 2.0, 600
# A connection that does not send the token is dropped. As hex digits, it may have any characters.
SECRET = os.environ.get("ELASTIC_TOKEN") or secrets.token_hex(16)
TOKEN = SECRET.encode().hex()
MESSAGE = len(TOKEN) + 64  # bytes: all messages are as long, so that one read is one message


def send(connection, *words):
    with suppress(OSError):  # the other end is gone: whoever reads next notices
        connection.sendall(" ".join(map(str, [TOKEN, *words])).ljust(MESSAGE).encode())


def receive(connection):
    """Return a message: a word and numbers. It is empty if the other end is gone or a stranger."""
    try:
        token, word, *numbers = connection.recv(MESSAGE).decode("ascii").split()
        return [word, *map(int, numbers)] if secrets.compare_digest(token, TOKEN) else []
    except TimeoutError:
        return ["nothing"]
    except (OSError, ValueError):
        return []


class Coordinator:
    """Decide who is in which group. Nobody else decides, so two groups never compete.

    Each worker has a connection to it. A worker without a group reports how many steps it has
    taken, and gets its rank in the next group. If it dies, the system closes its connection.
    """

    def __init__(self, server, processes, steps):
        self.server, self.local, self.steps = server, processes, steps
        # When each connection last sent something, and what each worker that waits has reported.
        self.heard, self.reports = {}, {}
        self.members, self.called, self.store = [], [], None  # of the group, and of the last one
        # Group numbers must be above those of an earlier coordinator.
        self.group, self.expected, self.deadline = time.time_ns(), len(processes), 0.0
        self.asked, self.finished = 0, 0.0  # the group that was asked to end; when one finished

    def run(self):
        """Return whether a worker has finished, as soon as nobody is left."""
        last_seen = time.monotonic()
        while True:
            self._listen()
            codes, now = [process.poll() for process in self.local], time.monotonic()
            last_seen = now if self.heard or None in codes else last_seen
            wait = 0 if codes or self.finished else ALONE  # for workers from elsewhere
            hangs = self.finished and now > self.finished + TIMEOUT.total_seconds()
            if hangs or now - last_seen > wait:
                return self.finished > 0 or 0 in codes
            waiting = {worker: report for worker, report in self.reports.items() if report}
            if not self.members or any(self.reports.get(m, True) for m in self.members):
                self._open_next_group(waiting)
            elif waiting and self.asked != self.group:  # all train, and somebody wants to join
                self.asked = self.group
                send(self.members[0], "leave", self.group)  # after its step

    def _listen(self):
        """Read what has arrived. Drop who is gone, a stranger, or silent for too long."""
        # select cannot watch more than about a thousand connections.
        for ready in select.select([*self.heard, self.server][:1000], [], [], 0.1)[0]:
            if ready is self.server:
                self.heard[self.server.accept()[0]] = time.monotonic()
                continue
            message = receive(ready)
            self.heard[ready] = time.monotonic() if message else 0.0
            self.reports.setdefault(ready, None)
            # Ignore a report that was sent before the worker has read our last reply.
            if len(message) > 1 and (ready not in self.called or message[1] == self.group):
                self.reports[ready] = message[2:]
            if message == ["finished"]:
                self.finished = time.monotonic()
        for worker in [w for w, heard in self.heard.items() if time.monotonic() > heard + FROZEN]:
            del self.heard[worker]
            self.reports.pop(worker, None)
            worker.close()

    def _open_next_group(self, waiting):
        """Open the next group as soon as all who live have reported, or when their time is up."""
        for member in set(self.members).intersection(self.reports):
            send(member, "over", self.group)
        # Newcomers do not start from scratch while a worker that has trained may still report.
        only_new = len(waiting) < len(self.reports) and not any(k for k, _ in waiting.values())
        if self.members or not waiting or only_new:
            self.members, self.store, self.deadline = [], None, time.monotonic() + LAST_CALL
        late = len(waiting) < max(self.expected, len(self.reports))
        if not waiting or (late and time.monotonic() < self.deadline):
            return
        self.group, self.expected = self.group + 1, 0
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        # Rank 0 gives its state to the others, so it must have the most steps, and not from a file.
        self.members = self.called = sorted(waiting, key=lambda each: waiting[each], reverse=True)
        for rank, member in enumerate(self.members):
            self.reports[member] = None
            group = ["open", self.group, rank, len(waiting), self.store.port, self.steps]
            send(member, *(["finished"] if self.finished else group))


def open_sockets():
    """Return the descriptors of this process's sockets. Only Linux has /proc to look into."""
    return {int(path.name) for path in Path("/proc/self/fd").glob("*") if path.is_socket()}


class Worker:
    def __init__(self, address):
        self.host, self.port = address.rsplit(":", 1)
        self.build()
        # Steps taken, and failures since the last one; the last group that this worker was called
        # to, the last that it was in, and the last that is over.
        self.step = self.failures = self.called = self.group = self.over = 0
        if SNAPSHOT.exists():
            self.load_state_dict(torch.load(SNAPSHOT, weights_only=True))
        self.connection, self.sockets, self.replies = socket.socket(), set(), queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def build(self):
        """Make what the methods below use."""
        self.data = datautils.MyTrainDataset()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def _listen(self):
        """Listen to the coordinator, in a thread: the main thread may wait in a collective."""
        while True:
            with suppress(OSError), socket.create_connection((self.host, self.port)) as connection:
                os.register_at_fork(after_in_child=connection.close)  # a copy would keep it open
                connection.settimeout(BEAT)
                self.connection, self.over = connection, self.group  # new here, so in no group
                self._cut()
                while message := receive(connection):
                    if message[0] == "over":
                        self._cut()
                    if message[0] in ("over", "leave"):
                        self.over = message[1]
                    elif message[0] in ("open", "finished"):
                        self.replies.put(message[1:])
                    send(connection, "busy")
            time.sleep(0.2)

    def _cut(self):
        """Cut the group's connections, so that its collectives fail at once, here and on the peers.

        Destroying the group would wait for them.
        """
        for descriptor in self.sockets & open_sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # fails if it only listens
                connection.shutdown(socket.SHUT_RDWR)

    def train(self):
        finished = False
        while not finished and (reply := self._next_group()):
            *group, steps = reply
            try:
                self._open_group(*group)
                finished = self._train_in_group(steps)
            except RuntimeError as error:  # if it is the network's, some member is gone
                self.failures += 1
                lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
                if not lost or self.failures == 10:  # a bug, not a fault
                    raise
                print(f"step {self.step}: {str(error).split('] ', 1)[-1]:.60}", flush=True)
            # Here the error is released, and with it the DDP model and the failed collective.
            self._close_group()
        send(self.connection, "finished")

    def _next_group(self):
        """Return the next group's number, this worker's rank, the size, a port and the steps."""
        for _ in range(ALONE):
            send(self.connection, "waiting", self.called, min(self.group, 1), self.step)
            with suppress(queue.Empty):
                return self.replies.get(timeout=1)  # nothing if the others have finished
        sys.exit(f"error: nobody at {self.host}:{self.port} answers to this ELASTIC_TOKEN")

    def _open_group(self, group, rank, world, port):
        self.called, before = group, open_sockets()
        timeout = OPENING * (1 + self.failures // 3) / 5  # longer if it fails again and again
        store = dist.TCPStore(self.host, port, is_master=False, timeout=OPENING)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        # To connect, gloo waits five times as long as this group's timeout.
        dist.group.WORLD.set_timeout(TIMEOUT)  # type: ignore[union-attr]
        self.sockets = open_sockets() - before
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        dist.broadcast(size := torch.tensor(file.tell()), src=0)
        content = bytearray(file.getvalue().ljust(int(size))[: int(size)])
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
        # All of rank 0's state has arrived: if it dies while it sends, nobody uses a mixture.
        self.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
        self.group = group

    def _close_group(self):
        self._cut()
        self.sockets = set()  # from now on, the system may give their numbers to other files
        if not dist.is_initialized():  # opening it has failed, but PyTorch has counted the group
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()  # now PyTorch's count of groups is 0 again
        sys.excepthook = sys.__excepthook__  # each group wraps it once more

    def state_dict(self):
        """Return everything that a step changes. A scheduler and a scaler belong in here, too."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"step": self.step, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _train_in_group(self, steps):
        if self.step > steps:
            sys.exit(f"error: the state has {self.step} steps already, and the run --steps {steps}")
        rank, world = dist.get_rank(), dist.get_world_size()
        model = DDP(self.model, init_sync=False)  # all have rank 0's state
        if rank == 0:
            print(f"step {self.step}: {world} workers", flush=True)
        while self.step < steps:
            self._take_step(model, rank, world)
            if rank == 0 and self.step % SAVE_EVERY == 0:
                datautils.save(SNAPSHOT, self.state_dict(), self.step // EPOCH)
            if self.over == self.group:  # in the last step, or before it
                return False
        if rank == 0:
            datautils.save("elastic.pt", self.model.state_dict(), self.step // EPOCH)
            SNAPSHOT.unlink(missing_ok=True)
        dist.barrier()  # rank 0 may die before it has saved
        return True

    def _take_step(self, model, rank, world):
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.optimizer.zero_grad()
        try:
            self.backward(model, rank, world)
        except RuntimeError:  # this step will be taken again: BatchNorm must forget the failed try
            self.model.load_state_dict(buffers, strict=False)
            raise
        self.optimizer.step()
        self.step, self.failures = self.step + 1, 0

    def backward(self, model, rank, world):
        """Compute the gradients of this step: of every world-th sample of the batch."""
        epoch, step = divmod(self.step, EPOCH)
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch))
        mine = order[step * GLOBAL_BATCH :][:GLOBAL_BATCH][rank::world]
        # What is random is drawn for the whole batch, so that a sample's part does not depend on
        # the number of workers.
        torch.manual_seed(self.step)
        noise = 0.05 * torch.randn(GLOBAL_BATCH, 64)[rank::world]
        outputs = model(self.data.images[mine] + noise)
        loss = nn.functional.cross_entropy(outputs, self.data.digits[mine], reduction="sum")
        (loss * world / GLOBAL_BATCH).backward()  # DDP divides by the number of workers


def main(worker=Worker):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2, help="workers to start here, default: 2")
    parser.add_argument("--join", metavar="HOST:PORT", help="be a worker of the run there")
    parser.add_argument("--port", type=int, default=0, help="where workers join, default: any")
    parser.add_argument("--steps", type=int, default=3000, help="of the run, default: 3000")
    args = parser.parse_args()
    if args.join:
        torch.set_num_threads(1)
        return worker(args.join).train()
    server = socket.create_server(("", args.port), backlog=1000)
    port = server.getsockname()[1]
    # Everybody on this machine can read a command line, but not the environment.
    environment = os.environ | {"ELASTIC_TOKEN": SECRET, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, sys.argv[0], f"--join=localhost:{port}"]
    processes = [subprocess.Popen(command, env=environment) for _ in range(args.nproc)]
    print("workers:", *(process.pid for process in processes))
    token = "" if os.environ.get("ELASTIC_TOKEN") else f"ELASTIC_TOKEN={SECRET} "
    print(f"one more: {token}python {sys.argv[0]} --join {socket.gethostname()}:{port}", flush=True)
    try:
        finished = Coordinator(server, processes, args.steps).run()
        return None if finished else "error: no worker has finished"
    finally:
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())

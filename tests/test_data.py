"""Each rank gets its own samples, starting anywhere in an epoch.

Loaders draw the same random numbers in any process and at any world size.
"""

import gc
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from harness import Running, run
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from ddp_ref.training.data import TrainBatches, eval_loader, train_loader
from ddp_ref.training.samplers import TrainSampler, _rows as rows

SIZES = st.integers(1, 40)
WORLDS = st.integers(1, 6)


class Noisy(torch.utils.data.Dataset):
    """Items of an index and three random numbers, from the three generators of augmentations."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def samplers(size, world_size, **options):
    return [TrainSampler(size, rank=r, world_size=world_size, **options) for r in range(world_size)]


@given(SIZES, WORLDS, st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_order_and_padding_are_those_of_distributed_sampler(size, world_size, shuffle, seed, epoch):
    ours = samplers(size, world_size, shuffle=shuffle, seed=seed)
    for rank, sampler in enumerate(ours):
        theirs = DistributedSampler(
            range(size), world_size, rank, shuffle=shuffle, seed=seed, drop_last=False
        )
        theirs.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert list(sampler) == [epoch * size + index for index in theirs]
        assert len(sampler) == len(theirs)


@given(SIZES, WORLDS, WORLDS, st.integers(1, 5), st.data())
def test_a_resume_at_any_world_size_gives_each_unseen_sample_once(size, before, after, batch, data):
    steps = data.draw(st.integers(0, -(-size // (batch * before))))
    seen = [index for s in samplers(size, before) for index in list(s)[: steps * batch]]
    samples_seen = steps * batch * before
    unseen = set(range(size)) - set(seen)
    resumed = samplers(size, after)
    for sampler in resumed:
        sampler.set_epoch(0, samples_seen)
    rest = [list(sampler) for sampler in resumed]
    assert {len(part) for part in rest} == {len(resumed[0])}  # all ranks take equally many steps
    indices = [index for part in rest for index in part]
    assert unseen <= set(indices) and len(indices) - len(unseen) < after
    if before == after:
        whole = [list(sampler) for sampler in samplers(size, before)]
        assert rest == [part[steps * batch :] for part in whole]


@given(st.integers(0, 40), WORLDS)
def test_shards_hold_each_item_once(size, world_size):
    loaders = [
        eval_loader(range(size), 3, rank=r, world_size=world_size) for r in range(world_size)
    ]
    items = [[item for batch in loader for item in batch.tolist()] for loader in loaders]
    assert sorted(item for part in items for item in part) == list(range(size))
    assert [len(loader.sampler) for loader in loaders] == [len(part) for part in items]


def epochs(world_size, start=(0, 0), **options):
    """Return the samples of epochs 0 and 1, by rank, starting at (epoch, samples_seen)."""
    samples = []
    for rank in range(world_size):
        loader = train_loader(Noisy(10), 2, rank=rank, world_size=world_size, seed=3, **options)
        for epoch in range(start[0], 2):
            loader.sampler.set_epoch(epoch, start[1] if epoch == start[0] else 0)
            samples += [(epoch, rank, sample.tolist()) for batch in loader for sample in batch]
    return samples


def test_random_numbers_depend_on_seed_epoch_and_index_alone():
    one_rank = epochs(1)
    assert len({sample[1] for _, _, sample in one_rank}) == 20  # a new one per epoch and index
    assert epochs(1, num_workers=2) == one_rank
    assert epochs(1, num_workers=1, persistent_workers=True) == one_rank
    assert epochs(1, start=(0, 4)) == one_rank[4:]
    by_index = {(epoch, sample[0]): sample for epoch, _, sample in one_rank}
    for epoch, _, sample in epochs(3):
        assert sample == by_index[epoch, sample[0]]


def images(kind=TensorDataset):
    pixels = torch.arange(10 * 24.0).reshape(10, 2, 3, 4)
    return kind(pixels.to(memory_format=torch.channels_last), torch.arange(10))


def can_index(data):
    """Say whether this version of torch can look up several rows; 2.8 cannot for uint16."""
    try:
        for tensor in getattr(data, "tensors", []):
            tensor[[0]]
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize(
    "data",
    [
        images(),
        Subset(images(), [4, -1, 2]),
        Subset(Subset(images(), range(3, 9)), torch.tensor([5, 0, -2, 1])),
        Subset(images(), np.array([3, 0, 1], np.uint8)),
        TensorDataset(torch.arange(5).to(torch.uint16), torch.eye(5).to(torch.float8_e4m3fn)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"drop_last": True}])
def test_rows_looked_up_together_equal_rows_looked_up_one_by_one(data, options):
    ours = train_loader(data, 2, rank=0, world_size=1, shuffle=False, **options)
    assert (rows(data, [0, 1], len(data)) is not None) == can_index(data) and len(
        ours.dataset
    ) == len(data)
    theirs = list(DataLoader(data, 2, drop_last="drop_last" in options))
    batches = list(ours)
    assert len(batches) == len(theirs)
    for batch, expected in zip(batches, theirs, strict=True):
        assert type(batch) is type(expected)
        for part, other in zip(batch, expected, strict=True):
            assert part.dtype == other.dtype and part.stride() == other.stride()
            assert torch.equal(part.double(), other.double())
            part.copy_(torch.zeros_like(part))  # must not change the data set
    assert data[2][0].double().any()


def test_rows_reflect_later_changes_to_the_data_set():
    data = images()
    half = Subset(data, range(5))
    loader = train_loader(half, 5, rank=0, world_size=1, shuffle=False)
    data.tensors, half.indices = (data.tensors[0], -data.tensors[1]), range(5, 10)
    assert [numbers.tolist() for _, numbers in loader] == [[-5, -6, -7, -8, -9]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds_are_looked_up_one_by_one():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    parameter = torch.nn.Parameter(torch.ones(2))
    bits = torch.empty(2, dtype=torch.bits8)  # no version of torch can look up several rows
    for tensor in (nested, parameter, bits, torch.eye(2).to_sparse()):
        loader = train_loader(TensorDataset(tensor), 1, rank=0, world_size=1, collate_fn=list)
        assert rows(loader.dataset.dataset, [0, 1], 2) is None
        assert len(list(loader)) == 2


def test_a_collate_fn_is_given_the_items_of_a_tensor_dataset():
    def collate(items):
        assert type(items) is list and all(type(item) is tuple for item in items)
        return [(pixels.sum().item(), number.item()) for pixels, number in items]

    data = images()
    loader = train_loader(data, 4, rank=1, world_size=2, shuffle=False, collate_fn=collate)
    expected = [(pixels.sum().item(), number.item()) for pixels, number in data][1::2]
    assert [item for batch in loader for item in batch] == expected


def test_random_numbers_in_a_collate_fn_depend_on_seed_epoch_and_samples_alone():
    def mixed(items):
        return torch.rand(())

    def drawn(rank=0, epoch=0, seed=0, **options):
        shard = {"rank": rank, "world_size": 2, "seed": seed}
        loader = train_loader(images(), 2, **shard, collate_fn=mixed, **options)
        loader.sampler.set_epoch(epoch)
        return tuple(number.item() for number in loader)

    draws = [drawn(), drawn(rank=1), drawn(epoch=1), drawn(seed=7)]
    assert len({number for numbers in draws for number in numbers}) == sum(map(len, draws))
    assert drawn(rank=1, epoch=1) == drawn(rank=1, epoch=1, num_workers=2)


def test_a_tensor_dataset_subclass_that_draws_random_numbers_is_seeded():
    class Augmented(TensorDataset):
        def __getitem__(self, index):
            return [part + torch.rand(()) for part in super().__getitem__(index)]

    for data in (images(Augmented), Subset(images(Augmented), range(10))):
        loader = train_loader(data, 5, rank=0, world_size=1, shuffle=False)
        first, second = ([batch[1] for batch in loader] for _ in range(2))
        assert torch.equal(torch.cat(first), torch.cat(second))
        assert torch.cat(first).frac().unique().numel() > 1


def test_loading_leaves_the_global_generators_alone():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = draw()
    for options in ({}, {"num_workers": 1}):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        list(train_loader(Noisy(4), 2, rank=0, world_size=1, **options))
        list(eval_loader(range(4), 2, rank=0, world_size=1, **options))
        assert draw() == expected


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Unsized(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index


def test_a_callers_own_sampler_is_used_if_it_is_rank_aware():
    sharded = DistributedSampler(range(6), num_replicas=2, rank=1, shuffle=False)
    batches = BatchSampler(sharded, 2, drop_last=False)
    loader = train_loader(range(6), 2, rank=1, world_size=2, sampler=sharded)
    assert loader.sampler is sharded and [x.tolist() for x in loader] == [[1, 3], [5]]
    for data in (range(6), DataLoader(range(6), 4)):
        loader = train_loader(data, rank=1, world_size=2, batch_sampler=batches)
        assert loader.batch_sampler is batches and [x.tolist() for x in loader] == [[1, 3], [5]]
        with pytest.raises(ValueError, match="mutually exclusive with batch_size"):
            train_loader(data, 3, rank=1, world_size=2, batch_sampler=batches)
    for name in ("sampler", "batch_sampler"):
        with pytest.raises(ValueError, match=f"the {name} must be for rank 0 of 2, .*\\(1, 2\\)"):
            own = {"sampler": sharded, "batch_sampler": batches}[name]
            train_loader(range(6), 2, rank=0, world_size=2, **{name: own})
    unsharded = RandomSampler(range(6))
    with pytest.raises(ValueError, match=r"RandomSampler is \(None, None\): use a Dist"):
        train_loader(range(6), 2, rank=0, world_size=2, sampler=unsharded)
    assert train_loader(range(6), 2, rank=0, world_size=1, sampler=unsharded).sampler is unsharded
    sharded.sampler = unsharded  # as in a wrapper that is rank-aware itself, such as Catalyst's
    loader = train_loader(range(6), 2, rank=1, world_size=2, sampler=sharded)
    assert loader.sampler is sharded and len(list(loader)) == 2


@pytest.mark.parametrize(
    ("loader", "dataset", "batch_size", "options", "text"),
    [
        (train_loader, [], 1, {}, "the training set is empty"),
        (train_loader, Unsized(), 1, {}, "add __len__ to Unsized"),
        (train_loader, range(3), 0, {}, "batch_size must be an integer of at least 1, not 0"),
        (train_loader, DataLoader(range(3)), 0, {}, "at least 1, not 0"),
        (eval_loader, range(3), True, {}, "not True"),
        (eval_loader, Unsized(), 1, {}, "add __len__ to Unsized"),
        (eval_loader, Stream(), 1, {}, "an IterableDataset cannot be evaluated"),
        (eval_loader, range(3), 1, {"shuffle": True}, "leave out shuffle"),
        (eval_loader, range(3), 1, {"sampler": range(2)}, "leave out sampler"),
        (eval_loader, DataLoader(range(2), batch_sampler=[[0, 1]]), 8, {}, "but a list may not"),
        (train_loader, range(3), 1, {"in_order": False}, "in_order=False would mix up the order"),
        (train_loader, Stream(), 1, {"shuffle": True}, "expected unspecified shuffle option"),
    ],
)
def test_what_cannot_be_loaded_exactly_is_rejected(loader, dataset, batch_size, options, text):
    with pytest.raises(ValueError, match=text):
        loader(dataset, batch_size, rank=0, world_size=1, **options)


def test_an_existing_loader_with_workers_may_be_used_without_them():
    existing = DataLoader(
        range(6),
        4,
        num_workers=2,
        prefetch_factor=3,
        timeout=5,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    loader = train_loader(existing, num_workers=0, rank=0, world_size=1)
    assert loader.num_workers == 0 and len(list(loader)) == 2
    kept = train_loader(existing, num_workers=1, rank=0, world_size=1)
    assert (kept.prefetch_factor, kept.timeout, kept.persistent_workers) == (3, 5, True)


WORKERS = """
import os, time
from pathlib import Path
from ddp_ref.training.data import train_loader

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, index):
        Path(f"worker-{os.getpid()}").touch()
        time.sleep(0.05 if index < 100 else 1000)  # at work when the rank dies
        return index

def init(worker):
    Path(f"init-{worker}").touch()

loader = train_loader(Slow(), 1, rank=0, world_size=1, num_workers=2, worker_init_fn=init,
                      shuffle=False)
for step, batch in enumerate(loader):
    Path("step").write_text(str(step))
"""


def test_workers_leave_signals_to_their_rank_and_die_with_it(tmp_path):
    def workers():
        return [int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")]

    def step():
        return int((tmp_path / "step").read_text() or 0) if (tmp_path / "step").exists() else 0

    def wait_for(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and running.process.poll() is None, running.text()
            time.sleep(0.05)

    (tmp_path / "script.py").write_text(WORKERS)
    with Running(sys.executable, "script.py", cwd=tmp_path) as running:
        wait_for(lambda: len(workers()) == 2 and step() > 0)
        for worker in workers():
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGUSR1)
        signalled = step()
        wait_for(lambda: step() > signalled + 6)  # more than the workers had prefetched
        assert {path.name for path in tmp_path.glob("init-*")} == {"init-0", "init-1"}
        wait_for(lambda: step() == 99)
        processes = [psutil.Process(worker) for worker in workers()]
        assert len(processes) == 2  # no worker was replaced
        running.process.kill()
        killed = time.monotonic()
        assert psutil.wait_procs(processes, timeout=30)[1] == []
        assert time.monotonic() - killed < 4  # torch's own watchdog checks every 5 seconds


ENDING = """
import sys, time, torch.multiprocessing
from ddp_ref.training.data import train_loader

class Items(list):
    def __getitem__(self, index):
        if sys.argv[1] == "deaf":
            sum(range(10**13))  # one call of C code, during which Python runs no signal handler
        if sys.argv[1] == "left" and index > 3:
            time.sleep(1000)
        return super().__getitem__(index)

def rank(number=0):
    global loader, batches
    options = {"num_workers": 1 if sys.argv[1] == "left" else 4, "shuffle": False}
    options["persistent_workers"] = sys.argv[1] == "persistent"
    loader = train_loader(Items([1.0] * 50), 2, rank=0, world_size=1, **options)
    if sys.argv[1] == "deaf":
        batches = iter(loader)
        time.sleep(1)
        sys.exit(143)
    if sys.argv[1] == "left":
        next(iter(loader))  # torch waits for 10 seconds, and then leaves its busy workers alone
        sys.exit(7)
    for number, batch in enumerate(loader):
        if number == 3 and sys.argv[1] == "failing":
            raise KeyError("of an item")  # its traceback keeps the iterator and its workers alive

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank) if sys.argv[2] == "spawned" else rank()
"""


@pytest.mark.parametrize("how", ["failing", "persistent", "deaf"])
@pytest.mark.parametrize("started", ["alone", "spawned"])
def test_leftover_workers_do_not_keep_their_rank_from_exiting(tmp_path, how, started):
    """Workers ignore SIGTERM, but they end when the rank exits, and its exit code is unchanged."""
    (tmp_path / "script.py").write_text(ENDING)
    ended = run(sys.executable, "script.py", how, started, cwd=tmp_path, timeout=60)
    if how == "deaf" and started == "spawned":
        assert ended.code == 1 and "terminated with exit code 143" in ended.stderr, ended.stderr
    else:
        assert ended.code == {"failing": 1, "persistent": 0, "deaf": 143}[how], ended.stderr
    assert ("KeyError" in ended.stderr) == (how == "failing")
    assert "killed by signal" not in ended.stderr


def test_a_busy_worker_of_a_lost_iterator_does_not_keep_its_rank_from_exiting(tmp_path):
    (tmp_path / "script.py").write_text(ENDING)
    assert run(sys.executable, "script.py", "left", "alone", cwd=tmp_path, timeout=60).code == 7


class Late(list):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)


def test_an_iterator_in_a_reference_cycle_ends_without_an_error(monkeypatch):
    """Its workers leave by themselves. If they were killed, torch would complain in __del__."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    loader = train_loader(Late([1.0] * 200), 2, rank=0, world_size=1, num_workers=2)
    for _ in range(3):  # now and then, torch does not notice a killed worker
        cycle = [iter(loader)]
        cycle.append(cycle)
        next(cycle[0])
        del cycle
        gc.collect()
    assert errors == []


class Draws:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(())


def test_workers_draw_different_numbers_on_each_rank_and_epoch_with_a_callers_own_sampler():
    """With epoch None, in a loop that does not tell the loader the epoch."""

    def drawn(rank, epoch, seed=0):
        sampler = DistributedSampler(range(4), 2, rank)
        loader = train_loader(
            Draws(), 2, rank=rank, world_size=2, seed=seed, sampler=sampler, num_workers=1
        )
        if epoch is not None:
            TrainBatches(loader, None, seed=seed, rank=rank, world_size=1).seek(epoch, 0)
        return tuple(torch.cat(list(loader)).tolist())

    for cases in ([(0, 0), (1, 0), (0, 1), (0, 0, 7)], [(0, None), (1, None), (0, None, 7)]):
        assert len({drawn(*case) for case in cases}) == len(cases)
        assert drawn(*cases[1]) == drawn(*cases[1])


def test_workers_may_be_started_by_another_thread():
    """PR_SET_PDEATHSIG would kill them when that thread ends, although the rank still runs."""
    options = {"num_workers": 1, "persistent_workers": True}
    loader = train_loader([1.0] * 8, 2, rank=0, world_size=1, **options)
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    thread.join()
    assert len(list(loader)) == 4

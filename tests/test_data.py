"""Each rank gets its own samples, starting anywhere in an epoch."""

import os
import signal
import sys

import psutil
import pytest
import torch
from harness import Running, run, wait_until
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from ddp_ref.data import TrainSampler, eval_loader, in_steps, train_loader

SIZES = st.integers(1, 40)
WORLDS = st.integers(1, 6)


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
        assert list(sampler) == list(theirs)
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


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return [2 * part for part in super().__getitem__(index)]


@pytest.mark.parametrize("kind", [TensorDataset, Doubled])
def test_rows_looked_up_together_equal_rows_looked_up_one_by_one(kind):
    data = kind(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    ours = train_loader(data, 3, rank=0, world_size=1, shuffle=False)
    theirs = DataLoader(data, 3)
    for batch, expected in zip(ours, theirs, strict=True):
        assert type(batch) is type(expected)
        for part, other in zip(batch, expected, strict=True):
            torch.testing.assert_close(part, other, rtol=0, atol=0)
            part.zero_()  # must not change the data set
    assert data[2][0].any()


def test_a_callers_own_sampler_is_used_if_it_is_rank_aware():
    sharded = DistributedSampler(range(6), num_replicas=2, rank=1, shuffle=False)
    batches = BatchSampler(sharded, 2, drop_last=False)
    for own in ({"batch_size": 2, "sampler": sharded}, {"batch_sampler": batches}):
        for data in (range(6), DataLoader(range(6), 4)):
            loader = train_loader(data, rank=1, world_size=2, **own)
            assert [part.tolist() for part in loader] == [[1, 3], [5]]
        with pytest.raises(ValueError, match=r"sampler must be for rank 0 of 2, .*\(1, 2\)"):
            train_loader(range(6), rank=0, world_size=2, **own)
    unsharded = RandomSampler(range(6))
    with pytest.raises(ValueError, match=r"RandomSampler is \(None, None\): use a Dist"):
        train_loader(range(6), 2, rank=0, world_size=2, sampler=unsharded)
    assert train_loader(range(6), 2, rank=0, world_size=1, sampler=unsharded).sampler is unsharded


@pytest.mark.parametrize(
    ("loader", "dataset", "options", "text"),
    [
        (eval_loader, range(3), {"sampler": range(2), "drop_last": True}, "sampler, drop_last"),
        (eval_loader, DataLoader(range(2), batch_sampler=[[0, 1]]), {}, "but a list may not"),
        (train_loader, range(3), {"in_order": False}, "in_order=False would mix up the order"),
    ],
)
def test_what_cannot_be_loaded_exactly_is_rejected(loader, dataset, options, text):
    with pytest.raises(ValueError, match=text):
        loader(dataset, 1, rank=0, world_size=1, **options)


WORKERS = """
import os, time
from pathlib import Path
from ddp_ref.data import train_loader

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, index):
        Path(f"worker-{os.getpid()}").touch()
        time.sleep(0.05 if index < 100 else 1000)  # at work when the rank dies
        return index

loader = train_loader(Slow(), 1, rank=0, world_size=1, num_workers=2, shuffle=False)
for step, batch in enumerate(loader):
    Path("step").write_text(str(step))
"""


def test_workers_leave_signals_to_their_rank_and_die_with_it(tmp_path):
    def workers():
        return [int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")]

    def step():
        return int((tmp_path / "step").read_text() or 0) if (tmp_path / "step").exists() else 0

    (tmp_path / "script.py").write_text(WORKERS)
    with Running(sys.executable, "script.py", cwd=tmp_path) as running:
        wait_until(lambda: len(workers()) == 2 and step() > 0)
        for worker in workers():
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGUSR1)
        signalled = step()
        wait_until(lambda: step() > signalled + 6)  # more than the workers had prefetched
        wait_until(lambda: step() == 99)
        processes = [psutil.Process(worker) for worker in workers()]
        assert len(processes) == 2  # no worker was replaced
        running.process.kill()
        # torch's own watchdog checks every 5 seconds
        assert psutil.wait_procs(processes, timeout=4)[1] == []


ENDING = """
import sys, time
from ddp_ref.data import train_loader

class Items(list):
    def __getitem__(self, index):
        return sum(range(10**13))  # C code, during which Python runs no signal handler

batches = iter(train_loader(Items([1.0] * 50), 2, rank=0, world_size=1, num_workers=1))
time.sleep(1)
sys.exit(143)
"""


def test_leftover_workers_do_not_keep_their_rank_from_exiting(tmp_path):
    """Workers ignore SIGTERM, but they end when the rank exits, and its exit code is unchanged."""
    (tmp_path / "script.py").write_text(ENDING)
    ended = run(sys.executable, "script.py", cwd=tmp_path, timeout=60)
    assert ended.code == 143 and "killed by signal" not in ended.stderr, ended.stderr


def test_workers_draw_other_numbers_on_each_rank_and_the_data_set_is_the_users():
    """So a `worker_init_fn` may set a generator or open a file there."""

    def init(worker):
        info = torch.utils.data.get_worker_info()
        info.dataset.generator = torch.Generator().manual_seed(info.seed)

    class Own(list):
        def __getitem__(self, index):
            return torch.rand((), generator=self.generator)

    def drawn(rank, seed=0):
        shard = {"rank": rank, "world_size": 2, "seed": seed}
        loader = train_loader(data, 2, **shard, num_workers=2, worker_init_fn=init)
        assert loader.dataset is data and loader.worker_init_fn is init
        return tuple(torch.cat(list(loader)).tolist())

    data = Own([1.0] * 8)
    cases = [(0,), (1,), (0, 7)]
    assert len({number for case in cases for number in drawn(*case)}) == 3 * 4
    assert drawn(*cases[1]) == drawn(*cases[1])


def test_a_loader_that_ends_early_or_goes_on_is_an_error():
    assert [*in_steps(iter(range(5)), 5, 2)] == [[0, 1], [2, 3], [4]]
    for size in (0, 3, 4):
        with pytest.raises(RuntimeError, match=f"ended after {size} of 5 batches, and other ranks"):
            list(in_steps(iter(range(size)), 5, 2))
    with pytest.raises(RuntimeError, match="goes on after 5 batches"):
        list(in_steps(iter(range(6)), 5, 2))


def test_a_collate_fn_also_gets_the_rows_of_a_tensor_data_set():
    data = TensorDataset(torch.arange(4))
    assert list(train_loader(data, 2, rank=0, world_size=1, collate_fn=len)) == [2, 2]


def test_an_existing_loader_keeps_its_options_and_its_sampling():
    options = {"num_workers": 1, "collate_fn": list, "drop_last": True, "worker_init_fn": print}
    options |= {"timeout": 5, "prefetch_factor": 3, "persistent_workers": True}
    loader = train_loader(DataLoader(range(6), 4, **options), rank=0, world_size=1)
    assert {name: getattr(loader, name) for name in options} == options
    samplers = [RandomSampler(range(3)), SequentialSampler(range(3))]  # of a part of the data
    samplers += [
        RandomSampler(range(6), **own) for own in ({"replacement": True}, {"num_samples": 3})
    ]
    for own in samplers:
        existing = DataLoader(range(6), 2, sampler=own)
        assert train_loader(existing, rank=0, world_size=1).sampler is own
        with pytest.raises(ValueError, match="use a DistributedSampler"):
            train_loader(existing, rank=0, world_size=2)

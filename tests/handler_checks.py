"""Checks of Handler.

test_handler.py runs them on several ranks, and also in its own process without a group.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_checks import run_checks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from training_job import Points, accuracy, flat, job, network

from ddp_ref import Callback, Checkpoint
from ddp_ref.randomness import seed_everything


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def assert_same_on_all_ranks(tensor):
    if dist.is_initialized():
        others = [torch.empty_like(tensor) for _ in range(world_size())]
        dist.all_gather(others, tensor)
        assert all(torch.equal(tensor, other) for other in others)


def gloo_calls(work):
    """Return how often each gloo operation ran during `work`, DDP's own included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        work()
        time.sleep(0.1)  # gloo's thread ends the last event after the call has returned
    return Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))


def hand_written(size, batch_size, epochs):
    """Train the job of `training_job` with a hand-written loop; return the weights."""
    model = network(dropout=0.5)
    ddp = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    data = Points(size)
    sampler = DistributedSampler(data, world_size(), rank())
    seed_everything(0, rank())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        own = torch.Generator()  # else each iterator would draw a seed from dropout's generator
        for inputs, targets in DataLoader(data, batch_size, sampler=sampler, generator=own):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
    return flat(model)


def check_weights_and_step_collectives_equal_those_of_a_hand_written_loop():
    size, weights, losses = 60 * world_size() - 1, [], []

    def ours():
        handler = job(size, 6, model=network(dropout=0.5))
        handler.train(5)
        assert handler.step == 50
        weights.append(flat(handler.model))
        losses.extend(handler.train_losses)

    plain_calls = gloo_calls(lambda: weights.append(hand_written(size, 6, 5)))
    calls = gloo_calls(ours)
    assert torch.equal(*weights)
    assert not torch.allclose(weights[0], flat(network()), atol=0.1)
    assert losses[-1] < losses[0]
    assert_same_on_all_ranks(torch.tensor(losses, dtype=torch.float64))
    if dist.is_initialized():
        # Summaries: one every 10 of the 50 steps, two at the end of each epoch, and one at the
        # start of training. Earlier, the ranks compare their devices and their data. That takes
        # two all-gathers each, because the sizes of the messages are gathered first.
        summaries = 5 + 5 * 2 + 1
        assert calls - plain_calls == {"gloo:all_gather": summaries + 4}
        assert not plain_calls - calls and plain_calls["gloo:all_reduce"] >= 50


def check_accumulated_batches_equal_one_big_batch_even_in_a_shorter_last_step():
    runs, calls = [], []
    for batch_size, accumulate in ((12, 1), (4, 3), (1, 12)):
        model = network(dtype=torch.float64)
        handler = job(
            22 * world_size(), batch_size, model=model, accumulate=accumulate, clip_norm=0.5
        )
        calls.append(gloo_calls(lambda handler=handler: handler.train(2)))
        assert handler.step == 4  # 12 and 10 samples per rank
        runs.append((flat(handler.model), handler.train_losses, handler.train_metrics))
    assert calls[0] == calls[1] == calls[2]  # gradients are reduced once per step
    big, *others = runs
    assert not torch.allclose(big[0], flat(network(dtype=torch.float64)), atol=0.01)
    for weights, losses, metrics in others:
        assert torch.allclose(weights, big[0], rtol=1e-12, atol=1e-14)
        assert losses == pytest.approx(big[1], rel=1e-12)
        assert metrics["accuracy"] == pytest.approx(big[2]["accuracy"], rel=1e-12)


class Density(nn.Module):
    """A model with BatchNorm, log_likelihood and sample."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, inputs):
        return self.norm(self.linear(inputs))

    def log_likelihood(self, inputs):
        return -self(inputs).square().sum(1)

    def sample(self, number, *, scale):
        assert not self.training and not torch.is_grad_enabled()
        return [scale] * number


class Inputs(Points):
    def __getitem__(self, index):
        return self.inputs[index]


def assert_evaluation_equals(handler, size, reference):
    data = Points(size, dtype=torch.float64)
    handler.set_val_loader(data, 2)
    with torch.no_grad():
        outputs = reference(data.inputs)
        predicted = handler.predict(Inputs(size, dtype=torch.float64), 2)
        likely = handler.log_likelihood(data, 2)
        loss = nn.functional.cross_entropy(outputs, data.targets).item()
    assert handler.validate() == pytest.approx(
        {"loss": loss, "accuracy": accuracy(outputs, data.targets).item()}, rel=1e-12
    )
    if handler.rank == 0:
        assert torch.equal(torch.cat([outputs[:0], predicted]), predicted)  # same shape and dtype
        assert torch.allclose(predicted, outputs, rtol=1e-12)
        assert torch.allclose(likely, -outputs.square().sum(1), rtol=1e-12)
    else:
        assert predicted is None and likely is None


def check_evaluation_equals_that_of_one_process_for_any_number_of_items():
    torch.manual_seed(3)
    model = Density().double()
    handler = job(12 * world_size(), 4, model=model)
    handler.train(1)  # the ranks' BatchNorm buffers differ now
    gathered = handler.predict(Points(1, dtype=torch.float64), 1)  # uses rank 0's buffers
    assert (gathered is None) == (handler.rank > 0)
    reference = Density().double()
    reference.load_state_dict(model.state_dict())
    reference.eval()
    for size in range(1, 3 * world_size() + 1):
        assert_evaluation_equals(handler, size, reference)
    empty = handler.predict([], 2)
    assert empty is None if handler.rank else empty.shape == (0,)
    assert handler.sample(3, scale=2) == (None if handler.rank else [2, 2, 2])
    assert model.training  # as before
    assert_same_on_all_ranks(model.norm.running_mean)


def check_rows_of_two_kinds_are_refused_on_all_ranks():
    class Differs(nn.Linear):
        calls = 0

        def forward(self, inputs):
            outputs = super().forward(inputs)
            self.calls += 1
            if rank() or self.calls == 1:
                return outputs
            return self.change(outputs)

    for change in (lambda rows: rows[:, :1], lambda rows: rows.double(), list):
        handler = job(4 * world_size(), 2, model=Differs(4, 2))
        handler._unwrapped.change = change
        with pytest.raises(ValueError, match="rows of one shape and dtype, or all be lists"):
            handler.predict(Points(4 * world_size()), 2)
        assert_same_on_all_ranks(torch.ones(1))  # the group is usable


def check_all_ranks_decide_alike_if_a_loss_is_not_finite_on_any_rank():
    for bad_rank in range(world_size()):
        handler = job(40 * world_size(), 4, sync_every=5)
        loss_fn = handler.loop.task.loss_fn

        def loss(outputs, targets, handler=handler, loss_fn=loss_fn, bad_rank=bad_rank):
            bad = handler.rank == bad_rank and handler.step == 6
            return loss_fn(outputs, targets) * (torch.nan if bad else 1)

        handler.loop.task.loss_fn = loss
        with pytest.raises(FloatingPointError, match=r"epoch 1 is not finite, noticed at step 10"):
            handler.train(1)


def check_a_summary_from_before_an_error_is_dropped():
    handler = job(40 * world_size(), 4, sync_every=5)
    handler.save("good.pt")
    loss_fn = handler.loop.task.loss_fn

    def fails(outputs, targets):
        if handler.step == 5:
            raise RuntimeError("of the loss")
        return loss_fn(outputs, targets) * (torch.nan if handler.step == 4 else 1)

    handler.loop.task.loss_fn = fails
    with pytest.raises(RuntimeError, match="of the loss"):
        handler.train(1)
    handler.loop.task.loss_fn = loss_fn
    handler.load("good.pt")
    handler.save("again.pt")
    handler.train(1)  # it must not read the summary with the nan, which is still pending
    assert handler.step == 10 and torch.isfinite(flat(handler.model)).all()


class Notes(Callback):
    """Record the value of `running` in each hook."""

    def __init__(self):
        self.begins, self.steps, self.ends = [], {}, []

    def on_epoch_start(self):
        self.begins.append(self.handler.running)

    def on_step_end(self):
        self.steps[self.handler.step] = self.handler.running

    def on_epoch_end(self):
        self.ends.append(self.handler.running)


def check_running_covers_only_this_epoch_also_after_a_resume():
    size, notes, folder = 72 * world_size(), Notes(), Path("running")
    keeper = Checkpoint(folder, every_steps=7, keep=9)
    handler = job(size, 6, callbacks=[notes, keeper])
    handler.train(2)
    losses = {step: means["loss"] for step, means in notes.steps.items() if means}
    assert notes.begins == [{}, {}]
    # The summary of step 10 is read after step 11, when step 11's hooks have already been called.
    assert list(notes.steps) == list(range(1, 25)) and list(losses) == [12, 22, 23, 24]
    assert losses[12] > losses[22] == losses[23] == losses[24] > 0
    assert [means["loss"] for means in notes.ends] == handler.train_losses
    assert handler.running == notes.ends[-1]
    handler.load(folder / "step_000000007.pt")
    assert handler.running == {}
    again = job(size, 6, callbacks=[notes := Notes()])
    again.load(folder / "step_000000007.pt")
    again.train(1)
    assert notes.begins[0]["loss"] > again.train_losses[0] > 0


def check_a_handler_of_one_rank_alone_makes_no_collective_call():
    def alone():
        if rank() == 0:
            handler = job(9, 3, use_distributed=False)
            handler.set_val_loader(Points(9), 3)
            handler.train(1)
            assert len(handler.predict(Points(5), 3)) == 5

    assert not gloo_calls(alone)


@contextmanager
def ended_by_a_signal():
    """Expect training to exit, then restore both signal handlers: it leaves the signals ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(SystemExit):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Signal(Callback):
    """Send the last rank SIGTERM at the end of the second epoch."""

    def on_epoch_end(self):
        if self.handler.epoch == 2 and rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class CountsEpochs(Callback):
    epochs = 0

    def on_epoch_end(self):
        self.epochs += 1


def check_all_callbacks_are_called_before_a_signal_ends_training():
    """The first hook at the end of an epoch sends the signal, and training ends after the last."""
    folder, counts = Path("signalled"), CountsEpochs()
    keeper = Checkpoint(folder, monitor="train_loss")
    handler = job(24 * world_size(), 2, callbacks=[Signal(), keeper, counts])
    with ended_by_a_signal():
        handler.train(3)
    assert counts.epochs == handler.epoch == 2
    assert handler.train_losses[1] < handler.train_losses[0]
    best = job(24 * world_size(), 2)
    best.load(folder / "best.pt")
    assert best.epoch == 2


def state_of(handler):
    state = handler.optimizer.state_dict()["state"]
    momentum = torch.cat([entry["momentum_buffer"].reshape(-1) for entry in state.values()])
    return flat(handler.model), momentum


def collate_some(samples):
    """Collate only some of the samples, so a batch is smaller than what was drawn."""
    kept = [(inputs, target) for inputs, target in samples if inputs[0] > -0.5] or samples[:1]
    return torch.stack([inputs for inputs, _ in kept]), torch.stack([t for _, t in kept])


def resumable(workers=0, **options):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "step"

    handler = job(
        22 * world_size() - 1,
        3,
        model=network(dropout=0.3),
        noise=0.5,
        workers=workers,
        accumulate=2,
        scheduler=schedule,
        sync_every=3,
        loader={"collate_fn": collate_some},
        count=lambda batch: len(batch[1]),
        **options,
    )
    handler.set_val_loader(Points(9), 2)
    return handler


class SaveEach(Callback):
    def on_step_end(self):
        self.handler.save(f"{self.handler.step}.pt")

    on_epoch_end = on_step_end


def check_a_run_resumed_at_any_step_equals_the_uninterrupted_run():
    """Bit for bit, with augmentation, dropout and accumulation.

    The first steps also have a second interruption, right after the first one.
    """
    whole = resumable(callbacks=[SaveEach()])
    whole.save("0.pt")
    whole.train(2)
    assert whole.step == 8
    for step in range(9):
        # Workers only in one process: in CPython 3.11.7, a fork just after a collective can hang
        # (cpython#112275). test_data.py checks that a rank's workers draw what the rank would.
        for workers in (0, 2) if step in (1, 4) and world_size() == 1 else (0,):
            random.seed(step), torch.manual_seed(step)
            handler = resumable(workers)
            handler.load(f"{step}.pt")
            if step < 6:
                handler.train(0)
                handler.save("again.pt")
                handler = resumable(workers)
                handler.load("again.pt")
            assert handler.step == step
            handler.train(2)
            assert handler.history == whole.history, step
            for one, other in zip(state_of(handler), state_of(whole), strict=True):
                assert torch.equal(one, other), (step, workers)
            assert handler.optimizer.param_groups[0]["lr"] == 0.1 / 4
    assert whole.train_losses[1] < whole.train_losses[0]
    assert_same_on_all_ranks(torch.tensor(whole.train_losses + whole.val_losses))


def check_a_file_on_the_disk_of_rank_0_alone_is_enough():
    saved, loaded = job(8 * world_size(), 2), job(8 * world_size(), 2)
    saved.train(1)
    folder = Path(f"disk_of_rank_{rank()}")
    saved.save(folder / "step_4.pt")
    assert folder.exists() == (rank() == 0)
    assert not torch.equal(flat(loaded.model), flat(saved.model))
    loaded.load(folder)
    assert loaded.step == 4
    assert torch.equal(flat(loaded.model), flat(saved.model))


def distributed_sampler(size):
    return {"sampler": DistributedSampler(range(size), world_size(), rank(), seed=0)}


def check_a_users_own_sampler_gets_the_epoch():
    """DistributedSampler gives the same order as our sampler, but cannot resume within an epoch."""
    size = 20 * world_size()
    ours = job(size, 4)
    ours.train(3)
    whole = job(size, 4, loader=distributed_sampler(size), callbacks=[SaveEach()])
    whole.train(3)
    assert torch.equal(flat(ours.model), flat(whole.model)) and whole.step == 15
    handler = job(size, 4, loader=distributed_sampler(size))
    handler.load("10.pt")  # the end of an epoch
    handler.train(3)
    assert torch.equal(flat(handler.model), flat(whole.model))
    handler.load("7.pt")
    assert handler.samples_seen == 2 * 4 * world_size()  # counts samples, with any sampler
    assert handler.steps_left == 5 - 2
    with pytest.warns(UserWarning, match="epoch 2 starts again, because only Handler's own"):
        handler.train(2)
    assert (handler.step, handler.epoch) == (7 + 5, 2)
    with pytest.raises(ValueError, match="cannot go on with"):
        handler = job(size, 4)
        handler.load("7.pt")
        handler.train(3)


class Normed(nn.Sequential):
    def __init__(self):
        torch.manual_seed(5)
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def check_a_skipped_step_leaves_no_trace():
    """Neither in BatchNorm's statistics nor in the schedule, whichever rank had the bad sample."""
    size = 24 * world_size()

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "step"

    for bad in range(world_size() + 1):
        handler = job(size, 6, model=Normed(), on_nonfinite="skip", scheduler=schedule)
        data = handler.train_loader.dataset.dataset
        data.inputs[bad] = torch.nan
        handler.set_val_loader(Points(9), 3)
        handler.train(1)
        assert handler.skipped == 1 and handler.step == 4
        assert handler.optimizer.param_groups[0]["lr"] == 0.1 / 2**3
        assert torch.isfinite(handler._unwrapped[1].running_mean).all()
        assert 0 < handler.train_losses[0] < 2 and 0 < handler.val_losses[0] < 2
        handler.save("finite.pt")
        assert_same_on_all_ranks(flat(handler.model))


def check_gradients_are_clipped_as_by_hand():
    handler = job(6 * world_size(), 6, clip_norm=0.05, lr=1.0)
    handler.train(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = Points(6 * world_size())
    nn.functional.cross_entropy(model(data.inputs), data.targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    assert norm > 0.1
    assert torch.allclose(flat(handler.model), flat(model), atol=1e-6)


class Branches(nn.Module):
    """A model that uses only one of its two branches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.used(inputs)


def check_unused_parameters_are_an_error_unless_ddp_looks_for_them():
    size = 4 * world_size()
    if dist.is_initialized():
        with pytest.raises(RuntimeError, match="parameters that were not used"):
            job(size, 2, model=Branches()).train(1)
    for name, value, options in (
        ("DDP_FIND_UNUSED_PARAMETERS", "true", {}),
        ("DDP_FIND_UNUSED_PARAMETERS", "0", {"ddp_options": {"find_unused_parameters": True}}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            handler = job(size, 2, model=Branches(), **options)
        before = flat(handler._unwrapped.used), flat(handler._unwrapped.unused)
        handler.train(1)
        assert not torch.equal(flat(handler._unwrapped.used), before[0])
        assert torch.equal(flat(handler._unwrapped.unused), before[1])


def check_a_frozen_model_can_predict_and_a_wrapped_one_is_refused():
    model = network().requires_grad_(False)
    handler = job(model=model)
    predicted = handler.predict(Points(5), 2)
    assert predicted is None if handler.rank else torch.allclose(predicted, model(Points(5).inputs))
    if dist.is_initialized():
        with pytest.raises(ValueError, match="already wrapped in DDP"):
            job(model=nn.Sequential(DistributedDataParallel(network())))


class Buckets:
    """A batch sampler whose number of batches depends on the epoch, and from the second on rank."""

    def __init__(self, with_length=True):
        self.rank, self.num_replicas = rank(), world_size()
        self.epoch, self.with_length = 0, with_length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        if not self.with_length:
            raise TypeError
        return 2 + self.epoch * (1 + self.rank)

    def __iter__(self):
        return iter([[0, 1]] * (2 + self.epoch * (1 + self.rank)))


def check_a_batch_sampler_must_give_all_ranks_equally_many_batches():
    handler = job(4, 1, loader={"batch_sampler": Buckets()})
    handler.train(1)
    unsized = Buckets(with_length=False)
    if world_size() > 1:
        with pytest.raises(ValueError, match=r"batches \(all ranks: 3 or 4"):
            handler.train(2)
        with pytest.raises(ValueError, match=r"steps_per_epoch \(all ranks: 3 or 4\)"):
            handler.set_train_loader(
                Points(4), batch_sampler=unsized, steps_per_epoch=3 + (rank() > 0)
            )
    handler.set_train_loader(Points(4), batch_sampler=unsized, steps_per_epoch=3)
    handler.train(3)
    assert handler.step == 2 + 2 * 3


class GrowsABuffer(nn.Module):
    """Cache something for the longest input so far, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.longest = 0
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.longest < len(x):
            self.longest = len(x)
            self.register_buffer("cache", torch.ones(len(x)), persistent=False)
        return self.layer(x) * self.cache[: len(x), None]


def check_a_run_resumes_if_a_forward_pass_replaces_a_buffer():
    job(6 * world_size(), 3, model=GrowsABuffer(), callbacks=[SaveEach()]).train(1)
    resumed = job(6 * world_size(), 3, model=GrowsABuffer())
    resumed.load("1.pt")
    resumed.train(1)
    assert resumed.step == 2


if __name__ == "__main__":
    run_checks(globals())

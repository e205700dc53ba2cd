"""Checks of Handler.

test_handler.py runs them on several ranks, and also in its own process without a group.
"""

import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_checks import run_checks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from training_job import Points, accuracy, flat, job, network

from ddp_ref import Callback, Handler, reduce_sum, train_loader, wrap_model
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


def hand_written(model, loader):
    """Train for 5 epochs with a hand-written loop; return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seed_everything(0, rank())
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return flat(model)


def check_weights_and_step_collectives_equal_those_of_a_hand_written_loop():
    """The loop is plain PyTorch's, or made of wrap_model and train_loader."""
    data, weights, losses = Points(60 * world_size() - 1), [], []

    def plain():
        model = network(dropout=0.5)
        ddp = DistributedDataParallel(model) if dist.is_initialized() else model
        sampler = DistributedSampler(data, world_size(), rank())
        own = torch.Generator()  # else each iterator would draw a seed from dropout's generator
        weights.append(hand_written(ddp, DataLoader(data, 6, sampler=sampler, generator=own)))

    def ours():
        handler = job(len(data), 6, model=network(dropout=0.5), clip_norm=0.05)
        handler.train(5)
        assert handler.step == 50
        weights.append(flat(handler.model))
        losses.extend(handler.train_losses)

    plain_calls, calls = gloo_calls(plain), gloo_calls(ours)
    model = wrap_model(network(dropout=0.5), torch.device("cpu"))
    weights.append(hand_written(model, train_loader(data, 6)))
    assert torch.equal(*weights[:2]) and torch.equal(*weights[1:])
    assert not torch.allclose(weights[0], flat(network()), atol=0.1)
    assert losses[-1] < losses[0]
    assert_same_on_all_ranks(torch.tensor(losses, dtype=torch.float64))
    if dist.is_initialized():
        # Exchanges: one every 10 of the 50 steps, two at the end of each epoch and one at the start
        # of training. At an epoch's end, the ranks also compare the norms of their parameters.
        # Earlier, they compare their devices and their settings. That takes two all-gathers each,
        # because the sizes of the messages are gathered first.
        exchanges = 5 + 5 * 2 + 1 + 5
        assert calls - plain_calls == {"gloo:all_gather": 4, "gloo:all_reduce": exchanges}
        assert not plain_calls - calls and plain_calls["gloo:all_reduce"] >= 50


def check_accumulated_batches_equal_one_big_batch_even_in_a_shorter_last_step():
    runs, calls = [], []
    for batch_size, accumulate in ((12, 1), (4, 3)):
        model = network(dtype=torch.float64)
        handler = job(
            22 * world_size(), batch_size, model=model, accumulate=accumulate, clip_norm=0.5
        )
        calls.append(gloo_calls(lambda handler=handler: handler.train(2)))
        assert handler.step == 4  # 12 and 10 samples per rank
        runs.append((flat(handler.model), handler.train_losses, handler.train_metrics))
    assert calls[0] == calls[1]  # gradients are reduced once per step
    big, (weights, losses, metrics) = runs
    assert not torch.allclose(big[0], flat(network(dtype=torch.float64)), atol=0.01)
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
        data = Points(size, dtype=torch.float64)
        handler.set_val_loader(data, 2)
        with torch.no_grad():
            outputs = reference(data.inputs)
            predicted = handler.predict(list(data.inputs), 2)
            likely = handler.log_likelihood(data, 2)
            loss = nn.functional.cross_entropy(outputs, data.targets).item()
        expected = {"loss": loss, "accuracy": accuracy(outputs, data.targets).item()}
        assert handler.validate() == pytest.approx(expected, rel=1e-12)
        if handler.rank == 0:
            assert predicted.shape == outputs.shape and predicted.dtype == outputs.dtype
            assert torch.allclose(predicted, outputs, rtol=1e-12)
            assert torch.allclose(likely, -outputs.square().sum(1), rtol=1e-12)
        else:
            assert predicted is None and likely is None
    empty = handler.predict([], 2)
    assert empty is None if handler.rank else empty.shape == (0,)
    assert handler.sample(3, scale=2) == (None if handler.rank else [2, 2, 2])
    assert model.training  # as before
    assert_same_on_all_ranks(model.norm.running_mean)


def check_ranks_with_different_numbers_of_validation_batches_meet_equally_often():
    handler = job(4 * world_size(), 2, sync_every=1)
    handler.set_val_loader(Points(2 * world_size() + 1), 1)  # rank 0 has a batch more
    handler.train(1)
    assert handler.val_losses == [pytest.approx(handler.validate()["loss"], rel=1e-12)]


def check_all_ranks_decide_alike_if_a_loss_is_not_finite_on_any_rank():
    for bad_rank in range(world_size()):
        handler = job(40 * world_size(), 4, sync_every=5)
        loss_fn = handler.loss_fn

        def loss(outputs, targets, handler=handler, loss_fn=loss_fn, bad_rank=bad_rank):
            bad = handler.rank == bad_rank and handler.step == 6
            return loss_fn(outputs, targets) * (torch.nan if bad else 1)

        handler.loss_fn = loss
        with pytest.raises(FloatingPointError, match=r"epoch 1 is not finite, noticed at step 10"):
            handler.train(1)


def saved(name):
    """Return a path that differs between ranks, as if each rank had its own disk."""
    return Path(f"disk_of_rank_{rank()}", f"{name}.pt")


class SaveEach(Callback):
    def on_step_end(self):
        self.handler.save(saved(self.handler.step))

    def on_epoch_end(self):
        self.handler.save(saved(f"epoch_{self.handler.epoch}"))


def check_a_handler_of_one_rank_alone_makes_no_collective_call():
    def alone():
        if rank() == 0:
            handler = job(9, 3, use_distributed=False)
            handler.set_val_loader(Points(9), 3)
            handler.train(1)
            assert len(handler.predict(Points(5), 3)) == 5

    assert not gloo_calls(alone)


def state_of(handler):
    group = handler.optimizer.param_groups[0]
    states = [handler.optimizer.state[weight]["momentum_buffer"] for weight in group["params"]]
    return flat(handler.model), *states, torch.tensor(float(group["lr"]))


def collate_some(samples):
    """Collate only some of the samples, so a batch is smaller than what was drawn."""
    kept = [(inputs, target) for inputs, target in samples if inputs[0] > -0.5] or samples[:1]
    return torch.stack([inputs for inputs, _ in kept]), torch.stack([t for _, t in kept])


class F1:
    """An F1 score like torchmetrics': computed from counts over all samples, not as a mean."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts = torch.zeros(2, dtype=torch.float64)

    def update(self, outputs, targets):
        assert not outputs.requires_grad
        predicted = outputs.argmax(1)
        self.counts += torch.stack([2 * (predicted & targets).sum(), (predicted + targets).sum()])

    def compute(self):
        shared = dist.is_initialized()
        right, positives = reduce_sum({"n": self.counts})["n"] if shared else self.counts
        return right / positives


class Smoothed(nn.Module):
    """A loss with a state, a running mean of the losses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean.clone()


def resumable(workers=0, **options):
    torch.set_num_threads(1)
    model = network(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 3))
    handler = Handler(
        model,
        optimizer,
        Smoothed(),
        count=lambda batch: len(batch[1]),
        metrics={"accuracy": accuracy, "f1": F1()},
        scheduler=(rates, "step"),
        accumulate=2,
        sync_every=3,
        device="cpu",
        **options,
    )
    data = Points(22 * world_size() - 1, noise=0.5)
    handler.set_train_loader(data, 3, num_workers=workers, collate_fn=collate_some)
    handler.set_val_loader(Points(9, noise=0.5), 2, num_workers=workers)
    return handler


def assert_resumed(one, other):
    """Compare a resumed run's numbers with the uninterrupted run's.

    From three ranks on, they are equal up to rounding: a new DDP's first buckets are other ones,
    and they decide in which order ranks are summed.
    """
    torch.testing.assert_close(one, other, rtol=0, atol=0 if world_size() < 3 else 1e-6)


def assert_resumes(files, **options):
    """Compare with a run that was interrupted twice at each of `files`, a name and its step."""
    whole = resumable(callbacks=[SaveEach()], **options)
    whole.save(saved(0))
    whole.train(2)
    if world_size() > 2:  # a few are enough for what is equal up to rounding
        files = {name: step for name, step in files.items() if name in (0, 3, "epoch_1")}
    for name, step in files.items():
        random.seed(step), torch.manual_seed(step)
        handler = resumable(**options)
        handler.load(saved(name))
        handler.train(0)
        handler.save(saved("again"))
        handler = resumable(**options)
        handler.load(saved("again"))
        assert handler.step == step
        handler.train(2)
        assert_resumed(handler.history, whole.history)
        assert_resumed(state_of(handler), state_of(whole))
    assert saved(0).exists() == (rank() == 0)
    assert_same_on_all_ranks(torch.tensor(whole.train_losses + whole.val_losses))


def check_a_run_resumed_at_any_step_equals_the_uninterrupted_run():
    """Bit for bit on one rank and on two, with augmentation, dropout and accumulation."""
    assert_resumes({step: step for step in range(9)} | {"epoch_1": 4, "epoch_2": 8})


def check_a_run_with_workers_resumes_exactly_at_an_epochs_end():
    """Of training and validation, whose data draw random numbers."""
    # Only in one process: in CPython 3.11.7, a fork just after a collective can hang
    # (cpython#112275).
    if world_size() == 1:
        assert_resumes({"epoch_1": 4}, workers=2)


def check_a_users_own_sampler_gets_the_epoch():
    """DistributedSampler gives the same order as our sampler, but cannot resume within an epoch."""
    size = 20 * world_size()
    ours = job(size, 4)
    ours.train(3)
    sampler = {"sampler": DistributedSampler(range(size), world_size(), rank(), seed=0)}
    whole = job(size, 4, loader=sampler, callbacks=[SaveEach()])
    whole.train(3)
    assert torch.equal(flat(ours.model), flat(whole.model)) and whole.step == 15
    handler = job(size, 4, loader=sampler)
    handler.load(saved(7))
    assert handler.samples_seen == 2 * 4 * world_size()  # counts samples, with any sampler
    assert handler.steps_left == 5 - 2
    with pytest.warns(UserWarning, match="epoch 2 starts again, because only Handler's own"):
        handler.train(2)
    assert (handler.step, handler.epoch) == (7 + 5, 2)


def check_a_skipped_step_changes_neither_weights_nor_schedule_nor_the_loss():
    """Whichever rank had the bad sample."""
    size = 24 * world_size()

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "step"

    for bad in range(world_size() + 1):
        handler = job(size, 6, on_nonfinite="skip", scheduler=schedule)
        handler.train_loader.dataset.inputs[bad] = torch.nan
        handler.set_val_loader(Points(9), 3)
        handler.train(1)
        assert handler.skipped == 1 and handler.step == 4
        assert handler.optimizer.param_groups[0]["lr"] == 0.1 / 2**3
        assert 0 < handler.train_losses[0] < 2 and 0 < handler.val_losses[0] < 2
        handler.save("finite.pt")
        assert_same_on_all_ranks(flat(handler.model))


def check_unused_parameters_are_an_error_unless_ddp_looks_for_them():
    def train(value, **ddp_options):
        model = network()
        model.unused = nn.Parameter(torch.ones(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DDP_FIND_UNUSED_PARAMETERS", value)
            job(4 * world_size(), 2, model=model, ddp_options=ddp_options).train(1)

    if dist.is_initialized():
        with pytest.raises(RuntimeError, match="parameters that were not used"):
            train("0")
    train("true")
    train("0", find_unused_parameters=True)


class Buckets(list):
    """A batch sampler whose number of batches depends on the epoch, and from the second on rank."""

    rank, num_replicas = property(lambda self: rank()), property(lambda self: world_size())

    def set_epoch(self, epoch):
        self[:] = [[0, 1]] * (2 + epoch * (1 + rank()))


def check_a_batch_sampler_must_give_all_ranks_equally_many_batches():
    handler = job(4, 1, loader={"batch_sampler": Buckets([[0, 1]] * 2)})
    handler.train(1)
    assert handler.step == 2
    if world_size() > 1:
        text = "the same number of batches, but found 3 on rank 0; 4 on rank 1"
        with pytest.raises(ValueError, match=text):
            handler.train(2)


if __name__ == "__main__":
    run_checks(globals())

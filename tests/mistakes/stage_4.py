"""Typical wrong answers to stage 4 of myddp.py, and words of the hint that each gets."""

import torch
import torch.distributed as dist


class Right:
    def __init__(self, model, cap):
        self.buckets = self.pack([*model.parameters()], cap)
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, n=number: self.ready(n))
        self.reset()

    def pack(self, parameters, cap):
        buckets, size = [[]], 0
        for parameter in reversed(parameters):
            if self.is_full(size, parameter.nbytes, cap):
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
        return buckets

    def is_full(self, size, _following, cap):
        return size >= cap

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.started = []

    def ready(self, number):
        self.missing[number] -= 1
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self.start(self.buckets[len(self.started)])

    def start(self, bucket):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, flat, work in self.started:
            work.wait()
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        self.reset()


class BindsLate(Right):
    def __init__(self, model, cap):
        self.buckets = self.pack([*model.parameters()], cap)
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _: self.ready(number))  # noqa: B023
        self.reset()


class FirstLayersFirst(Right):
    def pack(self, parameters, cap):
        return super().pack(parameters[::-1], cap)


class NeverAboveTheCap(Right):
    def is_full(self, size, following, cap):
        return size > 0 and size + following > cap


class ForgetsTheLast(Right):
    def pack(self, parameters, cap):
        return [b for b in super().pack(parameters, cap) if sum(p.nbytes for p in b) >= cap]


class SendsAtTheEnd(Right):
    def ready(self, number):
        self.missing[number] -= 1

    def finish(self):
        for bucket in self.buckets:
            self.start(bucket)
        super().finish()


class WaitsInTheHook(Right):
    def start(self, bucket):
        super().start(bucket)
        self.started[-1][-1].wait()


class SendsWhatIsComplete(Right):
    def ready(self, number):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.start(self.buckets[number])


class StartsOneAtMost(Right):
    def ready(self, number):
        self.missing[number] -= 1
        if len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self.start(self.buckets[len(self.started)])


class PacksWhatIsReady(Right):
    """In the order of the hooks."""

    def __init__(self, model, cap):
        self.came = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.came.append)
        super().__init__(model, cap)

    def start(self, bucket):
        numbers = {id(parameter): number for number, parameter in enumerate(self.came)}
        super().start(sorted(bucket, key=lambda parameter: numbers[id(parameter)]))

    def reset(self):
        self.came.clear()
        super().reset()


class WaitsForAll(Right):
    def finish(self):
        super().finish()
        dist.barrier()


MISTAKES = {
    "Buckets": [
        (BindsLate, "Does each hook know the number of its own bucket"),
        (FirstLayersFirst, "Yours begin with the first layers"),
        (NeverAboveTheCap, "never exceed the cap"),
        (ForgetsTheLast, "Your last bucket is not full"),
        (SendsAtTheEnd, "A bucket that waits for later gradients"),
        (WaitsInTheHook, "a hook waits for an all-reduce"),
        (SendsWhatIsComplete, "the ranks add gradients of different parameters"),
        (PacksWhatIsReady, "pack them in the bucket's order"),
        (WaitsForAll, "192, 0) bytes"),
        (StartsOneAtMost, "how many others may have been waiting"),
    ],
}

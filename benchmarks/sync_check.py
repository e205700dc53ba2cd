"""Train ten steps in which an operation that waits for the GPU is an error.

    torchrun --standalone --nproc-per-node=2 benchmarks/sync_check.py

`Handler` waits for the GPU once per summary, on an event, which torch does not count as a wait.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_ref import Callback, Handler, cleanup_ddp, initialize_ddp

QUIET_FROM, STEPS = 15, 10  # after the first steps, in which DDP times itself


class NoWaits(Callback):
    """Make each operation that waits for the GPU an error, for some steps."""

    def on_step_end(self) -> None:
        quiet = QUIET_FROM <= self.handler.step < QUIET_FROM + STEPS
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")


def main() -> None:
    info = initialize_ddp(use_distributed=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    handler = Handler(
        model,
        optimizer,
        nn.functional.cross_entropy,
        metrics={
            "accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()
        },
        callbacks=[NoWaits()],
        clip_norm=1.0,
        precision="bf16",
        device="cuda",
    )
    inputs = torch.randn(32 * 40 * info.world_size, 16)
    handler.set_train_loader(TensorDataset(inputs, inputs[:, :4].argmax(1)), 32)
    handler.train(1)
    if info.rank == 0:
        print(f"{STEPS} steps on {info.world_size} x {info.device.type} did not wait for the GPU")
    cleanup_ddp()


if __name__ == "__main__":
    main()

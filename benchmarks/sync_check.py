"""Check that no operation waits for the GPU in ten training steps: each one raises an error.

    torchrun --standalone --nproc-per-node=2 benchmarks/sync_check.py

`Handler` does wait once per summary, on a CUDA event, which PyTorch's check does not report.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_ref import Callback, Handler, cleanup_ddp, initialize_ddp

FIRST, STEPS = 15, 10  # after the first steps, in which DDP times itself


class ForbidWaits(Callback):
    """Turn operations that wait for the GPU into errors, for some steps."""

    def on_step_end(self) -> None:
        checked = FIRST <= self.handler.step < FIRST + STEPS
        torch.cuda.set_sync_debug_mode("error" if checked else "default")


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
        callbacks=[ForbidWaits()],
        clip_norm=1.0,
        precision="bf16",
        device="cuda",
    )
    inputs = torch.randn(32 * 40 * info.world_size, 16)
    handler.set_train_loader(TensorDataset(inputs, inputs[:, :4].argmax(1)), 32)
    handler.train(1)
    if info.rank == 0:
        where = f"{info.world_size} x {info.device.type}"
        print(f"PyTorch's check found no hidden wait for the GPU in {STEPS} steps on {where}")
    cleanup_ddp()


if __name__ == "__main__":
    main()

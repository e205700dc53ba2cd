"""Run a script on one rank of torchrun, check it with sanity.py, and write down what it did.

python small_gpt_runner.py FOLDER SCRIPT [the script's flags]

Each rank works in a subfolder of its own, which then holds the files that it has saved.
If FOLDER holds an order.json, the script is the original, in one process, which draws the samples
of each epoch in that order, and nothing is checked.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, Sampler

from scripts.sanity import (
    check_epochs_differ,
    check_gradients_reduced,
    check_replicas_equal,
    check_samples_drawn_once,
)

LIMIT = 40  # seconds; after that, a rank that hangs writes its stack and ends
rates: list[float] = []  # the learning rate of each step
norms: list[float] = []  # what clip_grad_norm_ returned
reduced = [0]  # for each step and the next one, how many microbatches are all-reduced
epochs: list[list[int]] = []  # the samples that this rank draws in each epoch
order: list[list[int]] = []  # those of the original
models: set["weakref.ref[nn.Module]"] = set()  # a DDP model must not outlive its group
draw, build, clip = BatchSampler.__iter__, DataLoader.__init__, nn.utils.clip_grad_norm_


def before_forward(module: nn.Module, _: Any) -> None:
    if isinstance(module, DDP) and torch.is_grad_enabled():
        models.add(weakref.ref(module))
        reduced[-1] += module.require_backward_grad_sync


def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    rates.append(optimizer.param_groups[0]["lr"])
    if order:
        return
    assert dist.is_initialized(), "your script never calls init_process_group"
    model = next((model for ref in models if (model := ref())), None)
    assert model, "your script never calls a DDP model: wrap the model, and call the wrapped one"
    check_replicas_equal(model)
    check_gradients_reduced(model)
    reduced.append(0)


class Replay(Sampler[int]):
    """Draw the samples of `order`."""

    def __len__(self) -> int:
        return len(order[0])

    def __iter__(self) -> Iterator[int]:
        epochs.append(order[len(epochs)])
        return iter(epochs[-1])


def draw_and_check(self: BatchSampler) -> Iterator[list[int]]:
    drawn: list[int] = []
    for batch in draw(self):
        drawn += batch
        yield batch
    if torch.is_grad_enabled():  # so not in a validation
        named = [getattr(self.sampler, name, None) for name in ("dataset", "data_source")]
        data = next((data for data in named if data is not None), None)
        assert data is not None, "draw the samples with a DistributedSampler"
        check_samples_drawn_once(drawn, len(data))
        if epochs:
            check_epochs_differ(epochs[-1], drawn)
        epochs.append(drawn)


def build_without_workers(self: Any, *args: Any, **options: Any) -> None:
    for name in ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context"):
        options.pop(name, None)  # starting workers takes longer than these few steps
    if order:
        options = {"sampler": Replay()}
    build(self, *args, **options)


def clip_and_note(*args: Any, **options: Any) -> torch.Tensor:
    norm = clip(*args, **options)
    norms.append(norm.item())
    return norm


def main(folder: Path, script: str) -> None:
    seen: dict[str, Any] = {"error": "", "place": ""}
    own = folder / os.environ.get("RANK", "0")
    own.mkdir()
    if (given := folder / "order.json").exists():
        order.extend(json.loads(given.read_text()))
    os.chdir(own)
    stack = Path("stack").open("w")  # noqa: SIM115 - open until this process ends
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=stack)
    faulthandler.register(signal.SIGTERM, file=stack, chain=True)  # when another rank has ended
    torch.set_num_threads(1)
    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)
    if not order:
        BatchSampler.__iter__ = draw_and_check  # type: ignore[method-assign]
    DataLoader.__init__ = build_without_workers  # type: ignore[method-assign]
    nn.utils.clip_grad_norm_ = clip_and_note
    dist.destroy_process_group = lambda *_: None  # os._exit does it, so no order can hang
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = sys.argv[2:]
    with redirect_stdout(StringIO()) as printed:
        try:
            runpy.run_path(script, run_name="__main__")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the reader's code may raise any
            seen["error"] = (str(error).splitlines() or ["no message"])[0]
            lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == script]
            if not isinstance(error, AssertionError):  # the checks name the cause themselves
                seen["error"] = f"{type(error).__name__}: {seen['error']}"
                seen["place"] = f"line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
    seen |= {"printed": printed.getvalue(), "ended": time.time(), "drawn": epochs}
    seen |= {"rates": rates, "norms": norms, "reduced": reduced[:-1]}
    Path("seen.json").write_text(json.dumps(seen))
    os._exit(bool(seen["error"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

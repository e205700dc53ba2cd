"""Run a script on one rank of torchrun, check it with sanity.py, and write down what it did.

python small_gpt_runner.py FOLDER SCRIPT [the script's flags]

Each rank works in a subfolder of its own, which then holds the files that it has saved.
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
from torch.utils.data import BatchSampler, DataLoader

from scripts.sanity import (
    check_epochs_differ,
    check_gradients_reduced,
    check_replicas_equal,
    check_samples_drawn_once,
)

LIMIT = 40  # seconds; after that, a rank that hangs writes its stack and ends
rates: list[float] = []  # the learning rate of each step
reduced = [0]  # for each step and the next one, how many microbatches are all-reduced
epochs: list[list[int]] = []  # the samples that this rank draws in each epoch
models: set["weakref.ref[nn.Module]"] = set()  # a DDP model must not outlive its group
draw, build = BatchSampler.__iter__, DataLoader.__init__


def before_forward(module: nn.Module, _: Any) -> None:
    if isinstance(module, DDP) and torch.is_grad_enabled():
        models.add(weakref.ref(module))
        reduced[-1] += module.require_backward_grad_sync


def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert dist.is_initialized(), "your script never calls init_process_group"
    model = next((model for ref in models if (model := ref())), None)
    assert model, "your script never calls a DDP model: wrap the model, and call the wrapped one"
    check_replicas_equal(model)
    check_gradients_reduced(model)
    rates.append(optimizer.param_groups[0]["lr"])
    reduced.append(0)


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
    build(self, *args, **options)


def main(folder: Path, script: str) -> None:
    seen: dict[str, Any] = {"error": "", "place": ""}
    own = folder / os.environ["RANK"]
    own.mkdir()
    os.chdir(own)
    stack = Path("stack").open("w")  # noqa: SIM115 - open until this process ends
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=stack)
    faulthandler.register(signal.SIGTERM, file=stack, chain=True)  # when another rank has ended
    torch.set_num_threads(1)
    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_pre_hook(before_step)
    BatchSampler.__iter__ = draw_and_check  # type: ignore[method-assign]
    DataLoader.__init__ = build_without_workers  # type: ignore[method-assign]
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
    seen |= {"printed": printed.getvalue(), "ended": time.time(), "epochs": len(epochs)}
    seen |= {"rates": rates, "reduced": reduced[:-1]}
    Path("seen.json").write_text(json.dumps(seen))
    os._exit(bool(seen["error"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

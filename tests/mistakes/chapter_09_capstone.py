"""Wrong conversions of the small GPT, each an edit of the solution, with words of its hint."""

from pathlib import Path
from tempfile import TemporaryDirectory

from harness import ROOT

SOLUTION = (ROOT / "notebooks/exercises/small_gpt_ddp.py").read_text()
FOLDER = TemporaryDirectory()  # removed at exit
ALONE = "if rank == 0:\n        "


def edited(name, old, new):
    """Write the solution with `new` in place of `old`; return a `my_script` that returns the path.

    It is a closure, so it gets to its rank whole: the rank does not import this module.
    """
    assert SOLUTION.count(old) == 1, f"{old!r} must stand in the solution once"
    file = Path(FOLDER.name) / f"{name}.py"
    file.write_text(SOLUTION.replace(old, new))
    path = str(file)

    def my_script():
        return path

    return my_script


no_sampler = edited("no_sampler", "sampler=sampler", "shuffle=True")
no_set_epoch = edited("no_set_epoch", "        sampler.set_epoch(epoch)\n", "")
schedule_of_one = edited("schedule_of_one", "ACCUMULATE * world_size\n", "ACCUMULATE\n")
module_keys = edited("module_keys", "model.module.state_dict", "model.state_dict")
prints_everywhere = edited("prints_everywhere", f'{ALONE}    print(f"epoch', 'print(f"epoch')
own_loss = edited("own_loss", "        dist.all_reduce(val_loss)\n", "")
backward_alone = edited(
    "backward_alone",
    """model.no_sync():
                loss = loss_of(model, inputs, targets)
                (loss""",
    """model.no_sync():
                pass
            loss = loss_of(model, inputs, targets)
            with nullcontext() if last else model.no_sync():
                (loss""",
)
no_clipping = edited("no_clipping", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass")
no_losses = edited("no_losses", "validation loss {val_loss:.4f}", "")
divided_twice = edited("divided_twice", "(loss / ACCUMULATE)", "(loss / ACCUMULATE / world_size)")

MISTAKES = {
    "my_script": [
        (no_sampler, "use a DistributedSampler"),
        (no_set_epoch, "call sampler.set_epoch(epoch)"),
        (schedule_of_one, "does the schedule count the steps of one process?"),
        (module_keys, "the file has keys such as 'module."),
        (prints_everywhere, "rank 1 prints 'epoch 0"),
        (own_loss, "rank 0 prints validation loss"),
        (backward_alone, "DDP reduces 2 microbatches per step"),
        (divided_twice, "look for a wrong factor, such as in the loss"),
        (no_clipping, "look for something that is missing, such as the clipping"),
        (no_losses, "does not print a train loss and a validation loss"),
    ]
}

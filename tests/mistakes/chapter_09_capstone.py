"""Wrong conversions of the small GPT, each an edit of the solution, with words of its hint."""

from pathlib import Path
from tempfile import TemporaryDirectory

from harness import ROOT

SOLUTION = (ROOT / "notebooks/exercises/small_gpt_ddp.py").read_text()
FOLDER = TemporaryDirectory()  # removed at exit


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
own_loss = edited("own_loss", "        dist.all_reduce(val_loss)\n", "")
divided_twice = edited("divided_twice", "(loss / ACCUMULATE)", "(loss / ACCUMULATE / world_size)")

MISTAKES = {
    "my_script": [
        (no_sampler, "use a DistributedSampler"),
        (no_set_epoch, "call sampler.set_epoch(epoch)"),
        (own_loss, "rank 0 prints validation loss"),
        (divided_twice, "look for a wrong factor, such as in the loss"),
    ]
}

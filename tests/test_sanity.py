"""scripts/sanity.py: each check is silent in a healthy run and catches its mistake on all ranks."""

import functools
import math
import subprocess
import sys
from datetime import timedelta

import pytest
from harness import SCRIPTS

from ddp_ref import run_ranks

sys.path.append(str(SCRIPTS))  # also for the ranks, which get this process's path
import sanity
from sanity_cases import CASES, verdicts

LIMIT = timedelta(minutes=2)
HEALTHY = {"", "a tensor", "names", "dropped, as told", "NaN on all", "sparse"}
# The smallest number of ranks on which each mistake can be made, and a part of its error message.
MISTAKES = {
    "check_samples_drawn_once": {
        "no sampler": (2, "draws of 13 samples, sample 0"),
        "seeded by rank": (2, "use a DistributedSampler, with the same seed"),
        "lost": (1, "samples were not drawn, such as"),
    },
    "check_stream_read_once": {
        "each rank reads all": (2, "13 of 13 items were read more than once, item 0"),
        "workers repeat": (1, "13 of 13 items were read more than once, item 0 was read 2 times"),
        "lost": (1, "12 of 13 items were read: shard by rank and by worker"),
    },
    "check_epochs_differ": {
        "no set_epoch": (1, "both epochs begin with ["),
        "on rank 0 only": (1, "call sampler.set_epoch(epoch) on every rank"),
    },
    "check_augmentation_differs": {
        "ranks alike": (2, "only 50 of"),
        "workers alike": (1, "random draws are different: seed a generator"),
    },
    "check_same_split": {
        "seeded by rank": (2, "test items are in the training set of a rank"),
        "one item less": (2, "the ranks hold different splits of 30 items"),
        "overlap": (1, "1 of 10 test items are in the training set"),
    },
    "check_whole_batch_gradient": {
        "a sum": (2, "rank 0's gradient has norm"),
        "a mean of unequal counts": (2, "local sum x world size / count of all ranks"),
        "divided by 5": (1, "the whole batch's"),
        "not a number": (1, "rank 0's gradient has norm nan"),
    },
    "check_replicas_equal": {
        "last bit": (2, "1 of 4 parameters differ between rank 0 and rank 1, such as module.2.w"),
        "two weights swapped": (2, "1 of 4 parameters differ between rank 0 and rank 1"),
        "other layers": (2, "ranks have [1, 2] parameters"),
    },
    "check_metric_is_global": {
        "this rank's": (2, "the ranks report"),
        "mean of means": (1, "but sum / count is 50"),
        "padding": (2, "samples, not 13: shard without padding"),
        "nothing": (1, "but sum / count is nan"),
    },
    "check_gradients_reduced": {
        "through module": (2, "4 of 4 gradients differ between rank 0 and rank 1"),
        "no_sync": (2, "outside no_sync"),
        "rank 0 alone": (2, "ranks have [0, 4] gradients"),
        "before backward": (1, "no rank has a gradient"),
    },
}
# If there is a GPU for each rank, the ranks use nccl, else gloo.
LAUNCHES = [1, 2, pytest.param(3, marks=pytest.mark.full)]


@functools.cache
def answers(world):
    """Return what each check said on each rank. Cached, because starting ranks takes seconds."""
    by_rank = run_ranks(verdicts, nproc=world, timeout=LIMIT)
    runs = list(zip(*by_rank, strict=True))
    assert len(runs) == (2 if world == 1 else 1)  # one process: with and without a group
    return runs


@pytest.mark.gpu
@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("world", LAUNCHES)
def test_on_ranks(world, name):
    for run in answers(world):
        first, *others = [rank[name] for rank in run]
        assert all(other == first for other in others)  # all ranks raise, with the same line
        assert MISTAKES[name].keys() == first.keys() - HEALTHY
        for case, answer in first.items():
            fewest, line = MISTAKES[name].get(case, (math.inf, ""))
            assert (answer is not None) == (world >= fewest), f"{case}: {answer}"
            assert answer is None or (line in answer and "\n" not in answer), answer


def test_there_are_nine_checks_and_each_has_cases():
    names = [name for name in vars(sanity) if name.startswith("check_")]
    assert names == [check.__name__ for check in CASES] == [*MISTAKES] and len(names) == 9
    assert all("very rank" in getattr(sanity, name).__doc__ for name in names)


def test_the_file_works_on_its_own(tmp_path):
    """Copied into an empty folder, it needs nothing of this repository."""
    (tmp_path / "sanity.py").write_text((SCRIPTS / "sanity.py").read_text())
    code = "import sanity, sys; sanity.check_epochs_differ([0, 1], [1, 0]);"
    code += "sys.exit(bool({'ddp_ref', 'datautils'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)

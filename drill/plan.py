"""Draw what a round does: which launcher, which fault, on which rank, and when."""

import random
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import count

Pairs = Set[tuple[str, str]]  # of a launcher and a fault
LAUNCHERS = ("spawn", "torchrun", "srun")
FAULTS = (  # docs/fault-drill.md explains each of them
    "kill",
    "stop",
    "pause",
    "interrupt",
    "terminate",
    "exception",
    "full disk",
    "truncate",
    "flip",
)
DAMAGES = ("truncate", "flip")  # of the newest checkpoint, after a kill
TO_ALL = ("interrupt", "terminate")  # signals that may also go to the whole job
# These can happen at any time. The others need a rank that waits for them.
AT_ANY_TIME = ("kill", "pause", "truncate", "flip", *TO_ALL)
EPOCHS, STEPS = 6, 23  # of the whole training, and per epoch
DELAY = 0.2  # seconds at most: an epoch takes about as long
KEEP = 3  # checkpoints, the default of Checkpoint
IN_TRAINING = ("step", "validation", "epoch's end", "save")
PLACES = ("start-up", "load", *IN_TRAINING)
# A rank that is stopped here looks like a slow one, so the others wait for it in on_rank.
ON_RANK_WAITS = ("load", "save")


@dataclass(frozen=True)
class Plan:
    """One round: the fault comes `delay` seconds after `rank` has reached a place."""

    number: int
    launcher: str
    restarts: int  # torchrun's --max-restarts
    fault: str
    rank: int
    to_all: bool  # the fault hits all ranks, at the time when `rank` reaches the place
    place: str
    nth: int  # the fault comes when `rank` reaches the place for the nth time
    delay: float
    share: float  # from 0 to 1: where in a file the damage is, or how much space the disk has left

    @property
    def pair(self) -> tuple[str, str]:
        return self.launcher, self.fault

    @property
    def launch(self) -> str:
        """Return the launcher with its option."""
        return f"{self.launcher} --max-restarts={self.restarts}" if self.restarts else self.launcher

    @property
    def must_save(self) -> bool:
        """Whether this is a SIGTERM during Handler.train, after which the job saves and exits."""
        return self.fault == "terminate" and not self.delay and self.place in IN_TRAINING

    @property
    def must_show(self) -> bool:
        """Whether the output must mention the fault even if the job succeeds.

        The job need not notice a pause. And once it has written as many checkpoints as it keeps,
        deleting the oldest one can make enough room on a full disk.
        """
        if self.fault == "full disk":
            return self.place != "save" or self.nth <= KEEP
        return self.fault != "pause"

    @property
    def epochs_saved(self) -> int:
        """How many epochs have a checkpoint by the time the rank reaches its place.

        This holds for both ranks, because each waits in `on_rank` until rank 0 has written a
        checkpoint.
        """
        return (self.nth - 1) // (STEPS if self.place == "step" else 1)

    def __str__(self) -> str:
        nth = f" {self.nth}" if self.place in IN_TRAINING else ""
        target = f"all, when rank {self.rank} is" if self.to_all else f"rank {self.rank}"
        delay = f" + {self.delay:.3f} s" if self.delay else ""
        return f"{self.launch} | {self.fault} | {target} at {self.place}{nth}{delay}"


def draw(seed: int, number: int, pairs: Pairs) -> Plan:
    """Return the plan of a round, whose launcher and fault are one of `pairs`."""
    chance = random.Random(f"{seed} {number}")
    while True:
        plan = _draw(chance, number)
        waits_forever = plan.fault == "stop" and plan.place in ON_RANK_WAITS
        if plan.pair in pairs and not waits_forever:
            return plan


def draw_possible(seed: int, requested: Pairs, possible: Pairs) -> Iterator[Plan]:
    """Yield the plans of the rounds 1, 2 and so on, without those that this machine cannot run."""
    for number in count(1):
        plan = draw(seed, number, requested)
        if plan.pair in possible:
            yield plan


def _draw(chance: random.Random, number: int) -> Plan:
    launcher, fault = chance.choice(LAUNCHERS), chance.choice(FAULTS)
    # There must be an older checkpoint than the damaged one, so damage starts in the third epoch.
    places, first = (IN_TRAINING, 3) if fault in DAMAGES else (PLACES, 1)
    place, epoch = chance.choice(places), chance.randint(first, EPOCHS)
    nth = {"start-up": 1, "load": 1, "step": (epoch - 1) * STEPS + chance.randint(1, STEPS)}
    return Plan(
        number=number,
        launcher=launcher,
        restarts=chance.randint(0, 1) if launcher == "torchrun" else 0,
        fault=fault,
        rank=0 if fault == "full disk" else chance.randint(0, 1),  # only rank 0 writes
        to_all=fault in TO_ALL and chance.random() < 0.5,
        place=place,
        nth=nth.get(place, epoch),
        delay=chance.choice([0, round(chance.uniform(0, DELAY), 3)]) if fault in AT_ANY_TIME else 0,
        share=chance.random(),
    )

"""What a round does: drawn from the seed, the round's number, and the pairs to choose from."""

import random
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import count

Pairs = Set[tuple[str, str]]  # of a launcher and a fault
LAUNCHERS = ("spawn", "torchrun", "srun")
FAULTS = (  # docs/fault-drill.md says what each of them is
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
DAMAGES = ("truncate", "flip")
TO_ALL = ("interrupt", "terminate")  # whose signal may go to the whole job
AT_ANY_TIME = ("kill", "pause", "truncate", "flip", *TO_ALL)  # that need no rank that waits
EPOCHS, STEPS = 6, 23  # of the unbroken run; STEPS are of an epoch
KEEP = 3  # checkpoints, Checkpoint's default
IN_TRAINING = ("step", "validation", "epoch's end", "save")
PLACES = ("start-up", "load", *IN_TRAINING)
BY_DESIGN = ("load", "save")  # where a stopped rank is waited for, as one that is slow: on_rank


@dataclass(frozen=True)
class Plan:
    """A fault, whom it strikes, and when: `delay` seconds after `rank` has come to a place."""

    number: int
    launcher: str
    restarts: int  # of torchrun
    fault: str
    rank: int
    to_all: bool  # the fault is not the rank's alone
    place: str
    nth: int
    delay: float
    share: float  # of a file's bytes: where it is cut or changed, or how much of it a disk takes

    @property
    def pair(self) -> tuple[str, str]:
        return self.launcher, self.fault

    @property
    def target(self) -> str:
        return "all" if self.to_all else str(self.rank)

    @property
    def how(self) -> str:
        """Return the launcher with its option, as the table has it."""
        return f"{self.launcher} --max-restarts={self.restarts}" if self.restarts else self.launcher

    @property
    def is_answered(self) -> bool:
        """Whether it is a signal that finds all ranks in Handler.train, which saves and leaves."""
        return self.fault == "terminate" and not self.delay and self.place in IN_TRAINING

    @property
    def must_show(self) -> bool:
        """Whether the job cannot go on, or be started anew, without a word about the fault.

        It can after a pause, and where a disk gets full once a checkpoint is there that makes
        another one superfluous: its place is free again.
        """
        if self.fault == "full disk":
            return self.place != "save" or self.nth <= KEEP
        return self.fault != "pause"

    @property
    def epochs_saved(self) -> int:
        """How many epochs have ended with a checkpoint when the rank has come to its place.

        This holds for both ranks: each waits in `on_rank` until rank 0 has written a checkpoint.
        """
        return (self.nth - 1) // (STEPS if self.place == "step" else 1)

    def __str__(self) -> str:
        nth = f" {self.nth}" if self.place in IN_TRAINING else ""
        whom = f"all as rank {self.rank} is" if self.to_all else f"rank {self.rank}"
        late = f" + {self.delay:.2f} s" if self.delay else ""
        return f"{self.how} | {self.fault} | {whom} at {self.place}{nth}{late}"


def draw(seed: int, number: int, pairs: Pairs) -> Plan:
    """Return the plan of a round; one whose launcher and fault are not in `pairs` is drawn anew."""
    chance = random.Random(f"{seed} {number}")
    while True:
        plan = _draw(chance, number)
        stuck = plan.fault == "stop" and plan.place in BY_DESIGN
        if plan.pair in pairs and not stuck:
            return plan


def drawn(seed: int, asked: Pairs, possible: Pairs) -> Iterator[Plan]:
    """Yield the plans of the rounds 1, 2 and so on, without those that are not possible here."""
    for number in count(1):
        plan = draw(seed, number, asked)
        if plan.pair in possible:
            yield plan


def _draw(chance: random.Random, number: int) -> Plan:
    launcher, fault = chance.choice(LAUNCHERS), chance.choice(FAULTS)
    # What is damaged must not be the only checkpoint: the drill begins with the third epoch.
    places, first = (IN_TRAINING, 3) if fault in DAMAGES else (PLACES, 1)
    place, epoch = chance.choice(places), chance.randint(first, EPOCHS)
    nth = {"start-up": 1, "load": 1, "step": (epoch - 1) * STEPS + chance.randint(1, STEPS)}
    return Plan(
        number=number,
        launcher=launcher,
        restarts=chance.randint(0, 1) if launcher == "torchrun" else 0,
        fault=fault,
        rank=0 if fault == "full disk" else chance.randint(0, 1),  # rank 0 writes
        to_all=fault in TO_ALL and chance.random() < 0.5,
        place=place,
        nth=nth.get(place, epoch),
        delay=chance.choice([0, round(chance.uniform(0, 1), 2)]) if fault in AT_ANY_TIME else 0,
        share=chance.random(),
    )

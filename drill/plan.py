"""Draw what a round does: which launcher, which fault, on which rank, and when."""

import random
from dataclasses import dataclass

LAUNCHERS = "spawn", "torchrun", "srun"
DAMAGES = "truncate", "flip"  # of the newest checkpoint, after a kill
TO_ALL = "interrupt", "terminate"  # signals that may also go to the whole job
# docs/evidence.md explains each of them.
FAULTS = "kill", "stop", "pause", *TO_ALL, "exception", "full disk", *DAMAGES
NEED_A_WAITING_RANK = "stop", "exception", "full disk"  # the others can happen at any time
EPOCHS, STEPS = 6, 23  # of the whole training, and per epoch
DELAY = 0.2  # seconds at most: an epoch takes about as long
KEEP = 3  # checkpoints, the default of Checkpoint
IN_TRAINING = "step", "validation", "epoch's end", "save"
PLACES = "start-up", "load", *IN_TRAINING


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
    def launch(self) -> str:
        """Return the launcher with its option."""
        return f"{self.launcher} --max-restarts={self.restarts}" if self.restarts else self.launcher

    def __str__(self) -> str:
        nth = f" {self.nth}" if self.place in IN_TRAINING else ""
        target = f"all, when rank {self.rank} is" if self.to_all else f"rank {self.rank}"
        delay = f" + {self.delay:.3f} s" if self.delay else ""
        return f"{self.launch} | {self.fault} | {target} at {self.place}{nth}{delay}"


def draw(seed: int, number: int) -> Plan:
    """Return the plan of a round. It is the same on every machine."""
    chance = random.Random(f"{seed} {number}")
    while True:
        plan = _draw(chance, number)
        # A rank that is stopped here looks like a slow one, so the others wait for it in on_rank.
        if plan.fault != "stop" or plan.place not in ("load", "save"):
            return plan


def _draw(chance: random.Random, number: int) -> Plan:
    launcher, fault = chance.choice(LAUNCHERS), chance.choice(FAULTS)
    # There must be an older checkpoint than the damaged one, so damage starts in the third epoch.
    places, first = (IN_TRAINING, 3) if fault in DAMAGES else (PLACES, 1)
    place, epoch = chance.choice(places), chance.randint(first, EPOCHS)
    nth = {"start-up": 1, "load": 1, "step": (epoch - 1) * STEPS + chance.randint(1, STEPS)}
    at_any_time = fault not in NEED_A_WAITING_RANK
    return Plan(
        number=number,
        launcher=launcher,
        restarts=chance.randint(0, 1) if launcher == "torchrun" else 0,
        fault=fault,
        rank=0 if fault == "full disk" else chance.randint(0, 1),  # only rank 0 writes
        to_all=fault in TO_ALL and chance.random() < 0.5,
        place=place,
        nth=nth.get(place, epoch),
        delay=chance.choice([0, round(chance.uniform(0, DELAY), 3)]) if at_any_time else 0,
        share=chance.random(),
    )

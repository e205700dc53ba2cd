from .callbacks import Callback, Checkpoint, EarlyStopping, LearningRateMonitor
from .collectives import (
    broadcast_object,
    gather_objects,
    gather_tensors,
    reduce_mean,
    reduce_sum,
)
from .configuration import get_loader, load_config
from .decorators import on_rank, rank_first
from .environment import LaunchInfo, detect_launch
from .executor import ParallelExecutor, parallel_on_all_devices, parallelize_on_gpus
from .handler import Handler
from .initialize import DistInfo, cleanup_ddp, initialize_ddp
from .launch import run_ranks
from .randomness import seed_everything
from .trainer import TrainerDDP, setup_logging

__all__ = [
    "Callback",
    "Checkpoint",
    "DistInfo",
    "EarlyStopping",
    "Handler",
    "LaunchInfo",
    "LearningRateMonitor",
    "ParallelExecutor",
    "TrainerDDP",
    "broadcast_object",
    "cleanup_ddp",
    "detect_launch",
    "gather_objects",
    "gather_tensors",
    "get_loader",
    "initialize_ddp",
    "load_config",
    "on_rank",
    "parallel_on_all_devices",
    "parallelize_on_gpus",
    "rank_first",
    "reduce_mean",
    "reduce_sum",
    "run_ranks",
    "seed_everything",
    "setup_logging",
]

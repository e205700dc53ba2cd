"""Data-parallel training with DistributedDataParallel: every public name of the package.

A name's module is imported when the name is first used (PEP 562), so that `import ddp_ref` loads
next to nothing, and a project may copy only the folders that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors
    from .collectives import (
        barrier as barrier,
        broadcast_object as broadcast_object,
        gather_objects as gather_objects,
        gather_tensors as gather_tensors,
        reduce_max as reduce_max,
        reduce_mean as reduce_mean,
        reduce_min as reduce_min,
        reduce_sum as reduce_sum,
    )
    from .config.loader import get_loader as get_loader, load_config as load_config
    from .config.trainer import TrainerDDP as TrainerDDP, setup_logging as setup_logging
    from .decorators import on_rank as on_rank, rank_first as rank_first
    from .environment import LaunchInfo as LaunchInfo, detect_launch as detect_launch
    from .handler import Handler as Handler
    from .initialize import (
        DistInfo as DistInfo,
        cleanup_ddp as cleanup_ddp,
        initialize_ddp as initialize_ddp,
    )
    from .randomness import seed_everything as seed_everything
    from .training.callbacks import (
        Callback as Callback,
        Checkpoint as Checkpoint,
        EarlyStopping as EarlyStopping,
        LearningRateMonitor as LearningRateMonitor,
    )
    from .training.data import eval_loader as eval_loader, train_loader as train_loader
    from .training.ddp_model import wrap_model as wrap_model
    from .workers.executor import (
        ParallelExecutor as ParallelExecutor,
        parallel_on_all_devices as parallel_on_all_devices,
        parallelize_on_gpus as parallelize_on_gpus,
    )
    from .workers.run_ranks import run_ranks as run_ranks

_MODULES = {
    "environment": ("LaunchInfo", "detect_launch"),
    "initialize": ("DistInfo", "cleanup_ddp", "initialize_ddp"),
    "randomness": ("seed_everything",),
    "collectives": (
        *("barrier", "broadcast_object", "gather_objects", "gather_tensors"),
        *("reduce_max", "reduce_mean", "reduce_min", "reduce_sum"),
    ),
    "decorators": ("on_rank", "rank_first"),
    "handler": ("Handler",),
    "training.callbacks": ("Callback", "Checkpoint", "EarlyStopping", "LearningRateMonitor"),
    "training.data": ("eval_loader", "train_loader"),
    "training.ddp_model": ("wrap_model",),
    "workers.executor": ("ParallelExecutor", "parallel_on_all_devices", "parallelize_on_gpus"),
    "workers.run_ranks": ("run_ranks",),
    "config.loader": ("get_loader", "load_config"),
    "config.trainer": ("TrainerDDP", "setup_logging"),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

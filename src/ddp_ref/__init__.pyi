"""The public names, and the modules that define them; `__init__.py` reads this file."""

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

__version__: str

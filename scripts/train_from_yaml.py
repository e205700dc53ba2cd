"""Train from a YAML file with ddp_ref: the same script runs alone, under torchrun and under srun.

python scripts/train_from_yaml.py --config scripts/configs/digits.yaml [--nproc 2]
torchrun --standalone --nproc-per-node=2 scripts/train_from_yaml.py --config ...
"""

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_ref import TrainerDDP, cleanup_ddp, detect_launch, load_config, setup_logging


def classifier(features, hidden, classes):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def train(rank, config):
    """Train on one rank and test on rank 0. Collective: all ranks call it."""
    setup_logging(rank)
    trainer = TrainerDDP(rank, config)  # joins the group, resumes from the newest checkpoint
    train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
    trainer.run_training(train_loader, val_loader)
    if rank == 0:
        results = trainer.run_test(test_loader)
        print(f"test loss {results['loss']:.4f} | test accuracy {results['accuracy']:.4f}")
    cleanup_ddp()


def train_spawned(rank, config):
    """Run `train` and print this rank's error: mp.spawn shows the error of only one rank."""
    try:
        train(rank, config)
    except KeyboardInterrupt:  # mp.spawn would count it as success
        sys.exit(f"error: rank {rank} was interrupted")
    except Exception as error:
        sys.stderr.write(f"error: rank {rank}: {type(error).__name__}: {error}\n")
        raise


def spawn(nproc, config):
    """Start `nproc` ranks on this machine. They meet at a free port."""
    if nproc < 1:
        sys.exit(f"error: --nproc must be at least 1, not {nproc}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"world_size": nproc, "master_addr": "127.0.0.1", "master_port": port}
    config["parallel"] = config.get("parallel", {}) | place
    ranks = mp.spawn(train_spawned, args=(config,), nprocs=nproc, join=False)

    def forward(number, frame):
        """Forward a signal to the ranks, which then save and exit with code 143."""
        for rank in ranks.processes:
            if rank.exitcode is None:  # it has not ended yet
                os.kill(rank.pid, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGUSR1, forward)
    try:
        while not ranks.join():
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code != 143:
            raise
        sys.exit(143)


@record  # so that torchrun shows the traceback of the rank that failed first
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="such as scripts/configs/digits.yaml")
    parser.add_argument("--nproc", type=int, help="processes to start; not under a launcher")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], help="such as training.batch_size=64"
    )
    args = parser.parse_args()
    try:
        config = load_config(args.config, ("__main__", "datautils"), overrides=args.set)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if (folder := config["training"].get("path")) and detect_launch().rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = Path(args.config).read_text() + f"\n# --set {' '.join(args.set)}\n"
        (Path(folder) / "config.yaml").write_text(text)  # beside the results of the run
    if args.nproc is None:
        train(detect_launch().rank, config)
    else:
        spawn(args.nproc, config)


if __name__ == "__main__":
    main()

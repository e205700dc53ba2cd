"""Train graphs.yaml: torchrun --standalone --nproc-per-node=2 graphs_from_yaml.py graphs.yaml."""

import sys

from ddp_ref import TrainerDDP, cleanup_ddp, detect_launch, load_config, setup_logging


def train(path, overrides=()):
    allow = ("torch_geometric", "graphs")  # the modules that the file may name
    config = load_config(path, allow, overrides)
    rank = detect_launch().rank
    setup_logging(rank)
    trainer = TrainerDDP(rank, config)
    train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
    trainer.run_training(train_loader, val_loader)
    return trainer, trainer.run_test(test_loader)


if __name__ == "__main__":
    trainer, result = train(sys.argv[1], overrides=sys.argv[2:])
    if trainer.handler.rank == 0:
        print(f"test accuracy {result['accuracy']:.4f}")
    cleanup_ddp()

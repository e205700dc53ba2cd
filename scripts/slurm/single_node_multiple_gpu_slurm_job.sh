#!/bin/bash
# Train on one node with several GPUs: torchrun starts a rank for each. From the project's root:
#
#   sbatch scripts/slurm/single_node_multiple_gpu_slurm_job.sh
#
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1     # torchrun, which starts the ranks
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8       # for all ranks of the node and their DataLoader workers
#SBATCH --mem=16G               # per node
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue               # the job may go back into the queue: here, or preempted by another
#SBATCH --open-mode=append      # then the log goes on where it ended
#SBATCH --signal=B:USR1@120     # 120 s before the time is over this shell (B) is told, see `stop`
##SBATCH --partition=gpu        # with one # where your cluster asks for them
##SBATCH --account=project

PYTHON=.venv/bin/python
TRAIN=(scripts/train_reference.py --config scripts/configs/digits.yaml)
TRAIN+=(--set "training.path=runs/$SLURM_JOB_ID")  # the job keeps its id, and so its checkpoints
# module load cuda              # and what else your cluster needs

# ---- Nothing below needs an edit. ----------------------------------------------------------------

set -u
: "${SLURM_GPUS_ON_NODE:?ask for GPUs in the head}"

stop() {  # Every rank saves and exits; torchrun hands SIGTERM on, and would die of SIGUSR1.
    trap '' USR1  # once is enough
    stopped=yes
    scancel --signal=TERM "$SLURM_JOB_ID"
}
stopped=
trap stop USR1

# --cpus-per-task: since Slurm 22.05, srun does not take it from the head by itself.
# --standalone: torchrun finds a free port, for all its ranks are on this node.
# SLURM_GPUS_ON_NODE counts what Slurm gave to the job here, a rank for each.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 \
    "$PYTHON" -m torch.distributed.run --standalone \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" "${TRAIN[@]}" &

wait $!  # In the background, as bash looks at a signal only while it waits. Ends at the signal,
wait $!  # and this one when all ranks have saved.
code=$?

# With 0 all epochs are done. A job that failed by itself is not requeued: it would fail again.
if [ "$stopped" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # about 2 minutes later it goes on from its checkpoint
fi
exit $code

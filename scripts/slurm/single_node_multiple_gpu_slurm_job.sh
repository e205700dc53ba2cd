#!/bin/bash
# Train on one node with several GPUs: torchrun starts one rank per GPU. From the project's root:
#
#   sbatch scripts/slurm/single_node_multiple_gpu_slurm_job.sh
#   sbatch scripts/slurm/single_node_multiple_gpu_slurm_job.sh scripts/multigpu_torchrun.py 20 5
#
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1     # torchrun, which starts the ranks
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8       # for all ranks of the node and their DataLoader workers
#SBATCH --mem=16G               # per node
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue               # allow this script, or a preemption, to requeue the job
#SBATCH --open-mode=append      # a requeued job appends to its log
#SBATCH --signal=B:USR1@120     # USR1 to this shell (B) 120 s before the time limit, see stop()
##SBATCH --partition=gpu        # if your cluster requires these, remove one #
##SBATCH --account=project

PYTHON=${PYTHON:-.venv/bin/python}
TRAIN=(scripts/train_reference.py 20 5)
[ $# = 0 ] || TRAIN=("$@")      # what you name after this file, instead
export RUN_DIR=runs/$SLURM_JOB_ID  # a requeued job keeps its id, and a new job starts over
# module load cuda              # and whatever else your cluster needs

# ---- You need not edit anything below. --------------------------------------------------------

set -u
export PYTHONUNBUFFERED=1       # the log shows each line at once
: "${SLURM_GPUS_ON_NODE:?request GPUs in the header}"

# When torchrun stops, it gives the ranks this many seconds to save. PyTorch before 2.12 ignores
# this variable and gives the ranks 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100

stop() {  # Every rank saves and exits. torchrun passes SIGTERM on; SIGUSR1 would kill it.
    trap '' USR1  # once is enough
    stopped=yes
    scancel --signal=TERM "$SLURM_JOB_ID"
}
stopped=
trap stop USR1

# --cpus-per-task: since Slurm 22.05, srun does not read it from the header.
# --standalone: torchrun chooses a free port, because all its ranks are on this node.
# SLURM_GPUS_ON_NODE is the number of GPUs of the job on this node: one rank for each.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 \
    "$PYTHON" -m torch.distributed.run --standalone \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" "${TRAIN[@]}" &

# srun runs in the background, because bash handles a signal only while it waits.
wait $!  # ends when srun ends, or at USR1
wait $!  # ends when all ranks have saved
code=$?

# Exit code 0: all epochs are done. A job that failed by itself would fail again: do not requeue it.
if [ "$stopped" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # it resumes about 2 minutes later
fi
exit $code

#!/bin/bash
# Train on several nodes with one GPU each: srun starts one rank per node. From the project's root:
#
#   sbatch scripts/slurm/multiple_nodes_single_gpu_slurm_job.sh
#   sbatch scripts/slurm/multiple_nodes_single_gpu_slurm_job.sh scripts/multinode_slurm.py 20 5
#
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # the rank
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4       # for the rank and its DataLoader workers
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
INTERFACE=                      # such as ib0 or eth0, if NCCL or Gloo choose the wrong network;
                                # `ip -brief address` on a node lists the names
# module load cuda              # and whatever else your cluster needs

# ---- You need not edit anything below. --------------------------------------------------------

set -u
export PYTHONUNBUFFERED=1       # the log shows each line at once

# NCCL sends gradients between GPUs. Gloo sends gradients between CPUs, and also the objects that
# ddp_ref gathers. Both choose an interface by themselves. If a rank announces the wrong one, the
# others cannot reach it, or they wait until the timeout. NCCL expects the beginnings of names: "="
# before a name means exactly that name, and "^" excludes it. Gloo expects exact names and rejects
# "^".
if [ "$INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME="=$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi
# export NCCL_DEBUG=INFO        # shows which one NCCL uses

stop() {  # every rank saves and exits
    trap '' USR1  # once is enough
    stopped=yes
    scancel --signal=TERM "$SLURM_JOB_ID"
}
stopped=
trap stop USR1

# The ranks meet on the first node. Each job has a different port, below the ports that Linux
# assigns by itself. OMP_NUM_THREADS: otherwise, each rank would use all cores of its node.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12768))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# --cpus-per-task: since Slurm 22.05, srun does not read it from the header.
# --kill-on-bad-exit: if one rank fails, Slurm ends the others. Otherwise they would wait for it
# until the timeout. --wait=0: rank 0 may still test when the others have ended, and some clusters
# would then end it, too.
# The ranks read their rank and the world size from Slurm's variables.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 --wait=0 \
    "$PYTHON" "${TRAIN[@]}" &

# srun runs in the background, because bash handles a signal only while it waits.
wait $!  # ends when srun ends, or at USR1
wait $!  # ends when all ranks have saved
code=$?

# Exit code 0: all epochs are done. A job that failed by itself would fail again: do not requeue it.
if [ "$stopped" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # it resumes about 2 minutes later
fi
exit $code

#!/bin/bash
# Train on several nodes with several GPUs: srun starts one torchrun per node, which starts one rank
# per GPU. From the project's root:
#
#   sbatch scripts/slurm/multiple_nodes_multiple_gpu_slurm_job.sh
#   sbatch scripts/slurm/multiple_nodes_multiple_gpu_slurm_job.sh scripts/multinode_slurm.py 20 5
#
#SBATCH --job-name=digits
#SBATCH --nodes=2
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
INTERFACE=                      # such as ib0 or eth0, if NCCL or Gloo choose the wrong network;
                                # `ip -brief address` on a node lists the names
# module load cuda              # and whatever else your cluster needs

# ---- You need not edit anything below. --------------------------------------------------------

set -u
export PYTHONUNBUFFERED=1       # the log shows each line at once
: "${SLURM_GPUS_ON_NODE:?request GPUs in the header}"

# NCCL sends gradients between GPUs. Gloo sends gradients between CPUs, and also the objects that
# ddp_ref gathers. Both choose an interface by themselves. If a rank announces the wrong one, the
# others cannot reach it, or they wait until the timeout. NCCL expects the beginnings of names: "="
# before a name means exactly that name, and "^" excludes it. Gloo expects exact names and rejects
# "^".
if [ "$INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME="=$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi
# export NCCL_DEBUG=INFO        # shows which one NCCL uses

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
# --kill-on-bad-exit: if one torchrun fails, Slurm ends the others. --wait=0: rank 0 may still test
# when the others have ended, and some clusters would then end it, too.
# The quoted lines run on every node. Without quotes, this shell would insert its own values.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 \
    --wait=0 bash -c '
    # The torchruns meet at the first node of the step. Each job and step has a different port,
    # below the ports that Linux assigns by itself.
    first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    port=$((20000 + (97 * SLURM_JOB_ID + SLURM_STEP_ID) % 12007))
    # c10d: they agree on the node ranks. --rdzv-id: only the torchruns of this step may join.
    # --local-addr: how the others reach this node. Otherwise, torchrun announces the full name of
    # the node, which some clusters resolve to 127.0.0.1, or not at all.
    # SLURM_GPUS_ON_NODE is the number of GPUs of the job on this node: one rank for each.
    exec "$0" -m torch.distributed.run \
        --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \
        --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \
        --rdzv-id="$SLURM_JOB_ID.$SLURM_STEP_ID" --local-addr="$SLURMD_NODENAME" "$@"
' "$PYTHON" "${TRAIN[@]}" &

# srun runs in the background, because bash handles a signal only while it waits.
wait $!  # ends when srun ends, or at USR1
wait $!  # ends when all ranks have saved
code=$?

# Exit code 0: all epochs are done. A job that failed by itself would fail again: do not requeue it.
if [ "$stopped" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # it resumes about 2 minutes later
fi
exit $code

#!/bin/bash
# Train on several nodes with several GPUs: srun starts a torchrun on each node, which starts a rank
# for each GPU. From the project's root:
#
#   sbatch scripts/slurm/multiple_nodes_multiple_gpu_slurm_job.sh
#
#SBATCH --job-name=digits
#SBATCH --nodes=2
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
INTERFACE=                      # such as ib0 or eth0, where NCCL or gloo take a wrong one:
                                # `ip -brief address` on a node names them
# module load cuda              # and what else your cluster needs

# ---- Nothing below needs an edit. ----------------------------------------------------------------

set -u
: "${SLURM_GPUS_ON_NODE:?ask for GPUs in the head}"

# NCCL carries the gradients of GPUs, gloo those of CPUs and, with ddp_ref, what on_rank says. Both
# choose an interface by themselves; where a rank announces a wrong one, the others cannot reach it,
# or wait until the timeout. NCCL takes the beginning of names, a whole one after "=", and excludes
# with "^"; gloo takes whole names, separated by commas, and "^lo" is an error to it.
if [ "$INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME="=$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi
# export NCCL_DEBUG=INFO        # shows which one NCCL took

stop() {  # Every rank saves and exits; torchrun hands SIGTERM on, and would die of SIGUSR1.
    trap '' USR1  # once is enough
    stopped=yes
    scancel --signal=TERM "$SLURM_JOB_ID"
}
stopped=
trap stop USR1

# --cpus-per-task: since Slurm 22.05, srun does not take it from the head by itself.
# --kill-on-bad-exit: a torchrun that fails ends those of the other nodes.
# The quoted lines run on every node. Unquoted, this shell would fill in its own node's values.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 bash -c '
    # The torchruns meet at the first node of the step: its name as Slurm knows it, and a port below
    # those that Linux gives out by itself, another one for each job and step.
    first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
    port=$((20000 + (97 * SLURM_JOB_ID + SLURM_STEP_ID) % 12007))
    # c10d: they agree on the node ranks themselves. --rdzv-id: only those of this step may join.
    # --local-addr: how the others reach this node. Without it, torchrun would give its full name,
    # which some clusters resolve to 127.0.0.1, or not at all.
    # SLURM_GPUS_ON_NODE counts what Slurm gave to the job here, a rank for each.
    exec "$0" -m torch.distributed.run \
        --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \
        --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \
        --rdzv-id="$SLURM_JOB_ID.$SLURM_STEP_ID" --local-addr="$SLURMD_NODENAME" "$@"
' "$PYTHON" "${TRAIN[@]}" &

wait $!  # In the background, as bash looks at a signal only while it waits. Ends at the signal,
wait $!  # and this one when all ranks have saved.
code=$?

# With 0 all epochs are done. A job that failed by itself is not requeued: it would fail again.
if [ "$stopped" ] && [ $code -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # about 2 minutes later it goes on from its checkpoint
fi
exit $code

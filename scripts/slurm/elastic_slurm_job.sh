#!/bin/bash
# Elastic training: if a worker or a node dies, the others go on. From the project's root:
#
#   sbatch scripts/slurm/elastic_slurm_job.sh
#   sbatch --nodes=1 scripts/slurm/elastic_slurm_job.sh JOBID    # more workers for that job
#
#SBATCH --job-name=elastic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2     # workers
#SBATCH --cpus-per-task=1       # for a worker and its DataLoader workers
#SBATCH --mem=4G                # per node
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --no-kill               # if a node fails, the other nodes keep their workers
##SBATCH --partition=cpu        # if your cluster requires these, remove one #
##SBATCH --account=project

PYTHON=${PYTHON:-.venv/bin/python}
TRAIN=(scripts/elastic.py --steps 3000)
# module load                   # whatever your cluster needs

# ---- You need not edit anything below. --------------------------------------------------------

set -u
export PYTHONUNBUFFERED=1       # the log shows each line at once
umask 077                       # nobody else may read the token

# The coordinator runs in this shell, on the first node, and survives all workers. The file tells a
# second job where to join. Each job has a different port, below the ports that Linux assigns.
FILE=elastic-${1:-$SLURM_JOB_ID}.env
if [ $# = 0 ]; then
    {
        echo "export ELASTIC_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')"
        echo "COORDINATOR=$(hostname):$((20000 + SLURM_JOB_ID % 12768))"
    } > "$FILE"
fi
# shellcheck disable=SC1090  # the file was written above, or by the job to join
. "./$FILE"
if [ $# = 0 ]; then
    "$PYTHON" "${TRAIN[@]}" --nproc 0 --port "${COORDINATOR##*:}" &
    coordinator=$!
fi

# --no-kill and --kill-on-bad-exit=0: a task, or a whole node, may die. --wait=0: the others may go
# on for as long as they like. --cpus-per-task: since Slurm 22.05, srun does not read it from the
# header.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --no-kill \
    --kill-on-bad-exit=0 --wait=0 "$PYTHON" "${TRAIN[@]}" --join "$COORDINATOR"
code=$?
if [ $# = 0 ]; then
    wait "$coordinator"  # exit code 0: a worker has finished, whatever happened to the others
    code=$?
    rm "$FILE"
fi
exit $code

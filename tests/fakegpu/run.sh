#!/usr/bin/env bash
# Run a command on fake GPUs:  [FAKE_GPUS=2] run.sh FOLDER COMMAND...
# FOLDER is what build.sh made. Its torch comes before the one that is installed.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: [FAKE_GPUS=2] $0 FOLDER COMMAND..." >&2
    exit 2
fi
folder=$(cd "$1" && pwd)
shift
exec env \
    FAKE_GPUS="${FAKE_GPUS:-2}" \
    LD_LIBRARY_PATH="$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
    LD_PRELOAD="$folder/lib/libfakecuda.so${LD_PRELOAD:+:$LD_PRELOAD}" \
    PYTHONPATH="$folder/torch${PYTHONPATH:+:$PYTHONPATH}" \
    PYTORCH_NVML_BASED_CUDA_CHECK=0 \
    "$@"

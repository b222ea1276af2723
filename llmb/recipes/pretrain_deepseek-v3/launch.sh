#!/usr/bin/env bash
# DeepSeek-V3 pre-training, set by the environment (README.md lists the variables); arguments go to `llmb-run submit`:
#   GPU_TYPE=h200 ./launch.sh --proxy true-width
# Inside an allocation it runs there: sbatch -N 1 ... ./launch.sh
set -euo pipefail
gpus=${JOB_TOTAL_GPUS:-1}
exec llmb-run submit -w pretrain_deepseek-v3 -s "${MODEL_SIZE:-671b}" --dtype "${DTYPE:-bf16}" --scale "$gpus" "$@"

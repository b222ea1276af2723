#!/usr/bin/env bash
# Llama 3.1 pre-training, set by the environment (README.md lists the variables); arguments go to `llmb-run submit`:
#   JOB_TOTAL_GPUS=128 GPU_TYPE=gb200 ./launch.sh
# Inside an allocation it runs there: sbatch -N 32 ... ./launch.sh
set -euo pipefail
gpus=${JOB_TOTAL_GPUS:?"set the number of GPUs: JOB_TOTAL_GPUS=128 GPU_TYPE=gb200 ./launch.sh"}
exec llmb-run submit -w pretrain_llama3.1 -s "${MODEL_SIZE:-405b}" --dtype "${DTYPE:-fp8}" --scale "$gpus" "$@"

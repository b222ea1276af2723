#!/usr/bin/env bash
# Nemotron-H pre-training, set by the environment (README.md lists the variables); arguments go to `llmb-run submit`:
#   JOB_TOTAL_GPUS=256 ./launch.sh
# Inside an allocation it runs there: sbatch -N 32 ... ./launch.sh
set -euo pipefail
gpus=${JOB_TOTAL_GPUS:?"set the number of GPUs: JOB_TOTAL_GPUS=256 ./launch.sh"}
exec llmb-run submit -w pretrain_nemotronh -s "${MODEL_SIZE:-56b}" --dtype "${DTYPE:-fp8}" --scale "$gpus" "$@"

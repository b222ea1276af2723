#!/usr/bin/env bash
# Llama 3.1 inference, set by the environment (README.md lists the variables); arguments go to `llmb-run submit`:
#   GPU_TYPE=h200 USE_CASE=chat:128/128 ./launch.sh
# Inside an allocation it runs there: sbatch -N 1 ... ./launch.sh
set -euo pipefail
exec llmb-run submit -w inference_llama3.1 -s "${MODEL_SIZE:-8b}" --dtype "${DTYPE:-fp8}" --scale "${JOB_TOTAL_GPUS:-1}" "$@"

#!/usr/bin/env bash
# DeepSeek-R1 inference, set by the environment (README.md lists the variables); arguments go to `llmb-run submit`:
#   GPU_TYPE=gb200 USE_CASE=chat:128/128 ./launch.sh
# Inside an allocation it runs there: sbatch -N 1 ... ./launch.sh
set -euo pipefail
gpu=${GPU_TYPE:-}
case ${gpu,,} in
  h100) gpus=16 dtype=fp8 ;; # the 4-bit weights need Blackwell
  *) gpus=4 dtype=nvfp4 ;;
esac
exec llmb-run submit -w inference_deepseek-r1 -s "${MODEL_SIZE:-671b}" --dtype "${DTYPE:-$dtype}" \
  --scale "${JOB_TOTAL_GPUS:-$gpus}" "$@"

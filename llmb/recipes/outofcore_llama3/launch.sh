#!/usr/bin/env bash
# Llama 3 out-of-core training on one GPU, set by the environment (README.md lists the variables); arguments go to
# `llmb-run submit`:
#   MODEL_SIZE=8b ./launch.sh --seqlen 65536 --host-gb 178 --device-gb 78
# Inside an allocation it runs there: sbatch -N 1 ... ./launch.sh
set -euo pipefail
exec llmb-run submit -w outofcore_llama3 -s "${MODEL_SIZE:-8b}" --dtype "${DTYPE:-bf16}" \
  --scale "${JOB_TOTAL_GPUS:-1}" "$@"

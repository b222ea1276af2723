#!/usr/bin/env bash
# Profiles out-of-core training of a Llama on one GPU, with the arguments of the published script: host GiB, device GiB,
# sequence length, model in billions of parameters. It ends with where profile.html is; what follows the four goes to
# `llmb-run submit`:
#   ./do_transformer_profile.sh 178 78 65536 8
#   ./do_transformer_profile.sh 0.5 1 1024 8 --proxy       # a small proxy, on any machine
set -euo pipefail
usage="usage: do_transformer_profile.sh HOST_GIB DEVICE_GIB SEQLEN MODEL; MODEL is one of 1, 3, 8, 15, 32, 70"
if (($# < 4)); then
  echo "ERROR: $# of 4 arguments given; $usage" >&2
  exit 1
fi
case "$4" in
  1 | 3 | 8 | 15 | 32 | 70) ;;
  *)
    echo "ERROR: unknown model '$4'; $usage" >&2
    exit 1
    ;;
esac
exec llmb-run submit -w outofcore_llama3 -s "$4b" --dtype "${DTYPE:-bf16}" --scale 1 \
  --host-gb "$1" --device-gb "$2" --seqlen "$3" -p "${@:5}"

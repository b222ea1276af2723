#!/bin/sh
# How fast is my model on my machine? Three commands; a Hugging Face folder, or its config.json alone (random weights).
#
#     sh examples/my_model.sh Qwen3-8B/
#
# Without a GPU a model of up to 50 million parameters runs whole, a larger one as a small proxy.
set -e
model=${1:?usage: sh examples/my_model.sh FOLDER_OR_CONFIG_JSON}
llmb-run submit --model "$model" --task train --dry-run   # layout, batch, predicted time and memory
llmb-run submit --model "$model" --task train             # tokens/s and MFU of a training step
llmb-run submit --model "$model" --task serve             # requests/s, TTFT and TPOT

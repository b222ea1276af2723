#!/usr/bin/env bash
# Step-time table in milliseconds, of any engine's training logs:
#   parse_train_timing_mbridge.sh [--format=table|csv|json] [--full-names] [--window FIRST-LAST] [DIR]
llmb_run=$(command -v llmb-run) || llmb_run=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/llmb-run
exec "$llmb_run" timing --style megatron_bridge "$@"

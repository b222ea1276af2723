#!/usr/bin/env bash
# Step-time table of Megatron-Bridge logs: parse_train_timing_mbridge.sh [--format=table|csv|json] [--full-names] [DIR]
exec llmb-run timing --style megatron_bridge "$@"

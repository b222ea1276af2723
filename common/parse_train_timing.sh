#!/usr/bin/env bash
# Step-time table of NeMo logs: parse_train_timing.sh [--format=table|csv|json] [--full-names] [--window FIRST-LAST] [DIR]
exec llmb-run timing --style nemo "$@"

#!/usr/bin/env bash
# Prepares $LLMB_INSTALL for the recipes, and installs llmb with torch into the active Python environment if it is not
# there yet. The same for each recipe of the documents; arguments go to llmb-install:
#   ./setup.sh
set -euo pipefail
if ! command -v llmb-install >/dev/null; then
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
  environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [[ -z $environment || ! -f $root/pyproject.toml ]]; then
    echo "ERROR: llmb-install is not on the PATH; activate the Python environment that llmb is, or is to be, in" >&2
    exit 1
  fi
  echo "Installing llmb and torch into $environment: 1 to 5 minutes, up to 3 GB where there is a GPU"
  "$environment/bin/python" -m pip install --disable-pip-version-check --constraint "$root/constraints.txt" "$root[engine]"
fi
exec llmb-install "$@"

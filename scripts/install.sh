#!/usr/bin/env bash
# Installs jaxserve from the folder above this one into a new virtual environment; the Containerfile does it this way.
#   scripts/install.sh FOLDER [EXTRAS]      EXTRAS as pip takes them: cuda13,otel
set -euo pipefail
folder=${1:?scripts/install.sh FOLDER [EXTRAS]: FOLDER is missing}
extras=${2:-}
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --no-cache-dir --quiet ".${extras:+[$extras]}"
"$folder/bin/jaxserve" serve --help >/dev/null

#!/usr/bin/env bash
# Sets up .venv for serving on CPU and for development. Quick when nothing has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The first interpreter that runs and is of a supported version. Each candidate is run, because
# a name on PATH can be a shim without an interpreter behind it.
find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.12 python3.13 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

if ! python=$(find_python); then
    found=$("${PYTHON:-python3}" --version 2>&1) || found="no working ${PYTHON:-python3}"
    echo "set-up: Python 3.11, 3.12 or 3.13 is needed, and PATH has $found. Install one of them," \
        "or name it: PYTHON=/path/to/python3.12 scripts/setup.sh" >&2
    exit 1
fi
exec "$python" scripts/setup_venv.py

#!/usr/bin/env bash
# Builds the module of this working tree beside runtime/kernels/__init__.py, where a checkout that is not installed
# finds it. (`pip install -e .` builds one of its own, again at each install.)
#
#   runtime/kernels/native/build.sh [PYTHON]      PYTHON: who imports it and has nanobind, cmake, ninja; default: python
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
python="$(command -v "${1:-python}")"
build="$root/build/native"
export PATH="$(dirname "$python"):$PATH"
cmake -S "$root/runtime/kernels/native" -B "$build" -G Ninja -DPython_EXECUTABLE="$python" --log-level=WARNING
cmake --build "$build"
for module in "$build"/_native.*.so; do
  # Another process may be running the former one: it keeps its file.
  cp "$module" "$root/runtime/kernels/.new" && mv "$root/runtime/kernels/.new" "$root/runtime/kernels/$(basename "$module")"
done

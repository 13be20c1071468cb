#!/usr/bin/env bash
# The native kernels under sanitizers, from a C++ program of their own: Python and torch are not instrumented.
#
#   tests/runtime/kernels/sanitize/run.sh [address | undefined | thread]      default: all, one after the other
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../../../.." && pwd)"
for sanitizer in ${1:-address undefined thread}; do
  build="$root/build/sanitize-$sanitizer"
  cmake -S "$here" -B "$build" -DCMAKE_BUILD_TYPE=Release -DLLMQ_SANITIZE="$sanitizer" --log-level=WARNING
  cmake --build "$build" --parallel "$(nproc)"
  for program in pool_check linear_check attention_check program_check sample_check; do
    echo "$program under $sanitizer"
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/$program"
  done
done

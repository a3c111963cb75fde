#!/bin/sh
# keep_ptxas.sh OBJECT COMMAND...: compiles, and keeps beside the object what ptxas says of its kernels' registers, so
# that tools/kernel_table.py need not compile anything. All else is shown.
kept="$1.ptxas"
shift
"$@" 2> "$kept"
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' "$kept" >&2
exit $status

#!/bin/sh
# The pipeline as single steps, for a shell script of your own. Each step takes what is ready; its exit code says how it
# went (README lists them): 75 means "try again later", 65 that a job was bad and lies in failed/ with its reason.
#   night.sh SAMPLER_SPOOL DECODER LATENT...        DECODER is [USER@]HOST:SPOOL or a path
# Where h3spool is not in PATH, set H3SPOOL to it.
set -eu
[ $# -ge 2 ] || { echo "usage: night.sh SAMPLER_SPOOL DECODER [LATENT...]" >&2; exit 2; }
spool=$1 decoder=$2
shift 2
h3spool=${H3SPOOL:-h3spool}

step() {
    status=0
    "$h3spool" "$@" --spool "$spool" || status=$?
    case $status in
        0 | 65) ;;                                       # bad jobs are set aside, the rest goes on
        75) echo "later: $*" >&2 ;;
        *) echo "h3spool $1 ended with $status" >&2; exit $status ;;
    esac
}

[ $# -eq 0 ] || step export "$@"
step verify
step push --to "$decoder"
step pull --from "$decoder"
step status --failed

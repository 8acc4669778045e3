#!/usr/bin/env bash
# One nightly run, for cron, a systemd timer or a batch system.
# Exit code: 0 fine, 1 a ceiling fell, 2 the plan is wrong, 3 no fleet, 4 some cells have no answer.
#   nightly.sh PLAN RESULTS [RAY_ADDRESS]
set -euo pipefail
plan=$1 results=$2 address=${3:-auto}
export RAY_USAGE_STATS_ENABLED=0
code=0
prober fleet "$plan" --results "$results" --address "$address" >"$results.last.md" 2>"$results.last.log" || code=$?
# TEXTFILE_DIR: folder of a node exporter's textfile collector, if there is one.
if [ -n "${TEXTFILE_DIR:-}" ] && [ -e "$results/fleet/ceilings.prom" ]; then
    cp "$results/fleet/ceilings.prom" "$TEXTFILE_DIR/.prober.prom.draft"
    mv "$TEXTFILE_DIR/.prober.prom.draft" "$TEXTFILE_DIR/prober.prom"
fi
# NOTIFY: command that receives the summary on standard input after a regression.
if [ "$code" -eq 1 ] && [ -n "${NOTIFY:-}" ]; then
    $NOTIFY <"$results.last.md"
fi
exit "$code"

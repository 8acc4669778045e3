#!/usr/bin/env bash
# One night, for a calendar that knows nothing of the prober: cron, a systemd timer, a batch system.
# Exit code: 0 fine, 1 a ceiling fell, 2 the plan is wrong, 3 no fleet, 4 some cells have no answer.
#   nightly.sh PLAN RESULTS [RAY_ADDRESS]
set -euo pipefail
plan=$1 results=$2 address=${3:-auto}
export RAY_USAGE_STATS_ENABLED=0
code=0
prober fleet "$plan" --results "$results" --address "$address" >"$results.last.md" 2>"$results.last.log" || code=$?
# Where a node exporter collects text files, if it does.
if [ -n "${TEXTFILE_DIR:-}" ] && [ -e "$results/fleet/ceilings.prom" ]; then
    cp "$results/fleet/ceilings.prom" "$TEXTFILE_DIR/.prober.prom.draft"
    mv "$TEXTFILE_DIR/.prober.prom.draft" "$TEXTFILE_DIR/prober.prom"
fi
# Whom a regression wakes: NOTIFY is a command that takes the summary on its standard input.
if [ "$code" -eq 1 ] && [ -n "${NOTIFY:-}" ]; then
    $NOTIFY <"$results.last.md"
fi
exit "$code"

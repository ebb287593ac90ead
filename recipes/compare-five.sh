#!/bin/sh
# Five candidates of one model, scored on identical tokens with paired intervals, on one page.
#
# usage: compare-five.sh MODEL OUT [WINDOWS]
# Each candidate is made with the same calibration text, so what differs is the method. On the page, candidates off the
# dashed line are beaten by another in both bytes and divergence. Intervals that overlap do not decide: compare ratios,
# which are paired, and take more documents when a difference matters.
set -eu
MODEL=$1 OUT=$2 WINDOWS=${3:-40}
TEXT="--calibration builtin:novels --samples ${SAMPLES:-64} --length ${LENGTH:-512}"
suture quantize "$MODEL" "$OUT/rtn-w4" --method rtn --group-size 64
suture quantize "$MODEL" "$OUT/gptq-w4" --method gptq --group-size 64 $TEXT
suture quantize "$MODEL" "$OUT/awq-w4" --method awq --group-size 64 $TEXT
suture quantize "$MODEL" "$OUT/nf4" --method nf4
suture quantize "$MODEL" "$OUT/gptq-w3" --method gptq --bits 3 --group-size 64 $TEXT
suture report "$MODEL" "$OUT/rtn-w4" "$OUT/gptq-w4" "$OUT/awq-w4" "$OUT/nf4" "$OUT/gptq-w3" \
    --data builtin:holmes --window 512 --max-windows "$WINDOWS" --output "$OUT/page"

#!/bin/sh
# A fine-tuned model's difference from its base as a LoRA adapter, and how much of it each rank carries.
#
# usage: extract-adapter.sh BASE TUNED OUT [RANK]
# The adapter holds the best approximation of every layer's change at that rank (a truncated SVD: Eckart-Young). The curve
# scores base + adapter at several ranks against the fine-tuned model on held-out text: how much of the tuning each rank
# keeps. Full fine-tuning's changes are of high rank; a curve that is still rising says that this rank is not enough.
set -eu
BASE=$1 TUNED=$2 OUT=$3 RANK=${4:-16}
suture lora extract "$BASE" "$TUNED" "$OUT" --rank "$RANK"
suture inspect "$OUT"
suture lora curve "$BASE" "$TUNED" "$OUT" --data builtin:holmes --ranks 1 --ranks "$RANK" --window 512 --max-windows 8

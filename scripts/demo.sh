#!/usr/bin/env bash
# From a fresh clone to a trained model: dependencies, build, text, a GPT of two million parameters trained by two
# ranks over CommFuse schedules, then steps of the overlap modes side by side; as root on Linux also over a slow
# link between two hosts made of this machine, where the modes differ.
#
#     scripts/demo.sh          DEMO_STEPS=100 scripts/demo.sh     a quick look
#
# All output is in build/demo. Training takes two to three minutes on two cores. On tiny Shakespeare the validation loss must fall
# below 1.88 nats per byte (nanoGPT's figure for a small model on a CPU); the exit status is 0 only if it does, all parts work, and
# all overlap modes give the same losses. The last line says what the comparison has proved: steps of one round are paired.
set -euo pipefail
cd "$(dirname "$0")/.."

full_steps=1500
steps=${DEMO_STEPS:-$full_steps}
target=1.88
demo=build/demo
bench=build/release/tests/bench/bench_train

heading() { printf '\n== %s\n' "$*"; }
fail() { echo "error: demo: $*" >&2; exit 1; }

heading "1/5 dependencies and build"
scripts/install_deps.sh || fail "a package is missing, see above"
make --no-print-directory -s -O -j"$(nproc)" train_gpt $bench || fail "the build failed"
python=$(scripts/find_python.sh)

heading "2/5 text and tokens"
# Tiny Shakespeare, so that figures are comparable between machines; without a network, this project's documents and sources.
text=$demo/tinyshakespeare.txt
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
mkdir -p $demo
right() { echo "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed  $text" | sha256sum --check --status 2>/dev/null; }
right || timeout 30 "$python" -c "import urllib.request as web; web.urlretrieve('$url', '$text')" 2>/dev/null ||
    echo "no tiny Shakespeare from $url"
right || { text=$demo/documents.txt && cat README.md */README.md tests/*/README.md {commfuse,layers,data}/*.[ch] >$text; }
echo "text: $text"
"$python" data/prepare.py --input "$text" --out $demo/tokens --encoding byte || fail "data/prepare.py failed"

heading "3/5 training: $steps steps on two ranks, --overlap ring"
# Small matrices gain nothing from many threads.
threads=$(($(nproc) < 4 ? 1 : $(nproc) > 8 ? 4 : $(nproc) / 2))
shape=(--tp 2 --threads $threads --layers 4 --heads 6 --channels 192 --seq 64 --micro-batch 16)
scripts/mpirun.sh -np 2 ./train_gpt "${shape[@]}" --steps "$steps" --overlap ring \
    --train "$demo/tokens/train_*.bin" --val "$demo/tokens/val_*.bin" --lr 3e-3 --min-lr 3e-4 --warmup 100 --beta2 0.99 \
    --val-every $((steps < 10 ? 1 : steps / 10)) --val-batches 100 --sample-every "$steps" --log $demo/train.jsonl \
    --trace $demo/trace.json --trace-steps $((steps > 3 ? steps - 3 : 0)):"$steps" |
    awk '/^step .* loss .* tok\/s/ && n++ % 50 { next } { print; fflush() }' || fail "training failed" # one step line in fifty

heading "4/5 a step of each overlap mode in turn"
# The table of bench_train. nowire and ideal leave transfers out, so their losses are wrong by construction.
compare() { # PLACE MODE COMMAND …
    "${@:3}" --json >$demo/modes.txt || fail "the comparison failed"
    grep -v '^{' $demo/modes.txt
    awk '/^(none|slice|ring|auto)/ && !($10 <= 1e-5) { exit 1 }' $demo/modes.txt || fail "the losses of the modes disagree"
    proved=$("$python" -c "import sys; sys.path.insert(0, 'scripts'); import run_log; from experiments.steps import by_mesh, difference
modes = by_mesh([{'mesh': '', **row} for row in run_log.turns(open('$demo/modes.txt').read())[1]])['']
print('$1, with equal losses (to 1e-5),', difference(modes, '$2', 'slice:4') + ', and', difference(modes, '$2', 'none') + '.')")
}
compare "Over shared memory" ring scripts/mpirun.sh -np 2 $bench --modes none,slice:4,ring,ideal --rounds 30 --vocab 256 "${shape[@]}"
echo "Over shared memory transfers are short: the modes are expected to take about the same time."
if why=$("$python" -c 'import sys; sys.path.insert(0, "scripts"); import lab; sys.exit(lab.obstacle())' 2>&1); then
    printf '\nOver a link of 1 Gbit/s between two hosts made of this machine, with wide layers:\n'
    compare "Over a link of 1 Gbit/s" ring:4 scripts/lab.py --rate 1gbit -- $bench --modes none,slice:4,ring:4,auto,nowire,ideal --rounds 12 --tp 2 --threads 1 \
        --layers 2 --heads 24 --channels 1536 --vocab 256 --seq 512 --micro-batch 1
else
    echo "Over a slow link they differ: $why"
fi

heading "5/5 results"
loss=$(sed -n '/"event":"val"/s/.*"loss":\([^,]*\).*/\1/p' $demo/train.jsonl | tail -n 1)
echo "timeline          $demo/trace.json, three steps: open it in https://ui.perfetto.dev"
echo "log               $demo/train.jsonl"
printf "validation loss   %.4f nats per byte\n" "$loss"
echo "total time        $((SECONDS / 60)) min $((SECONDS % 60)) s"
if [ "$(basename "$text")" = tinyshakespeare.txt ] && [ "$steps" -ge $full_steps ]; then
    "$python" -c "import sys; sys.exit(not $loss < $target)" || fail "validation loss $loss is not below $target"
    echo "below $target, as it should be"
fi
printf '\n%s\n' "$proved"

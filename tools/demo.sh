#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, asks the demo model a question, checks its answer and draws the step.
set -u -o pipefail
usage='usage: tools/demo.sh [QUESTION]

Installs missing system packages, builds preset release, asks the demo model (tests/data/ft-tiny) the question,
shows which jobs ran in one step and draws them in build/demo/step.svg. Without a question it asks one whose answer
it knows, and fails when another comes. The model knows small sums, chemical symbols and some old books, not the world.'
case ${1-} in -h | --help) printf '%s\n' "$usage" && exit 0 ;; esac

cd -P -- "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)" || exit 2
. tools/install_deps.sh
. tools/build_preset.sh
exec </dev/null

model=tests/data/ft-tiny
out=build/demo
question=${*:-What is the symbol for gold?}
case $question in
"What is the symbol for gold?") expected="The symbol for gold is Au." ;;
"What is 12 plus 30?") expected="12 plus 30 is 42." ;;
*) expected='' ;;
esac

die() {
    printf 'tools/demo.sh: %s\n' "$*" >&2
    exit 1
}
# Prints a command as one would type it (past redirections of its output), then runs it.
exec 3>&1
show_and_run() {
    local word line='$'
    for word in "$@"; do
        case $word in *[!A-Za-z0-9_./=-]*) line+=" '${word//\'/\'\\\'\'}'" ;; *) line+=" $word" ;; esac
    done
    printf '\n%s\n' "$line" >&3
    "$@" 3>&-
}

ft_install_deps '' || exit 1
ft_build_preset release || exit 1
mkdir -p "$out" || exit 1
rm -f "$out"/step.trace "$out"/step.txt "$out"/step.svg "$out"/answer.txt

show_and_run build/release/ft run --model "$model" --chat --prompt "$question" --trace "$out/step.trace" |
    tee "$out/answer.txt" || die "the engine failed"
[ -s "$out/step.trace" ] || die "the engine left no trace in $out/step.trace"
if [ -n "$expected" ]; then
    grep -qF -- "$expected" "$out/answer.txt" || die "wrong answer: \"$expected\" was expected"
    printf '\nThe answer is right.\n'
fi

show_and_run build/release/ft-graph dump --trace "$out/step.trace" --format text >"$out/step.txt" ||
    die "ft-graph could not read the trace"
lines_max=70
head -n $lines_max "$out/step.txt"
lines=$(wc -l <"$out/step.txt")
[ "$lines" -le $lines_max ] || echo "... $((lines - lines_max)) more lines in $out/step.txt"
show_and_run build/release/ft-graph dump --trace "$out/step.trace" --format svg --out "$out/step.svg" ||
    die "ft-graph could not draw the step"
grep -q '<svg' "$out/step.svg" || die "$out/step.svg is not a drawing"

printf '\nPicture of the step: %s/%s/step.svg\n' "$PWD" "$out"
echo "Ask something else:  tools/demo.sh \"What is 12 plus 30?\""

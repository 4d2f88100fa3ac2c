#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ft-graph dump on a real trace and a real model: every format, every refusal, no half-written file.
# Arguments: ft, ft-graph, data directory.
set -u
ft=$1 graph=$2 data=$3
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
fails=0
check() { # name, wanted exit code, wanted text in stderr, command...
    local name=$1 wanted=$2 text=$3
    shift 3
    "$@" >"$work/out" 2>"$work/err"
    local got=$?
    if [ $got != "$wanted" ] || { [ -n "$text" ] && ! grep -qF -- "$text" "$work/err"; }; then
        echo "FAIL $name: exit $got, wanted $wanted with \"$text\": $(head -c 300 "$work/err")"
        fails=$((fails + 1))
    fi
}
model=$data/ft-tiny
"$ft" run --model "$model" --strategy hybrid --trace "$work/t" --max-tokens 4 --quiet "In the" >/dev/null || exit 1
for format in text json dot svg; do
    check "trace as $format" 0 "" "$graph" dump --trace "$work/t" --format $format --out "$work/t.$format"
    check "model as $format" 0 "" "$graph" dump --model "$model" --format $format --out "$work/m.$format"
    [ -s "$work/t.$format" ] && [ -s "$work/m.$format" ] || { echo "FAIL: empty $format"; fails=$((fails + 1)); }
    check "full device, $format" 1 "No space left" "$graph" dump --trace "$work/t" --format $format --out /dev/full
done
grep -q 'total by class' "$work/t.text" || { echo "FAIL: no totals"; fails=$((fails + 1)); }
grep -q '</svg>' "$work/t.svg" || { echo "FAIL: svg does not end"; fails=$((fails + 1)); }
# A file-size limit stands for a full disk: what was begun is removed.
check "half-written file" 1 "File too large" bash -c "ulimit -f 1; '$graph' dump --trace '$work/t' --format json --out '$work/half'"
[ -e "$work/half" ] && { echo "FAIL: a half-written file was left"; fails=$((fails + 1)); }
head -c $(($(stat -c %s "$work/t") - 100)) "$work/t" >"$work/cut"
check "cut trace" 0 "showing the last whole step" "$graph" dump --trace "$work/cut"
check "wrong file" 1 "not a trace file" "$graph" dump --trace "$model/config.json"
check "absent file" 1 "No such file" "$graph" dump --trace "$work/absent"
check "absent step" 2 "the trace holds" "$graph" dump --trace "$work/t" --step 99999
check "no source" 2 "either --trace FILE or --model DIR" "$graph" dump
check "bad layers" 2 "give a layer or a range" "$graph" dump --trace "$work/t" --layers 3-1
check "bad layers" 2 "give a layer or a range" "$graph" dump --trace "$work/t" --layers -1
check "absent layers" 2 "no layer 40" "$graph" dump --trace "$work/t" --layers 40-50
check "absent layers" 2 "no layer 40" "$graph" dump --model "$model" --layers 40
check "wrong pair" 2 "go with --model" "$graph" dump --trace "$work/t" --rows 3
check "bad format" 2 "format" "$graph" dump --trace "$work/t" --format png
check "no command" 2 "usage: ft-graph" "$graph"
check "bad command" 2 "no command" "$graph" draw
check "help" 0 "" "$graph" dump --help
[ $fails = 0 ] && echo "e2e_graph_dump: ok"
exit $((fails != 0))

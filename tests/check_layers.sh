#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails on an include that goes against the arrows of the architecture, or on a third-party header outside its home.
set -u
cd "$(dirname "$0")/.." || exit 2
fail=0
complain() { echo "check_layers: $1"; fail=1; }
allowed() {
    case $1 in
    graph) echo "graph" ;;
    kernels_cpu) echo "graph kernels_cpu" ;;
    kernels_cuda) echo "graph kernels_cuda" ;;
    io) echo "graph io" ;;
    planner) echo "graph planner" ;;
    jobs) echo "graph io kernels_cpu kernels_cuda jobs" ;;
    tools) echo "graph io kernels_cpu kernels_cuda planner jobs tools" ;;
    esac
}
# header pattern -> files (regular expression) that may include it
third_party='liburing\.h ^io/uring\.c$
jansson\.h ^(io|planner|tools)/
pcre2\.h ^io/
utf8proc\.h ^io/
hwloc(/.*)?\.h ^jobs/topology\.c$
ck_.*\.h ^jobs/(ring|park)\.c$
cuda.*\.h ^(kernels_cuda/|jobs/lane_cuda[a-z_]*\.[ch]$)
microhttpd\.h ^tools/'
for folder in graph kernels_cpu kernels_cuda io planner jobs tools; do
    for file in "$folder"/*.[ch] "$folder"/*.cu "$folder"/*.cuh; do
        [ -e "$file" ] || continue
        while read -r target; do
            layer=${target%%/*}
            case " graph kernels_cpu kernels_cuda io planner jobs tools tests " in
            *" $layer "*) case " $(allowed "$folder") " in *" $layer "*) ;; *) complain "$file includes $target" ;; esac ;;
            *) case $target in */*) complain "$file includes $target (not a path from the root)" ;; *) complain "$file includes \"$target\": write the path from the root" ;; esac ;;
            esac
            [ -e "$target" ] || complain "$file includes $target, which does not exist"
        done < <(sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]+"([^"]+)".*/\1/p' "$file")
        while read -r header; do
            while read -r pattern home; do
                if [[ $header =~ ^$pattern$ ]] && ! [[ $file =~ $home ]]; then complain "$file includes <$header>, whose home is $home"; fi
            done <<<"$third_party"
        done < <(sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]+<([^>]+)>.*/\1/p' "$file")
    done
done
for entry in *; do
    case $entry in graph | jobs | kernels_cuda | kernels_cpu | io | planner | tools | tests | README.md | LICENSE | CMakeLists.txt | CMakePresets.json | build) ;; *) complain "top level holds $entry" ;; esac
done
for entry in graph kernels_cpu kernels_cuda io planner jobs; do
    if grep -nE '\b(exit|printf|puts|perror)\(|fprintf\((stdout|stderr)' "$entry"/*.c 2>/dev/null | grep -v 'graph/error.c' | grep -vE '\b(snprintf|vsnprintf|_exit)\(' ; then complain "a library prints or exits"; fi
done
[ $fail = 0 ] && echo "check_layers: every arrow is right"
exit $fail

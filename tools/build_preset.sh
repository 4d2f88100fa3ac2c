# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by demo.sh and test.sh: ft_build_preset PRESET configures and builds build/PRESET, or brings it up to date.
#
# Expects the root of the checkout as working directory. On a terminal the build shows its progress; elsewhere its
# output goes to build/log/PRESET.log, whose errors are printed when something fails. Returns 1 on failure.

ft_build_preset() {
    local preset=$1 log=build/log/$1.log begin=$SECONDS fresh=()
    mkdir -p build/log
    echo "Building preset $preset in build/$preset"
    # A checkout that was moved or copied with its build folder: CMake refuses the old cache.
    if [ -e "build/$preset/CMakeCache.txt" ] &&
        ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "build/$preset/CMakeCache.txt"; then
        fresh=(--fresh)
    fi
    if ! cmake --preset "$preset" ${fresh[@]+"${fresh[@]}"} >"$log" 2>&1; then
        cat "$log" >&2
        echo "Configuring preset $preset failed" >&2
        return 1
    fi
    if [ -t 1 ]; then
        cmake --build --preset "$preset" || return 1
    elif ! cmake --build --preset "$preset" >"$log" 2>&1; then
        grep -v '^\[[0-9]*/[0-9]*\] ' "$log" | tail -n 60 >&2
        echo "Building preset $preset failed (log: $log)" >&2
        return 1
    fi
    echo "Built preset $preset in $((SECONDS - begin)) s"
}

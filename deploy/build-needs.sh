# Sourced: makes sure that what the build needs is there (a C compiler and cmake, for zlib-ng, zstd and pcre2; Rust).
need_package() { # command, Debian package
    command -v "$1" > /dev/null && return
    if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
        apt-get install -y -qq "$2" > /dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq "$2" > /dev/null; } >&2
    else
        echo "please install $2 (for the command $1) and start again" >&2
        exit 1
    fi
}
need_package cmake cmake
need_package cc gcc
need_package c++ g++
command -v cargo > /dev/null || { echo "please install Rust 1.95 or later with rustup and start again" >&2; exit 1; }

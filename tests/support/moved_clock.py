"""A library that moves the wall clock of a process that preloads it, and never the machine's clock."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long offset(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("CLOCK_OFFSET_FILE"), "r");
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (clock == CLOCK_REALTIME) time->tv_sec += offset();
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def compile_clock(folder: Path) -> dict[str, str] | None:
    """The environment of a process whose clock is that of the machine plus the seconds in `folder`/offset.

    None: there is no C compiler.
    """
    source, library, offset = (folder / name for name in ("clock.c", "clock.so", "offset"))
    source.write_text(SOURCE)
    offset.write_text("0")
    try:
        done = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}

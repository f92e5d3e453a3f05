/* The wall clock of a program that is started with this library in LD_PRELOAD is CLOCK_AHEAD seconds
   ahead. Waiting, which other clocks measure, is not changed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t ahead(void) {
    const char *seconds = getenv("CLOCK_AHEAD");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*original)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = original(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += ahead();
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int (*original)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = original(now, zone);
    if (!failed) {
        now->tv_sec += ahead();
    }
    return failed;
}

time_t time(time_t *now) {
    struct timespec current;
    clock_gettime(CLOCK_REALTIME, &current);
    if (now) {
        *now = current.tv_sec;
    }
    return current.tv_sec;
}

/* Makes every fdatasync and fsync of a program longer by FLETCH_BENCH_SYNC_US microseconds: a slower disk.
   bench-lease compiles it, and loads it into a server with LD_PRELOAD. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void wait_longer(void) {
    const char *us = getenv("FLETCH_BENCH_SYNC_US");
    long n = us ? atol(us) : 0;
    struct timespec rest = {n / 1000000, n % 1000000 * 1000};
    while (n > 0 && nanosleep(&rest, &rest)) {
    }
}

int fdatasync(int fd) {
    wait_longer();
    return (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd) {
    wait_longer();
    return (int)syscall(SYS_fsync, fd);
}

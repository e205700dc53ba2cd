/* Makes the fake NCCL hang as a real one does: preloaded before libfakecuda.so, it lets the first
 * HANG_AFTER all-reduces of a process through. A later one returns at once and never completes, so
 * that PyTorch's watchdog sees a collective whose peer does not come. ncclCommAbort ends the hang.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#define NOT_READY 600 /* cudaErrorNotReady */

static volatile int calls, hangs, aborted;

int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, void *comm,
                  void *stream)
{
    if (++calls > atoi(getenv("HANG_AFTER")) && !aborted) {
        hangs = 1;
        return 0;
    }
    int (*next)(const void *, void *, size_t, int, int, void *, void *) =
        dlsym(RTLD_NEXT, "ncclAllReduce");
    return next(in, out, count, type, op, comm, stream);
}

int cudaEventQuery(void *event)
{
    int (*next)(void *) = dlsym(RTLD_NEXT, "cudaEventQuery");
    return hangs ? NOT_READY : next(event);
}

int cudaDeviceSynchronize(void)
{
    int (*next)(void) = dlsym(RTLD_NEXT, "cudaDeviceSynchronize");
    while (hangs)
        usleep(1000);
    return next();
}

int ncclCommAbort(void *comm)
{
    int (*next)(void *) = dlsym(RTLD_NEXT, "ncclCommAbort");
    aborted = 1;
    hangs = 0;
    return next(comm);
}

/* What cuda.c and nccl.c share. See README.md for what is faked and why. */
#include <stdatomic.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* What is counted, in each process since its start */
enum {
    STREAM_SYNC,
    EVENT_SYNC,
    DEVICE_SYNC,
    MEMCPY_SYNC,
    H2D_PAGEABLE,
    H2D_PINNED,
    D2H_PAGEABLE,
    D2H_PINNED,
    D2D,
    LAUNCH,
    NCCL,
    STREAM_WAIT_EVENT,
    CUDA_MALLOC,
    SET_DEVICE,
    COUNTERS
};

extern atomic_long counters[COUNTERS];

/* Print a line if FAKE_TRACE is set */
void trace(const char *text);

/* The calling thread's device; each thread begins on device 0, as with CUDA */
extern __thread int current;

/* An allocation: the kind of its memory, and the device that was current when it was made */
enum { UNKNOWN, DEVICE, PINNED };

struct region {
    char *start;
    size_t size;
    int device;
    int kind;
};

/* The allocation that an address lies in; its start is NULL if there is none */
struct region find_region(const void *address);

static inline size_t round_up(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

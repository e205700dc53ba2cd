/* A fake of NCCL between processes of one machine, through shared memory.
 *
 * Every call does its work before it returns. Reductions are done in float64. A missing rank is
 * waited for forever, unless another thread aborts the communicator.
 *
 * As the real NCCL does, it refuses two ranks on one card of one host. NCCL_HOSTID names the host,
 * so ranks with different values can share a card.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---- Types, as in nccl.h 2.29: that wheel is 206 MB ---- */

typedef struct ncclComm *ncclComm_t;
typedef struct ncclConfig ncclConfig_t; /* passed by pointer and never read */

typedef struct {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
} ncclResult_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
} ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
} ncclDataType_t;

/* ---- A communicator: one shared segment ----
 *
 * The segment holds its head, then a chunk for each rank (collectives), then a chunk for each
 * pair of ranks (a mailbox for send and recv). Longer buffers go through chunk by chunk.
 */

#define CHUNK ((size_t)1 << 20)
#define MAX_RANKS 64

struct place {
    char host[256]; /* of NCCL_HOSTID */
    int card;       /* the PCI bus */
};

struct head {
    atomic_int arrived;    /* ranks that wait at the barrier */
    atomic_int generation; /* barriers passed */
    atomic_int members;
    atomic_long full[MAX_RANKS * MAX_RANKS]; /* mailbox [sender * ranks + receiver] */
    struct place places[MAX_RANKS];
};

struct ncclComm {
    int rank;
    int ranks;
    int device;
    int aborted;
    struct head *head;
    char *chunks;
    char *mailboxes;
};

static void nap(void)
{
    struct timespec duration = {0, 20000};
    nanosleep(&duration, NULL);
}

static size_t at_most_a_chunk(size_t size)
{
    return size < CHUNK ? size : CHUNK;
}

static char *chunk_of(ncclComm_t comm, int rank)
{
    return comm->chunks + rank * CHUNK;
}

/* Returns 1 if the communicator was aborted while its rank waited */
static int barrier(ncclComm_t comm)
{
    struct head *head = comm->head;
    int generation = head->generation;
    if (++head->arrived == comm->ranks) {
        head->arrived = 0;
        head->generation++;
        return 0;
    }
    while (head->generation == generation) {
        if (comm->aborted)
            return 1;
        nap();
    }
    return 0;
}

static char last_error[160] = "fake nccl";

static struct place own_place(void)
{
    struct place own = {0};
    struct cudaDeviceProp card;
    const char *host = getenv("NCCL_HOSTID");
    cudaGetDeviceProperties(&card, current);
    own.card = card.pciBusID;
    snprintf(own.host, sizeof own.host, "%s", host ? host : "this host");
    return own;
}

static int same_place(const struct place *a, const struct place *b)
{
    return a->card == b->card && !strcmp(a->host, b->host);
}

/* Every rank checks all ranks: one that stayed would wait forever for those that are refused. */
static ncclResult_t refuse_duplicates(ncclComm_t comm)
{
    struct place *places = comm->head->places;
    for (int a = 0; a < comm->ranks; a++) {
        for (int b = a + 1; b < comm->ranks; b++) {
            if (same_place(&places[a], &places[b])) {
                snprintf(last_error, sizeof last_error,
                         "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", a,
                         b, places[a].card << 12);
                return ncclInvalidUsage;
            }
        }
    }
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t *result, int ranks, const char *name, int rank)
{
    ncclComm_t comm = *result = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->ranks = ranks;
    comm->device = current;

    size_t head_size = round_up(sizeof(struct head), 4096);
    size_t size = head_size + ranks * CHUNK + (size_t)ranks * ranks * CHUNK;
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (ftruncate(file, size))
        perror("[fake nccl] ftruncate");
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    comm->head = (struct head *)memory;
    comm->chunks = memory + head_size;
    comm->mailboxes = comm->chunks + ranks * CHUNK;

    comm->head->places[rank] = own_place();
    comm->head->members++;
    while (comm->head->members < ranks)
        nap();
    barrier(comm);
    if (rank == 0)
        shm_unlink(name); /* all have it mapped */

    char text[99];
    snprintf(text, sizeof text, "ncclCommInit rank %d of %d on device %d", rank, ranks, current);
    trace(text);
    return refuse_duplicates(comm);
}

/* A second communicator made from the first one, and a sum with a factor, are not supported. As a
 * stub that reports success, each would lead to a hang or to wrong numbers. */

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *split,
                                  ncclConfig_t *config)
{
    return ncclInvalidUsage;
}

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *factor, ncclDataType_t type,
                                             int where, ncclComm_t comm)
{
    return ncclInvalidUsage;
}

EXPORT ncclResult_t ncclGetVersion(int *version)
{
    *version = 22907;
    return ncclSuccess;
}

/* The id is the segment's name */
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, 60, "/fakenccl-%d-%ld%ld", getpid(), now.tv_sec, now.tv_nsec);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    return join(comm, ranks, id.internal, rank);
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t *config)
{
    return join(comm, ranks, id.internal, rank);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int id_count,
                                             ncclUniqueId *ids, ncclConfig_t *config)
{
    return join(comm, ranks, ids->internal, rank);
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    trace("ncclCommFinalize");
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    trace("ncclCommDestroy");
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    trace("ncclCommAbort");
    if (comm) /* PyTorch may abort twice: then it is NULL, which NCCL ignores */
        comm->aborted = 1;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *ranks)
{
    *ranks = comm->ranks;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result)
{
    return "fake nccl";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm)
{
    return last_error;
}

/* ---- Elements ---- */

static size_t width(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    default:
        return type >= ncclFloat8e4m3 ? 1 : 8;
    }
}

static float from_half(uint16_t bits)
{
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t to_half(float number)
{
    _Float16 value = number;
    uint16_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_bfloat(uint16_t upper)
{
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to the nearest, ties to even */
static uint16_t to_bfloat(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits += 0x7fff + ((bits >> 16) & 1);
    return bits >> 16;
}

/* uint32, uint64 and the 8-bit floats have no case: reducing them gives wrong numbers */
static double get_element(const void *p, size_t i, ncclDataType_t type)
{
    switch (type) {
    case ncclFloat64:
        return ((double *)p)[i];
    case ncclFloat32:
        return ((float *)p)[i];
    case ncclFloat16:
        return from_half(((uint16_t *)p)[i]);
    case ncclBfloat16:
        return from_bfloat(((uint16_t *)p)[i]);
    case ncclInt64:
        return ((int64_t *)p)[i];
    case ncclInt32:
        return ((int32_t *)p)[i];
    case ncclUint8:
        return ((uint8_t *)p)[i];
    default:
        return ((int8_t *)p)[i];
    }
}

static void put_element(void *p, size_t i, ncclDataType_t type, double value)
{
    switch (type) {
    case ncclFloat64:
        ((double *)p)[i] = value;
        break;
    case ncclFloat32:
        ((float *)p)[i] = value;
        break;
    case ncclFloat16:
        ((uint16_t *)p)[i] = to_half(value);
        break;
    case ncclBfloat16:
        ((uint16_t *)p)[i] = to_bfloat(value);
        break;
    case ncclInt64:
        ((int64_t *)p)[i] = value;
        break;
    case ncclInt32:
        ((int32_t *)p)[i] = value;
        break;
    case ncclUint8:
        ((uint8_t *)p)[i] = value;
        break;
    default:
        ((int8_t *)p)[i] = value;
    }
}

/* ---- Collectives ---- */

/* Whether a buffer is not in the memory of the communicator's device */
static int misplaced(const void *buffer, ncclComm_t comm, size_t count)
{
    struct region r = find_region(buffer);
    int wrong = count && (r.kind != DEVICE || r.device != comm->device);
    if (wrong)
        fprintf(stderr, "[fake nccl] BAD BUFFER comm-dev %d buf-dev %d kind %d\n", comm->device,
                r.device, r.kind);
    return wrong;
}

/* Counts the call, and refuses a misplaced buffer */
static ncclResult_t check(const void *buffer, ncclComm_t comm, const char *call, size_t count)
{
    struct region r = find_region(buffer);
    char text[160];
    counters[NCCL]++;
    snprintf(text, sizeof text, "%s count %zu comm-dev %d buf-dev %d kind %d", call, count,
             comm->device, r.device, r.kind);
    trace(text);
    return misplaced(buffer, comm, count) ? ncclInvalidArgument : ncclSuccess;
}

static double reduce_element(ncclComm_t comm, size_t i, ncclDataType_t type, ncclRedOp_t op)
{
    double result = get_element(comm->chunks, i, type);
    for (int rank = 1; rank < comm->ranks; rank++) {
        double value = get_element(chunk_of(comm, rank), i, type);
        switch (op) {
        case ncclProd:
            result *= value;
            break;
        case ncclMax:
            result = result > value ? result : value;
            break;
        case ncclMin:
            result = result < value ? result : value;
            break;
        default: /* sum, average, and the operations that an application defines */
            result += value;
        }
    }
    return op == ncclAvg ? result / comm->ranks : result;
}

/* Each rank computes the whole result for itself, in float64; root -1 stands for all ranks */
static ncclResult_t reduce(ncclComm_t comm, const void *in, void *out, size_t count,
                           ncclDataType_t type, ncclRedOp_t op, int root)
{
    size_t size = width(type);
    size_t room = CHUNK / size;
    for (size_t done = 0; done < count; done += room) {
        size_t now = count - done < room ? count - done : room;
        memcpy(chunk_of(comm, comm->rank), (char *)in + done * size, now * size);
        if (barrier(comm))
            return ncclUnhandledCudaError;
        if (root < 0 || root == comm->rank)
            for (size_t i = 0; i < now; i++)
                put_element((char *)out + done * size, i, type,
                            reduce_element(comm, i, type, op));
        if (barrier(comm))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    if (check(in, comm, "allReduce", count) || misplaced(out, comm, count))
        return ncclInvalidArgument;
    return reduce(comm, in, out, count, type, op, -1);
}

EXPORT ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    if (check(in, comm, "reduce", count) || (comm->rank == root && misplaced(out, comm, count)))
        return ncclInvalidArgument;
    return reduce(comm, in, out, count, type, op, root);
}

EXPORT ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    if (check(in, comm, "reduceScatter", count) || misplaced(out, comm, count))
        return ncclInvalidArgument;
    size_t bytes = count * width(type);
    char *all = malloc(bytes * comm->ranks);
    ncclResult_t result = reduce(comm, in, all, count * comm->ranks, type, op, -1);
    memcpy(out, all + bytes * comm->rank, bytes);
    free(all);
    return result;
}

EXPORT ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type,
                                  int root, ncclComm_t comm, cudaStream_t stream)
{
    if (check(out, comm, "broadcast", count))
        return ncclInvalidArgument;
    size_t bytes = count * width(type);
    for (size_t done = 0; done < bytes; done += CHUNK) {
        size_t now = at_most_a_chunk(bytes - done);
        if (comm->rank == root)
            memcpy(comm->chunks, (char *)in + done, now);
        if (barrier(comm))
            return ncclUnhandledCudaError;
        memmove((char *)out + done, comm->chunks, now);
        if (barrier(comm))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream)
{
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream)
{
    if (check(in, comm, "allGather", count) || misplaced(out, comm, count))
        return ncclInvalidArgument;
    size_t bytes = count * width(type);
    for (size_t done = 0; done < bytes; done += CHUNK) {
        size_t now = at_most_a_chunk(bytes - done);
        memcpy(chunk_of(comm, comm->rank), (char *)in + done, now);
        if (barrier(comm))
            return ncclUnhandledCudaError;
        for (int rank = 0; rank < comm->ranks; rank++)
            memcpy((char *)out + rank * bytes + done, chunk_of(comm, rank), now);
        if (barrier(comm))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

/* ---- Send and receive: queued within a group, run together at its end ---- */

struct transfer {
    int sends;
    char *buffer;
    size_t bytes;
    size_t done;
    int peer;
    ncclComm_t comm;
};

static __thread struct transfer queue[4096];
static __thread int queued;
static __thread int group_depth;

/* Move one chunk if the mailbox allows it; returns 1 once the transfer is complete */
static int advance(struct transfer *t)
{
    if (t->done >= t->bytes)
        return 1;
    ncclComm_t comm = t->comm;
    int sender = t->sends ? comm->rank : t->peer;
    int receiver = t->sends ? t->peer : comm->rank;
    int box = sender * comm->ranks + receiver;
    atomic_long *full = &comm->head->full[box];
    char *mailbox = comm->mailboxes + box * CHUNK;
    size_t now = at_most_a_chunk(t->bytes - t->done);
    if (t->sends && !*full) {
        memcpy(mailbox, t->buffer + t->done, now);
        *full = 1;
        t->done += now;
    } else if (!t->sends && *full) {
        memcpy(t->buffer + t->done, mailbox, now);
        *full = 0;
        t->done += now;
    }
    return t->done >= t->bytes;
}

static ncclResult_t run_queue(void)
{
    int left = 1;
    while (left) {
        left = 0;
        for (int i = 0; i < queued; i++) {
            if (queue[i].comm->aborted) {
                queued = 0;
                return ncclUnhandledCudaError;
            }
            left += !advance(&queue[i]);
        }
        if (left)
            nap();
    }
    queued = 0;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream)
{
    if (check(buffer, comm, "send", count))
        return ncclInvalidArgument;
    queue[queued++] = (struct transfer){1, (char *)buffer, count * width(type), 0, peer, comm};
    return group_depth ? ncclSuccess : run_queue();
}

EXPORT ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream)
{
    if (check(buffer, comm, "recv", count))
        return ncclInvalidArgument;
    queue[queued++] = (struct transfer){0, buffer, count * width(type), 0, peer, comm};
    return group_depth ? ncclSuccess : run_queue();
}

EXPORT ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void)
{
    return --group_depth ? ncclSuccess : run_queue();
}

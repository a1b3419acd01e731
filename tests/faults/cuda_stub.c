/* A libcuda.so.1 for tests: what the doctor's survey and the child that asks CUDA's order call, then streams and
 * copies, then memory pools.
 *
 * CUDA_STUB_INIT is cuInit's code, CUDA_STUB_COUNT the number of GPUs, CUDA_STUB_DOES what cuInit does before it
 * returns: crash or hang. CUDA_STUB_VERSION is the driver's CUDA. GPU 1 cannot reach GPU 0's memory. If CUDA_STUB_UUIDS is
 * set, it has the UUIDs of the GPUs (none: CUDA_ERROR_NO_DEVICE), and no device is counted before cuInit.
 * CUDA_STUB_INTEGRATED=1: they use the machine's memory; CUDA_STUB_TOTAL and _FREE are MiB, of each. CUDA_STUB_IDLE=1:
 * all work is done at once, else when somebody waits for it. CUDA_STUB_POOLS=0: it has no memory pools. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int started;

/* The start of the UUID of GPU `device` in CUDA_STUB_UUIDS; 0 if it is not there. */
static const char *listed(int device) {
    const char *uuid = getenv("CUDA_STUB_UUIDS");
    while (uuid && *uuid && device--) {
        uuid = strchr(uuid, ',');
        if (uuid) uuid++;
    }
    return uuid && *uuid ? uuid : 0;
}

int cuDriverGetVersion(int *version) { *version = number("CUDA_STUB_VERSION", 13000); return 0; }

int cuInit(unsigned flags) {
    const char *does = getenv("CUDA_STUB_DOES");
    (void)flags;
    if (does && !strcmp(does, "crash")) *(volatile int *)0 = 1;
    if (does && !strcmp(does, "hang")) for (;;) pause();
    if (getenv("CUDA_STUB_UUIDS") && !listed(0)) return 100;
    started = number("CUDA_STUB_INIT", 0) == 0;
    return number("CUDA_STUB_INIT", 0);
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 0 ? "CUDA_SUCCESS" : code == 100 ? "CUDA_ERROR_NO_DEVICE"
        : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return *name ? 0 : 1;
}

int cuDeviceGetCount(int *count) {
    *count = number("CUDA_STUB_COUNT", 2);
    if (!getenv("CUDA_STUB_UUIDS")) return 0;
    for (*count = 0; listed(*count); ++*count);
    return started ? 0 : 3; /* CUDA_ERROR_NOT_INITIALIZED */
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid_v2(unsigned char *out, int device) {
    memset(out, 17 * (device + 1), 16);
    const char *uuid = listed(device);
    if (!uuid) return 0;
    uuid += strlen("GPU-");
    for (int i = 0; i < 16; i++, uuid += 2) {
        unsigned byte;
        if (*uuid == '-') uuid++;
        sscanf(uuid, "%2x", &byte);
        out[i] = (unsigned char)byte;
    }
    return 0;
}
int cuDeviceTotalMem_v2(size_t *out, int device) {
    *out = getenv("CUDA_STUB_TOTAL") ? (size_t)number("CUDA_STUB_TOTAL", 0) << 20 : (size_t)(device + 1) << 30;
    return 0;
}
int cuDeviceCanAccessPeer(int *out, int device, int peer) { *out = device == 0 && peer == 1; return 0; }

int cuDeviceGetName(char *out, int size, int device) {
    snprintf(out, (size_t)size, device ? "NVIDIA H200 MIG 1g.18gb" : "NVIDIA H200");
    return 0;
}

int cuDeviceGetAttribute(int *out, int which, int device) {
    *out = which == 16 ? 132 : which == 18 ? number("CUDA_STUB_INTEGRATED", 0) : which == 75 ? 9 : which == 115 ? number("CUDA_STUB_POOLS", 1) : 0;
    return device > 1;
}

/* Streams and copies. Every call is recorded, and stub_fail makes calls of a name fail. A stream's work is over when
 * stub_finish says so. */
#define CALLS 64
enum { EVENTS = 4096, DEEP = 64, NOT_READY = 600, INVALID = 1, NO_CONTEXT = 201 };
static char asked[CALLS][40], failing[40];
static int asked_count, fail_code, fail_left;
static int live_events, live_pinned, live_streams, mode;
#ifndef PER_THREAD
#define PER_THREAD /* one stack of contexts for all threads, unless it is built otherwise */
#endif
static PER_THREAD int depth;
static PER_THREAD void *stack[DEEP];
static char event_state[EVENTS]; /* 0 none, 1 made, 2 recorded and under way, 3 over */

static int call(const char *name) {
    if (asked_count < CALLS) snprintf(asked[asked_count++], sizeof *asked, "%s", name);
    if (fail_left && !strcmp(name, failing)) return fail_left--, fail_code;
    return 0;
}
#define CALL(name) do { int code_ = call(name); if (code_) return code_; } while (0)

void stub_fail(const char *name, int code, int times) {
    snprintf(failing, sizeof failing, "%s", name);
    fail_code = code;
    fail_left = times;
}
void stub_forget(void) { asked_count = 0; fail_left = 0; }
const char *stub_asked(int number) { return number < asked_count ? asked[number] : 0; }
void stub_finish(void) { for (int i = 1; i < EVENTS; i++) if (event_state[i] == 2) event_state[i] = 3; }
int stub_live(int what) { return what == 0 ? live_events : what == 1 ? live_pinned : what == 2 ? live_streams : depth; }
int stub_mode(void) { return mode; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    CALL("cuDevicePrimaryCtxGetState");
    *flags = 0;
    *active = device == 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    *out = (void *)(0x7f0000001000 + device); /* above 32 bits: a handle that is cut is not this one */
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxGetDevice(int *out) { CALL("cuCtxGetDevice"); if (!depth) return NO_CONTEXT; *out = 0; return 0; }
int cuCtxGetCurrent(void **out) { CALL("cuCtxGetCurrent"); *out = depth ? stack[depth - 1] : 0; return 0; }
int cuCtxPushCurrent_v2(void *context) {
    CALL("cuCtxPushCurrent_v2");
    if (((size_t)context & ~0xfffUL) != 0x7f0000001000 || depth == DEEP) return INVALID;
    stack[depth++] = context;
    return 0;
}
int cuCtxPopCurrent_v2(void **out) { if (!depth) return NO_CONTEXT; *out = stack[--depth]; return 0; }
int cuCtxSynchronize(void) { CALL("cuCtxSynchronize"); if (!depth) return NO_CONTEXT; stub_finish(); return 0; }
int cuThreadExchangeStreamCaptureMode(int *wanted) {
    CALL("cuThreadExchangeStreamCaptureMode");
    int before = mode;
    mode = *wanted;
    *wanted = before;
    return 0;
}

static int streams_idle;
void stub_idle(int now) { streams_idle = now; }
static int idle(void) { return streams_idle || number("CUDA_STUB_IDLE", 0); }

static int number_of(void *event) {
    size_t at = (size_t)event - 0x7f0000100000;
    return at % 64 == 0 && at / 64 > 0 && at / 64 < EVENTS && event_state[at / 64] ? (int)(at / 64) : 0;
}
int cuEventCreate(void **out, unsigned flags) {
    CALL("cuEventCreate");
    if (!depth || flags != 2) return depth ? INVALID : NO_CONTEXT;
    for (int i = 1; i < EVENTS; i++) if (!event_state[i]) {
        event_state[i] = 1;
        live_events++;
        *out = (void *)(0x7f0000100000 + 64 * (size_t)i);
        return 0;
    }
    return 2;
}
int cuEventDestroy_v2(void *event) {
    CALL("cuEventDestroy_v2");
    int i = number_of(event);
    if (!i) return INVALID;
    event_state[i] = 0;
    live_events--;
    return 0;
}
static int record(void *event) {
    int i = number_of(event);
    if (!i) return INVALID;
    event_state[i] = idle() ? 3 : 2;
    return 0;
}
int cuEventRecord(void *event, void *stream) { (void)stream; CALL("cuEventRecord"); return record(event); }
#ifndef OLD_DRIVER
int cuCtxRecordEvent(void *context, void *event) {
    CALL("cuCtxRecordEvent");
    return ((size_t)context & ~0xfffUL) == 0x7f0000001000 ? record(event) : INVALID;
}
#endif
int cuEventQuery(void *event) {
    CALL("cuEventQuery");
    int i = number_of(event);
    return !i ? INVALID : event_state[i] == 2 ? NOT_READY : 0;
}
int cuEventSynchronize(void *event) {
    CALL("cuEventSynchronize");
    int i = number_of(event);
    if (!i) return INVALID;
    event_state[i] = 3;
    return 0;
}
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    CALL("cuStreamWaitEvent");
    if ((size_t)stream <= 2 && !depth) return NO_CONTEXT;
    return flags == 0 && number_of(event) ? 0 : INVALID;
}
int cuStreamIsCapturing(void *stream, int *out) {
    CALL("cuStreamIsCapturing");
    *out = (size_t)stream == 0x7f0000ca0000;
    return 0;
}
int cuStreamQuery(void *stream) {
    CALL("cuStreamQuery");
    if ((size_t)stream <= 2 && !depth) return NO_CONTEXT;
    if ((size_t)stream == 0x7f0000ca0000) return 900; /* a captured one: asking ends the capture */
    return idle() ? 0 : NOT_READY;
}
/* What is weak tests/native/memory_stub.c, which keeps count of memory, has its own of. */
__attribute__((weak)) int cuPointerGetAttribute(void *out, int which, unsigned long long address) {
    CALL("cuPointerGetAttribute");
    if (address < 0x1000) return INVALID;
    if (which == 9) *(int *)out = 0;
    else *(void **)out = (void *)0x7f0000001000;
    return 0;
}

__attribute__((weak)) int cuMemGetInfo_v2(size_t *free, size_t *total) {
    CALL("cuMemGetInfo_v2");
    if (!depth) return NO_CONTEXT;
    *free = (size_t)number("CUDA_STUB_FREE", 1024) << 20;
    return cuDeviceTotalMem_v2(total, 0);
}
__attribute__((weak)) int cuMemcpy(unsigned long long to, unsigned long long from, size_t size) {
    CALL("cuMemcpy");
    memcpy((void *)to, (void *)from, size);
    return 0;
}
__attribute__((weak)) int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t size, void *stream) {
    CALL("cuMemcpyAsync");
    if ((size_t)stream <= 2 && !depth) return NO_CONTEXT;
    memcpy((void *)to, (void *)from, size);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream) {
    CALL("cuMemcpyDtoHAsync_v2");
    if ((size_t)stream != 0x7f0000500000) return INVALID;
    memcpy(to, (void *)from, size);
    return 0;
}
int cuStreamCreate(void **out, unsigned flags) {
    CALL("cuStreamCreate");
    if (flags > 1) return INVALID;
    live_streams++;
    *out = (void *)0x7f0000500000;
    return 0;
}
int cuStreamDestroy_v2(void *stream) { CALL("cuStreamDestroy_v2"); if (!stream) return INVALID; live_streams--; return 0; }
int cuStreamSynchronize(void *stream) { (void)stream; CALL("cuStreamSynchronize"); return 0; }
int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    CALL("cuMemHostAlloc");
    if (flags) return INVALID;
    *out = malloc(size);
    live_pinned++;
    return 0;
}
int cuMemFreeHost(void *address) { CALL("cuMemFreeHost"); free(address); live_pinned--; return 0; }

/* Memory pools of GPU 0. CUmemPoolProps as in cuda.h (CUDA 13.0). */
struct pool_props {
    int allocType, handleTypes, location_type, location_id;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
};
static struct pool { size_t max; unsigned long long threshold, reserved, peak, used; } pools[8];
static int made_pools = 1, live_pools, current_pool; /* pool 0 is the default one */
#define POOL(number) ((void *)(0x7f0000b00000 + 64 * (size_t)(number)))

static struct pool *pool_of(void *pool) {
    size_t at = (size_t)pool - 0x7f0000b00000;
    return at % 64 == 0 && at / 64 < (size_t)made_pools ? &pools[at / 64] : 0;
}
int stub_pools(void) { return live_pools; }
int stub_current_pool(void) { return current_pool; }
unsigned long long stub_pool_max(int pool) { return pools[pool].max; }
unsigned long long stub_pool_threshold(int pool) { return pools[pool].threshold; }
void stub_pool_use(int pool, unsigned long long reserved, unsigned long long used) {
    pools[pool].reserved = reserved;
    pools[pool].used = used;
    if (reserved > pools[pool].peak) pools[pool].peak = reserved;
}

int cuDeviceGetMemPool(void **out, int device) {
    CALL("cuDeviceGetMemPool");
    *out = POOL(current_pool);
    return device ? 101 : 0;
}
int cuDeviceGetDefaultMemPool(void **out, int device) {
    CALL("cuDeviceGetDefaultMemPool");
    *out = POOL(0);
    return device ? 101 : 0;
}
int cuDeviceSetMemPool(int device, void *pool) {
    CALL("cuDeviceSetMemPool");
    if (device || !pool_of(pool)) return INVALID;
    current_pool = (int)(pool_of(pool) - pools);
    return 0;
}
int cuMemPoolCreate(void **out, const struct pool_props *props) {
    static const unsigned char zeros[54];
    CALL("cuMemPoolCreate");
    if (props->allocType != 1 || props->handleTypes || props->location_type != 1 || props->location_id) return INVALID;
    if (props->win32SecurityAttributes || props->usage || memcmp(props->reserved, zeros, sizeof zeros)) return INVALID;
    pools[made_pools].max = props->maxSize;
    *out = POOL(made_pools++);
    live_pools++;
    return 0;
}
int cuMemPoolDestroy(void *pool) { CALL("cuMemPoolDestroy"); if (!pool_of(pool)) return INVALID; live_pools--; return 0; }
int cuMemPoolSetAttribute(void *pool, int which, unsigned long long *value) {
    CALL("cuMemPoolSetAttribute");
    if (!pool_of(pool) || which != 4) return INVALID;
    pool_of(pool)->threshold = *value;
    return 0;
}
int cuMemPoolGetAttribute(void *pool, int which, unsigned long long *value) {
    struct pool *found = pool_of(pool);
    CALL("cuMemPoolGetAttribute");
    if (!found || which < 4 || which > 7) return INVALID;
    *value = which == 4 ? found->threshold : which == 5 ? found->reserved : which == 6 ? found->peak : found->used;
    return 0;
}
/* Pools grow in pieces of 32 MiB, up to their size. No address is given out twice, and nothing may be read from one. */
enum { BLOCKS = 8192 };
static struct { unsigned long long at; size_t size; int pool; } blocks[BLOCKS];
static unsigned long long next_block = 0x7e0000000000;
int stub_blocks(void) {
    int live = 0;
    for (int i = 0; i < BLOCKS; i++) live += blocks[i].size > 0;
    return live;
}
int cuMemAllocFromPoolAsync(unsigned long long *out, size_t size, void *pool, void *stream) {
    const unsigned long long piece = 32 << 20;
    struct pool *found = pool_of(pool);
    (void)stream;
    CALL("cuMemAllocFromPoolAsync");
    if (!found || !size || !depth) return depth ? INVALID : NO_CONTEXT;
    if (found->max && found->used + size > found->max) return 2;
    for (int i = 0; i < BLOCKS; i++) if (!blocks[i].size) {
        blocks[i].at = *out = next_block;
        blocks[i].size = size;
        blocks[i].pool = (int)(found - pools);
        next_block += (size + 511) / 512 * 512;
        found->used += size;
        if (found->used > found->reserved) found->reserved = (found->used + piece - 1) / piece * piece;
        if (found->max && found->reserved > found->max) found->reserved = found->max;
        if (found->reserved > found->peak) found->peak = found->reserved;
        return 0;
    }
    return 2;
}
int cuMemFreeAsync(unsigned long long at, void *stream) {
    (void)stream;
    CALL("cuMemFreeAsync");
    for (int i = 0; i < BLOCKS; i++) if (blocks[i].size && blocks[i].at == at) {
        pools[blocks[i].pool].used -= blocks[i].size;
        blocks[i].size = 0;
        return 0;
    }
    return INVALID;
}
int cuMemPoolTrimTo(void *pool, size_t keep) {
    CALL("cuMemPoolTrimTo");
    struct pool *found = pool_of(pool);
    if (!found) return INVALID;
    if (found->reserved > keep) found->reserved = found->used > keep ? found->used : keep;
    return 0;
}

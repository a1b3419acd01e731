/* Memory for the stub of libcuda (tests/faults/cuda_stub.c): addresses that nothing may be read from. The driver gives
 * out whole pages of 2 MiB here, of a GPU of CUDA_STUB_MIB MiB, and takes back what it gave. */
#include <stdlib.h>

enum { PIECES = 8192 };
static const size_t page = 2 << 20;
static struct { unsigned long long at, id; size_t pages; void *context; } pieces[PIECES];
static int used; /* no piece of a higher number has been given out */
static size_t taken, most;
static unsigned long long next = 0x7f1000000000, ids;

int cuCtxGetCurrent(void **context);
static void *current(void) { void *found = 0; cuCtxGetCurrent(&found); return found; }

static size_t total(void) {
    const char *mib = getenv("CUDA_STUB_MIB");
    return (mib ? strtoull(mib, 0, 10) : 1024) / 2;
}
/* Bytes that the driver has handed out, now and at most since `stub_level`. */
size_t stub_taken(void) { return taken * page; }
size_t stub_most(void) { return most * page; }
void stub_level(void) { most = taken; }

int cuMemAlloc_v2(unsigned long long *out, size_t size) {
    size_t pages = (size + page - 1) / page;
    if (!size) return 1;
    if (taken + pages > total()) return 2;
    for (int i = 0; i < PIECES; i++) if (!pieces[i].pages) {
        if (i >= used) used = i + 1;
        pieces[i].at = *out = next;
        pieces[i].id = ++ids;
        pieces[i].pages = pages;
        pieces[i].context = current();
        taken += pages;
        if (taken > most) most = taken;
        next += pages * page;
        return 0;
    }
    return 2;
}
static void give_back(int i) { taken -= pieces[i].pages; pieces[i].pages = 0; }
static void destroy(void *context) {
    for (int i = 0; i < used; i++) if (pieces[i].pages && pieces[i].context == context) give_back(i);
}
int cuMemFree_v2(unsigned long long at) {
    for (int i = 0; i < used; i++) if (pieces[i].pages && pieces[i].at == at) return give_back(i), 0;
    return 1;
}
/* 7 is the id of the allocation, 9 the device's ordinal, 1 the context. */
int cuPointerGetAttribute(void *out, int which, unsigned long long at) {
    if (which == 9) return *(int *)out = 0;
    for (int i = 0; i < used; i++) if (pieces[i].pages && pieces[i].at == at) {
        if (which == 7) *(unsigned long long *)out = pieces[i].id;
        else *(void **)out = pieces[i].context;
        return 0;
    }
    return 1;
}
int cuMemAllocPitch_v2(unsigned long long *out, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 511) / 512 * 512;
    return cuMemAlloc_v2(out, *pitch * height);
}
int cuMemGetInfo_v2(size_t *free_, size_t *all) {
    *all = total() * page;
    *free_ = *all - taken * page;
    return 0;
}
int cuMemcpy(unsigned long long to, unsigned long long from, size_t size) {
    (void)to; (void)from; (void)size;
    return 0;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t size, void *stream) {
    (void)stream;
    return cuMemcpy(to, from, size);
}
int cuGetErrorString(int code, const char **out) { *out = code == 2 ? "out of memory" : "an error"; return 0; }
int cuCtxGetApiVersion(void *context, unsigned *version) { (void)context; *version = 13000; return 0; }
int cuDeviceComputeCapability(int *major, int *minor, int device) { (void)device; *major = 9; *minor = 0; return 0; }

/* A context beside the primary one. It is pushed, as the driver does it. Each has the handle of the one before it, and
 * another id. A driver of CUDA 11 gives no ids. */
enum { PRIMARY = 1, FIRST_ID = 8 };
static unsigned long long primary_id = PRIMARY, made_id = FIRST_ID;
static void *const made = (void *)0x7f0000001800;

int cuCtxGetId(void *context, unsigned long long *id) {
    const char *version = getenv("CUDA_STUB_VERSION");
    if (version && atoi(version) < 12000) return 801;
    if (!context) context = current();
    if (!context) return 201;
    *id = context == made ? made_id : primary_id + ((size_t)context & 7);
    return 0;
}
/* As cuDevicePrimaryCtxReset of GPU 0 and the next cuDevicePrimaryCtxRetain, whatever they do to the id. */
void stub_reset(int another_id) {
    destroy((void *)0x7f0000001000);
    if (another_id) primary_id = ++made_id;
}

int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
static int make(void **out) { made_id++; *out = made; return cuCtxPushCurrent_v2(*out); }
int cuCtxCreate_v2(void **out, unsigned flags, int device) { (void)flags; (void)device; return make(out); }
int cuCtxCreate_v4(void **out, void *params, unsigned flags, int device) {
    (void)params; (void)flags; (void)device;
    return make(out);
}
int cuCtxDestroy_v2(void *context) { destroy(context); return cuCtxPopCurrent_v2(&context); }
int cuCtxDetach(void *context) { return cuCtxDestroy_v2(context); }

/* Memory for the stub of libcuda (tests/faults/cuda_stub.c): addresses that nothing may be read from. The driver gives
 * out whole pages of 2 MiB here, of a GPU of CUDA_STUB_MIB MiB, and takes back what it gave. */
#include <stdlib.h>

enum { PIECES = 4096 };
static const size_t page = 2 << 20;
static struct { unsigned long long at; size_t pages; } pieces[PIECES];
static size_t taken;
static unsigned long long next = 0x7f1000000000;

static size_t total(void) {
    const char *mib = getenv("CUDA_STUB_MIB");
    return (mib ? strtoull(mib, 0, 10) : 1024) / 2;
}
size_t stub_taken(void) { return taken * page; }

int cuMemAlloc_v2(unsigned long long *out, size_t size) {
    size_t pages = (size + page - 1) / page;
    if (!size) return 1;
    if (taken + pages > total()) return 2;
    for (int i = 0; i < PIECES; i++) if (!pieces[i].pages) {
        pieces[i].at = *out = next;
        pieces[i].pages = pages;
        taken += pages;
        next += pages * page;
        return 0;
    }
    return 2;
}
int cuMemFree_v2(unsigned long long at) {
    for (int i = 0; i < PIECES; i++) if (pieces[i].pages && pieces[i].at == at) {
        taken -= pieces[i].pages;
        pieces[i].pages = 0;
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
int cuCtxGetApiVersion(void *context, unsigned *version) { (void)context; *version = 13000; return 0; }
int cuDeviceComputeCapability(int *major, int *minor, int device) { (void)device; *major = 9; *minor = 0; return 0; }

/* A context beside the primary one. It is pushed, as the driver does it. */
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
static int make(void **out) { *out = (void *)0x7f0000001800; return cuCtxPushCurrent_v2(*out); }
int cuCtxCreate_v2(void **out, unsigned flags, int device) { (void)flags; (void)device; return make(out); }
int cuCtxCreate_v4(void **out, void *params, unsigned flags, int device) {
    (void)params; (void)flags; (void)device;
    return make(out);
}
int cuCtxDestroy_v2(void *context) { (void)context; return cuCtxPopCurrent_v2(&context); }

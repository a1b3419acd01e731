/* The stub of cuCheckpointProcess* with what a placeholder needs beside it: one GPU, contexts, and memory without end.
 *
 * ROOM_STUB_UUID is the GPU's, 32 hexadecimal digits. */
#include "checkpoint_stub.c"

typedef unsigned long long address_t;

int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }

int cuDeviceGetUuid_v2(char out[16], int device) {
    const char *digits = getenv("ROOM_STUB_UUID");
    for (int place = 0; place < 16; place++) {
        unsigned byte = 0;
        if (!digits || sscanf(digits + 2 * place, "%2x", &byte) != 1) return 100;
        out[place] = (char)byte;
    }
    (void)device;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; (void)device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)16; return 0; }

int cuMemAlloc_v2(address_t *address, size_t size) {
    record("alloc", (int)(size >> 20));
    *address = 4096;
    return 0;
}

int cuMemFree_v2(address_t address) { (void)address; record("free", 0); return 0; }

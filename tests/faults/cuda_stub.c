/* A libcuda.so.1 for tests: what the doctor's survey asks of it. CUDA_STUB_INIT is cuInit's code, CUDA_STUB_COUNT the
 * number of GPUs, CUDA_STUB_DOES what cuInit does before it answers: crash or hang. GPU 1 cannot reach GPU 0's memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }

int cuInit(unsigned flags) {
    const char *does = getenv("CUDA_STUB_DOES");
    (void)flags;
    if (does && !strcmp(does, "crash")) *(volatile int *)0 = 1;
    if (does && !strcmp(does, "hang")) for (;;) pause();
    return number("CUDA_STUB_INIT", 0);
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 0 ? "CUDA_SUCCESS" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : 0;
    return *name ? 0 : 1;
}

int cuDeviceGetCount(int *count) { *count = number("CUDA_STUB_COUNT", 2); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid_v2(unsigned char *out, int device) { memset(out, 17 * (device + 1), 16); return 0; }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = (size_t)(device + 1) << 30; return 0; }
int cuDeviceCanAccessPeer(int *out, int device, int peer) { *out = device == 0 && peer == 1; return 0; }

int cuDeviceGetName(char *out, int size, int device) {
    snprintf(out, (size_t)size, device ? "NVIDIA H200 MIG 1g.18gb" : "NVIDIA H200");
    return 0;
}

int cuDeviceGetAttribute(int *out, int which, int device) {
    *out = which == 16 ? 132 : which == 75 ? 9 : 0;
    return device > 1;
}

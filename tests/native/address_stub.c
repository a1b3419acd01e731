/* What numba-cuda calls of the stub of libcuda beyond what PyCUDA does: cuda-bindings looks every call up by its name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);

/* The newest of the versions of a call that the stub has. */
int cuGetProcAddress_v2(const char *symbol, void **out, int version, unsigned long long flags, int *status) {
    static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
    Dl_info here;
    char name[128];
    (void)version; (void)flags;
    *out = 0;
    dladdr((void *)cuGetProcAddress_v2, &here);
    void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < 4 && !*out; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, versions[i]);
        *out = dlsym(library, name);
    }
    if (status) *status = *out ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return *out ? 0 : 500;
}
int cuCtxSetCurrent(void *context) {
    void *before;
    cuCtxPopCurrent_v2(&before);
    return context ? cuCtxPushCurrent_v2(context) : 0;
}

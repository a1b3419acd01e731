/* A libnvidia-ml.so.1 for tests: what memguard asks of NVML, answered from a scenario file that is read at every call.
 *
 * NVML_STUB names the file, lines of `key=value`: driver=, count=, init= (error code), memory_v2=, memory=, handle=,
 * mig_code=, arch_code=, processes_code=, lost= (index of a GPU that is gone, -1: none), and for the GPU of index 0:
 * uuid0=, name0=, total0=, reserved0=, used0=, mig0=, arch0=, processes0=pid:bytes,pid:na, handle0= and denied0= (error
 * codes, of its handle and its memory). slow_init=, slow_memory=, slow_processes= are milliseconds; fail= of 1,000 calls
 * fail, which ones is up to seed=. utilization0=pid:stamp:percent,… and utilization_code= are of the processes'.
 * NVML_STUB_LOG names a file for `init` and `shutdown`. `stub_nvml_calls` counts how often a GPU's memory (0) and processes (1) were asked for. Built with -DONCE the file is read at the first call only,
 * for measurements, in which reading a file would count.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } process_t;


enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, LOST = 15 };

static int ready_in; /* the process that initialised; a forked child has to do it again */
static char cells[16]; /* handles are addresses of these */

static int calls[2];
int stub_nvml_calls(int what) { return calls[what]; }

static int text(const char *key, int index, char *out, size_t size) {
    char wanted[64], line[4096];
    if (index < 0) snprintf(wanted, sizeof wanted, "%s=", key);
    else snprintf(wanted, sizeof wanted, "%s%d=", key, index);
    size_t length = strlen(wanted);
#ifdef ONCE
    static char known[64][256];
    static int count = -1;
    if (count < 0) {
        FILE *file = fopen(getenv("NVML_STUB"), "r");
        for (count = 0; file && count < 64 && fgets(known[count], sizeof *known, file); count++)
            known[count][strcspn(known[count], "\n")] = 0;
        if (file) fclose(file);
    }
    int found = 0;
    while (found < count && strncmp(known[found], wanted, length)) found++;
    if (found == count) return 0;
    (void)line;
    snprintf(out, size, "%s", known[found] + length);
    return 1;
#else
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file))
        if (!strncmp(line, wanted, length)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, size, "%s", line + length);
            found = 1;
        }
    if (file) fclose(file);
    return found;
#endif
}

static u64 number(const char *key, int index, u64 otherwise) {
    char value[64];
    return text(key, index, value, sizeof value) ? strtoull(value, NULL, 10) : otherwise;
}

static void note(const char *what) {
    const char *path = getenv("NVML_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s %d\n", what, (int)getpid()); fclose(file); }
}

static void linger(const char *key) {
    u64 wait = number(key, -1, 0);
    if (wait) usleep((useconds_t)wait * 1000); /* for 0 too it would sleep, for 50 us */
}

static int chance(void) {
    static const int codes[] = {UNINITIALIZED, 4, 10, LOST, 17, 18, 20, 999};
    static u64 state;
    u64 share = number("fail", -1, 0);
    if (!share) return OK;
    if (!state) state = number("seed", -1, 1) * 2654435761ULL + 1;
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    u64 drawn = state >> 33;
    return drawn % 1000 < share ? codes[drawn / 1000 % (sizeof codes / sizeof *codes)] : OK;
}

static int check(void *handle, int *index) {
    int unlucky = chance();
    *index = 0;
    if (unlucky) return unlucky;
    if (ready_in != getpid()) return UNINITIALIZED;
    if ((char *)handle < cells || (char *)handle >= cells + sizeof cells) return INVALID;
    *index = (int)((char *)handle - cells);
    return number("lost", -1, (u64)-1) == (u64)*index ? LOST : OK;
}

static int answer(void *handle, const char *key, char *out, unsigned size) {
    int index, code = check(handle, &index);
    if (!code) text(key, index, out, size);
    return code;
}

#ifndef NO_INIT
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    linger("slow_init");
    int code = (int)number("init", -1, chance());
    if (!code) { ready_in = getpid(); note("init"); }
    return code;
}
#endif

int nvmlShutdown(void) {
    if (ready_in != getpid()) return UNINITIALIZED;
    ready_in = 0;
    note("shutdown");
    return (int)number("shutdown", -1, OK);
}

const char *nvmlErrorString(int code) {
    static char buffer[32];
    snprintf(buffer, sizeof buffer, "stub error %d", code);
    return buffer;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int code = ready_in == getpid() ? chance() : UNINITIALIZED;
    if (code) return code;
    if (!text("driver", -1, out, size)) snprintf(out, size, "580.159.03");
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = ready_in == getpid() ? chance() : UNINITIALIZED;
    if (code) return code;
    *count = (unsigned)number("count", -1, 1);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (ready_in != getpid()) return UNINITIALIZED;
    *handle = cells + index;
    int code = (int)number("handle", (int)index, number("handle", -1, OK));
    return code ? code : check(*handle, (int *)&index);
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) { return answer(handle, "uuid", out, size); }
int nvmlDeviceGetName(void *handle, char *out, unsigned size) { return answer(handle, "name", out, size); }

#ifndef NO_ARCHITECTURE
int nvmlDeviceGetArchitecture(void *handle, unsigned *out) {
    int index, code = check(handle, &index);
    *out = (unsigned)number("arch", index, 9);
    return code ? code : (int)number("arch_code", -1, OK);
}
#endif

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    int index, code = check(handle, &index);
    u64 mode = number("mig", index, 99);
    *current = *pending = (unsigned)mode;
    if (!code) code = (int)number("mig_code", -1, OK);
    return code ? code : mode == 99 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetVirtualizationMode(void *handle, unsigned *out) {
    int index, code = check(handle, &index);
    u64 mode = number("virtual", index, 99);
    *out = (unsigned)mode;
    return code ? code : mode == 99 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *out) {
    int index, code = check(handle, &index);
    if (code || (code = (int)number("denied", index, number("memory", -1, OK)))) return code;
    u64 reserved = number("reserved", index, 0), used = number("used", index, 0);
    out->total = number("total", index, 0);
    out->used = used + reserved; /* v1 counts the driver's part as used */
    out->free = out->total - out->used;
    return OK;
}

#ifndef NO_MEMORY_V2
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *out) {
    int index, code = check(handle, &index);
    calls[0]++;
    linger("slow_memory");
    if (code || (code = (int)number("denied", index, number("memory_v2", -1, OK)))) return code;
    if (out->version != (sizeof(memory_v2_t) | 2u << 24)) return 25; /* argument version mismatch */
    out->total = number("total", index, 0);
    out->reserved = number("reserved", index, 0);
    out->used = number("used", index, 0);
    out->free = out->total - out->reserved - out->used;
    return OK;
}
#endif

static int listed(const char *key, int index, unsigned *count, process_t *out) {
    char list[2048] = "", *rest = list, *entry;
    unsigned found = 0;
    text(key, index, list, sizeof list);
    while ((entry = strsep(&rest, ",")))
        if (*entry) {
            if (out && found < *count) {
                out[found].pid = (unsigned)strtoul(entry, &entry, 10);
                out[found].bytes = strcmp(entry, ":na") ? strtoull(entry + 1, NULL, 10) : ~0ULL;
            }
            found++;
        }
    int code = found && (!out || found > *count) ? TOO_SMALL : OK;
    *count = found;
    return code;
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *out) {
    int index, code = check(handle, &index);
    return code ? code : listed("mps", index, count, out);
}

#ifndef NO_PROCESSES_V3
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *out) {
    int index, code = check(handle, &index);
    calls[1]++;
    linger("slow_processes");
    if (code || (code = (int)number("processes_code", -1, OK))) return code;
    return listed("processes", index, count, out);
}
#endif

#ifndef NO_UTILIZATION
typedef struct { unsigned pid; u64 stamp; unsigned sm, mem, enc, dec; } sample_t;

/* "utilization0=PID:STAMP:SM,..."; those after `seen` */
int nvmlDeviceGetProcessUtilization(void *handle, sample_t *out, unsigned *count, u64 seen) {
    char list[2048] = "", *rest = list, *entry;
    int index, code = check(handle, &index);
    if (code || (code = (int)number("utilization_code", -1, OK))) return code;
    text("utilization", index, list, sizeof list);
    unsigned found = 0;
    while ((entry = strsep(&rest, ",")))
        if (*entry) {
            sample_t one = {0};
            one.pid = (unsigned)strtoul(entry, &entry, 10);
            one.stamp = strtoull(entry + 1, &entry, 10);
            one.sm = (unsigned)strtoul(entry + 1, NULL, 10);
            if (one.stamp <= seen) continue;
            if (out && found < *count) out[found] = one;
            found++;
        }
    code = !found ? 6 /* not found */ : !out || found > *count ? TOO_SMALL : OK;
    *count = found;
    return code;
}
#endif

/* A libcuda.so.1 for tests of a suspension: the five calls of cuCheckpointProcess*, over files that all helpers share.
 *
 * CHECKPOINT_STUB names a folder. `PID.process` is "state destroyed bytes" of each process that has CUDA, `free` the
 * bytes that are free. `faults` has lines `CALL WHAT NUMBER`, of which a call takes the first one with its name away:
 *   code N  returns N and does nothing; a restore that returns 1 or 2 destroys the process
 *   hang D  does not return until the file `over` is there; D is 1: the operation is done at once all the same
 *   die N   kills the caller; if N is not 0, the operation is done all the same, N ms later
 *   slow N  takes N ms
 *   stopped N  never returns while the file `stopped` is there; then it is done
 * While an operation is under way, also one whose caller was killed, other calls for that process wait. `calls` records
 * each call. CHECKPOINT_STUB_INIT=hang: so does cuInit. It prints, as some libraries do. Codes and what they do are those of an H200 with driver 580.159. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED, INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, OPERATING_SYSTEM = 304, ILLEGAL = 401 };

typedef struct { int state, destroyed; long long bytes; } process_t;
typedef struct { unsigned timeout, reserved0; unsigned long long reserved1[7]; } lock_args_t;

static const char *in(const char *name, char *out, size_t size) {
    snprintf(out, size, "%s/%s", getenv("CHECKPOINT_STUB"), name);
    return out;
}

static int locked(const char *name) {
    char path[512];
    int file = open(in(name, path, sizeof path), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file >= 0) flock(file, LOCK_EX);
    return file;
}

static int known(int pid, process_t *out) {
    char name[32], path[512];
    snprintf(name, sizeof name, "%d.process", pid);
    FILE *file = fopen(in(name, path, sizeof path), "r");
    int read = file ? fscanf(file, "%d %d %lld", &out->state, &out->destroyed, &out->bytes) : 0;
    if (file) fclose(file);
    return read == 3;
}

static void keep(int pid, const process_t *process) {
    char name[32], path[512], other[520];
    snprintf(name, sizeof name, "%d.process", pid);
    in(name, path, sizeof path);
    snprintf(other, sizeof other, "%s.new", path);
    FILE *file = fopen(other, "w");
    if (!file) return;
    fprintf(file, "%d %d %lld\n", process->state, process->destroyed, process->bytes);
    fclose(file);
    rename(other, path);
}

static long long free_bytes(long long change) {
    char path[512];
    long long bytes = 1LL << 60;
    FILE *file = fopen(in("free", path, sizeof path), "r");
    if (!file) return bytes;
    if (fscanf(file, "%lld", &bytes) != 1) bytes = 0;
    fclose(file);
    if (change && (file = fopen(path, "w"))) {
        fprintf(file, "%lld\n", bytes + change);
        fclose(file);
    }
    return bytes;
}

static void record(const char *call, int pid) {
    char path[512], line[64];
    int length = snprintf(line, sizeof line, "%s %d\n", call, pid);
    int file = open(in("calls", path, sizeof path), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (write(file, line, (size_t)length) != length) abort();
    close(file);
}

/* Take the first fault for this call out of the file. */
static int fault(const char *call, char *what, int *number) {
    char path[512], text[8192] = "", rest[8192] = "", *save = 0;
    int gate = locked("faults.lock"), found = 0;
    FILE *file = fopen(in("faults", path, sizeof path), "r");
    if (file) {
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
        for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(0, "\n", &save)) {
            char name[32];
            if (!found && sscanf(line, "%31s %31s %d", name, what, number) == 3 && !strcmp(name, call)) {
                found = 1;
                continue;
            }
            strcat(strcat(rest, line), "\n");
        }
        if (found && (file = fopen(path, "w"))) {
            fputs(rest, file);
            fclose(file);
        }
    }
    if (gate >= 0) close(gate);
    return found;
}

static int done(const char *call, int pid, int before, int after) {
    process_t process;
    if (!known(pid, &process)) return OPERATING_SYSTEM;
    if (process.destroyed) return strcmp(call, "restore") ? ILLEGAL : OPERATING_SYSTEM;
    if (process.state != before) return ILLEGAL;
    if (!strcmp(call, "restore") && free_bytes(0) < process.bytes) {
        process.destroyed = 1;
        keep(pid, &process);
        return OUT_OF_MEMORY;
    }
    if (!strcmp(call, "restore")) free_bytes(-process.bytes);
    if (!strcmp(call, "checkpoint")) free_bytes(process.bytes);
    process.state = after;
    keep(pid, &process);
    return 0;
}

/* Until the test is over: its folder is gone then, if not the file there. */
static void hang(void) {
    char path[512];
    while (access(in("over", path, sizeof path), F_OK) && !access(getenv("CHECKPOINT_STUB"), F_OK)) usleep(20000);
}

static int do_it(const char *call, int pid, int before, int after) {
    char what[32], name[32], path[512];
    int number = 0;
    process_t process;
    record(call, pid);
    int broken = fault(call, what, &number);
    snprintf(name, sizeof name, "%d.lock", pid);
    int gate = locked(name), code;
    if (!broken) {
        code = done(call, pid, before, after);
    } else if (!strcmp(what, "code")) {
        if (!strcmp(call, "restore") && (number == INVALID || number == OUT_OF_MEMORY) && known(pid, &process)
            && process.state == CHECKPOINTED) {
            process.destroyed = 1;
            keep(pid, &process);
        }
        code = number;
    } else if (!strcmp(what, "hang")) {
        code = number ? done(call, pid, before, after) : 999;
        flock(gate, LOCK_UN);
        hang();
    } else if (!strcmp(what, "die")) {
        if (number && !fork()) { /* the target goes on: this child has the gate until it has */
            setsid();
            for (int file = 0; file < 256; file++) if (file != gate) close(file);
            usleep((unsigned)number * 1000);
            done(call, pid, before, after);
            _exit(0);
        }
        kill(getpid(), SIGKILL);
        for (;;) pause();
    } else if (!strcmp(what, "stopped")) {
        while (!access(in("stopped", path, sizeof path), F_OK)) usleep(20000);
        code = done(call, pid, before, after);
    } else {
        usleep((unsigned)number * 1000);
        code = done(call, pid, before, after);
    }
    close(gate);
    return code;
}

int cuInit(unsigned flags) {
    (void)flags;
    printf("cuInit\n");
    fflush(stdout);
    if (getenv("CHECKPOINT_STUB_INIT")) hang();
    return getenv("CHECKPOINT_STUB") ? 0 : 100;
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int code, const char **name) { *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : 0; return *name ? 0 : 1; }

int cuCheckpointProcessGetState(int pid, int *state) {
    char what[32], name[32], path[512];
    int number = 0;
    process_t process;
    if (fault("state", what, &number)) {
        if (!strcmp(what, "code")) return number;
        if (!strcmp(what, "die")) kill(getpid(), SIGKILL);
        if (!strcmp(what, "slow")) usleep((unsigned)number * 1000);
        else if (!strcmp(what, "stopped")) while (!access(in("stopped", path, sizeof path), F_OK)) usleep(20000);
        else hang();
    }
    snprintf(name, sizeof name, "%d.lock", pid);
    int gate = locked(name), found = known(pid, &process);
    close(gate);
    if (!found) return OPERATING_SYSTEM;
    *state = process.state;
    return 0;
}

#ifndef OLD /* a driver before 570 */
int cuCheckpointProcessLock(int pid, lock_args_t *args) {
    return args->reserved0 || args->reserved1[6] ? INVALID : do_it("lock", pid, RUNNING, LOCKED);
}
int cuCheckpointProcessCheckpoint(int pid, void *args) { (void)args; return do_it("checkpoint", pid, LOCKED, CHECKPOINTED); }
int cuCheckpointProcessRestore(int pid, void *args) { (void)args; return do_it("restore", pid, CHECKPOINTED, LOCKED); }
int cuCheckpointProcessUnlock(int pid, void *args) { (void)args; return do_it("unlock", pid, LOCKED, RUNNING); }
#endif

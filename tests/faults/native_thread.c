/* A library as XLA's: it does not link to libcuda, keeps the addresses of its functions in a table that is filled when
   each is first called, and has a thread that asks again and again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

__attribute__((used)) static const char name[] = "native_thread_of_a_test";
static int (*table[8])(void *) = {0, 0, 0, 0, 0, 0, 0, (int (*)(void *))1}; /* in .data, as XLA's */
static volatile int answers, last = -1, pause_ms;

static int ask(void *stream) {
    if (!table[3]) table[3] = (int (*)(void *))dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuStreamQuery");
    return table[3](stream);
}
static void *monitor(void *none) {
    while (1) {
        usleep(1000 * pause_ms);
        last = ask((void *)0x7f0000ca0000); /* the stub's driver says 900 */
        answers++;
    }
    return none;
}
void begin(int pause) {
    static pthread_t thread;
    pause_ms = pause;
    pthread_create(&thread, 0, monitor, 0);
}
int answered(void) { return answers; }
int last_answer(void) { return last; }

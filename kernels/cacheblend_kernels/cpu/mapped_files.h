/* End the process with a message when a mapped file turns out shorter or unreadable: the kernel sends SIGBUS then.

   The handler may only call async-signal-safe functions, so each message is prepared when its mapping is guarded. */

#include <signal.h>
#include <unistd.h>

enum { MOST_GUARDS = 64, MESSAGE_BYTES = 4608 /* a path and a sentence */ };

typedef struct {
    uintptr_t address, size;
    const char *message; /* copied */
    int64_t message_bytes;
    int32_t exit_code, padding;
} Guard;

enum { FREE = 0, CLAIMED = 1, GUARDED = 2 };

static struct {
    Guard guard;
    int state;
    char message[MESSAGE_BYTES];
} guards[MOST_GUARDS];
static struct sigaction before_guards;
static int has_handler, is_ending;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; i < MOST_GUARDS && info->si_code > 0; i++) { /* up to 0: sent by a process, without an address */
        const Guard *guard = &guards[i].guard;
        if (__atomic_load_n(&guards[i].state, __ATOMIC_ACQUIRE) != GUARDED || at - guard->address >= guard->size) continue;
        if (__atomic_exchange_n(&is_ending, 1, __ATOMIC_ACQ_REL)) /* another thread writes the message */
            for (;;) pause();
        for (int64_t done = 0, count; done < guard->message_bytes; done += count)
            if ((count = write(STDERR_FILENO, guards[i].message + done, guard->message_bytes - done)) <= 0) break;
        _exit(guard->exit_code);
    }
    sigaction(SIGBUS, &before_guards, 0); /* on return the access fails again, for whoever was there before */
    if (info->si_code <= 0) raise(number);
    (void)context;
}

/* Return the guard's number, -1 if there are too many. */
int32_t cb_guard_mapping(const Guard *given) {
    for (int i = 0; i < MOST_GUARDS; i++) {
        int expected = FREE;
        if (!__atomic_compare_exchange_n(&guards[i].state, &expected, CLAIMED, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
        guards[i].guard = *given;
        if (given->message_bytes > MESSAGE_BYTES) guards[i].guard.message_bytes = MESSAGE_BYTES;
        memcpy(guards[i].message, given->message, guards[i].guard.message_bytes);
        __atomic_store_n(&guards[i].state, GUARDED, __ATOMIC_RELEASE);
        if (!__atomic_exchange_n(&has_handler, 1, __ATOMIC_ACQ_REL)) {
            struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
            sigaction(SIGBUS, &action, &before_guards);
        }
        return i;
    }
    return -1;
}

void cb_unguard_mapping(int32_t number) { __atomic_store_n(&guards[number].state, FREE, __ATOMIC_RELEASE); }

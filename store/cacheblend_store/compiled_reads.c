/* Reads of many values of a file, each with its digest, in one call without Python's lock.

   Digests are XXH3-128 by the library of Python's xxhash package, whose functions the caller passes. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef struct { uint64_t low, high; } digest128;  /* XXH128_hash_t */

typedef struct {
    void *(*create_state)(void);
    int (*free_state)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    digest128 (*digest)(const void *);
} xxh3;

typedef struct {
    int64_t file, num_values;
    const int64_t *offsets;       /* [num_values], of each value in the file */
    const int64_t *first_parts;   /* [num_values + 1], of each value in `parts` */
    const struct iovec *parts;    /* memory to fill; the first part of a value is not digested */
    const char *seeds;            /* [num_values, seed_bytes], digested before the value */
    int64_t seed_bytes;
    unsigned char *digests;       /* [num_values, 16], big-endian: high half first */
    const xxh3 *hash;
} reads;

const int32_t cb_abi = 1;

static void put_big_endian(unsigned char *to, uint64_t number) {
    for (int i = 0; i < 8; i++) to[i] = (unsigned char)(number >> (56 - 8 * i));
}

/* Returns 0, or 1 if a value could not be read whole, or memory is short. */
int cb_read_digested(const reads *given) {
    const xxh3 *hash = given->hash;
    void *state = hash->create_state();
    if (!state) return 1;
    int failed = 0;
    for (int64_t i = 0; i < given->num_values && !failed; i++) {
        const struct iovec *parts = given->parts + given->first_parts[i];
        int num_parts = (int)(given->first_parts[i + 1] - given->first_parts[i]);
        size_t wanted = 0;
        for (int j = 0; j < num_parts; j++) wanted += parts[j].iov_len;
        ssize_t count;
        do count = preadv((int)given->file, parts, num_parts, (off_t)given->offsets[i]);
        while (count < 0 && errno == EINTR);
        failed = count < 0 || (size_t)count != wanted || hash->reset(state) != 0;
        if (!failed) failed = hash->update(state, given->seeds + i * given->seed_bytes, (size_t)given->seed_bytes) != 0;
        for (int j = 1; j < num_parts && !failed; j++) failed = hash->update(state, parts[j].iov_base, parts[j].iov_len) != 0;
        if (!failed) {
            digest128 found = hash->digest(state);
            put_big_endian(given->digests + 16 * i, found.high);
            put_big_endian(given->digests + 16 * i + 8, found.low);
        }
    }
    hash->free_state(state);
    return failed;
}

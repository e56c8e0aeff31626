/* Read several values of a file into places of a buffer and check them, in one call without Python's lock.

   A value is a head (the page header and the blob's own header), which is compared, followed by parts. Digests are
   XXH3-128, by functions of Python's xxhash package that the caller passes. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { PAGE_HEADER = 16, MOST_PARTS = 15, DIGEST_BYTES = 16 };

typedef struct { uint64_t low, high; } digest128;  /* XXH128_hash_t */

typedef struct {
    void *(*create_state)(void);
    int (*free_state)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    digest128 (*digest)(const void *);
} xxh3;

typedef struct {
    int64_t file, num_values, num_parts, seed_bytes;
    const int64_t *offsets;       /* [num_values], of each value's page header in the file */
    const int64_t *head_starts;   /* [num_values + 1], of each value's head in `heads` and `found_heads` */
    const int64_t *places;        /* [num_values, num_parts, 2], start in `buffer` and size */
    const char *heads;            /* expected: page header and head */
    char *found_heads;            /* scratch */
    char *buffer;
    const char *seeds;            /* [num_values, seed_bytes], digested before the value */
    const unsigned char *digests; /* [num_values, 16], expected; big-endian, high half first */
    const xxh3 *hash;
} reads;

const int32_t cb_abi = 1;

static uint64_t from_big_endian(const unsigned char *bytes) {
    uint64_t number = 0;
    for (int i = 0; i < 8; i++) number = number << 8 | bytes[i];
    return number;
}

/* The padding of a page header, bytes 8 and 9, may hold anything. */
static int is_head(const char *found, const char *wanted, size_t size) {
    return !memcmp(found, wanted, 8) && !memcmp(found + 10, wanted + 10, size - 10);
}

static int read_value(const reads *given, int64_t i, void *state) {
    const xxh3 *hash = given->hash;
    const int64_t *places = given->places + i * given->num_parts * 2;
    struct iovec parts[1 + MOST_PARTS];
    size_t start = (size_t)given->head_starts[i], size = (size_t)given->head_starts[i + 1] - start, wanted = size;
    char *head = given->found_heads + start;
    parts[0].iov_base = head;
    parts[0].iov_len = size;
    for (int64_t j = 0; j < given->num_parts; j++) {
        parts[1 + j].iov_base = given->buffer + places[2 * j];
        parts[1 + j].iov_len = (size_t)places[2 * j + 1];
        wanted += parts[1 + j].iov_len;
    }
    ssize_t count;
    do count = preadv((int)given->file, parts, 1 + (int)given->num_parts, (off_t)given->offsets[i]);
    while (count < 0 && errno == EINTR);
    if (count < 0 || (size_t)count != wanted || !is_head(head, given->heads + start, size)) return 0;
    if (hash->reset(state) || hash->update(state, given->seeds + i * given->seed_bytes, (size_t)given->seed_bytes)) return 0;
    if (hash->update(state, head + PAGE_HEADER, size - PAGE_HEADER)) return 0;
    for (int64_t j = 0; j < given->num_parts; j++)
        if (hash->update(state, parts[1 + j].iov_base, parts[1 + j].iov_len)) return 0;
    digest128 found = hash->digest(state);
    const unsigned char *digest = given->digests + i * DIGEST_BYTES;
    return found.high == from_big_endian(digest) && found.low == from_big_endian(digest + 8);
}

/* Return whether all values were read completely and are the expected ones. */
int cb_read_values(const reads *given) {
    void *state = given->hash->create_state();
    int right = state && given->num_parts <= MOST_PARTS;
    for (int64_t i = 0; right && i < given->num_values; i++) right = read_value(given, i, state);
    if (state) given->hash->free_state(state);
    return right;
}

/* Preloaded into a process: records what it does to files under one folder, in order, and lets a chosen call fail.

   SHIM_ROOT   the folder. Calls on other files pass through.
   SHIM_LOG    where to write the record of calls (disk_shim.py reads it).
   SHIM_FAULT  "countdown:kind:sticky", as shim_arm takes them.

   A write is recorded before it happens (a cut may come within it), a sync after it returned (only then it counts). */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, DURABLE = 2, SYNC = 3, TRUNCATE = 4, CREATE = 5, MKDIR = 6, RENAME = 7, UNLINK = 8, NOTE = 9 };
enum { NO_FAULT = 0, FAIL_IO = 1, FAIL_SPACE = 2, SHORT = 3, KILL = 4, FAIL_AFTER = 5 };

struct header {
    uint32_t op, path_length;
    uint64_t inode;
    int64_t offset;
    uint64_t length;
};

static char root[4096];
static size_t root_length;
static int log_fd = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int countdown = -1, fault_kind, sticky, counted, fired;

void shim_arm(int calls_before, int kind, int stays)
{
    countdown = calls_before, fault_kind = kind, sticky = stays, counted = 0, fired = 0;
}

int shim_counted(void) { return counted; }
int shim_fired(void) { return fired; }

__attribute__((constructor)) static void start(void)
{
    const char *folder = getenv("SHIM_ROOT"), *path = getenv("SHIM_LOG"), *fault = getenv("SHIM_FAULT");
    if (folder) {
        strncpy(root, folder, sizeof root - 1);
        root_length = strlen(root);
    }
    if (path)
        log_fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int a, b, c;
    if (fault && sscanf(fault, "%d:%d:%d", &a, &b, &c) == 3)
        shim_arm(a, b, c);
}

static int inside(const char *path) { return root_length && !strncmp(path, root, root_length) && path[root_length] == '/'; }

static int path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, 4095);
    if (n < 0)
        return 0;
    path[n] = 0;
    return inside(path) || !strcmp(path, root);
}

static int path_at(int folder, const char *name, char *path)
{
    char base[4096];
    if (name[0] == '/')
        snprintf(path, 8192, "%s", name);
    else if (folder == AT_FDCWD)
        snprintf(path, 8192, "%s/%s", getcwd(base, sizeof base) ? base : "", name);
    else if (path_of(folder, base))
        snprintf(path, 8192, "%s/%s", base, name);
    else
        return 0;
    return inside(path);
}

static uint64_t inode_at(const char *path)
{
    struct stat info;
    return stat(path, &info) ? 0 : info.st_ino;
}

static uint64_t inode_of(int fd)
{
    struct stat info;
    return fstat(fd, &info) ? 0 : info.st_ino;
}

static void record(int op, uint64_t inode, int64_t offset, const char *path, const struct iovec *parts, int count)
{
    if (log_fd < 0)
        return;
    struct header head = {op, path ? strlen(path) : 0, inode, offset, 0};
    for (int i = 0; i < count; i++)
        head.length += parts[i].iov_len;
    pthread_mutex_lock(&mutex);
    syscall(SYS_write, log_fd, &head, sizeof head);
    if (path)
        syscall(SYS_write, log_fd, path, head.path_length);
    for (int i = 0; i < count; i++)
        syscall(SYS_write, log_fd, parts[i].iov_base, parts[i].iov_len);
    pthread_mutex_unlock(&mutex);
}

void shim_note(int64_t number) { record(NOTE, 0, number, NULL, NULL, 0); }

/* What is to happen to this call. */
static int fate(void)
{
    counted++;
    if (countdown < 0 || !fault_kind)
        return NO_FAULT;
    if (countdown > 0) {
        countdown--;
        return NO_FAULT;
    }
    fired++;
    if (!sticky)
        countdown = -1;
    if (fault_kind == KILL)
        kill(getpid(), SIGKILL);
    return fault_kind;
}

static int failed(int kind)
{
    errno = kind == FAIL_SPACE ? ENOSPC : EIO;
    return -1;
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, int64_t offset, int positioned)
{
    char path[4096];
    int kind = NO_FAULT, durable = 0;
    uint64_t inode = 0;
    if (path_of(fd, path)) {
        kind = fate();
        if (kind == FAIL_IO || kind == FAIL_SPACE)
            return failed(kind);
        if (!positioned)
            offset = lseek(fd, 0, SEEK_CUR);
        inode = inode_of(fd);
        durable = (fcntl(fd, F_GETFL) & O_DSYNC) != 0;
        if (kind != SHORT)
            record(WRITE, inode, offset, path, parts, count);
    } else
        inode = 0;
    struct iovec half = parts[0];
    if (kind == SHORT) {
        half.iov_len /= 2;
        parts = &half, count = 1;
        record(WRITE, inode, offset, path, parts, count);
    }
    ssize_t done = positioned ? syscall(SYS_pwritev, fd, parts, count, offset, 0) : syscall(SYS_writev, fd, parts, count);
    if (inode && durable && done >= 0)
        record(DURABLE, inode, offset, path, NULL, 0);
    return kind == FAIL_AFTER ? failed(kind) : done;
}

ssize_t write(int fd, const void *data, size_t size)
{
    char path[4096];
    if (fd == log_fd || !root_length || !path_of(fd, path))
        return syscall(SYS_write, fd, data, size);
    struct iovec part = {(void *)data, size};
    return write_parts(fd, &part, 1, 0, 0);
}

ssize_t writev(int fd, const struct iovec *parts, int count) { return write_parts(fd, parts, count, 0, 0); }

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    struct iovec part = {(void *)data, size};
    return write_parts(fd, &part, 1, offset, 1);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return write_parts(fd, parts, count, offset, 1); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) { return pwritev(fd, parts, count, offset); }

static int sync_call(long number, int fd)
{
    char path[4096];
    int known = path_of(fd, path), kind = known ? fate() : NO_FAULT;
    if (kind == FAIL_IO || kind == FAIL_SPACE)
        return failed(kind);
    int done = syscall(number, fd);
    if (kind == FAIL_AFTER)
        return failed(kind);
    if (known && !done)
        record(SYNC, inode_of(fd), 0, path, NULL, 0);
    return done;
}

int fsync(int fd) { return sync_call(SYS_fsync, fd); }
int fdatasync(int fd) { return sync_call(SYS_fdatasync, fd); }

int ftruncate(int fd, off_t size)
{
    char path[4096];
    if (path_of(fd, path)) {
        int kind = fate();
        if (kind == FAIL_IO || kind == FAIL_SPACE)
            return failed(kind);
        record(TRUNCATE, inode_of(fd), size, path, NULL, 0);
    }
    return syscall(SYS_ftruncate, fd, size);
}

int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int open_at(int folder, const char *name, int flags, mode_t mode)
{
    char path[8192];
    int made = root_length && flags & O_CREAT && path_at(folder, name, path) && !inode_at(path);
    int fd = syscall(SYS_openat, folder, name, flags, mode);
    if (made && fd >= 0)
        record(CREATE, inode_of(fd), 0, path, NULL, 0);
    return fd;
}

#define MODE(flags) ({ mode_t mode = 0; if ((flags) & O_CREAT) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } mode; })

int open(const char *name, int flags, ...) { return open_at(AT_FDCWD, name, flags, MODE(flags)); }
int open64(const char *name, int flags, ...) { return open_at(AT_FDCWD, name, flags, MODE(flags)); }
int openat(int folder, const char *name, int flags, ...) { return open_at(folder, name, flags, MODE(flags)); }
int openat64(int folder, const char *name, int flags, ...) { return open_at(folder, name, flags, MODE(flags)); }

int mkdirat(int folder, const char *name, mode_t mode)
{
    char path[8192];
    int done = syscall(SYS_mkdirat, folder, name, mode);
    if (!done && root_length && path_at(folder, name, path))
        record(MKDIR, inode_at(path), 0, path, NULL, 0);
    return done;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    char source[8192], target[8192];
    if (root_length && path_at(from_folder, from, source) && path_at(to_folder, to, target)) {
        int kind = fate();
        if (kind == FAIL_IO || kind == FAIL_SPACE)
            return failed(kind);
        struct iovec part = {source, strlen(source)};
        record(RENAME, inode_at(source), 0, target, &part, 1);
    }
    return syscall(SYS_renameat, from_folder, from, to_folder, to);
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int folder, const char *name, int flags)
{
    char path[8192];
    if (root_length && path_at(folder, name, path) && inode_at(path))
        record(UNLINK, inode_at(path), 0, path, NULL, 0);
    return syscall(SYS_unlinkat, folder, name, flags);
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int remove(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

/* Fails the n-th call of the C library that reaches a file below a folder: for LD_PRELOAD.

   storage_faults_arm() begins to count anew, before a command runs; kinds are those of the enum. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { NAMES = 1, SYNC = 2, DATA = 4 };

static int armed, target, error_number, count;
static char folder[PATH_MAX];

void storage_faults_arm(int kinds, int call, int error, const char *below) {
    armed = kinds;
    target = call;
    error_number = error;
    count = 0;
    snprintf(folder, sizeof folder, "%s", below);
}

int storage_faults_count(void) { return count; }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, #name)

/* Tell whether a call is one of a file below the folder: by its path, or the file that is open. */
static int is_below(int fd, const char *path) {
    char link[64], found[PATH_MAX];
    REAL(ssize_t, readlink, const char *, char *, size_t);
    if (path && path[0] == '/') return !strncmp(path, folder, strlen(folder));
    if (path && fd == AT_FDCWD) return 1; /* commands run in it */
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = real(link, found, sizeof found - 1);
    if (size < 0) return 0;
    found[size] = 0;
    return !strncmp(found, folder, strlen(folder));
}

static int fails(int kind, int fd, const char *path) {
    if (!(armed & kind) || !is_below(fd, path)) return 0;
    if (__sync_add_and_fetch(&count, 1) != target) return 0;
    errno = error_number;
    return 1;
}

#define LIST(...) __VA_ARGS__
#define FAILING(kind, type, bad, name, parameters, types, arguments, fd, path) \
    type name parameters { \
        REAL(type, name, types); \
        return fails(kind, fd, path) ? bad : real arguments; \
    }
typedef const char *text;
typedef const void *bytes;
typedef struct stat64 *found;
#define ON_PATH(kind, type, bad, name) FAILING(kind, type, bad, name, (text p), LIST(text), (p), AT_FDCWD, p)
#define ON_FILE(kind, type, bad, name) FAILING(kind, type, bad, name, (int f), LIST(int), (f), f, NULL)

FAILING(NAMES, int, -1, stat64, (text p, found s), LIST(text, found), (p, s), AT_FDCWD, p)
FAILING(NAMES, int, -1, lstat64, (text p, found s), LIST(text, found), (p, s), AT_FDCWD, p)
FAILING(NAMES, int, -1, fstat64, (int f, found s), LIST(int, found), (f, s), f, NULL)
FAILING(NAMES, int, -1, fstatat64, (int f, text p, found s, int w), LIST(int, text, found, int), (f, p, s, w),
        f, p)
FAILING(NAMES, int, -1, mkdir, (text p, mode_t m), LIST(text, mode_t), (p, m), AT_FDCWD, p)
FAILING(NAMES, int, -1, mkdirat, (int f, text p, mode_t m), LIST(int, text, mode_t), (f, p, m), f, p)
FAILING(NAMES, int, -1, unlinkat, (int f, text p, int w), LIST(int, text, int), (f, p, w), f, p)
ON_PATH(NAMES, int, -1, unlink)
ON_PATH(NAMES, int, -1, rmdir)
ON_PATH(NAMES, DIR *, NULL, opendir)
ON_FILE(NAMES, DIR *, NULL, fdopendir)
FAILING(SYNC, int, -1, rename, (text a, text b), LIST(text, text), (a, b), AT_FDCWD, a)
FAILING(SYNC, int, -1, renameat, (int f, text a, int g, text b), LIST(int, text, int, text), (f, a, g, b),
        f, a)
ON_FILE(SYNC, int, -1, fsync)
FAILING(DATA, ssize_t, -1, write, (int f, bytes p, size_t n), LIST(int, bytes, size_t), (f, p, n), f, NULL)
FAILING(DATA, ssize_t, -1, pwrite64, (int f, bytes p, size_t n, off64_t o),
        LIST(int, bytes, size_t, off64_t), (f, p, n, o), f, NULL)
FAILING(DATA, int, -1, ftruncate64, (int f, off64_t n), LIST(int, off64_t), (f, n), f, NULL)
FAILING(DATA, ssize_t, -1, read, (int f, void *p, size_t n), LIST(int, void *, size_t), (f, p, n), f, NULL)

static mode_t mode_in(int flags, va_list more) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, int) : 0;
}

int open64(text p, int flags, ...) {
    REAL(int, open64, text, int, ...);
    va_list more;
    va_start(more, flags);
    mode_t mode = mode_in(flags, more);
    va_end(more);
    return fails(NAMES, AT_FDCWD, p) ? -1 : real(p, flags, mode);
}

int openat64(int f, text p, int flags, ...) {
    REAL(int, openat64, int, text, int, ...);
    va_list more;
    va_start(more, flags);
    mode_t mode = mode_in(flags, more);
    va_end(more);
    return fails(NAMES, f, p) ? -1 : real(f, p, flags, mode);
}

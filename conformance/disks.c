/* A disk that fails and remembers, for disks.py, which compiles this and preloads it into a process.

   Calls on the files of one folder fail on demand, and each is written to a trace, so that a power cut can be replayed.
   Linux only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, WRITE, SYNC, TRUNCATE, UNLINK, NOTE };
enum { BEFORE, AFTER, SHORT, LOST, SLOW };  /* not done; done all the same; half of it; what waited for it is gone, too;
                                               no failure, but it takes a while */
enum { SLOW_MICROSECONDS = 100000 };
enum { FILES = 4096, RULES = 4, PATH = 1024 };

struct record { uint32_t operation, named; uint64_t handle; int64_t at, length, result; };
struct rule { int operations, error, skip, count, how; char ending[64]; };
struct file { uint64_t handle; char path[PATH]; };

static struct rule rules[RULES];
static struct file files[FILES];        /* by descriptor; handle 0 is one that is not watched */
static char folder[PATH];               /* with a slash at its end */
static int trace = -1, whole, failures;
static uint64_t handles;
static pthread_mutex_t turn = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name) ({ static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

static void record(int operation, uint64_t handle, int64_t at, int64_t length, int64_t result, const char *path,
                   const void *data)
{
    if (trace < 0 || (!whole && operation != NOTE))
        return;
    int before = errno;
    struct record head = { operation, strlen(path), handle, at, length, result };
    struct iovec parts[] = { { &head, sizeof head }, { (void *)path, head.named }, { (void *)data, data ? length : 0 } };
    if (writev(trace, parts, 3) != (ssize_t)(sizeof head + head.named + (data ? length : 0)))
        dprintf(2, "the trace is incomplete\n");
    errno = before;
}

/* Return the rule by which this call fails, if one does. */
static struct rule *failing(int operation, const char *path)
{
    for (struct rule *one = rules; one < rules + RULES; one++) {
        size_t length = strlen(path), end = strlen(one->ending);
        if (!(one->operations & 1 << operation) || length < end || strcmp(path + length - end, one->ending))
            continue;
        if (one->skip-- > 0)
            continue;
        one->skip = 0;
        if (one->count == 0)
            continue;
        if (one->count > 0)
            one->count--;
        failures++;
        if (one->how == SLOW) {
            usleep(SLOW_MICROSECONDS);
            continue;
        }
        return one;
    }
    return NULL;
}

static struct file *watched(int descriptor)
{
    return descriptor >= 0 && descriptor < FILES && files[descriptor].handle ? &files[descriptor] : NULL;
}

static int is_inside(const char *path)
{
    return *folder && !strncmp(path, folder, strlen(folder));
}

static int fail(int error)
{
    pthread_mutex_unlock(&turn);
    errno = error;
    return -1;
}

/* What disks.py calls. */

void disk_watch(const char *path, const char *trace_path, int all)
{
    snprintf(folder, sizeof folder, "%s/", path);
    whole = all;
    trace = REAL(open)(trace_path, O_WRONLY | O_CREAT | O_APPEND, 0600);
}

void disk_fail(int slot, int operations, const char *ending, int error, int skip, int count, int how)
{
    pthread_mutex_lock(&turn);
    rules[slot] = (struct rule){ operations, error, skip, count, how, "" };
    snprintf(rules[slot].ending, sizeof rules[slot].ending, "%s", ending);
    pthread_mutex_unlock(&turn);
}

int disk_failures(void)
{
    return failures;
}

void disk_note(const char *text, int length)
{
    pthread_mutex_lock(&turn);
    record(NOTE, 0, 0, length, 0, "", text);
    pthread_mutex_unlock(&turn);
}

void disk_kill(void)
{
    pthread_mutex_lock(&turn);
    kill(getpid(), SIGKILL);
    pause();
}

/* What the process calls. */

static int open_watched(const char *path, int flags, mode_t mode)
{
    int is_folder = *folder && strlen(path) + 1 == strlen(folder) && !strncmp(path, folder, strlen(path));
    if (!is_inside(path) && !is_folder)
        return REAL(open)(path, flags, mode);
    pthread_mutex_lock(&turn);
    struct rule *rule = failing(OPEN, path);
    if (rule)
        return fail(rule->error);
    int descriptor = REAL(open)(path, flags, mode);
    if (descriptor >= 0 && descriptor < FILES) {
        files[descriptor].handle = (uint64_t)getpid() << 32 | ++handles;
        snprintf(files[descriptor].path, PATH, "%s", path);
        record(OPEN, files[descriptor].handle, is_folder, 0, descriptor, path, NULL);
    }
    pthread_mutex_unlock(&turn);
    return descriptor;
}

#define MODE(flags) ({ mode_t mode = 0; if ((flags) & O_CREAT) { va_list rest; va_start(rest, flags); \
                       mode = va_arg(rest, mode_t); va_end(rest); } mode; })

int open(const char *path, int flags, ...) { return open_watched(path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return open_watched(path, flags, MODE(flags)); }

int close(int descriptor)
{
    if (watched(descriptor))
        files[descriptor].handle = 0;
    return REAL(close)(descriptor);
}

static ssize_t write_watched(int descriptor, const void *data, size_t length, off_t at, int moves)
{
    struct file *file = watched(descriptor);
    if (!file)
        return moves ? REAL(write)(descriptor, data, length) : REAL(pwrite)(descriptor, data, length, at);
    pthread_mutex_lock(&turn);
    struct rule *rule = failing(WRITE, file->path);
    if (rule && (rule->how == BEFORE || rule->how == LOST))
        return fail(rule->error);
    if (moves)
        at = lseek(descriptor, 0, SEEK_CUR);
    if (rule && rule->how == SHORT) {
        length /= 2;
        rule->how = BEFORE;             /* the rest does not fit either */
        rule->count += rule->count == 0;
    }
    int reported = rule && rule->how == AFTER ? rule->error : 0;
    ssize_t done = moves ? REAL(write)(descriptor, data, length) : REAL(pwrite)(descriptor, data, length, at);
    if (done >= 0)
        record(WRITE, file->handle, at, done, done, "", data);
    if (reported)
        return fail(reported);
    pthread_mutex_unlock(&turn);
    return done;
}

ssize_t write(int descriptor, const void *data, size_t length)
{
    return write_watched(descriptor, data, length, 0, 1);
}

ssize_t pwrite(int descriptor, const void *data, size_t length, off_t at)
{
    return write_watched(descriptor, data, length, at, 0);
}

ssize_t pwrite64(int descriptor, const void *data, size_t length, off_t at)
{
    return write_watched(descriptor, data, length, at, 0);
}

static int sync_watched(int descriptor, int (*sync)(int))
{
    struct file *file = watched(descriptor);
    if (!file)
        return sync(descriptor);
    pthread_mutex_lock(&turn);
    struct rule *rule = failing(SYNC, file->path);
    int done = !rule || rule->how == AFTER ? sync(descriptor) : -1;
    record(SYNC, file->handle, 0, 0, rule && rule->how == LOST ? -2 : done, "", NULL);
    if (rule)
        return fail(rule->error);
    pthread_mutex_unlock(&turn);
    return done;
}

int fsync(int descriptor) { return sync_watched(descriptor, REAL(fsync)); }
int fdatasync(int descriptor) { return sync_watched(descriptor, REAL(fdatasync)); }

int ftruncate(int descriptor, off_t length)
{
    struct file *file = watched(descriptor);
    if (!file)
        return REAL(ftruncate)(descriptor, length);
    pthread_mutex_lock(&turn);
    struct rule *rule = failing(TRUNCATE, file->path);
    if (rule)
        return fail(rule->error);
    int done = REAL(ftruncate)(descriptor, length);
    record(TRUNCATE, file->handle, length, 0, done, "", NULL);
    pthread_mutex_unlock(&turn);
    return done;
}

int ftruncate64(int descriptor, off_t length) { return ftruncate(descriptor, length); }

int unlink(const char *path)
{
    if (!is_inside(path))
        return REAL(unlink)(path);
    pthread_mutex_lock(&turn);
    struct rule *rule = failing(UNLINK, path);
    if (rule)
        return fail(rule->error);
    int done = REAL(unlink)(path);
    if (!done)
        record(UNLINK, 0, 0, 0, done, path, NULL);
    pthread_mutex_unlock(&turn);
    return done;
}

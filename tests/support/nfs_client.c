/* A file system in user space that treats a local folder as a Linux NFS client treats a server's export.
 *
 * Usage: nfs_client EXPORT MOUNTPOINT CONTROL LOCKS, in the foreground. EXPORT must be on a file system with file
 * handles (ext4, xfs, tmpfs). LOCKS: "server", "local" (as with `nolock`) or "none". CONTROL is a text file of
 * "name value" lines, looked at fifty times a second; see `settings` below for the names.
 *
 * What is as on NFS: objects are known by handles, so one that another client removed is ESTALE; attributes and names,
 * also absent ones, are cached by the kernel for acregmin..acdirmax; open() and opendir() validate (close-to-open);
 * writes wait in the client until fsync, close, a megabyte or some seconds, and errors come only then; an open file
 * that is removed gets a name .nfs...; requests of root are nobody's with root_squash; a lost reply makes the client
 * repeat the request, and the caller gets the answer to the second one; while the server is away calls wait (hard) or
 * end with EIO (soft); file times are the server's.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 314
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <limits.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HANDLE = 64, NOBODY = 65534, MAX_DIRTY = 1 << 20, MAX_NAMES = 4096 };

/* Every value is a double; zero is off. */
static struct setting { const char *name; double value; } settings[] = {
    {"acregmin", 3}, {"acregmax", 60}, {"acdirmin", 30}, {"acdirmax", 60},
    {"cto", 1},          /* open() asks the server */
    {"sync", 0},         /* writes go through at once, as with noac */
    {"soft", 0},         /* seconds until EIO while the server is away; 0: hard */
    {"away", 0},         /* the server does not answer */
    {"clock", 0},        /* the server's clock is so many seconds ahead */
    {"granularity", 0},  /* of the server's file times, s */
    {"squash", 0},       /* root is nobody */
    {"room", -1},        /* bytes that may still be written; -1: no limit */
    {"errno", EDQUOT},   /* what is said where there is no room */
    {"lost", 0},         /* share of replies that are lost */
    {"stale", 0},        /* share of reads, writes and getattrs that end with ESTALE */
    {"delay", 0},        /* seconds that each request takes longer */
    {"flush", 5},        /* seconds that a write waits in the client at most */
};
enum { ACREGMIN, ACREGMAX, ACDIRMIN, ACDIRMAX, CTO, SYNC, SOFT, AWAY, CLOCK, GRANULARITY, SQUASH, ROOM, ERRNO, LOST,
       STALE, DELAY, FLUSH, NUM_SETTINGS };
#define SET(what) (settings[what].value)

struct extent { struct extent *next; off_t offset; size_t size; char *data; };
struct name { struct name *next; bool doomed; char text[]; };
struct listing { struct listing *next; struct stat st; char name[]; };
struct version { struct timespec mtime, ctime; off_t size; };

struct node {
    struct node *next;
    uint64_t lookups;
    unsigned opens;
    struct file_handle *handle;
    pthread_mutex_t mutex;           /* of what follows */
    struct extent *dirty, *last;
    size_t num_dirty;
    double dirty_since;
    int write_error;
    struct version seen;             /* as the kernel was told */
    double timeout;
    struct name *names;              /* of a folder: those the kernel may have cached */
    unsigned num_names;
    struct listing *listing;         /* of a folder */
    struct version known;            /* of a folder, when the kernel's names and the listing were last compared */
    double listed_at;
    struct file_handle *silly_parent; /* where it lies under a name .nfs... */
    char silly_name[32];
};

struct lock { struct lock *next; struct node *node; uint64_t owner; int fd; };

static struct node *table[4096], root;
static struct lock *locks;
static pthread_mutex_t table_mutex = PTHREAD_MUTEX_INITIALIZER, lock_mutex = PTHREAD_MUTEX_INITIALIZER;
static int export_fd;
static struct fuse_session *session;
static const char *control_path, *lock_mode;
static double room_left = -1;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static bool roll(double share) { return share > 0 && random() < share * RAND_MAX; }

/* Settings */

static void read_control(void) {
    char name[32];
    double value;
    FILE *file = fopen(control_path, "r");
    if (!file) return;
    double room = SET(ROOM);
    while (fscanf(file, "%31s %lf", name, &value) == 2)
        for (int i = 0; i < NUM_SETTINGS; i++)
            if (!strcmp(settings[i].name, name)) settings[i].value = value;
    fclose(file);
    if (SET(ROOM) != room) room_left = SET(ROOM);
}

/* Tells who has written the settings that they are in force. */
static void confirm_control(const struct stat *st) {
    char seen[PATH_MAX], fresh[PATH_MAX];
    snprintf(seen, sizeof seen, "%s.seen", control_path);
    snprintf(fresh, sizeof fresh, "%s.fresh", control_path);
    FILE *file = fopen(fresh, "w");
    if (!file) return;
    fprintf(file, "%lu %ld%09ld\n", (unsigned long)st->st_ino, (long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec);
    if (!fclose(file)) rename(fresh, seen);
}

static int flush_node(struct node *node, fuse_req_t req);

static void *housekeeping(void *unused) {
    struct stat before = {0}, st;
    (void)unused;
    for (unsigned turn = 0;; turn++) {
        if (!stat(control_path, &st) &&
            (st.st_ino != before.st_ino || memcmp(&st.st_mtim, &before.st_mtim, sizeof st.st_mtim))) {
            before = st;
            read_control();
            confirm_control(&st);
        }
        usleep(20000);
    }
    return NULL;
}

/* The server */

static bool is_killed(fuse_req_t req) {
    char path[64], line[128];
    unsigned long long pending = 0, one;
    snprintf(path, sizeof path, "/proc/%d/status", (int)fuse_req_ctx(req)->pid);
    FILE *file = fopen(path, "r");
    if (!file) return true;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "SigPnd: %llx", &one) == 1 || sscanf(line, "ShdPnd: %llx", &one) == 1) pending |= one;
    fclose(file);
    return pending & (1ULL << 8);
}

/* Returns 0 when the server answers. A process that was killed does not wait. */
static int reach_server(fuse_req_t req) {
    double since = now_s();
    if (SET(DELAY) > 0) usleep(SET(DELAY) * 1e6);
    while (SET(AWAY) > 0) {
        if (SET(SOFT) > 0 && now_s() - since > SET(SOFT)) return EIO;
        if (req && fuse_req_interrupted(req) && is_killed(req)) return EINTR;
        usleep(20000);
    }
    return 0;
}

static int open_handle(struct file_handle *handle, int flags) {
    return open_by_handle_at(export_fd, handle, flags | O_CLOEXEC);
}

static int open_node(struct node *node, int flags) { return open_handle(node->handle, flags); }

static void become(fuse_req_t req) {
    const struct fuse_ctx *ctx = fuse_req_ctx(req);
    gid_t groups[256];
    bool squash = ctx->uid == 0 && SET(SQUASH) > 0;
    int count = squash ? 0 : fuse_req_getgroups(req, 256, groups);
    syscall(SYS_setgroups, count > 0 ? (count > 256 ? 256 : count) : 0, groups);
    setfsgid(squash ? NOBODY : ctx->gid);
    setfsuid(squash ? NOBODY : ctx->uid);
}

static void become_root(void) {
    setfsuid(0);
    setfsgid(0);
    syscall(SYS_setgroups, 0, NULL);
}

/* Objects */

static struct file_handle *handle_of(int fd) {
    struct file_handle *handle = calloc(1, sizeof *handle + MAX_HANDLE);
    int mount_id;
    handle->handle_bytes = MAX_HANDLE;
    if (name_to_handle_at(fd, "", handle, &mount_id, AT_EMPTY_PATH)) {
        free(handle);
        return NULL;
    }
    return handle;
}

static bool same_handle(const struct file_handle *a, const struct file_handle *b) {
    return a->handle_bytes == b->handle_bytes && a->handle_type == b->handle_type &&
           !memcmp(a->f_handle, b->f_handle, a->handle_bytes);
}

static unsigned bucket_of(const struct file_handle *handle) {
    uint32_t hash = 2166136261u;
    for (unsigned i = 0; i < handle->handle_bytes; i++) hash = (hash ^ handle->f_handle[i]) * 16777619u;
    return hash % 4096;
}

/* Takes the handle; counts one look-up more. */
static struct node *node_of(struct file_handle *handle) {
    unsigned bucket = bucket_of(handle);
    pthread_mutex_lock(&table_mutex);
    struct node *node = table[bucket];
    while (node && !same_handle(node->handle, handle)) node = node->next;
    if (node) {
        free(handle);
    } else {
        node = calloc(1, sizeof *node);
        node->handle = handle;
        pthread_mutex_init(&node->mutex, NULL);
        node->next = table[bucket];
        table[bucket] = node;
    }
    node->lookups++;
    pthread_mutex_unlock(&table_mutex);
    return node;
}

static struct node *node_at(fuse_ino_t ino) { return ino == FUSE_ROOT_ID ? &root : (struct node *)ino; }
static fuse_ino_t ino_of(struct node *node) { return node == &root ? FUSE_ROOT_ID : (fuse_ino_t)node; }

static struct timespec server_time(struct timespec t) {
    double granularity = SET(GRANULARITY);
    if (granularity > 0) {
        double whole = (double)(int64_t)((t.tv_sec + t.tv_nsec * 1e-9) / granularity) * granularity;
        t.tv_sec = (time_t)whole;
        t.tv_nsec = (long)((whole - t.tv_sec) * 1e9);
    }
    return t;
}

static void as_seen(struct stat *st) {
    st->st_atim = server_time(st->st_atim), st->st_mtim = server_time(st->st_mtim);
    st->st_ctim = server_time(st->st_ctim);
    long clock = (long)SET(CLOCK);
    st->st_atim.tv_sec += clock, st->st_mtim.tv_sec += clock, st->st_ctim.tv_sec += clock;
}

static struct version version_of(const struct stat *st) {
    struct version version;
    memset(&version, 0, sizeof version);
    version.mtime = server_time(st->st_mtim), version.ctime = server_time(st->st_ctim), version.size = st->st_size;
    return version;
}

/* Notes what the kernel is told about a node and returns how long it may believe that. */
static double believe(struct node *node, struct stat *st) {
    bool is_folder = S_ISDIR(st->st_mode);
    double low = SET(is_folder ? ACDIRMIN : ACREGMIN), high = SET(is_folder ? ACDIRMAX : ACREGMAX);
    struct version version = version_of(st);
    pthread_mutex_lock(&node->mutex);
    if (memcmp(&version, &node->seen, sizeof version)) node->timeout = low;
    else node->timeout = node->timeout * 2 < low ? low : node->timeout * 2;
    if (node->timeout > high) node->timeout = high;
    node->seen = version;
    double timeout = node->timeout;
    pthread_mutex_unlock(&node->mutex);
    as_seen(st);
    return timeout;
}

static int stat_node(struct node *node, struct stat *st) {
    int fd = open_node(node, O_PATH);
    if (fd < 0) return errno;
    int err = fstat(fd, st) ? errno : 0;
    if (!err && S_ISREG(st->st_mode) && st->st_nlink == 0) err = ESTALE;
    close(fd);
    return err;
}

/* Names that the kernel may have cached */

static struct name *find_name(struct node *folder, const char *text) {
    struct name *name = folder->names;
    while (name && strcmp(name->text, text)) name = name->next;
    return name;
}

static void note_name(struct node *folder, const char *text, bool doomed) {
    pthread_mutex_lock(&folder->mutex);
    struct name *name = find_name(folder, text);
    if (!name && folder->num_names < MAX_NAMES) {
        name = calloc(1, sizeof *name + strlen(text) + 1);
        strcpy(name->text, text);
        name->next = folder->names;
        folder->names = name;
        folder->num_names++;
    }
    if (name) name->doomed = doomed;
    pthread_mutex_unlock(&folder->mutex);
}

static bool is_doomed(struct node *folder, const char *text) {
    pthread_mutex_lock(&folder->mutex);
    struct name *name = find_name(folder, text);
    bool doomed = name && name->doomed;
    if (name) name->doomed = false;
    pthread_mutex_unlock(&folder->mutex);
    return doomed;
}

static void drop_listing(struct node *folder) {
    while (folder->listing) {
        struct listing *next = folder->listing->next;
        free(folder->listing);
        folder->listing = next;
    }
}

static void own_change(struct node *folder) {
    pthread_mutex_lock(&folder->mutex);
    drop_listing(folder);
    pthread_mutex_unlock(&folder->mutex);
}

/* Has the kernel ask again for the names of a folder, which somebody else has changed. */
static void expire_names(struct node *folder) {
    pthread_mutex_lock(&folder->mutex);
    struct name *names = folder->names;
    folder->names = NULL;
    folder->num_names = 0;
    pthread_mutex_unlock(&folder->mutex);
    while (names) {
        struct name *next = names->next;
        struct fuse_notify_inval_entry_out entry = {.parent = ino_of(folder), .namelen = strlen(names->text)};
        uint32_t expire_only = 1;
        memcpy((char *)&entry + 12, &expire_only, 4);
        struct fuse_out_header head = {.error = FUSE_NOTIFY_INVAL_ENTRY};
        struct iovec parts[3] = {{&head, sizeof head}, {&entry, sizeof entry}, {names->text, entry.namelen + 1}};
        head.len = sizeof head + sizeof entry + entry.namelen + 1;
        ssize_t ignored = writev(fuse_session_fd(session), parts, 3);
        (void)ignored;
        free(names);
        names = next;
    }
}

/* Writing back */

static int write_extents(struct node *node) {
    int err = 0, fd = open_node(node, O_WRONLY);
    if (fd < 0) err = errno;
    else if (roll(SET(STALE))) err = ESTALE;
    while (node->dirty) {
        struct extent *one = node->dirty;
        for (size_t done = 0; !err && done < one->size;) {
            size_t todo = one->size - done;
            if (room_left >= 0 && todo > room_left) todo = (size_t)room_left;
            ssize_t count = todo ? pwrite(fd, one->data + done, todo, one->offset + (off_t)done) : -1;
            if (count < 0) err = todo ? errno : (int)SET(ERRNO);
            else done += (size_t)count, room_left -= room_left >= 0 ? (double)count : 0;
        }
        node->dirty = one->next;
        free(one->data);
        free(one);
    }
    node->last = NULL;
    node->num_dirty = 0;
    struct stat st;
    if (fd >= 0 && !fstat(fd, &st)) node->seen = version_of(&st);
    if (fd >= 0) close(fd);
    return err;
}

/* Sends what waits in the client; an error is kept for the next fsync or close. */
static int flush_node(struct node *node, fuse_req_t req) {
    int err = 0;
    pthread_mutex_lock(&node->mutex);
    if (node->dirty) {
        err = reach_server(req);
        if (err == EINTR) { /* the killed one does not wait, the data do */
            pthread_mutex_unlock(&node->mutex);
            return err;
        }
        if (!err) err = write_extents(node);
        if (err && !node->write_error) node->write_error = err;
    }
    pthread_mutex_unlock(&node->mutex);
    return err;
}

static int take_error(struct node *node) {
    pthread_mutex_lock(&node->mutex);
    int err = node->write_error;
    node->write_error = 0;
    pthread_mutex_unlock(&node->mutex);
    return err;
}

static void *writing_back(void *unused) {
    (void)unused;
    for (;;) {
        usleep(200000);
        struct node *old[256];
        int count = 0;
        pthread_mutex_lock(&table_mutex);
        for (int bucket = 0; bucket < 4096; bucket++)
            for (struct node *node = table[bucket]; node && count < 256; node = node->next)
                if (node->dirty && now_s() - node->dirty_since > SET(FLUSH)) node->lookups++, old[count++] = node;
        pthread_mutex_unlock(&table_mutex);
        for (int i = 0; i < count; i++) {
            flush_node(old[i], NULL);
            pthread_mutex_lock(&table_mutex);
            old[i]->lookups--; /* an idle node that nobody looks up again stays; there are few */
            pthread_mutex_unlock(&table_mutex);
        }
    }
    return NULL;
}

/* Requests */

#define FAIL(err) do { fuse_reply_err(req, err); return; } while (0)
#define REACH() do { int away = reach_server(req); if (away) FAIL(away); } while (0)

static int entry_of(int parent_fd, const char *name, struct fuse_entry_param *entry) {
    int fd = openat(parent_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    memset(entry, 0, sizeof *entry);
    int err = fstat(fd, &entry->attr) ? errno : 0;
    struct file_handle *handle = err ? NULL : handle_of(fd);
    if (!err && !handle) err = errno;
    close(fd);
    if (err) return err;
    struct node *node = node_of(handle);
    flush_node(node, NULL);
    stat_node(node, &entry->attr);
    entry->ino = ino_of(node);
    entry->attr_timeout = believe(node, &entry->attr);
    entry->entry_timeout = SET(ACDIRMIN);
    return 0;
}

static void op_init(void *unused, struct fuse_conn_info *conn) {
    (void)unused;
    conn->want &= ~(unsigned)(FUSE_CAP_ATOMIC_O_TRUNC | FUSE_CAP_WRITEBACK_CACHE | FUSE_CAP_READDIRPLUS);
    conn->want |= FUSE_CAP_AUTO_INVAL_DATA;
    unsigned both = FUSE_CAP_FLOCK_LOCKS | FUSE_CAP_POSIX_LOCKS;
    conn->want = strcmp(lock_mode, "local") ? conn->want | both : conn->want & ~both;
    pthread_t thread;
    pthread_create(&thread, NULL, housekeeping, NULL);
    pthread_create(&thread, NULL, writing_back, NULL);
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    REACH();
    struct node *folder = node_at(parent);
    int fd = open_node(folder, O_PATH | O_DIRECTORY);
    if (fd < 0) FAIL(errno);
    int err = entry_of(fd, name, &entry);
    close(fd);
    if (err == ENOENT) {
        bool doomed = roll(SET(LOST));
        memset(&entry, 0, sizeof entry);
        entry.entry_timeout = doomed ? 0 : SET(ACDIRMIN);
        note_name(folder, name, doomed);
        fuse_reply_entry(req, &entry);
    } else if (err) {
        FAIL(err);
    } else {
        note_name(folder, name, false);
        fuse_reply_entry(req, &entry);
    }
}

static void forget(fuse_ino_t ino, uint64_t count) {
    struct node *node = node_at(ino), **place;
    if (node == &root) return;
    pthread_mutex_lock(&table_mutex);
    node->lookups -= count;
    if (!node->lookups && !node->dirty && !node->opens) {
        for (place = &table[bucket_of(node->handle)]; *place != node;) place = &(*place)->next;
        *place = node->next;
        drop_listing(node);
        while (node->names) {
            struct name *next = node->names->next;
            free(node->names);
            node->names = next;
        }
        free(node->handle);
        free(node);
    }
    pthread_mutex_unlock(&table_mutex);
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t count) {
    forget(ino, count);
    fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets) {
    for (size_t i = 0; i < count; i++) forget(forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(req);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    struct stat st;
    struct node *node = node_at(ino);
    (void)fi;
    REACH();
    if (flush_node(node, req) == EINTR) FAIL(EINTR);
    int err = roll(SET(STALE)) ? ESTALE : stat_node(node, &st);
    if (err) FAIL(err);
    double timeout = believe(node, &st);
    fuse_reply_attr(req, &st, timeout);
}

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int which, struct fuse_file_info *fi) {
    struct node *node = node_at(ino);
    char path[64];
    struct stat st;
    int err = 0;
    REACH();
    if (flush_node(node, req) == EINTR) FAIL(EINTR);
    int fd = open_node(node, O_PATH);
    if (fd < 0) FAIL(errno);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!(which & FUSE_SET_ATTR_SIZE) || !fi) become(req); /* an open file may be cut by whoever could open it */
    if (which & FUSE_SET_ATTR_MODE) err = chmod(path, attr->st_mode & 07777) ? errno : 0;
    if (!err && which & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) {
        uid_t uid = which & FUSE_SET_ATTR_UID ? attr->st_uid : (uid_t)-1;
        gid_t gid = which & FUSE_SET_ATTR_GID ? attr->st_gid : (gid_t)-1;
        err = fchownat(fd, "", uid, gid, AT_EMPTY_PATH) ? errno : 0;
    }
    if (!err && which & FUSE_SET_ATTR_SIZE) err = truncate(path, attr->st_size) ? errno : 0;
    if (!err && which & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
        if (which & FUSE_SET_ATTR_ATIME) times[0] = attr->st_atim, times[0].tv_sec -= (long)SET(CLOCK);
        if (which & FUSE_SET_ATTR_MTIME) times[1] = attr->st_mtim, times[1].tv_sec -= (long)SET(CLOCK);
        if (which & FUSE_SET_ATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
        if (which & FUSE_SET_ATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
        err = utimensat(AT_FDCWD, path, times, 0) ? errno : 0;
    }
    become_root();
    if (!err) err = fstat(fd, &st) ? errno : 0;
    close(fd);
    if (err) FAIL(err);
    double timeout = believe(node, &st);
    fuse_reply_attr(req, &st, timeout);
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino) {
    char text[4097];
    REACH();
    int fd = open_node(node_at(ino), O_PATH | O_NOFOLLOW);
    if (fd < 0) FAIL(errno);
    ssize_t size = readlinkat(fd, "", text, sizeof text - 1);
    int err = size < 0 ? errno : 0;
    close(fd);
    if (err) FAIL(err);
    text[size] = 0;
    fuse_reply_readlink(req, text);
}

/* Makes an entry, twice where the first reply is lost. */
static void make_entry(fuse_req_t req, fuse_ino_t parent, const char *name, int (*make)(int, const char *, void *),
                       void *with, struct fuse_file_info *fi) {
    struct fuse_entry_param entry;
    REACH();
    struct node *folder = node_at(parent);
    int fd = open_node(folder, O_PATH | O_DIRECTORY);
    if (fd < 0) FAIL(errno);
    bool doomed = is_doomed(folder, name) && !fi; /* an exclusive create has a verifier */
    become(req);
    int err = room_left == 0 ? (int)SET(ERRNO) : make(fd, name, with);
    if (!err && doomed) err = make(fd, name, with);
    become_root();
    if (!err) err = entry_of(fd, name, &entry);
    close(fd);
    own_change(folder);
    if (err) FAIL(err);
    note_name(folder, name, false);
    if (!fi) {
        fuse_reply_entry(req, &entry);
        return;
    }
    struct node *node = node_at(entry.ino);
    pthread_mutex_lock(&node->mutex);
    node->opens++;
    pthread_mutex_unlock(&node->mutex);
    fi->keep_cache = 1;
    fuse_reply_create(req, &entry, fi);
}

static int make_folder(int fd, const char *name, void *mode) { return mkdirat(fd, name, *(mode_t *)mode) ? errno : 0; }

static void op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode) {
    make_entry(req, parent, name, make_folder, &mode, NULL);
}

static int make_link(int fd, const char *name, void *target) { return symlinkat(target, fd, name) ? errno : 0; }

static void op_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name) {
    make_entry(req, parent, name, make_link, (void *)target, NULL);
}

struct making { mode_t mode; dev_t device; int flags; };

static int make_special(int fd, const char *name, void *with) {
    struct making *making = with;
    return mknodat(fd, name, making->mode, making->device) ? errno : 0;
}

static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t device) {
    struct making making = {mode, device, 0};
    make_entry(req, parent, name, make_special, &making, NULL);
}

static int make_file(int fd, const char *name, void *with) {
    struct making *making = with;
    int flags = making->flags & (O_EXCL | O_ACCMODE | O_TRUNC);
    int made = openat(fd, name, flags | O_CREAT | O_NOFOLLOW | O_CLOEXEC, making->mode);
    if (made < 0) return errno;
    close(made);
    return 0;
}

static void op_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi) {
    struct making making = {mode, 0, fi->flags};
    make_entry(req, parent, name, make_file, &making, fi);
}

/* Hard links: the second request of a lost reply says that the name exists. */
static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    char path[64];
    REACH();
    struct node *folder = node_at(parent);
    int from = open_node(node_at(ino), O_PATH), fd = from < 0 ? -1 : open_node(folder, O_PATH | O_DIRECTORY), err = 0;
    if (fd < 0) err = errno;
    if (!err) {
        bool doomed = is_doomed(folder, name);
        snprintf(path, sizeof path, "/proc/self/fd/%d", from);
        become(req);
        for (int turn = 0; turn <= doomed && !err; turn++)
            err = linkat(AT_FDCWD, path, fd, name, AT_SYMLINK_FOLLOW) ? errno : 0;
        become_root();
        if (!err) err = entry_of(fd, name, &entry);
        own_change(folder);
    }
    if (from >= 0) close(from);
    if (fd >= 0) close(fd);
    if (err) FAIL(err);
    note_name(folder, name, false);
    fuse_reply_entry(req, &entry);
}

/* Keeps a file that is open here under another name; returns -1 where it is not open, else 0 or an errno. */
static int put_aside(struct node *folder, int fd, const char *name) {
    static unsigned counter;
    int err = -1, one = openat(fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (one < 0) return -1;
    struct file_handle *handle = handle_of(one);
    close(one);
    if (!handle) return -1;
    pthread_mutex_lock(&table_mutex);
    struct node *node = table[bucket_of(handle)];
    while (node && !same_handle(node->handle, handle)) node = node->next;
    if (node && node->opens && !node->silly_parent) {
        snprintf(node->silly_name, sizeof node->silly_name, ".nfs%08x%08x", (unsigned)getpid(), ++counter);
        err = renameat(fd, name, fd, node->silly_name) ? errno : 0;
        if (!err) {
            node->silly_parent = malloc(sizeof *handle + MAX_HANDLE);
            memcpy(node->silly_parent, folder->handle, sizeof *handle + MAX_HANDLE);
        }
    }
    pthread_mutex_unlock(&table_mutex);
    free(handle);
    return err;
}

static void remove_entry(fuse_req_t req, fuse_ino_t parent, const char *name, int flags) {
    REACH();
    struct node *folder = node_at(parent);
    int fd = open_node(folder, O_PATH | O_DIRECTORY);
    if (fd < 0) FAIL(errno);
    become(req);
    int err = flags ? -1 : put_aside(folder, fd, name);
    if (err == -1) {
        err = unlinkat(fd, name, flags) ? errno : 0;
        if (!err && roll(SET(LOST))) err = unlinkat(fd, name, flags) ? errno : 0;
    }
    become_root();
    close(fd);
    own_change(folder);
    FAIL(err);
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name) { remove_entry(req, parent, name, 0); }
static void op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name) {
    remove_entry(req, parent, name, AT_REMOVEDIR);
}

static void op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
                      unsigned flags) {
    if (flags) FAIL(EINVAL);
    REACH();
    struct node *folder = node_at(parent), *target = node_at(new_parent);
    int from = open_node(folder, O_PATH | O_DIRECTORY);
    int to = from < 0 ? -1 : open_node(target, O_PATH | O_DIRECTORY), err = to < 0 ? errno : 0;
    if (!err) {
        bool doomed = is_doomed(target, new_name);
        become(req);
        struct stat st;
        if (!fstatat(to, new_name, &st, AT_SYMLINK_NOFOLLOW)) {
            doomed = doomed || roll(SET(LOST));
            if (S_ISREG(st.st_mode)) put_aside(target, to, new_name);
        }
        for (int turn = 0; turn <= doomed && !err; turn++) err = renameat(from, name, to, new_name) ? errno : 0;
        become_root();
        own_change(folder);
        own_change(target);
        note_name(target, new_name, false);
    }
    if (from >= 0) close(from);
    if (to >= 0) close(to);
    FAIL(err);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    struct node *node = node_at(ino);
    struct stat st;
    char path[64];
    int err = 0;
    REACH();
    if (flush_node(node, req) == EINTR) FAIL(EINTR);
    int fd = open_node(node, O_PATH);
    if (fd < 0) FAIL(errno);
    if (fstat(fd, &st)) err = errno;
    else if (!st.st_nlink) err = ESTALE;
    const struct fuse_ctx *ctx = fuse_req_ctx(req);
    if (!err && (ctx->uid != st.st_uid)) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        become(req);
        int opened = open(path, (fi->flags & O_ACCMODE) | O_CLOEXEC);
        err = opened < 0 ? errno : 0;
        become_root();
        if (opened >= 0) close(opened);
    }
    close(fd);
    if (err) FAIL(err);
    fi->keep_cache = 1;
    pthread_mutex_lock(&node->mutex);
    node->opens++;
    struct version version = version_of(&st);
    bool changed = memcmp(&version, &node->seen, sizeof version);
    pthread_mutex_unlock(&node->mutex);
    if (SET(CTO) > 0) {
        fi->keep_cache = !changed;
        fuse_lowlevel_notify_inval_inode(session, ino, -1, 0);
    }
    fuse_reply_open(req, fi);
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi) {
    struct node *node = node_at(ino);
    (void)fi;
    REACH();
    if (flush_node(node, req) == EINTR) FAIL(EINTR);
    if (roll(SET(STALE))) FAIL(ESTALE);
    int fd = open_node(node, O_RDONLY);
    if (fd < 0) FAIL(errno);
    struct stat st;
    if (!fstat(fd, &st) && !st.st_nlink) {
        close(fd);
        FAIL(ESTALE);
    }
    char *data = malloc(size);
    ssize_t count = pread(fd, data, size, offset);
    if (count < 0) fuse_reply_err(req, errno);
    else fuse_reply_buf(req, data, (size_t)count);
    free(data);
    close(fd);
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *fi) {
    struct node *node = node_at(ino);
    (void)fi;
    pthread_mutex_lock(&node->mutex);
    struct extent *last = node->last;
    if (last && last->offset + (off_t)last->size == offset) {
        last->data = realloc(last->data, last->size + size);
        memcpy(last->data + last->size, data, size);
        last->size += size;
    } else {
        struct extent *one = calloc(1, sizeof *one);
        one->offset = offset, one->size = size, one->data = malloc(size);
        memcpy(one->data, data, size);
        if (last) last->next = one;
        else node->dirty = one, node->dirty_since = now_s();
        node->last = one;
    }
    node->num_dirty += size;
    bool now = node->num_dirty > MAX_DIRTY || SET(SYNC) > 0;
    pthread_mutex_unlock(&node->mutex);
    if (now) {
        int err = flush_node(node, req);
        if (err && SET(SYNC) > 0) FAIL(take_error(node));
        if (err == EINTR) FAIL(EINTR);
    }
    fuse_reply_write(req, size);
}

static void unlock_owner(struct node *node, uint64_t owner) {
    pthread_mutex_lock(&lock_mutex);
    for (struct lock **place = &locks; *place;) {
        struct lock *one = *place;
        if (one->node == node && one->owner == owner) {
            *place = one->next;
            close(one->fd);
            free(one);
        } else {
            place = &one->next;
        }
    }
    pthread_mutex_unlock(&lock_mutex);
}

static void op_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    struct node *node = node_at(ino);
    if (flush_node(node, req) == EINTR) FAIL(EINTR);
    unlock_owner(node, fi->lock_owner);
    FAIL(take_error(node));
}

static void op_fsync(fuse_req_t req, fuse_ino_t ino, int only_data, struct fuse_file_info *fi) {
    (void)only_data, (void)fi;
    REACH();
    if (flush_node(node_at(ino), req) == EINTR) FAIL(EINTR);
    FAIL(take_error(node_at(ino)));
}

static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    struct node *node = node_at(ino);
    flush_node(node, NULL);
    if (fi->flock_release) unlock_owner(node, fi->lock_owner);
    pthread_mutex_lock(&table_mutex);
    struct file_handle *parent = --node->opens ? NULL : node->silly_parent;
    if (parent) node->silly_parent = NULL;
    pthread_mutex_unlock(&table_mutex);
    if (parent) {
        int fd = open_handle(parent, O_PATH | O_DIRECTORY);
        if (fd >= 0) {
            unlinkat(fd, node->silly_name, 0);
            close(fd);
        }
        free(parent);
    }
    FAIL(0);
}

static void op_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    struct node *folder = node_at(ino);
    struct stat st;
    REACH();
    int err = stat_node(folder, &st);
    if (err) FAIL(err);
    pthread_mutex_lock(&folder->mutex);
    struct version version = version_of(&st);
    bool changed = memcmp(&version, &folder->known, sizeof version);
    bool ask = SET(CTO) > 0 ? changed : now_s() - folder->listed_at > SET(ACDIRMIN);
    if (ask) {
        drop_listing(folder);
        folder->known = version;
    }
    pthread_mutex_unlock(&folder->mutex);
    if (ask) {
        fuse_lowlevel_notify_inval_inode(session, ino, -1, 0);
        expire_names(folder);
    }
    fuse_reply_open(req, fi);
}

static int list_folder(fuse_req_t req, struct node *folder) {
    int fd = open_node(folder, O_PATH | O_DIRECTORY);
    if (fd < 0) return errno;
    become(req);
    int readable = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), err = readable < 0 ? errno : 0;
    become_root();
    close(fd);
    if (err) return err;
    DIR *entries = fdopendir(readable);
    struct listing **end = &folder->listing;
    for (struct dirent *one; (one = readdir(entries));) {
        *end = calloc(1, sizeof **end + strlen(one->d_name) + 1);
        strcpy((*end)->name, one->d_name);
        (*end)->st.st_ino = one->d_ino;
        (*end)->st.st_mode = (mode_t)one->d_type << 12;
        end = &(*end)->next;
    }
    closedir(entries);
    folder->listed_at = now_s();
    return 0;
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi) {
    struct node *folder = node_at(ino);
    (void)fi;
    REACH();
    pthread_mutex_lock(&folder->mutex);
    int err = !offset && roll(SET(STALE)) ? ESTALE : !folder->listing ? list_folder(req, folder) : 0;
    char *data = malloc(size);
    size_t used = 0;
    off_t position = 0;
    for (struct listing *one = folder->listing; one && !err; one = one->next) {
        if (++position <= offset) continue;
        size_t needed = fuse_add_direntry(req, data + used, size - used, one->name, &one->st, position);
        if (needed > size - used) break;
        used += needed;
    }
    pthread_mutex_unlock(&folder->mutex);
    if (err) fuse_reply_err(req, err);
    else fuse_reply_buf(req, data, used);
    free(data);
}

static void op_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
    (void)ino, (void)fi;
    FAIL(0);
}

static void op_fsyncdir(fuse_req_t req, fuse_ino_t ino, int only_data, struct fuse_file_info *fi) {
    (void)ino, (void)only_data, (void)fi;
    FAIL(0); /* as on NFS, where the server has made every change of names durable before it answers */
}

static void op_statfs(fuse_req_t req, fuse_ino_t ino) {
    struct statvfs values;
    (void)ino;
    REACH();
    if (fstatvfs(export_fd, &values)) FAIL(errno);
    if (room_left >= 0) values.f_bavail = values.f_bfree = (fsblkcnt_t)(room_left / values.f_frsize);
    fuse_reply_statfs(req, &values);
}

/* Locks of the server: one description per owner, on which the kernel's locks of open file descriptions are taken. */
static void lock_range(fuse_req_t req, fuse_ino_t ino, uint64_t owner, struct flock range, bool wait) {
    struct node *node = node_at(ino);
    REACH();
    if (!strcmp(lock_mode, "none")) FAIL(ENOLCK);
    pthread_mutex_lock(&lock_mutex);
    struct lock *one = locks;
    while (one && (one->node != node || one->owner != owner)) one = one->next;
    if (!one) {
        int fd = open_node(node, O_RDWR);
        if (fd < 0) {
            pthread_mutex_unlock(&lock_mutex);
            FAIL(errno);
        }
        one = calloc(1, sizeof *one);
        one->node = node, one->owner = owner, one->fd = fd, one->next = locks;
        locks = one;
    }
    int fd = dup(one->fd);
    pthread_mutex_unlock(&lock_mutex);
    range.l_pid = 0;
    int err;
    while ((err = fcntl(fd, F_OFD_SETLK, &range) ? errno : 0) == EAGAIN && wait && !fuse_req_interrupted(req))
        usleep(20000);
    if (err == EAGAIN && wait) err = EINTR;
    close(fd);
    FAIL(err);
}

static void op_setlk(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, struct flock *range, int wait) {
    lock_range(req, ino, fi->lock_owner, *range, wait);
}

static void op_getlk(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, struct flock *range) {
    (void)fi;
    REACH();
    int fd = open_node(node_at(ino), O_RDWR);
    if (fd < 0) FAIL(errno);
    range->l_pid = 0;
    int err = fcntl(fd, F_OFD_GETLK, range) ? errno : 0;
    close(fd);
    if (err) FAIL(err);
    fuse_reply_lock(req, range);
}

static void op_flock(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, int operation) {
    short kind = operation & LOCK_UN ? F_UNLCK : operation & LOCK_EX ? F_WRLCK : F_RDLCK;
    struct flock range = {.l_type = kind, .l_whence = SEEK_SET};
    lock_range(req, ino, fi->lock_owner, range, !(operation & LOCK_NB));
}

static const struct fuse_lowlevel_ops operations = {
    .init = op_init, .lookup = op_lookup, .forget = op_forget, .forget_multi = op_forget_multi,
    .getattr = op_getattr, .setattr = op_setattr, .readlink = op_readlink, .mknod = op_mknod, .mkdir = op_mkdir,
    .unlink = op_unlink, .rmdir = op_rmdir, .symlink = op_symlink, .rename = op_rename, .link = op_link,
    .open = op_open, .read = op_read, .write = op_write, .flush = op_flush, .release = op_release, .fsync = op_fsync,
    .opendir = op_opendir, .readdir = op_readdir, .releasedir = op_releasedir, .fsyncdir = op_fsyncdir,
    .statfs = op_statfs, .create = op_create, .getlk = op_getlk, .setlk = op_setlk, .flock = op_flock,
};

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: nfs_client EXPORT MOUNTPOINT CONTROL LOCKS\n");
        return 2;
    }
    control_path = argv[3], lock_mode = argv[4];
    srandom((unsigned)(now_s() * 1e6));
    umask(0);
    export_fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (export_fd < 0 || !(root.handle = handle_of(export_fd))) {
        perror(argv[1]);
        return 1;
    }
    pthread_mutex_init(&root.mutex, NULL);
    root.lookups = 1;
    root.next = table[bucket_of(root.handle)];
    table[bucket_of(root.handle)] = &root;
    read_control();
    char *words[] = {"nfs_client", "-oallow_other,default_permissions,fsname=server:/export,subtype=nfs"};
    struct fuse_args args = FUSE_ARGS_INIT(2, words);
    session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, argv[2])) return 1;
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(config, 256);
    fuse_loop_cfg_set_idle_threads(config, 256);
    int err = fuse_session_loop_mt(session, config);
    fuse_session_unmount(session);
    return err ? 1 : 0;
}

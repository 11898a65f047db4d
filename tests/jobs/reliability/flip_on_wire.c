/* Preloaded into a rank: flips one bit of what it sends over TCP, as a faulty link would behind the checksum.
 *
 * FLIP_AFTER: large sends before the first flip, and between two. FLIP_LOG: a file that gets a line for each.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define LARGE 4096 /* bytes: the payload of an operation, and no header */

static int count, seed = 12345;

/* Returns memory with a bit of the last vector flipped, or NULL if this send stays as it is. `at`: bytes that
 * are sent before the changed one. */
static char *flipped(const struct iovec *vectors, size_t number, struct iovec *changed, ssize_t *at) {
    const char *after = getenv("FLIP_AFTER");
    if (!after || number == 0 || number > 8 || vectors[number - 1].iov_len < LARGE)
        return NULL;
    if (++count % atoi(after))
        return NULL;
    memcpy(changed, vectors, number * sizeof *vectors);
    size_t length = vectors[number - 1].iov_len;
    char *copy = malloc(length);
    memcpy(copy, vectors[number - 1].iov_base, length);
    seed = seed * 1103515245 + 12345;
    /* Near the front: what the kernel does not take at once is sent again from the caller's memory. */
    size_t place = ((unsigned)seed >> 8) % 2048;
    copy[place] ^= 1 << (((unsigned)seed >> 4) % 8);
    *at = (ssize_t)place;
    for (size_t each = 0; each + 1 < number; each++)
        *at += (ssize_t)vectors[each].iov_len;
    changed[number - 1].iov_base = copy;
    return copy;
}

static void note(void) {
    int file = open(getenv("FLIP_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, "flip\n", 5) != 5)
        abort();
    close(file);
}

ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (!real)
        real = (ssize_t(*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    struct iovec changed[8];
    ssize_t at;
    char *copy = flipped(message->msg_iov, message->msg_iovlen, changed, &at);
    if (!copy)
        return real(socket, message, flags);
    struct msghdr other = *message;
    other.msg_iov = changed;
    ssize_t sent = real(socket, &other, flags);
    if (sent > at)
        note();
    free(copy);
    return sent;
}

ssize_t writev(int file, const struct iovec *vectors, int number) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real)
        real = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    struct iovec changed[8];
    ssize_t at;
    char *copy = flipped(vectors, number, changed, &at);
    if (!copy)
        return real(file, vectors, number);
    ssize_t sent = real(file, changed, number);
    if (sent > at)
        note();
    free(copy);
    return sent;
}

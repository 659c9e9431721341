/* A name server that hangs, for faults.py, which compiles this and preloads it into a gate: as long as the file is there
   that HUNG_NAMES names, nobody learns where localhost is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **answers)
{
    const char *hung = getenv("HUNG_NAMES");
    while (hung && host && !strcmp(host, "localhost") && !access(hung, F_OK))
        usleep(10000);
    return ((__typeof__(getaddrinfo) *)dlsym(RTLD_NEXT, "getaddrinfo"))(host, service, hints, answers);
}

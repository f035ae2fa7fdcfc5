/* What every program of unit tests says when something does not hold: where and what; then it ends. */
#ifndef VGPU_TESTS_CHECK_H
#define VGPU_TESTS_CHECK_H
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s\n", __LINE__, #condition);                                                             \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#endif

/* dlsym and dlvsym: unchanged, except that they return the hook instead of a hooked driver function. dlopen: unchanged,
 * except that libraries opened with RTLD_DEEPBIND do not bypass the hooks.
 *
 * The exported entry points are a few instructions of assembler. They ask `vgpu_dlsym_answer` and otherwise jump (not
 * call) to the real function, so that it sees the caller's return address: RTLD_DEFAULT and RTLD_NEXT depend on the
 * caller. */
#define _GNU_SOURCE
#include "loader/loader.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "base/log.h"
#include "loader/driver.h"
#include "loader/loaded.h"
#include "loader/opening.h"
#include "loader/rebind.h"

typedef void *(*dlsym_function)(void *, const char *);
typedef void *(*dlvsym_function)(void *, const char *, const char *);
typedef void *(*dlopen_function)(const char *, int);
typedef char *(*dlerror_function)(void);

void *vgpu_linker_function(_Atomic(void *) *cache, const char *name) {
    void *function = atomic_load_explicit(cache, memory_order_acquire);
    if (!function) {
        function = vgpu_loaded_symbol("libc.so.6", name);
        if (!function)
            function = vgpu_loaded_symbol("libdl.so.2", name);
        atomic_store_explicit(cache, function, memory_order_release);
    }
    return function;
}

static _Atomic(void *) cached_dlsym, cached_dlvsym, cached_dlopen, cached_dlerror;

void *vgpu_linker_dlopen(void) {
    return vgpu_linker_function(&cached_dlopen, "dlopen");
}

void *vgpu_real_dlsym(void *handle, const char *symbol) {
    dlsym_function function = (dlsym_function)vgpu_linker_function(&cached_dlsym, "dlsym");
    return function ? function(handle, symbol) : NULL;
}

void *vgpu_real_dlopen(const char *file, int mode) {
    dlopen_function function = (dlopen_function)vgpu_linker_dlopen();
    dlerror_function forget = (dlerror_function)vgpu_linker_function(&cached_dlerror, "dlerror");
    void *handle = function ? function(file, mode) : NULL;
    if (!handle && forget)
        forget(); /* the program's next dlerror must not print this library's failure */
    return handle;
}

/* The action of the assembler below: jump to `jump` if it is set, else return `answer`. */
struct vgpu_dlsym_result {
    void *answer;
    void *jump;
};

/* RTLD_NEXT of a hooked name: the first definition after the caller's object, in load order. If the caller has its own
 * scope (a library opened with RTLD_LOCAL), the driver may come earlier. Then any loaded driver counts, so that no call
 * bypasses a hook. */
static void *next_hook(int hook, const char *symbol, const void *caller) {
    void *found = vgpu_loaded_next(caller, symbol);
    if (!found) {
        found = vgpu_loaded_symbol("libcuda.so.1", symbol);
        if (!found)
            found = vgpu_loaded_symbol("libnvidia-ml.so.1", symbol);
    }
    if (!vgpu_loaded_in_driver(found))
        return NULL;
    vgpu_driver_learn(hook, found);
    return vgpu_hook_function(hook);
}

/* This library's own entry point for a lookup of dlsym, dlvsym or dlopen; NULL: any other name. */
static void *own_lookup(const char *symbol) {
    if (symbol[0] != 'd' || symbol[1] != 'l')
        return NULL;
    return strcmp(symbol, "dlsym") == 0    ? (void *)dlsym
           : strcmp(symbol, "dlvsym") == 0 ? (void *)dlvsym
           : strcmp(symbol, "dlopen") == 0 ? (void *)dlopen
                                           : NULL;
}

static void *look_up(void *jump, void *handle, const char *symbol, const char *version) {
    void *found = version ? ((dlvsym_function)jump)(handle, symbol, version) : ((dlsym_function)jump)(handle, symbol);
    return found; /* called, not jumped to: for RTLD_NEXT this library is the caller */
}

/* The driver looks up its own functions (the loaders of WSL2 and of compatibility packages do this). It gets the answer
 * that it would get without this library: with the hook, the driver would call itself. NULL: the real function finds
 * the answer by itself. */
static void *answer_for_driver(void *jump, void *handle, int hook, const char *symbol, const char *version,
                               const void *caller) {
    void *const ours = vgpu_hook_function(hook);
    dlerror_function forget = (dlerror_function)vgpu_linker_function(&cached_dlerror, "dlerror");
    bool searches;
    if (handle == RTLD_NEXT)
        return vgpu_loaded_is_before(caller, ours) ? vgpu_loaded_next(ours, symbol) : NULL;
    if (handle != RTLD_DEFAULT && look_up(jump, handle, symbol, version) != ours)
        return NULL;
    /* The default scope, or the scope of the whole program (dlopen(NULL)): this library comes first there. */
    void *found = look_up(jump, RTLD_NEXT, symbol, version);
    if (!found)
        found = look_up(jump, (void *)vgpu_loaded_object(caller, &searches), symbol, version);
    if (forget)
        forget();
    return found && found != ours ? found : vgpu_driver_entry((enum vgpu_entry)hook);
}

static struct vgpu_dlsym_result answer_hooked(void *jump, void *handle, int hook, const char *symbol,
                                              const char *version, const void *caller) {
    struct vgpu_dlsym_result result = {.jump = jump};
    if (vgpu_loaded_is_driver(caller)) {
        result.answer = answer_for_driver(jump, handle, hook, symbol, version, caller);
        if (result.answer)
            result.jump = NULL;
    } else if (handle == RTLD_NEXT) {
        result.answer = next_hook(hook, symbol, caller);
        if (result.answer)
            result.jump = NULL;
    } else if (handle !=
               RTLD_DEFAULT) { /* RTLD_DEFAULT finds the hook by itself: this library comes first in the global scope */
        void *found = look_up(jump, handle, symbol, version);
        result.jump = NULL;
        result.answer = found;
        if (vgpu_loaded_in_driver(found)) {
            vgpu_driver_learn(hook, found);
            result.answer = vgpu_hook_function(hook);
        }
    }
    return result;
}

__attribute__((used)) struct vgpu_dlsym_result vgpu_dlsym_answer(void *handle, const char *symbol, const char *version,
                                                                 const void *caller) {
    int kept = errno;
    void *jump =
        version ? vgpu_linker_function(&cached_dlvsym, "dlvsym") : vgpu_linker_function(&cached_dlsym, "dlsym");
    struct vgpu_dlsym_result result = {.jump = jump};
    int hook = symbol && jump ? vgpu_hook_number(symbol) : -1;
    void *own = symbol && jump ? own_lookup(symbol) : NULL;
    /* RTLD_DEFAULT finds this library's entry points by itself. */
    if (own && handle != RTLD_DEFAULT) {
        /* A tracer that hooks dlsym asks the C library for the real one: that would bypass every hook. */
        void *found = handle == RTLD_NEXT ? vgpu_loaded_next(caller, symbol) : look_up(jump, handle, symbol, version);
        if (vgpu_loaded_in_libc(found) || (found && handle != RTLD_NEXT)) {
            result.answer = vgpu_loaded_in_libc(found) ? own : found;
            result.jump = NULL;
        }
    } else if (hook >= 0) {
        result = answer_hooked(jump, handle, hook, symbol, version, caller);
    }
    errno = kept;
    return result;
}

/* Opens libraries here in two cases. For the driver, so that they count as the driver's. With RTLD_DEEPBIND, so that
 * calls that bypass the entry points can be bound again. If this is impossible, the real dlopen opens the library
 * without RTLD_DEEPBIND. */
__attribute__((used)) struct vgpu_dlsym_result vgpu_dlopen_answer(const char *file, int mode, const void *caller) {
    struct vgpu_dlsym_result result = {.jump = vgpu_linker_dlopen()};
    if (!result.jump || !file || (!(mode & RTLD_DEEPBIND) && !vgpu_loaded_is_driver(caller)))
        return result;
    if (!vgpu_open_for(caller, file, mode, &result.answer)) {
        vgpu_log(VGPU_LOG_WARNING, "dlopen(\"%s\"): opened without RTLD_DEEPBIND", file);
        return result;
    }
    result.jump = NULL;
    const int kept = errno;
    if (result.answer && mode & RTLD_DEEPBIND)
        vgpu_rebind();
    errno = kept;
    return result;
}

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlopen\n"
        ".type dlopen, @function\n"
        ".p2align 4\n"
        "dlopen:\n"
        ".cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    pushq %rdx\n" /* keeps the stack aligned */
        ".cfi_adjust_cfa_offset 8\n"
        "    movq 24(%rsp), %rdx\n" /* the caller */
        "    call vgpu_dlopen_answer\n"
        "    movq %rdx, %r11\n"
        "    popq %rdx\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    testq %r11, %r11\n"
        "    jz 1f\n"
        "    andl $~8, %esi\n" /* RTLD_DEEPBIND */
        "    jmpq *%r11\n"
        "1:  ret\n"
        ".cfi_endproc\n"
        ".size dlopen, .-dlopen\n"
        ".macro vgpu_entry name, versioned\n"
        ".globl \\name\n"
        ".type \\name, @function\n"
        ".p2align 4\n"
        "\\name:\n"
        ".cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    pushq %rdx\n"
        ".cfi_adjust_cfa_offset 8\n"
        "    movq 24(%rsp), %rcx\n" /* the caller */
        ".if \\versioned == 0\n"
        "    xorl %edx, %edx\n"
        ".endif\n"
        "    call vgpu_dlsym_answer\n"
        "    movq %rdx, %r11\n"
        "    popq %rdx\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "    testq %r11, %r11\n"
        "    jz 1f\n"
        "    jmpq *%r11\n"
        "1:  ret\n"
        ".cfi_endproc\n"
        ".size \\name, .-\\name\n"
        ".endm\n"
        "vgpu_entry dlsym, 0\n"
        "vgpu_entry dlvsym, 1\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl dlopen\n"
        ".type dlopen, %function\n"
        ".p2align 4\n"
        "dlopen:\n"
        ".cfi_startproc\n"
        "    hint #34\n" /* bti c */
        "    stp x29, x30, [sp, #-32]!\n"
        ".cfi_adjust_cfa_offset 32\n"
        ".cfi_rel_offset x29, 0\n"
        ".cfi_rel_offset x30, 8\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    mov x2, x30\n" /* the caller */
        "    bl vgpu_dlopen_answer\n"
        "    mov x16, x1\n"
        "    cbz x16, 1f\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    and w1, w1, #0xfffffff7\n" /* RTLD_DEEPBIND */
        "    ldp x29, x30, [sp], #32\n"
        ".cfi_remember_state\n"
        ".cfi_adjust_cfa_offset -32\n"
        ".cfi_restore x29\n"
        ".cfi_restore x30\n"
        "    br x16\n"
        ".cfi_restore_state\n"
        "1:  ldp x29, x30, [sp], #32\n"
        ".cfi_adjust_cfa_offset -32\n"
        ".cfi_restore x29\n"
        ".cfi_restore x30\n"
        "    ret\n"
        ".cfi_endproc\n"
        ".size dlopen, .-dlopen\n"
        ".macro vgpu_entry name, versioned\n"
        ".globl \\name\n"
        ".type \\name, %function\n"
        ".p2align 4\n"
        "\\name:\n"
        ".cfi_startproc\n"
        "    hint #34\n" /* bti c */
        "    stp x29, x30, [sp, #-48]!\n"
        ".cfi_adjust_cfa_offset 48\n"
        ".cfi_rel_offset x29, 0\n"
        ".cfi_rel_offset x30, 8\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    str x2, [sp, #32]\n"
        "    mov x3, x30\n" /* the caller */
        ".if \\versioned == 0\n"
        "    mov x2, #0\n"
        ".endif\n"
        "    bl vgpu_dlsym_answer\n"
        "    mov x16, x1\n"
        "    cbz x16, 1f\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldr x2, [sp, #32]\n"
        "    ldp x29, x30, [sp], #48\n"
        ".cfi_remember_state\n"
        ".cfi_adjust_cfa_offset -48\n"
        ".cfi_restore x29\n"
        ".cfi_restore x30\n"
        "    br x16\n"
        ".cfi_restore_state\n"
        "1:  ldp x29, x30, [sp], #48\n"
        ".cfi_adjust_cfa_offset -48\n"
        ".cfi_restore x29\n"
        ".cfi_restore x30\n"
        "    ret\n"
        ".cfi_endproc\n"
        ".size \\name, .-\\name\n"
        ".endm\n"
        "vgpu_entry dlsym, 0\n"
        "vgpu_entry dlvsym, 1\n");
#else
#error "libvgpu: only x86-64 and aarch64"
#endif

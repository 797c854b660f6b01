/* Included ahead of ggml's CPU kernels (engine_options.cmake). It changes one intrinsic of GCC 12 and older, and nothing where the
 * target has no AMX.
 *
 * A tile configuration is 64 bytes, but those compilers declare that _tile_loadconfig() reads only a pointer's width of it. When the
 * optimiser believes that, it drops the stores to the other bytes, and the CPU answers the garbage with a general protection
 * fault in the first matrix product. The replacement declares the whole object as read. */
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#include <immintrin.h>

struct __attribute__((may_alias)) calculet_tile_config {
    unsigned char bytes[64];
};

static inline void calculet_load_tile_config(const void * config) {
    __asm__ volatile("ldtilecfg %X0" : : "m"(*static_cast<const calculet_tile_config *>(config)));
}

#define _tile_loadconfig(config) calculet_load_tile_config(config)
#endif

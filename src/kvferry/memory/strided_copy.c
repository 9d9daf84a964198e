/* Strided copies between two places in host memory, without Python between the runs.
 *
 * planning/strided_copy.py describes the loops: each has a count and one stride per side, and a run is
 * contiguous on both sides. The caller has checked that every run is inside its memory, and that source and
 * destination do not overlap.
 */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#endif

struct loop {
    int64_t count, src, dst;
};

enum { MAX_LOOPS = 16, LINE = 64, STREAMED_RUN = 4 * LINE, LONGEST_COLUMN = 512, TRANSPOSED_BYTES = 40 << 10 };

/* Rows that a transposition reads ahead, and the longest run of which the next one is read ahead. The CPU reads ahead
 * itself inside of longer runs. */
enum { ROWS_AHEAD = 16, RUN_AHEAD = 2048 };

typedef void (*copy_run)(char *dst, const char *src, int64_t bytes);

static void copy_cached(char *dst, const char *src, int64_t bytes) { memcpy(dst, src, (size_t)bytes); }

#ifdef X86
/* Stores that bypass the cache do not first read the destination's lines into it. They are slow unless they fill
 * whole lines, so the ends of a run are stored as usual. */
__attribute__((target("avx2"))) static void copy_streamed(char *dst, const char *src, int64_t bytes) {
    int64_t head = -(intptr_t)dst & (LINE - 1);
    if (head > bytes) head = bytes;
    memcpy(dst, src, (size_t)head);
    dst += head, src += head, bytes -= head;
    for (; bytes >= LINE; dst += LINE, src += LINE, bytes -= LINE) {
        __m256i low = _mm256_loadu_si256((const __m256i *)src), high = _mm256_loadu_si256((const __m256i *)src + 1);
        _mm256_stream_si256((__m256i *)dst, low);
        _mm256_stream_si256((__m256i *)dst + 1, high);
    }
    memcpy(dst, src, (size_t)bytes);
}

/* Transpose 8 x 8 elements of 2 bytes. Strides are those of the rows, in bytes. */
static void transpose_tile_2(const char *src, int64_t src_stride, char *dst, int64_t dst_stride) {
    __m128i r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm_loadu_si128((const __m128i *)(src + i * src_stride));
    for (int i = 0; i < 4; i++) {
        s[2 * i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            r[4 * i + 2 * j] = _mm_unpacklo_epi32(s[4 * i + j], s[4 * i + 2 + j]);
            r[4 * i + 2 * j + 1] = _mm_unpackhi_epi32(s[4 * i + j], s[4 * i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(dst + 2 * i * dst_stride), _mm_unpacklo_epi64(r[i], r[4 + i]));
        _mm_storeu_si128((__m128i *)(dst + (2 * i + 1) * dst_stride), _mm_unpackhi_epi64(r[i], r[4 + i]));
    }
}

/* Transpose 4 x 4 elements of 4 bytes. */
static void transpose_tile_4(const char *src, int64_t src_stride, char *dst, int64_t dst_stride) {
    __m128i r[4];
    for (int i = 0; i < 4; i++) r[i] = _mm_loadu_si128((const __m128i *)(src + i * src_stride));
    __m128i a = _mm_unpacklo_epi32(r[0], r[1]), b = _mm_unpackhi_epi32(r[0], r[1]);
    __m128i c = _mm_unpacklo_epi32(r[2], r[3]), d = _mm_unpackhi_epi32(r[2], r[3]);
    _mm_storeu_si128((__m128i *)dst, _mm_unpacklo_epi64(a, c));
    _mm_storeu_si128((__m128i *)(dst + dst_stride), _mm_unpackhi_epi64(a, c));
    _mm_storeu_si128((__m128i *)(dst + 2 * dst_stride), _mm_unpacklo_epi64(b, d));
    _mm_storeu_si128((__m128i *)(dst + 3 * dst_stride), _mm_unpackhi_epi64(b, d));
}
#else
#define transpose_tile_2 0
#define transpose_tile_4 0
#endif

typedef void (*copy_tile)(const char *src, int64_t src_stride, char *dst, int64_t dst_stride);

/* Copy `rows` x `columns` elements of `size` bytes. A row is contiguous at the source, a column at the destination.
 *
 * whole: copies a whole tile of `tile` x `tile` elements; null for element by element.
 */
static inline __attribute__((always_inline)) void copy_tiles(const char *src, int64_t src_stride, int64_t rows,
                                                             char *dst, int64_t dst_stride, int64_t columns,
                                                             int64_t size, int64_t tile, copy_tile whole) {
    for (int64_t i = 0; i < rows; i += tile)
        for (int64_t j = 0; j < columns; j += tile) {
            const char *from = src + i * src_stride + j * size;
            char *to = dst + j * dst_stride + i * size;
            int64_t high = rows - i < tile ? rows - i : tile, wide = columns - j < tile ? columns - j : tile;
            if ((j * size & (LINE - 1)) == 0)
                for (int64_t x = ROWS_AHEAD; x < ROWS_AHEAD + tile; x++) __builtin_prefetch(from + x * src_stride, 0, 0);
            if (whole && high == tile && wide == tile)
                whole(from, src_stride, to, dst_stride);
            else
                for (int64_t y = 0; y < wide; y++)
                    for (int64_t x = 0; x < high; x++)
                        memcpy(to + y * dst_stride + x * size, from + x * src_stride + y * size, (size_t)size);
        }
}

/* Copy as `copy_tiles` does. If columns bypass the cache, transpose inside of the cache first: stores that bypass it
 * must fill whole lines, one after another. */
static inline __attribute__((always_inline)) void copy_transposed(const char *src, const struct loop *row, char *dst,
                                                                  const struct loop *column, int64_t size, int64_t tile,
                                                                  copy_tile whole, copy_run copy) {
    if (copy == copy_cached) {
        copy_tiles(src, row->src, row->count, dst, column->dst, column->count, size, tile, whole);
        return;
    }
    char transposed[TRANSPOSED_BYTES] __attribute__((aligned(LINE)));
    int64_t most_rows = row->count < LONGEST_COLUMN / size ? row->count : LONGEST_COLUMN / size;
    int64_t length = most_rows * size, most_columns = TRANSPOSED_BYTES / length / tile * tile;
    for (int64_t i = 0; i < row->count; i += most_rows)
        for (int64_t j = 0; j < column->count; j += most_columns) {
            int64_t rows = row->count - i < most_rows ? row->count - i : most_rows;
            int64_t columns = column->count - j < most_columns ? column->count - j : most_columns;
            char *to = dst + j * column->dst + i * size;
            copy_tiles(src + i * row->src + j * size, row->src, rows, transposed, length, columns, size, tile, whole);
            if (column->dst == length)
                copy(to, transposed, columns * length);
            else
                for (int64_t y = 0; y < columns; y++) copy(to + y * column->dst, transposed + y * length, rows * size);
        }
}

/* Run the innermost loop, with the length of a run known to the compiler where runs are short. */
static void copy_runs(const struct loop *loop, const char *src, char *dst, int64_t run, copy_run copy) {
    int64_t count = loop->count, from = loop->src, to = loop->dst;
#define FIXED(N)                                                                        \
    case N:                                                                             \
        for (int64_t i = 0; i < count; i++) memcpy(dst + i * to, src + i * from, N);    \
        return
    switch (run) {
        FIXED(1);
        FIXED(2);
        FIXED(4);
        FIXED(8);
        FIXED(16);
        FIXED(32);
        FIXED(64);
        FIXED(128);
    default:
        for (int64_t i = 0; i < count; i++) {
            if (run <= RUN_AHEAD)
                for (int64_t b = 0; b < run; b += LINE) __builtin_prefetch(src + (i + 1) * from + b, 0, 0);
            copy(dst + i * to, src + i * from, run);
        }
    }
}

static void copy_loops(const struct loop *loops, int count, const char *src, char *dst, int64_t run, copy_run copy) {
    if (count == 0)
        copy(dst, src, run);
    else if (count == 1)
        copy_runs(loops, src, dst, run, copy);
    else
        for (int64_t i = 0; i < loops->count; i++)
            copy_loops(loops + 1, count - 1, src + i * loops->src, dst + i * loops->dst, run, copy);
}

static void transpose(const struct loop *loops, int count, const struct loop *row, const struct loop *column,
                      const char *src, char *dst, int64_t run, copy_run copy) {
    if (count > 0) {
        for (int64_t i = 0; i < loops->count; i++)
            transpose(loops + 1, count - 1, row, column, src + i * loops->src, dst + i * loops->dst, run, copy);
        return;
    }
    switch (run) {
    case 1: copy_transposed(src, row, dst, column, 1, 16, 0, copy); return;
    case 2: copy_transposed(src, row, dst, column, 2, 8, transpose_tile_2, copy); return;
    case 4: copy_transposed(src, row, dst, column, 4, 4, transpose_tile_4, copy); return;
    default: copy_transposed(src, row, dst, column, 8, 8, 0, copy);
    }
}

/* Copy cells. There are at most MAX_LOOPS loops.
 *
 * sources, destinations: addresses of the cells on each side.
 * run: bytes of a run. loops: outermost first. streamed: whether long runs bypass the cache.
 */
void kvferry_copy_cells(const int64_t *sources, const int64_t *destinations, int64_t cells, int64_t run,
                       const struct loop *loops, int64_t count, int streamed) {
    const struct loop *row = 0, *column = 0;
    struct loop others[MAX_LOOPS];
    int left = 0;
    if (run == 1 || run == 2 || run == 4 || run == 8)
        for (int i = 0; i < count; i++) {
            if (loops[i].dst == run) row = &loops[i];
            if (loops[i].src == run) column = &loops[i];
        }
    int transposed = row && column && row != column;
    copy_run copy = copy_cached;
#ifdef X86
    if (streamed && (transposed || run >= STREAMED_RUN) && __builtin_cpu_supports("avx2")) copy = copy_streamed;
#else
    (void)streamed;
#endif
    if (transposed)
        for (int i = 0; i < count; i++)
            if (&loops[i] != row && &loops[i] != column) others[left++] = loops[i];
    for (int64_t i = 0; i < cells; i++) {
        const char *src = (const char *)(intptr_t)sources[i];
        char *dst = (char *)(intptr_t)destinations[i];
        if (transposed)
            transpose(others, left, row, column, src, dst, run, copy);
        else
            copy_loops(loops, (int)count, src, dst, run, copy);
    }
#ifdef X86
    if (copy == copy_streamed) _mm_sfence();
#endif
}

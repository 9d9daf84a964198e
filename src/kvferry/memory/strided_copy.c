/* Strided copies between two places in host memory, and digests of strided memory, without Python between the runs.
 *
 * planning/strided_copy.py describes the loops: each has a count and one stride per side, and a run is
 * contiguous on both sides. The caller has checked that every run is inside its memory, and that source and
 * destination do not overlap.
 */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(KVFERRY_PORTABLE)
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

/* Digests. A digest is the sum of all 32-bit words of an image, each times the key of its position, modulo 2^64
 * (memory/image_digest.py). So the runs may be added in any order. */

enum { KEY_WORDS = 256, WORD = 4, KEY_BYTES = KEY_WORDS * WORD, AHEAD = 4096 };

typedef uint64_t (*sum_words)(const char *src, int64_t words, const uint32_t *keys);
typedef uint64_t (*digest_runs)(const struct loop *loop, const char *src, int64_t at, int64_t run,
                                const uint32_t *keys);

static inline __attribute__((always_inline)) uint64_t sum_words_plain(const char *src, int64_t words,
                                                                      const uint32_t *keys) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < words; i++) {
        uint32_t word;
        memcpy(&word, src + i * WORD, WORD);
        sum += (uint64_t)word * keys[i];
    }
    return sum;
}

#ifdef X86
/* The instruction multiplies the even words of two vectors. Odd words are shuffled to even places, and their keys are
 * loaded from one word further on: there is one more key than words. */
__attribute__((target("avx2"))) static inline uint64_t sum_words_avx2(const char *src, int64_t words,
                                                                      const uint32_t *keys) {
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    int64_t i = 0;
    for (; i + 16 <= words; i += 16)
        for (int half = 0; half < 2; half++) {
            const uint32_t *key = keys + i + 8 * half;
            __m256i even = _mm256_loadu_si256((const __m256i *)(src + (i + 8 * half) * WORD));
            __m256i odd = _mm256_shuffle_epi32(even, _MM_SHUFFLE(3, 3, 1, 1));
            even = _mm256_mul_epu32(even, _mm256_loadu_si256((const __m256i *)key));
            odd = _mm256_mul_epu32(odd, _mm256_loadu_si256((const __m256i *)(key + 1)));
            sums[2 * half] = _mm256_add_epi64(sums[2 * half], even);
            sums[2 * half + 1] = _mm256_add_epi64(sums[2 * half + 1], odd);
        }
    __m256i all = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    __m128i sum = _mm_add_epi64(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    uint64_t found = (uint64_t)_mm_cvtsi128_si64(sum) + (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(sum, sum));
    found += sum_words_plain(src + i * WORD, words - i, keys + i);
    return found;
}
#endif

/* SplitMix64 at a place of its sequence (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
 * OOPSLA 2014). */
static inline uint64_t split_mix(uint64_t place) {
    uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Sum the bytes of a part of a word, which begins at byte `at` of the image. */
static uint64_t sum_bytes(const char *src, int64_t at, int64_t bytes, const uint32_t *keys) {
    uint64_t part = 0;
    for (int64_t i = 0; i < bytes; i++) part |= (uint64_t)(unsigned char)src[i] << 8 * ((at + i) % WORD);
    return part * keys[at / WORD];
}

/* The CPU reads ahead itself, but not into the next page or run. */
static inline void read_ahead(const char *src, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += LINE) __builtin_prefetch(src + b, 0, 3);
}

static inline __attribute__((always_inline)) uint64_t digest_run(const char *src, uint64_t at, int64_t bytes,
                                                                 const uint32_t *keys, sum_words words) {
    uint64_t digest = 0;
    while (bytes > 0) {
        int64_t first = at % KEY_BYTES, length = KEY_BYTES - first < bytes ? KEY_BYTES - first : bytes;
        uint64_t sum;
        if (bytes > AHEAD) read_ahead(src + AHEAD, length);
        if (((first | length) & (WORD - 1)) == 0)
            sum = words(src, length / WORD, keys + first / WORD);
        else {
            int64_t head = -first & (WORD - 1), tail;
            if (head > length) head = length;
            tail = (length - head) % WORD;
            sum = words(src + head, (length - head) / WORD, keys + (first + head) / WORD);
            if (head) sum += sum_bytes(src, first, head, keys);
            if (tail) sum += sum_bytes(src + length - tail, first + length - tail, tail, keys);
        }
        digest += sum * (split_mix(at / KEY_BYTES) | 1);
        src += length, at += length, bytes -= length;
    }
    return digest;
}

static inline __attribute__((always_inline)) uint64_t digest_loop(const struct loop *loop, const char *src, int64_t at,
                                                                  int64_t run, const uint32_t *keys, sum_words words) {
    uint64_t digest = 0;
    int64_t count = loop->count, from = loop->src, to = loop->dst, far = run < AHEAD ? AHEAD / run : count;
    for (int64_t i = 0; i < count; i++) {
        if (i + far < count) read_ahead(src + (i + far) * from, run);
        digest += digest_run(src + i * from, at + i * to, run, keys, words);
    }
    return digest;
}

static uint64_t digest_loop_plain(const struct loop *loop, const char *src, int64_t at, int64_t run,
                                  const uint32_t *keys) {
    return digest_loop(loop, src, at, run, keys, sum_words_plain);
}

#ifdef X86
__attribute__((target("avx2"))) static uint64_t digest_loop_avx2(const struct loop *loop, const char *src, int64_t at,
                                                                 int64_t run, const uint32_t *keys) {
    return digest_loop(loop, src, at, run, keys, sum_words_avx2);
}
#endif

static uint64_t digest_loops(const struct loop *loops, int64_t count, const char *src, int64_t at, int64_t run,
                             const uint32_t *keys, digest_runs runs) {
    static const struct loop once = {1, 0, 0};
    if (count <= 1) return runs(count ? loops : &once, src, at, run, keys);
    uint64_t digest = 0;
    for (int64_t i = 0; i < loops->count; i++)
        digest += digest_loops(loops + 1, count - 1, src + i * loops->src, at + i * loops->dst, run, keys, runs);
    return digest;
}

/* Return the share of some cells in the digest of an image.
 *
 * sources: addresses of the cells. positions: bytes from the start of the image to each.
 * run, loops: as of a copy into the image. keys: of KEY_WORDS words, and one more that is not used.
 */
uint64_t kvferry_digest_cells(const int64_t *sources, const int64_t *positions, int64_t cells, int64_t run,
                              const struct loop *loops, int64_t count, const uint32_t *keys) {
    uint64_t digest = 0;
    digest_runs runs = digest_loop_plain;
#ifdef X86
    if (__builtin_cpu_supports("avx2")) runs = digest_loop_avx2;
#endif
    for (int64_t i = 0; i < cells && run > 0; i++)
        digest += digest_loops(loops, count, (const char *)(intptr_t)sources[i], positions[i], run, keys, runs);
    return digest;
}

/* Operations a second that the vector units can do at most: multiply-adds on registers alone, in every thread.
   Prints a line for each kind that this processor has: KIND OPERATIONS_PER_SECOND. */
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CHAINS = 12, ROUNDS = 20000000 }; /* independent chains hide the latency of the units */

/* keeps the compiler from knowing, and so from leaving out, what is computed */
#define HIDE(value) __asm__ volatile("" : "+v"(value));
#define EACH(act) act(0) act(1) act(2) act(3) act(4) act(5) act(6) act(7) act(8) act(9) act(10) act(11)
#define BEGIN(n) s##n = a; HIDE(s##n)
#define STEP(n) s##n = ADD(s##n, a, b);
#define KEEP(n) HIDE(s##n)
#define WORK(name, type, nought) \
    static void *name(void *unused) { \
        type a = nought, b = nought, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11; \
        HIDE(a) HIDE(b) \
        EACH(BEGIN) \
        for (long i = 0; i < ROUNDS; i++) { EACH(STEP) __asm__ volatile(""); } \
        EACH(KEEP) \
        return unused; \
    }

#ifdef __AVX512F__
#define ADD(sum, a, b) _mm512_fmadd_ps(a, b, sum)
WORK(fp32, __m512, _mm512_setzero_ps())
#undef ADD
#define FP32_OPERATIONS 32.0
#elif defined(__AVX2__) && defined(__FMA__)
#define ADD(sum, a, b) _mm256_fmadd_ps(a, b, sum)
WORK(fp32, __m256, _mm256_setzero_ps())
#undef ADD
#define FP32_OPERATIONS 16.0
#endif
#ifdef __AVX512BF16__
#define ADD(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b)
WORK(bf16, __m512, _mm512_setzero_ps())
#undef ADD
#endif
#ifdef __AVX512VNNI__
#define ADD(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
WORK(int8, __m512i, _mm512_setzero_si512())
#undef ADD
#endif

/* operations: of one instruction */
static void show(const char *kind, void *(*work)(void *), double operations, int threads) {
    pthread_t *all = malloc(threads * sizeof *all);
    double best = 0;
    for (int round = 0; round < 3; round++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int t = 0; t < threads; t++) pthread_create(&all[t], NULL, work, NULL);
        for (int t = 0; t < threads; t++) pthread_join(all[t], NULL);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double seconds = (end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
        double rate = operations * CHAINS * ROUNDS * threads / seconds;
        best = rate > best ? rate : best;
    }
    printf("%s %.4g\n", kind, best);
    free(all);
}

int main(int count, char **arguments) {
    int threads = count > 1 ? atoi(arguments[1]) : 1;
#ifdef FP32_OPERATIONS
    show("fp32", fp32, FP32_OPERATIONS, threads);
#endif
#ifdef __AVX512BF16__
    show("bf16", bf16, 64.0, threads);
#endif
#ifdef __AVX512VNNI__
    show("int8", int8, 128.0, threads);
#endif
    return 0;
}

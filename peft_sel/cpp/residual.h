// The residual B @ A of one tile, and its gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE = 384;  // columns; what a tile needs of every array stays in the first-level cache

// These sums may round once where they would round twice. And loops have no vectors but those written here: of rows of B
// g++ 12 makes some that read one row too many, which crashes where the memory ends (with AVX2; tests/guarded.py).
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast", "no-tree-loop-vectorize")

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

inline Lanes load_lanes(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

template <int WIDTH>
inline float add_up(const float* lanes) {
    typedef float Half __attribute__((vector_size(WIDTH / 2 * sizeof(float))));
    Half low, high;
    std::memcpy(&low, lanes, sizeof low);
    std::memcpy(&high, lanes + WIDTH / 2, sizeof high);
    low += high;
    float halves[WIDTH / 2];
    std::memcpy(halves, &low, sizeof low);
    if constexpr (WIDTH == 4) return halves[0] + halves[1];
    else return add_up<WIDTH / 2>(halves);
}

// Adds to ROWS rows of out what RANKS columns of B and rows of A give to as many rows of B @ A.
template <int ROWS, int RANKS>
void add_ranks(const float* a, int64_t columns, const float* b, int64_t rank, int width, float (*out)[TILE]) {
    Lanes factors[ROWS][RANKS];  // in registers
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < RANKS; ++k) factors[i][k] = b[i * rank + k] - Lanes{};
    }
    int j = 0;
    for (; j + LANES <= width; j += LANES) {
        Lanes values[RANKS];
        for (int k = 0; k < RANKS; ++k) values[k] = load_lanes(a + k * columns + j);
        for (int i = 0; i < ROWS; ++i) {
            Lanes sum = load_lanes(out[i] + j);
            for (int k = 0; k < RANKS; ++k) sum += values[k] * factors[i][k];
            std::memcpy(out[i] + j, &sum, sizeof sum);
        }
    }
    for (; j < width; ++j) {
        for (int i = 0; i < ROWS; ++i) {
            for (int k = 0; k < RANKS; ++k) out[i][j] += a[k * columns + j] * b[i * rank + k];
        }
    }
}

// Fills ROWS rows of out with those of B @ A. Not inlined, like the others that are called from outside: the caller's
// rules of rounding would hold there.
template <int ROWS>
__attribute__((noinline)) void multiply_residual(const float* a, int64_t columns, const float* b, int64_t rank,
                                                 int width, float (*out)[TILE]) {
    for (int i = 0; i < ROWS; ++i) std::fill(out[i], out[i] + width, 0.0f);
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) add_ranks<ROWS, 4>(a + k * columns, columns, b + k, rank, width, out);
    for (; k < rank; ++k) add_ranks<ROWS, 1>(a + k * columns, columns, b + k, rank, width, out);
}

// Adds what ROWS rows of a gradient give to RANKS rows of A's gradient and to as many columns of B's.
template <int ROWS, int RANKS>
void pull_back_ranks(const float (*grads)[TILE], const float* a, int64_t columns, const float* b, int64_t rank,
                     int width, float* a_sums, double* b_sums, int64_t b_stride) {
    Lanes factors[ROWS][RANKS], sums[ROWS][RANKS] = {};  // all of them in registers
    float rest[ROWS][RANKS] = {};
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < RANKS; ++k) factors[i][k] = b[i * rank + k] - Lanes{};
    }
    int j = 0;
    for (; j + LANES <= width; j += LANES) {
        Lanes grad[ROWS];
        for (int i = 0; i < ROWS; ++i) grad[i] = load_lanes(grads[i] + j);
        for (int k = 0; k < RANKS; ++k) {
            const Lanes value = load_lanes(a + k * columns + j);
            Lanes a_sum = load_lanes(a_sums + k * columns + j);
            for (int i = 0; i < ROWS; ++i) {
                a_sum += grad[i] * factors[i][k];
                sums[i][k] += grad[i] * value;
            }
            std::memcpy(a_sums + k * columns + j, &a_sum, sizeof a_sum);
        }
    }
    for (; j < width; ++j) {
        for (int k = 0; k < RANKS; ++k) {
            for (int i = 0; i < ROWS; ++i) {
                a_sums[k * columns + j] += grads[i][j] * b[i * rank + k];
                rest[i][k] += grads[i][j] * a[k * columns + j];
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < RANKS; ++k) {
            const float* lanes = reinterpret_cast<const float*>(&sums[i][k]);
            b_sums[i * b_stride + k] += add_up<LANES>(lanes) + rest[i][k];
        }
    }
}

template <int ROWS>
__attribute__((noinline)) void pull_back_residual(const float (*grads)[TILE], const float* a, int64_t columns,
                                                  const float* b, int64_t rank, int width, float* a_sums,
                                                  double* b_sums, int64_t b_stride) {
    int64_t k = 0;
    for (; k + 2 <= rank; k += 2) {
        pull_back_ranks<ROWS, 2>(grads, a + k * columns, columns, b + k, rank, width, a_sums + k * columns, b_sums + k,
                                 b_stride);
    }
    if (k < rank) {
        pull_back_ranks<ROWS, 1>(grads, a + k * columns, columns, b + k, rank, width, a_sums + k * columns, b_sums + k,
                                 b_stride);
    }
}

#pragma GCC pop_options

}  // namespace

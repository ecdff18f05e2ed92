// The residual B @ A of one tile, and its gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE = 384;  // columns; what a tile needs of every array stays in the first-level cache

// These sums may round once where they would round twice.
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")

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

// Adds to out what RANKS columns of B and rows of A give to a row of B @ A.
template <int RANKS>
void add_ranks(const float* a, int64_t columns, const float* b, int width, float* out) {
    Lanes factors[RANKS];
    for (int k = 0; k < RANKS; ++k) factors[k] = b[k] - Lanes{};
    int j = 0;
    for (; j + LANES <= width; j += LANES) {
        Lanes sum = load_lanes(out + j);
        for (int k = 0; k < RANKS; ++k) sum += load_lanes(a + k * columns + j) * factors[k];
        std::memcpy(out + j, &sum, sizeof sum);
    }
    for (; j < width; ++j) {
        for (int k = 0; k < RANKS; ++k) out[j] += a[k * columns + j] * b[k];
    }
}

// Fills out with a row of B @ A.
void multiply_residual(const float* a, int64_t columns, const float* b, int64_t rank, int width, float* out) {
    std::fill(out, out + width, 0.0f);
    int64_t k = 0;
    for (; k + 8 <= rank; k += 8) add_ranks<8>(a + k * columns, columns, b + k, width, out);
    for (; k < rank; ++k) add_ranks<1>(a + k * columns, columns, b + k, width, out);
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
void pull_back_residual(const float (*grads)[TILE], const float* a, int64_t columns, const float* b, int64_t rank,
                        int width, float* a_sums, double* b_sums, int64_t b_stride) {
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

// Newton's method for the raw weights of float32 weights (numerics/newton.py): q * expm1(b * x) + lam * x = |w|,
// x >= 0.
//
// A tile takes its first steps in float32 and the others in float64, all its elements together, until the residual of
// the worst is small enough. Nothing depends on the number of threads or on what other tiles hold.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE = 256;  // elements; what a tile needs stays in the first-level cache
enum Rule { MISMATCH, CONGRUENT, OPPOSE };  // in the order of numerics.MODES

}  // namespace

extern "C" {

struct Coefficient {
    const double* values;
    int64_t row_stride, column_stride;  // in elements, 0 where there is one value for all
};

struct Inversion {
    int64_t numel, columns;
    float* values;          // the weights, which their raw weights replace
    int64_t rule;
    int64_t float32_steps, max_steps;
    double max_residual;    // relative; where a tile stops
    int64_t num_threads;
    Coefficient growth, curvature, linear;  // q, b and the linear scale before the rule gives it a sign
    int64_t steps_taken;    // by the slowest tile
    double residual_left;   // of the worst element
};

}  // extern "C"

namespace {

template <typename To, typename From>
inline To reinterpret(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Adding it leaves the integer nearest to a number in the last bits of the sum.
constexpr double ROUND_DOUBLE = 6755399441055744.0;  // 1.5 * 2^52
constexpr float ROUND_FLOAT = 12582912.0f;           // 1.5 * 2^23

inline double expm1_series(double z) {  // z >= 0 or NaN; within 2 ulp
    z = z > 710.0 ? 710.0 : z;          // beyond lies infinity
    const double shifted = z * 1.4426950408889634 + ROUND_DOUBLE;
    const double k = shifted - ROUND_DOUBLE;
    const double r = (z - k * (355.0 / 512.0)) - k * (0.6931471805599453094 - 355.0 / 512.0);
    double series = r * (1.0 / 87178291200.0) + 1.0 / 6227020800.0;
    series = series * r + 1.0 / 479001600.0;
    series = series * r + 1.0 / 39916800.0;
    series = series * r + 1.0 / 3628800.0;
    series = series * r + 1.0 / 362880.0;
    series = series * r + 1.0 / 40320.0;
    series = series * r + 1.0 / 5040.0;
    series = series * r + 1.0 / 720.0;
    series = series * r + 1.0 / 120.0;
    series = series * r + 1.0 / 24.0;
    series = series * r + 1.0 / 6.0;
    series = series * r + 0.5;
    const double scale = reinterpret<double>((reinterpret<uint64_t>(shifted) + 1023) << 52);
    return scale * (r + r * r * series) + (scale - 1.0);
}

inline float expm1_estimate(float z) {  // z >= 0 or NaN; within 1e-6
    z = z > 88.0f ? 88.0f : z;          // finite, so that float64 can go on from what float32 leaves
    const float shifted = z * 1.44269504f + ROUND_FLOAT;
    const float k = shifted - ROUND_FLOAT;
    const float r = (z - k * (355.0f / 512.0f)) - k * static_cast<float>(0.6931471805599453094 - 355.0 / 512.0);
    float series = r * (1.0f / 720) + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    const float scale = reinterpret<float>((reinterpret<uint32_t>(shifted) + 127) << 23);
    return scale * (r + r * r * series) + (scale - 1.0f);
}

inline float log1p_estimate(float t) {  // t >= 0; within 1e-5 of itself, however small
    const int32_t above = reinterpret<int32_t>(1.0f + t) - 0x3f3504f3;  // sqrt(1/2)
    const int32_t k = std::min(above >> 23, 126);
    const float power = reinterpret<float>((127 + k) << 23), inverse = reinterpret<float>((127 - k) << 23);
    const float f = (t - (power - 1.0f)) * inverse;  // (1 + t) / 2^k - 1, and t itself where k is 0
    const float s = f / (2.0f + f), square = s * s;
    const float series = 2.0f + square * (2.0f / 3 + square * (2.0f / 5 + square * (2.0f / 7)));
    return static_cast<float>(k) * 0.69314718f + s * series;
}

struct Tile {
    alignas(64) float weight[TILE];
    alignas(64) double growth[TILE];
    alignas(64) double curvature[TILE];
    alignas(64) double linear[TILE];  // before the rule gives it a sign
    alignas(64) double path[TILE];    // lam, with its sign
    alignas(64) float start[TILE];
    alignas(64) double x[TILE];
    alignas(64) double excess[TILE];  // h(x) - |w|
    alignas(64) double slope[TILE];   // h'(x)
};

void expand(const Coefficient& from, int64_t columns, int64_t first, int width, double* out) {
    for (int done = 0; done < width;) {
        const int64_t i = (first + done) / columns, j = (first + done) % columns;
        const int count = static_cast<int>(std::min<int64_t>(width - done, columns - j));
        const double* values = from.values + i * from.row_stride + j * from.column_stride;
        if (from.column_stride == 0) std::fill(out + done, out + done + count, *values);
        else if (from.column_stride == 1) std::copy(values, values + count, out + done);
        else for (int c = 0; c < count; ++c) out[done + c] = values[c * from.column_stride];
        done += count;
    }
}

void expand_where(bool uniform, const Inversion& task, int64_t first, int width, Tile& tile) {
    const auto fill = [&](const Coefficient& from, double* out) {
        if ((from.row_stride == 0 && from.column_stride == 0) == uniform) expand(from, task.columns, first, width, out);
    };
    fill(task.growth, tile.growth);
    fill(task.curvature, tile.curvature);
    fill(task.linear, tile.linear);
}

template <int RULE>
void sign_path(int width, Tile& tile) {
#pragma omp simd
    for (int j = 0; j < width; ++j) {
        const double linear = tile.linear[j];
        if (RULE == MISMATCH) tile.path[j] = std::copysign(linear, static_cast<double>(tile.weight[j]));
        else tile.path[j] = RULE == OPPOSE ? -linear : linear;
    }
}

// Right in slope at 0 and in growth at infinity, then steps in float32.
void start(int64_t steps, int width, Tile& tile) {
#pragma omp simd
    for (int j = 0; j < width; ++j) {
        const float q = static_cast<float>(tile.growth[j]), b = static_cast<float>(tile.curvature[j]);
        const float lam = static_cast<float>(tile.path[j]), y = std::fabs(tile.weight[j]);
        tile.start[j] = log1p_estimate(y * (b / (q * b + lam))) / b;
    }
    for (int64_t step = 0; step < steps; ++step) {
#pragma omp simd
        for (int j = 0; j < width; ++j) {
            const float q = static_cast<float>(tile.growth[j]), b = static_cast<float>(tile.curvature[j]);
            const float lam = static_cast<float>(tile.path[j]), y = std::fabs(tile.weight[j]), x = tile.start[j];
            const float growth = expm1_estimate(b * x);
            const float next = x - (q * growth + lam * x - y) / (q * b * (growth + 1.0f) + lam);
            tile.start[j] = next < 0.0f ? 0.0f : next;
        }
    }
#pragma omp simd
    for (int j = 0; j < width; ++j) tile.x[j] = static_cast<double>(tile.start[j]);
}

// Evaluates map and slope; returns the bits of the largest relative residual: as integers, NaN is above all numbers.
int64_t evaluate(int width, Tile& tile) {
    int64_t worst = 0;
#pragma omp simd reduction(max : worst)
    for (int j = 0; j < width; ++j) {
        const double q = tile.growth[j], b = tile.curvature[j], lam = tile.path[j], x = tile.x[j];
        const double y = std::fabs(static_cast<double>(tile.weight[j]));
        const double growth = expm1_series(b * x);
        const double excess = q * growth + lam * x - y;
        tile.excess[j] = excess;
        tile.slope[j] = q * b * (growth + 1.0) + lam;
        const int64_t bits = reinterpret<int64_t>(excess / (y == 0.0 ? 1.0 : y)) & INT64_MAX;
        worst = bits > worst ? bits : worst;
    }
    return worst;
}

void step(int width, Tile& tile) {
#pragma omp simd
    for (int j = 0; j < width; ++j) {
        const double next = tile.x[j] - tile.excess[j] / tile.slope[j];
        tile.x[j] = next < 0.0 ? 0.0 : next;
    }
}

}  // namespace

extern "C" void sel_invert(Inversion* task) {
    const int64_t num_tiles = (task->numel + TILE - 1) / TILE;
    int64_t steps_taken = 0, worst = 0;
#pragma omp parallel num_threads(task->num_threads) reduction(max : steps_taken, worst)
    {
        Tile tile;
        expand_where(true, *task, 0, TILE, tile);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < num_tiles; ++t) {
            float* const values = task->values + t * TILE;
            const int width = static_cast<int>(std::min<int64_t>(TILE, task->numel - t * TILE));
            std::copy(values, values + width, tile.weight);
            expand_where(false, *task, t * TILE, width, tile);
            if (task->rule == MISMATCH) sign_path<MISMATCH>(width, tile);
            else if (task->rule == OPPOSE) sign_path<OPPOSE>(width, tile);
            else sign_path<CONGRUENT>(width, tile);
            start(task->float32_steps, width, tile);
            int64_t steps = task->float32_steps, residual = evaluate(width, tile);
            while (steps < task->max_steps && !(reinterpret<double>(residual) <= task->max_residual)) {
                step(width, tile);
                residual = evaluate(width, tile);
                ++steps;
            }
            for (int j = 0; j < width; ++j) values[j] = std::copysign(static_cast<float>(tile.x[j]), tile.weight[j]);
            steps_taken = std::max(steps_taken, steps);
            worst = std::max(worst, residual);
        }
    }
    task->steps_taken = steps_taken;
    task->residual_left = reinterpret<double>(worst);
}

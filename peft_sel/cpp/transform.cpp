// The symexp family on a CPU: a fold in one pass, and its gradients with all their row and column sums in one pass.
//
// What is elementwise has the bits of numerics/transform.py: the same operations in the same order, which neither
// contraction nor reordering may touch (-ffp-contract=off, no -ffast-math). Sums are float32 within a tile or a chunk of
// rows and float64 beyond, in an order that does not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE = 256;       // columns; what a tile needs of every array stays in the first-level cache
constexpr int NUM_SCALES = 5;   // in the order of numerics.SCALE_NAMES
enum ScaleName { EXP, LINEAR, INNER, OFFSET, SHIFT };
enum Pattern { ABSENT, GLOBAL, ROW, COLUMN, ROW_COL_MULT, ROW_COL_ADD };
enum Path { NO_PATH, MISMATCH, SIGNED };  // how the sign of a weight enters the linear path
enum Type { FLOAT32, BFLOAT16, FLOAT16 };

}  // namespace

extern "C" {

struct Scale {
    int64_t pattern;
    const float* row;     // the value itself where the pattern is GLOBAL
    const float* column;
};

struct Weight {
    int64_t rows, columns;
    const float* raw;
    int64_t rank;           // of the residual, 0 for none
    const float* a;         // (rank, columns)
    const float* b;         // (rows, rank)
    int64_t mode;           // in the order of numerics.MODES
    int64_t normalize;
    int64_t num_threads;
    float beta;
    Scale scales[NUM_SCALES];
};

struct Gradients {
    const void* grad;       // dLoss/dw_eff
    int64_t grad_type;
    float* raw;             // or null
    double* row[NUM_SCALES];     // (rows,) or null
    double* column[NUM_SCALES];  // (columns,) or null
    double* a_grad;              // (rank, columns), or null
    double* b_grad;              // (rows, rank)
    void* weight;           // the effective weight, or null
    int64_t weight_type;
    float* column_sums;     // room for one float per chunk of rows, sum over rows, and column
    int64_t chunk_rows;     // of a float32 sum over rows
};

}  // extern "C"

namespace {

inline float power_of_two(int exponent) {  // from -126 on; infinite from 128 on
    const int32_t bits = (std::min(exponent, 128) + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float reduce(float x, int& k) {  // numerics/elementary.py: x = k * ln(2) + r; returns expm1(r)
    const float rounded = std::nearbyintf(x * 1.4426950408889634f);
    const float r = (x - rounded * (355.0f / 512.0f)) - rounded * static_cast<float>(0.6931471805599453 - 355.0 / 512.0);
    float series = r * (1.0f / 5040) + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    k = rounded == rounded ? static_cast<int>(rounded) : 0;  // NaN is in what is returned
    return r + r * r * series;
}

inline float expm1_series(float x) {
    int k;
    x = x < -50.0f ? -50.0f : x;
    x = x > 1000.0f ? 1000.0f : x;
    const float rest = reduce(x, k);
    const float inverse = power_of_two(std::max(-k, -127));  // 2^-127 as 0, which 1 swallows as well
    return power_of_two(k) * (rest + (1.0f - inverse));
}

inline float exp_series(float x) {
    int k;
    x = x < -1000.0f ? -1000.0f : x;
    x = x > 1000.0f ? 1000.0f : x;
    const float rest = reduce(x, k);
    const float scale = k < -126 ? std::ldexp(1.0f, k) : power_of_two(k);
    return scale * (1.0f + rest);
}

inline float widen_bfloat16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint16_t round_to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

void load(const void* values, int64_t type, int64_t first, int width, float* __restrict out) {
    if (type == FLOAT32) {
        const float* from = static_cast<const float*>(values) + first;
        std::copy(from, from + width, out);
    } else if (type == BFLOAT16) {
        const uint16_t* from = static_cast<const uint16_t*>(values) + first;
        for (int j = 0; j < width; ++j) out[j] = widen_bfloat16(from[j]);
    }
#ifdef __FLT16_MAX__
    if (type == FLOAT16) {
        const _Float16* from = static_cast<const _Float16*>(values) + first;
        for (int j = 0; j < width; ++j) out[j] = static_cast<float>(from[j]);
    }
#endif
}

void store(const float* values, int64_t type, int64_t first, int width, void* __restrict out) {
    if (type == FLOAT32) {
        std::copy(values, values + width, static_cast<float*>(out) + first);
    } else if (type == BFLOAT16) {
        uint16_t* to = static_cast<uint16_t*>(out) + first;
        for (int j = 0; j < width; ++j) to[j] = round_to_bfloat16(values[j]);
    }
#ifdef __FLT16_MAX__
    if (type == FLOAT16) {
        _Float16* to = static_cast<_Float16*>(out) + first;
        for (int j = 0; j < width; ++j) to[j] = static_cast<_Float16>(values[j]);
    }
#endif
}

// One row of a tile: the scales and what follows from them, expanded.
struct Line {
    alignas(64) float scale[NUM_SCALES][TILE];
    alignas(64) float decay[TILE];   // exp(-n)
    alignas(64) float growth[TILE];  // exp(-n) * expm1(beta * m * |w| + s)
    alignas(64) float rise[TILE];    // its derivative by the exponent
    alignas(64) float grad[TILE];
    alignas(64) float sign[TILE];
    alignas(64) float magnitude[TILE];
    alignas(64) float linear[TILE];  // the linear scale with the sign of its path
};

Path path_of(const Weight& weight) {
    if (weight.mode == 3 || weight.scales[LINEAR].pattern == ABSENT) return NO_PATH;
    return weight.mode == 0 ? MISMATCH : SIGNED;
}

void expand(const Scale& scale, int64_t i, int64_t start, int width, float absent, float* __restrict out) {
    const float* column = scale.column + start;
    const float row = scale.row ? scale.row[scale.pattern == GLOBAL ? 0 : i] : absent;
    switch (scale.pattern) {
        case COLUMN: std::copy(column, column + width, out); break;
        case ROW_COL_MULT:
            for (int j = 0; j < width; ++j) out[j] = row * column[j];
            break;
        case ROW_COL_ADD:
            for (int j = 0; j < width; ++j) out[j] = row + column[j];
            break;
        default: std::fill(out, out + width, row);
    }
}

// Fills a line with all that value and gradients have in common.
void evaluate(const Weight& weight, int64_t i, int64_t start, int width, Line& line) {
    const float fills[NUM_SCALES] = {0, 0, 1, 0, 0};
    for (int s = 0; s < NUM_SCALES; ++s) expand(weight.scales[s], i, start, width, fills[s], line.scale[s]);
    const float* raw = weight.raw + i * weight.columns + start;
    const float beta = weight.beta;
    if (weight.scales[OFFSET].pattern == ABSENT) {
        std::fill(line.decay, line.decay + width, 1.0f);
    } else {
        for (int j = 0; j < width; ++j) line.decay[j] = exp_series(-line.scale[OFFSET][j]);
    }
#pragma omp simd
    for (int j = 0; j < width; ++j) {
        const float sign = std::copysign(1.0f, raw[j]);
        const float magnitude = sign * raw[j];
        const float growth = expm1_series(beta * line.scale[INNER][j] * magnitude + line.scale[SHIFT][j]);
        line.sign[j] = sign;
        line.magnitude[j] = magnitude;
        line.growth[j] = line.decay[j] * growth;
        line.rise[j] = line.growth[j] + line.decay[j];
    }
    const Path path = path_of(weight);
    const float sign = weight.mode == 2 ? -1.0f : 1.0f;
    for (int j = 0; j < width; ++j) line.linear[j] = (path == MISMATCH ? line.sign[j] : sign) * line.scale[LINEAR][j];
}

template <bool WITH_LINEAR>
void combine(const Weight& weight, int width, const Line& line, float* inside) {
#pragma omp simd
    for (int j = 0; j < width; ++j) {
        inside[j] = line.scale[EXP][j] * line.growth[j];
        if (WITH_LINEAR) inside[j] = inside[j] + line.magnitude[j] * line.linear[j];
    }
}

void combine(const Weight& weight, int width, const Line& line, float* inside) {
    path_of(weight) == NO_PATH ? combine<false>(weight, width, line, inside)
                               : combine<true>(weight, width, line, inside);
}

float dot(const float* one, const float* other, int width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < width; ++j) sum += one[j] * other[j];
    return sum;
}

void add_product(const float* values, float factor, int width, float* sums) {
#pragma omp simd
    for (int j = 0; j < width; ++j) sums[j] += factor * values[j];
}

// Stores the effective weights of an evaluated line.
void store_line(const Weight& weight, int64_t i, int64_t start, int width, const Line& line, void* out, int64_t type) {
    alignas(64) float value[TILE];
    combine(weight, width, line, value);
    if (weight.normalize) {
        for (int j = 0; j < width; ++j) value[j] = value[j] / line.scale[INNER][j];
    }
    for (int j = 0; j < width; ++j) value[j] = line.sign[j] * value[j];
    const int64_t first = i * weight.columns + start;
    if (weight.rank > 0) {
        alignas(64) float delta[TILE] = {};
        for (int64_t k = 0; k < weight.rank; ++k) {
            add_product(weight.a + k * weight.columns + start, weight.b[i * weight.rank + k], width, delta);
        }
        for (int j = 0; j < width; ++j) value[j] = delta[j] == 0 ? value[j] : value[j] + delta[j];  // keeps -0.0
    }
    store(value, type, first, width, out);
}

// The gradient of one expanded scale, elementwise.
void differentiate(const Weight& weight, int name, int width, const Line& line, float* out) {
    const float* sign = line.sign;
    const float beta = weight.beta;
    switch (name) {
        case EXP:
            for (int j = 0; j < width; ++j) out[j] = line.grad[j] * sign[j] * line.growth[j];
            break;
        case LINEAR: {
            const float flip = weight.mode == 2 ? -1.0f : 1.0f;
            const bool mismatch = weight.mode == 0;
            if (weight.mode == 3) std::fill(out, out + width, 0.0f);
            else for (int j = 0; j < width; ++j) {
                out[j] = (mismatch ? line.grad[j] : line.grad[j] * sign[j]) * (flip * line.magnitude[j]);
            }
            break;
        }
        case INNER:
            for (int j = 0; j < width; ++j) {
                out[j] = line.grad[j] * sign[j] * line.scale[EXP][j] * line.rise[j] * (beta * line.magnitude[j]);
            }
            if (weight.normalize) {
                alignas(64) float total[TILE];
                combine(weight, width, line, total);
                for (int j = 0; j < width; ++j) {
                    out[j] = out[j] - line.grad[j] * sign[j] * total[j] / line.scale[INNER][j];
                }
            }
            break;
        case OFFSET:
            for (int j = 0; j < width; ++j) out[j] = -(line.grad[j] * sign[j]) * line.scale[EXP][j] * line.growth[j];
            break;
        default:
            for (int j = 0; j < width; ++j) out[j] = line.grad[j] * sign[j] * line.scale[EXP][j] * line.rise[j];
    }
}

// Where the sums over the rows of one chunk go: (number of column sums, columns) of float32.
struct ColumnSums {
    int index[NUM_SCALES];  // of each scale, -1 for none
    int residual;           // index of the first of rank sums
    int count;
};

ColumnSums plan(const Weight& weight, const Gradients& out) {
    ColumnSums sums{};
    for (int s = 0; s < NUM_SCALES; ++s) sums.index[s] = out.column[s] ? sums.count++ : -1;
    sums.residual = sums.count;
    sums.count += out.a_grad ? static_cast<int>(weight.rank) : 0;
    return sums;
}

// Adds what a line of a gradient gives to column sums of A's gradient and to a row of B's; four ranks read it at once.
void pull_back_residual(const Weight& weight, const float* grad, int64_t i, int64_t start, int width, float* a_sums,
                        double* b_grad) {
    const int64_t columns = weight.columns, rank = weight.rank;
    const float* b = weight.b + i * rank;
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) {
        const float *a0 = weight.a + k * columns + start, *a1 = a0 + columns, *a2 = a1 + columns, *a3 = a2 + columns;
        float *to0 = a_sums + k * columns, *to1 = to0 + columns, *to2 = to1 + columns, *to3 = to2 + columns;
        const float b0 = b[k], b1 = b[k + 1], b2 = b[k + 2], b3 = b[k + 3];
        float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
        for (int j = 0; j < width; ++j) {
            sum0 += grad[j] * a0[j];
            sum1 += grad[j] * a1[j];
            sum2 += grad[j] * a2[j];
            sum3 += grad[j] * a3[j];
            to0[j] += grad[j] * b0;
            to1[j] += grad[j] * b1;
            to2[j] += grad[j] * b2;
            to3[j] += grad[j] * b3;
        }
        b_grad[k] += sum0;
        b_grad[k + 1] += sum1;
        b_grad[k + 2] += sum2;
        b_grad[k + 3] += sum3;
    }
    for (; k < rank; ++k) {
        b_grad[k] += dot(grad, weight.a + k * columns + start, width);
        add_product(grad, b[k], width, a_sums + k * columns);
    }
}

void pull_back_line(const Weight& weight, const Gradients& out, const ColumnSums& sums, int64_t i, int64_t start,
                    int width, Line& line, float* column_sums) {
    alignas(64) float terms[TILE];
    alignas(64) float ones[TILE];
    const int64_t first = i * weight.columns + start;
    evaluate(weight, i, start, width, line);
    if (out.weight) store_line(weight, i, start, width, line, out.weight, out.weight_type);
    load(out.grad, out.grad_type, first, width, line.grad);
    if (out.a_grad) {
        float* a_sums = column_sums + sums.residual * weight.columns + start;
        pull_back_residual(weight, line.grad, i, start, width, a_sums, out.b_grad + i * weight.rank);
    }
    if (weight.normalize) {
        for (int j = 0; j < width; ++j) line.grad[j] = line.grad[j] / line.scale[INNER][j];
    }
    if (out.raw) {
        const bool has_path = path_of(weight) != NO_PATH;
        float* raw_grad = out.raw + first;
#pragma omp simd
        for (int j = 0; j < width; ++j) {
            const float slope = line.scale[EXP][j] * (weight.beta * line.scale[INNER][j]) * line.rise[j];
            raw_grad[j] = line.grad[j] * (has_path ? slope + line.linear[j] : slope);
        }
    }
    std::fill(ones, ones + width, 1.0f);
    for (int s = 0; s < NUM_SCALES; ++s) {
        if (!out.row[s] && !out.column[s]) continue;
        const Scale& scale = weight.scales[s];
        const bool is_product = scale.pattern == ROW_COL_MULT;
        differentiate(weight, s, width, line, terms);
        if (out.row[s]) out.row[s][i] += dot(terms, is_product ? scale.column + start : ones, width);
        if (out.column[s]) {
            float* to = column_sums + sums.index[s] * weight.columns + start;
            add_product(terms, is_product ? scale.row[i] : 1.0f, width, to);
        }
    }
}

}  // namespace

extern "C" {

void sel_fold(const Weight* weight, void* out, int64_t type) {
#pragma omp parallel num_threads(weight->num_threads)
    {
        Line line;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < weight->rows; ++i) {
            for (int64_t start = 0; start < weight->columns; start += TILE) {
                const int width = static_cast<int>(std::min<int64_t>(TILE, weight->columns - start));
                evaluate(*weight, i, start, width, line);
                store_line(*weight, i, start, width, line, out, type);
            }
        }
    }
}

void sel_pull_back(const Weight* weight, const Gradients* out) {
    const ColumnSums sums = plan(*weight, *out);
    const int64_t rows = weight->rows, columns = weight->columns, stride = sums.count * columns;
    const int64_t num_chunks = (rows + out->chunk_rows - 1) / out->chunk_rows;
#pragma omp parallel num_threads(weight->num_threads)
    {
        Line line;
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            float* const own = out->column_sums + chunk * stride;
            const int64_t stop = std::min<int64_t>(rows, (chunk + 1) * out->chunk_rows);
            std::fill(own, own + stride, 0.0f);
            for (int64_t start = 0; start < columns; start += TILE) {
                const int width = static_cast<int>(std::min<int64_t>(TILE, columns - start));
                for (int64_t i = chunk * out->chunk_rows; i < stop; ++i) {
                    pull_back_line(*weight, *out, sums, i, start, width, line, own);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < columns; ++j) {
            for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
                const float* const own = out->column_sums + chunk * stride + j;
                for (int s = 0; s < NUM_SCALES; ++s) {
                    if (out->column[s]) out->column[s][j] += own[sums.index[s] * columns];
                }
                for (int64_t k = 0; out->a_grad && k < weight->rank; ++k) {
                    out->a_grad[k * columns + j] += own[(sums.residual + k) * columns];
                }
            }
        }
    }
}

int sel_has_float16() {
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;  // g++ before version 12
#endif
}

}  // extern "C"

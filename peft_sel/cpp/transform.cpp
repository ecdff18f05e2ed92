// The symexp family on a CPU: a fold in one pass, and its gradients with all their row and column sums in one pass.
//
// What is elementwise has the bits of numerics/transform.py: the same operations in the same order, which neither
// contraction nor reordering may touch (-ffp-contract=off, no -ffast-math). Sums are float32 within a tile or a chunk
// of rows and float64 beyond, in an order that does not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "elementary.h"
#include "residual.h"

namespace {

constexpr int NUM_SCALES = 5;   // in the order of numerics.SCALE_NAMES
enum ScaleName { EXP, LINEAR, INNER, OFFSET, SHIFT };
enum Pattern { ABSENT, GLOBAL, ROW, COLUMN, ROW_COL_MULT, ROW_COL_ADD };

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
    float* row[NUM_SCALES];      // (rows,) or null
    float* column[NUM_SCALES];   // (columns,) or null
    float* a_grad;               // (rank, columns), or null
    float* b_grad;               // (rows, rank)
    void* weight;           // the effective weight, or null
    int64_t weight_type;
    float* column_sums;     // room for one float per chunk of rows, sum over rows, and column
    int64_t chunk_rows;     // of a float32 sum over rows
};

}  // extern "C"

namespace {

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
    alignas(64) float inside[TILE];  // the effective weight but for the sign, the division by m, and the residual
};

// Tiles of about one width, all but the last of whole vectors: a narrow one would cost as much as a wide one.
int64_t choose_tile(int64_t columns) {
    const int64_t num_tiles = (columns + TILE - 1) / TILE, width = (columns + num_tiles - 1) / num_tiles;
    return (width + 15) / 16 * 16;
}

bool has_path(const Weight& weight) { return weight.mode != 3 && weight.scales[LINEAR].pattern != ABSENT; }

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

template <bool HAS_PATH, bool IS_SHIFTED>
void evaluate(const Weight& weight, const float* raw, int width, Line& line) {
    const float beta = weight.beta, flip = weight.mode == 2 ? -1.0f : 1.0f;
    const bool is_mismatch = weight.mode == 0;
#pragma omp simd
    for (int j = 0; j < width; ++j) {
        const float sign = std::copysign(1.0f, raw[j]);
        const float magnitude = sign * raw[j];
        const float exponent = beta * line.scale[INNER][j] * magnitude;
        const float growth = IS_SHIFTED ? line.decay[j] * expm1_series(exponent + line.scale[SHIFT][j])
                                        : expm1_series(exponent);
        line.sign[j] = sign;
        line.magnitude[j] = magnitude;
        line.growth[j] = growth;
        line.rise[j] = growth + (IS_SHIFTED ? line.decay[j] : 1.0f);
        float inside = line.scale[EXP][j] * growth;
        if (HAS_PATH) {
            const float linear = (is_mismatch ? sign : flip) * line.scale[LINEAR][j];
            line.linear[j] = linear;
            inside = inside + magnitude * linear;
        }
        line.inside[j] = inside;
    }
}

// Fills a line with all that value and gradients have in common.
void evaluate(const Weight& weight, int64_t i, int64_t start, int width, Line& line) {
    const bool is_shifted = weight.scales[OFFSET].pattern != ABSENT || weight.scales[SHIFT].pattern != ABSENT;
    const float fills[NUM_SCALES] = {0, 0, 1, 0, 0};
    for (int s = 0; s < (is_shifted ? NUM_SCALES : OFFSET); ++s) {
        expand(weight.scales[s], i, start, width, fills[s], line.scale[s]);
    }
    for (int j = 0; is_shifted && j < width; ++j) line.decay[j] = exp_series(-line.scale[OFFSET][j]);
    const auto call = has_path(weight) ? (is_shifted ? evaluate<true, true> : evaluate<true, false>)
                                       : (is_shifted ? evaluate<false, true> : evaluate<false, false>);
    call(weight, weight.raw + i * weight.columns + start, width, line);
}

// Sums may round once where they would round twice; what is elementwise may not.
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")

struct Ones {
    float values[TILE];
    Ones() { std::fill(values, values + TILE, 1.0f); }
};

const Ones ones;

// The gradient of an expanded scale, for one element.
template <int NAME, bool NORMALIZE>
inline float differentiate(const Weight& weight, const Line& line, int j) {
    const float grad = line.grad[j], signed_grad = grad * line.sign[j];
    switch (NAME) {
        case EXP: return signed_grad * line.growth[j];
        case LINEAR: {
            const float flip = weight.mode == 3 ? 0.0f : weight.mode == 2 ? -1.0f : 1.0f;
            return (weight.mode == 0 ? grad : signed_grad) * (flip * line.magnitude[j]);
        }
        case OFFSET: return -signed_grad * line.scale[EXP][j] * line.growth[j];
        case SHIFT: return signed_grad * line.scale[EXP][j] * line.rise[j];
        default: {
            const float slope = signed_grad * line.scale[EXP][j] * line.rise[j] * (weight.beta * line.magnitude[j]);
            return NORMALIZE ? slope - signed_grad * line.inside[j] / line.scale[INNER][j] : slope;
        }
    }
}

// Adds the gradients of a scale on a line, times what they multiply, to the sum of the row and to those of the columns.
template <int NAME, bool NORMALIZE, bool SUMS_COLUMNS>
float add_gradients(const Weight& weight, const Line& line, const float* column, float row, int width, float* sums) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < width; ++j) {
        const float gradient = differentiate<NAME, NORMALIZE>(weight, line, j);
        sum += gradient * column[j];
        if (SUMS_COLUMNS) sums[j] += gradient * row;
    }
    return sum;
}

template <int NAME>
__attribute__((noinline)) double pull_back_scale(const Weight& weight, const Gradients& out, int64_t i, int64_t start,
                                                 int width, const Line& line, float* column_sums) {
    const Scale& scale = weight.scales[NAME];
    const bool is_product = scale.pattern == ROW_COL_MULT;
    const float* column = is_product ? scale.column + start : ones.values;
    const float row = is_product ? scale.row[i] : 1.0f;
    const auto add = NAME == INNER && weight.normalize
                         ? (out.column[NAME] ? add_gradients<NAME, true, true> : add_gradients<NAME, true, false>)
                         : (out.column[NAME] ? add_gradients<NAME, false, true> : add_gradients<NAME, false, false>);
    return add(weight, line, column, row, width, column_sums);
}

#pragma GCC pop_options

// The residual of ROWS rows of a tile; null where there is none.
template <int ROWS>
const float (*multiply_rows(const Weight& weight, int64_t i, int64_t start, int width, float (*delta)[TILE]))[TILE] {
    if (weight.rank == 0) return nullptr;
    const float* b = weight.b + i * weight.rank;
    multiply_residual<ROWS>(weight.a + start, weight.columns, b, weight.rank, width, delta);
    return delta;
}

// Stores the effective weights of an evaluated line, with a line of the residual, if not null.
void store_line(const Weight& weight, int64_t i, int64_t start, int width, const Line& line, const float* delta,
                void* out, int64_t type) {
    alignas(64) float value[TILE];
    for (int j = 0; j < width; ++j) {
        const float inside = weight.normalize ? line.inside[j] / line.scale[INNER][j] : line.inside[j];
        const float bare = line.sign[j] * inside;
        value[j] = !delta || delta[j] == 0 ? bare : bare + delta[j];  // keeps -0.0
    }
    store(value, type, i * weight.columns + start, width, out);
}

template <int ROWS>
void fold_rows(const Weight& weight, int64_t i, int64_t start, int width, Line& line, void* out, int64_t type) {
    alignas(64) float room[ROWS][TILE];
    const auto delta = multiply_rows<ROWS>(weight, i, start, width, room);
    for (int row = 0; row < ROWS; ++row) {
        evaluate(weight, i + row, start, width, line);
        store_line(weight, i + row, start, width, line, delta ? delta[row] : nullptr, out, type);
    }
}

// The sums of one chunk of rows.
struct Sums {
    int index[NUM_SCALES];     // among the column sums, of each scale; -1 for none
    int residual;              // index of the first of rank sums, which A's gradient needs
    int count;
    float* columns;            // (count, columns)
    std::vector<double> rows;  // (rows of the chunk, row_stride): of each scale, then of each rank
    int64_t row_stride;
};

Sums plan(const Weight& weight, const Gradients& out) {
    Sums sums{};
    for (int s = 0; s < NUM_SCALES; ++s) sums.index[s] = out.column[s] ? sums.count++ : -1;
    sums.residual = sums.count;
    sums.count += out.a_grad ? static_cast<int>(weight.rank) : 0;
    sums.row_stride = NUM_SCALES + weight.rank;
    return sums;
}

void pull_back_line(const Weight& weight, const Gradients& out, const float* grad, const float* delta, int64_t i,
                    int64_t start, int width, Line& line, Sums& sums, double* row_sums) {
    const int64_t first = i * weight.columns + start;
    evaluate(weight, i, start, width, line);
    if (out.weight) store_line(weight, i, start, width, line, delta, out.weight, out.weight_type);
    std::copy(grad, grad + width, line.grad);
    if (weight.normalize) {
        for (int j = 0; j < width; ++j) line.grad[j] = line.grad[j] / line.scale[INNER][j];
    }
    if (out.raw) {
        const bool with_path = has_path(weight);
        float* raw_grad = out.raw + first;
#pragma omp simd
        for (int j = 0; j < width; ++j) {
            const float slope = line.scale[EXP][j] * (weight.beta * line.scale[INNER][j]) * line.rise[j];
            raw_grad[j] = line.grad[j] * (with_path ? slope + line.linear[j] : slope);
        }
    }
    const decltype(&pull_back_scale<0>) pull_back[NUM_SCALES] = {pull_back_scale<EXP>, pull_back_scale<LINEAR>,
                                                                 pull_back_scale<INNER>, pull_back_scale<OFFSET>,
                                                                 pull_back_scale<SHIFT>};
    for (int s = 0; s < NUM_SCALES; ++s) {
        if (!out.row[s] && !out.column[s]) continue;
        float* to = out.column[s] ? sums.columns + sums.index[s] * weight.columns + start : nullptr;
        row_sums[s] += pull_back[s](weight, out, i, start, width, line, to);
    }
}

template <int ROWS>
void pull_back_rows(const Weight& weight, const Gradients& out, int64_t i, int64_t start, int width, Line& line,
                    Sums& sums) {
    alignas(64) float grads[ROWS][TILE], room[ROWS][TILE];
    const auto delta = out.weight ? multiply_rows<ROWS>(weight, i, start, width, room) : nullptr;
    double* const row_sums = sums.rows.data() + i % out.chunk_rows * sums.row_stride;
    for (int row = 0; row < ROWS; ++row) {
        load(out.grad, out.grad_type, (i + row) * weight.columns + start, width, grads[row]);
        pull_back_line(weight, out, grads[row], delta ? delta[row] : nullptr, i + row, start, width, line, sums,
                       row_sums + row * sums.row_stride);
    }
    if (out.a_grad) {
        float* a_sums = sums.columns + sums.residual * weight.columns + start;
        const float* b = weight.b + i * weight.rank;
        pull_back_residual<ROWS>(grads, weight.a + start, weight.columns, b, weight.rank, width, a_sums,
                                 row_sums + NUM_SCALES, sums.row_stride);
    }
}

}  // namespace

extern "C" {

void sel_fold(const Weight* weight, void* out, int64_t type) {
    const int64_t rows = weight->rows, tile = choose_tile(weight->columns);
#pragma omp parallel num_threads(weight->num_threads)
    {
        Line line;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < rows; first += 4) {
            for (int64_t start = 0; start < weight->columns; start += tile) {
                const int width = static_cast<int>(std::min(tile, weight->columns - start));
                if (first + 4 <= rows) {
                    fold_rows<4>(*weight, first, start, width, line, out, type);
                } else {
                    for (int64_t i = first; i < rows; ++i) fold_rows<1>(*weight, i, start, width, line, out, type);
                }
            }
        }
    }
}

void sel_pull_back(const Weight* weight, const Gradients* out) {
    const int64_t rows = weight->rows, columns = weight->columns, rank = weight->rank;
    const int64_t tile = choose_tile(columns);
    const int64_t num_chunks = (rows + out->chunk_rows - 1) / out->chunk_rows;
#pragma omp parallel num_threads(weight->num_threads)
    {
        Line line;
        Sums sums = plan(*weight, *out);
        const int64_t stride = sums.count * columns;
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            const int64_t first = chunk * out->chunk_rows, stop = std::min<int64_t>(rows, first + out->chunk_rows);
            sums.columns = out->column_sums + chunk * stride;
            std::fill(sums.columns, sums.columns + stride, 0.0f);
            sums.rows.assign((stop - first) * sums.row_stride, 0.0);
            for (int64_t start = 0; start < columns; start += tile) {
                const int width = static_cast<int>(std::min(tile, columns - start));
                int64_t i = first;
                for (; i + 4 <= stop; i += 4) pull_back_rows<4>(*weight, *out, i, start, width, line, sums);
                for (; i < stop; ++i) pull_back_rows<1>(*weight, *out, i, start, width, line, sums);
            }
            const double* row_sums = sums.rows.data();
            for (int64_t i = first; i < stop; ++i, row_sums += sums.row_stride) {
                for (int s = 0; s < NUM_SCALES; ++s) {
                    if (out->row[s]) out->row[s][i] = static_cast<float>(row_sums[s]);
                }
                for (int64_t k = 0; out->b_grad && k < rank; ++k) {
                    out->b_grad[i * rank + k] = static_cast<float>(row_sums[NUM_SCALES + k]);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t start = 0; start < columns; start += TILE) {
            const int width = static_cast<int>(std::min<int64_t>(TILE, columns - start));
            const auto add_chunks = [&](int index, float* out_sums) {
                double totals[TILE] = {};
                for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
                    const float* own = out->column_sums + chunk * stride + index * columns + start;
                    for (int j = 0; j < width; ++j) totals[j] += own[j];
                }
                std::copy(totals, totals + width, out_sums + start);
            };
            for (int s = 0; s < NUM_SCALES; ++s) {
                if (out->column[s]) add_chunks(sums.index[s], out->column[s]);
            }
            for (int k = 0; out->a_grad && k < rank; ++k) add_chunks(sums.residual + k, out->a_grad + k * columns);
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

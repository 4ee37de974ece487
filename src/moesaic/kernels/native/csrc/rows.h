// Operations on single rows: norms, rotary embedding, the top-k gate, the merge of expert outputs.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear.h"

namespace MOESAIC_ISA {

constexpr moesaic::Stored kWide = moesaic::Stored::kWide;

inline Vec load_some(const float* p, int64_t count) {  // padded with zeros
    if (count >= LANES) return load(p);
    float lanes[LANES] = {};
    std::memcpy(lanes, p, size_t(count) * 4);
    return load(lanes);
}

inline void store_some(float* p, Vec x, int64_t count) {
    if (count >= LANES) return store(p, x);
    float lanes[LANES];
    store(lanes, x);
    std::memcpy(p, lanes, size_t(count) * 4);
}

inline void norm_row(const float* row, const float* weight, int64_t h, float epsilon, float* out) {
    Vec squares = zero();
    for (int64_t i = 0; i < h; i += LANES) {
        Vec x = load_some(row + i, h - i);
        squares = fma(x, x, squares);
    }
    Vec scale = set1(1.0f / std::sqrt(total(squares) / float(h) + epsilon));
    for (int64_t i = 0; i < h; i += LANES) {
        Vec x = mul(load_some(row + i, h - i), scale);
        store_some(out + i, mul(x, load_some(weight + i, h - i)), h - i);
    }
}

inline void norm(const moesaic::Norm& job) {
    parallel_rows(job.n, job.h, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* row = job.rows + r * job.row_stride;
            if (job.added != nullptr) {
                float* sum = job.sum + r * job.h;
                for (int64_t i = 0; i < job.h; i++) sum[i] = row[i] + job.added[r * job.h + i];
                row = sum;
            }
            norm_row(row, job.weight, job.h, job.epsilon, job.out + r * job.h);
        }
    });
}

inline void rope_head(const moesaic::Rope& job, const float* x, const float* c, const float* s, float* out) {
    int64_t half = job.rotated / 2;
    for (int64_t i = job.rotated; i < job.width; i++) out[i] = x[i];
    if (job.interleaved) {
        for (int64_t i = 0; i < half; i++) {
            out[2 * i] = x[2 * i] * c[i] - x[2 * i + 1] * s[i];
            out[2 * i + 1] = x[2 * i + 1] * c[i] + x[2 * i] * s[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * c[i] - x[half + i] * s[i];
        out[half + i] = x[half + i] * c[i] + x[i] * s[i];
    }
}

inline void rope(const moesaic::Rope& job) {
    parallel_rows(job.n, job.heads * job.width, [&](int64_t begin, int64_t end) {
        constexpr int64_t kLongest = 1024;
        float normed[kLongest];
        for (int64_t r = begin; r < end; r++) {
            const float* cosine = job.cosine + job.positions[r] * (job.rotated / 2);
            const float* sine = job.sine + job.positions[r] * (job.rotated / 2);
            for (int64_t head = 0; head < job.heads; head++) {
                const float* x = job.rows + r * job.row_stride + head * job.head_stride;
                if (job.weight != nullptr) {
                    norm_row(x, job.weight, job.width, job.epsilon, normed);
                    x = normed;
                }
                rope_head(job, x, cosine, sine, job.out + (r * job.heads + head) * job.width);
            }
        }
    });
}

inline float group_score(const float* scores, int64_t size, bool two_best) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        second = std::max(second, std::min(best, scores[i]));
        best = std::max(best, scores[i]);
    }
    return two_best ? best + second : best;
}

// Makes the scores of all experts outside the best groups minus infinity, since others may be negative. Ties go to the
// first group.
inline void limit_groups(const moesaic::Gate& job, float* scores) {
    int64_t size = job.experts / job.groups;
    Array<float> best(job.groups);
    for (int64_t group = 0; group < job.groups; group++) {
        best[group] = group_score(scores + group * size, size, job.two_best);
    }
    for (int64_t group = 0; group < job.groups; group++) {
        int64_t better = 0;
        for (int64_t other = 0; other < job.groups; other++) {
            better += best[other] > best[group] || (best[other] == best[group] && other < group);
        }
        if (better < job.groups_kept) continue;
        for (int64_t i = 0; i < size; i++) scores[group * size + i] = -INFINITY;
    }
}

inline void softmax(float* scores, int64_t experts) {
    Vec best = set1(scores[0]);
    for (int64_t i = 0; i < experts; i++) best = vmax(best, set1(scores[i]));
    Vec sums = zero();
    for (int64_t i = 0; i < experts; i += LANES) {
        int64_t count = experts - i;
        Vec x = exponential(sub(load_some(scores + i, count), best));
        store_some(scores + i, x, count);
        sums = add(sums, load_some(scores + i, count));
    }
    float sum = total(sums);
    for (int64_t i = 0; i < experts; i++) scores[i] /= sum;
}

inline void sigmoids(float* scores, int64_t experts) {
    for (int64_t i = 0; i < experts; i += LANES) {
        Vec below = add(set1(1.0f), exponential(sub(zero(), load_some(scores + i, experts - i))));
        store_some(scores + i, divide(set1(1.0f), below), experts - i);
    }
}

// products [experts] become scores; choice [experts] is room for the scores that choose.
inline void choose(const moesaic::Gate& job, float* products, float* choice, int64_t* ids, float* weights) {
    job.sigmoid ? sigmoids(products, job.experts) : softmax(products, job.experts);
    const float* scores = products;
    for (int64_t i = 0; i < job.experts; i++) choice[i] = job.bias ? scores[i] + job.bias[i] : scores[i];
    if (job.groups_kept < job.groups) limit_groups(job, choice);
    float chosen = 0;
    for (int64_t slot = 0; slot < job.top_k; slot++) {
        int64_t id = 0;
        for (int64_t i = 1; i < job.experts; i++) {
            if (choice[i] > choice[id]) id = i;  // of equal ones the first
        }
        ids[slot] = id, weights[slot] = scores[id];
        chosen += scores[id];
        choice[id] = -INFINITY;
    }
    for (int64_t slot = 0; slot < job.top_k; slot++) {
        if (job.normalise) weights[slot] /= chosen + job.added;
        weights[slot] *= job.scale;
    }
}

inline void gate(const moesaic::Gate& job) {
    float* products = scratch(kWork, 2 * job.n * job.experts);
    float* choices = products + job.n * job.experts;
    linear({job.rows, job.n, job.h, {{job.weight, job.added_to_products, products, job.experts, kWide}}, 1});
    parallel_rows(job.n, job.experts * (job.top_k + 4), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            choose(job, products + r * job.experts, choices + r * job.experts, job.ids + r * job.top_k,
                   job.weights + r * job.top_k);
        }
    });
}

inline void merge(const moesaic::Merge& job) {
    parallel_rows(job.n, job.h * (job.top_k + 1), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            for (int64_t i = 0; i < job.h; i += LANES) {
                int64_t count = job.h - i;
                Vec sum = load_some(job.residual + r * job.h + i, count);
                if (job.dense != nullptr) sum = add(sum, load_some(job.dense + r * job.h + i, count));
                for (int64_t k = 0; k < job.top_k; k++) {
                    const float* row = job.rows + (r * job.top_k + k) * job.h + i;
                    sum = fma(set1(job.weights[r * job.top_k + k]), load_some(row, count), sum);
                }
                store_some(job.out + r * job.h + i, sum, count);
            }
        }
    });
}

template <class T>
void embed_of(const moesaic::Embed& job) {
    parallel_rows(job.n, job.width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const T* from = static_cast<const T*>(job.table) + job.ids[r] * job.width;
            for (int64_t i = 0; i < job.width; i++) job.out[r * job.width + i] = widen(from[i]);
        }
    });
}

template <class T>
void embed_quantized(const moesaic::Embed& job) {
    parallel_rows(job.n, job.width, [&](int64_t begin, int64_t end) {
        alignas(64) float numbers[BLOCK];
        for (int64_t r = begin; r < end; r++) {
            const T* from = static_cast<const T*>(job.table) + job.ids[r] * span<T>(job.width);
            for (int64_t i = 0; i < job.width; i += BLOCK) {
                int64_t count = std::min(job.width - i, BLOCK);
                dequantize(from + span<T>(i), count, numbers);
                std::memcpy(job.out + r * job.width + i, numbers, size_t(count) * 4);
            }
        }
    });
}

inline void embed(const moesaic::Embed& job) {
    switch (job.stored) {
        case moesaic::Stored::kNarrow: return embed_of<bf16>(job);
        case moesaic::Stored::kWide: return embed_of<float>(job);
        default: return with_quantized(job.stored, [&](auto* of) {
            embed_quantized<std::remove_pointer_t<decltype(of)>>(job);
        });
    }
}

inline void join_rows(const moesaic::Join& job) {
    int64_t width = job.left_width + job.right_width;
    parallel_rows(job.n, job.heads * width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            for (int64_t head = 0; head < job.heads; head++) {
                float* to = job.out + (r * job.heads + head) * width;
                const float* left = job.left + r * job.left_row + head * job.left_head;
                const float* right = job.right + r * job.right_row + head * job.right_head;
                std::memcpy(to, left, size_t(job.left_width) * 4);
                std::memcpy(to + job.left_width, right, size_t(job.right_width) * 4);
            }
        }
    });
}

inline void sigmoid_gate(const moesaic::SigmoidGate& job) {
    float* scores = scratch(kWork, job.n);
    linear({job.rows, job.n, job.h, {{job.weight, nullptr, scores, 1, kWide}}, 1});
    parallel_rows(job.n, job.width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            Vec below = add(set1(1.0f), exponential(set1(-scores[r])));
            Vec opening = divide(set1(1.0f), below);
            for (int64_t i = 0; i < job.width; i += LANES) {
                int64_t count = job.width - i;
                store_some(job.out + r * job.width + i, mul(load_some(job.values + r * job.width + i, count), opening),
                           count);
            }
        }
    });
}

inline void clip(const moesaic::Clip& job) {
    parallel_rows(job.n, job.width, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * job.width; i < end * job.width; i++) {
            float x = job.rows[i];
            job.out[i] = x > job.limit ? job.limit : x < -job.limit ? -job.limit : x;
        }
    });
}

inline void mask_tokens(const moesaic::MaskTokens& job) {
    int64_t words = (job.width + 31) / 32;
    parallel_rows(job.n, job.width, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float* row = job.logits + job.lines[i] * job.width;
            for (int64_t w = 0; w < words; w++) {
                uint32_t word = job.masks[i * words + w];
                if (word == ~0u) continue;
                int64_t count = std::min<int64_t>(32, job.width - w * 32);
                for (int64_t t = 0; t < count; t++) {
                    float kept = row[w * 32 + t];
                    row[w * 32 + t] = (word >> t) & 1 ? kept : -std::numeric_limits<float>::infinity();
                }
            }
        }
    });
}

}  // namespace MOESAIC_ISA

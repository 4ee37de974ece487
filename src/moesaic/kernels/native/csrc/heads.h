// One matrix per head, in both memory layouts that the up-projections of latent attention use.
#pragma once

#include "linear.h"

namespace MOESAIC_ISA {

// Head `head` for rows [first, last). The inputs of one output are contiguous, so each output is a sum over k.
template <class T>
void head_dot(const moesaic::HeadLinear& job, int64_t head, int64_t first, int64_t last, RowOf<T>* memory) {
    int64_t width = padded(job.k);
    const T* weight = static_cast<const T*>(job.weight) + head * job.weight_head;
    for (int64_t begin = first; begin < last; begin += PANEL) {
        const float* rows[PANEL] = {};
        int64_t n = last - begin < PANEL ? last - begin : PANEL;
        for (int64_t i = 0; i < n; i++) rows[i] = job.rows + (begin + i) * job.row_stride + head * job.head_stride;
        for (int64_t i = 0; i < n; i += kTogether<T>) pack_set<T>(rows + i, job.k, memory + i * width);
        float* out = job.out + (begin * job.heads + head) * job.columns;
        panels<T>(memory, width, n, [&](int64_t, int64_t, auto x) {
            multiply<T>(x, n, weight, job.weight_column, job.columns, job.k, out, job.heads * job.columns);
        });
    }
}

// The same for weights in which the outputs of one input are contiguous.
template <class T>
void head_outer(const moesaic::HeadLinear& job, int64_t head, int64_t first, int64_t last, float* memory) {
    const T* weight = static_cast<const T*>(job.weight) + head * job.weight_head;
    const T** lines = reinterpret_cast<const T**>(memory);
    for (int64_t i = 0; i < job.k; i++) lines[i] = weight + i * job.weight_k;
    for (int64_t begin = first; begin < last; begin += PANEL) {
        const float* x[PANEL];
        int64_t n = last - begin < PANEL ? last - begin : PANEL;
        for (int64_t i = 0; i < n; i++) {
            x[i] = job.rows + (begin + i) * job.row_stride + head * job.head_stride;
        }
        float* out = job.out + (begin * job.heads + head) * job.columns;
        Nothing nothing;
        outer<T>(x, n, lines, job.columns, job.k, out, job.heads * job.columns, true, nothing);
    }
}

template <class T>
void head_linear_of(const moesaic::HeadLinear& job) {
    int64_t bands = (job.n + BAND - 1) / BAND;
    parallel(job.heads * bands, job.n * job.heads * job.k * job.columns, [&](int64_t task, int worker) {
        int64_t head = task / bands, first = task % bands * BAND;
        int64_t last = first + BAND < job.n ? first + BAND : job.n;
        if (job.weight_k == 1) {
            Registers<T> registers;
            int64_t bytes = PANEL * padded(job.k) * int64_t(sizeof(RowOf<T>));
            float* memory = worker_scratch(worker, bytes / int64_t(sizeof(float)));
            head_dot<T>(job, head, first, last, reinterpret_cast<RowOf<T>*>(memory));
        } else {
            head_outer<T>(job, head, first, last, worker_scratch(worker, 2 * job.k));
        }
    });
}

inline void head_linear(const moesaic::HeadLinear& job) {
    job.wide ? head_linear_of<float>(job) : head_linear_of<Narrow>(job);
}

}  // namespace MOESAIC_ISA

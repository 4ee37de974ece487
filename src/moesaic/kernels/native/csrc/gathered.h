// Combines the calls of several clients into one batch. Rows are read, and results written, in place.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"
#include "table.h"

namespace moesaic {

namespace nb = nanobind;

template <class U>
using Vector = nb::ndarray<U, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class U>
using Matrix = nb::ndarray<U, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The types of an expert's matrices.
struct Types {
    Stored inner;  // of gate and up
    Stored down;
};

class Gathered {
   public:
    // part: hidden [m, h]; row and expert of each pair [p]; results [q, h]; line of each pair in the results [p].
    // The arrays must stay valid until the batch is computed, so none is converted.
    void add(nb::handle part, int64_t h) {
        auto hidden = nb::cast<Matrix<const float>>(part[0], false);
        auto places = nb::cast<Vector<const int64_t>>(part[1], false);
        auto experts = nb::cast<Vector<const int64_t>>(part[2], false);
        auto answers = nb::cast<Matrix<float>>(part[3], false);
        auto lines = nb::cast<Vector<const int64_t>>(part[4], false);
        size_t pairs = experts.shape(0), first = rows.size();
        bool wide = int64_t(hidden.shape(1)) == h && int64_t(answers.shape(1)) == h;
        if (!wide || places.shape(0) != pairs || lines.shape(0) != pairs) {
            throw nb::value_error("part: the widths or the numbers of its arrays do not fit together");
        }
        for (size_t row = 0; row < hidden.shape(0); row++) rows.push_back(uint64_t(hidden.data() + int64_t(row) * h));
        for (size_t i = 0; i < pairs; i++) {
            size_t place = size_t(places.data()[i]), line = size_t(lines.data()[i]);  // negative numbers become huge
            if (place >= hidden.shape(0) || line >= answers.shape(0)) {
                throw nb::value_error("part: a place or a line is out of range");
            }
            row_of.push_back(int64_t(first + place));
            ids.push_back(experts.data()[i]);
            out.push_back(uint64_t(answers.data() + int64_t(line) * h));
        }
    }

    // table: [3, experts] addresses of gate, up and down; or [6, experts], then those of their biases.
    Experts job(const Matrix<const uint64_t>& table, int64_t h, int64_t w, Types types,
                const Activation& activation) const {
        const uint64_t* gate = table.data();
        int64_t experts = int64_t(table.shape(1));
        Experts made{nullptr,  ids.data(), gate, gate + experts, gate + 2 * experts, nullptr, int64_t(rows.size()),
                     /*top_k=*/0, h,       w,    experts,        types.inner,        types.down};
        if (table.shape(0) == 6) made.biases = {gate + 3 * experts, gate + 4 * experts, gate + 5 * experts};
        made.activation = activation;
        made.apart = {rows.data(), row_of.data(), out.data(), int64_t(ids.size())};
        return made;
    }

    std::vector<uint64_t> rows, out;
    std::vector<int64_t> row_of, ids;
};

// Copies rows to lines: row places[i] of `rows` to line lines[i] of `out`.
class Put {
   public:
    Put(const Matrix<float>& out, const Vector<const int64_t>& lines, const Matrix<const float>& rows,
        const Vector<const int64_t>& places)
        : out_(out.data()), rows_(rows.data()), lines_(lines.data()), places_(places.data()),
          count_(int64_t(lines.shape(0))), width_(int64_t(rows.shape(1))) {
        if (out.shape(1) != rows.shape(1) || places.shape(0) != lines.shape(0)) {
            throw nb::value_error("put: the widths or the numbers of its arrays do not fit together");
        }
        for (int64_t i = 0; i < count_; i++) {  // negative numbers become huge
            if (size_t(lines_[i]) >= out.shape(0) || size_t(places_[i]) >= rows.shape(0)) {
                throw nb::value_error("put: a place or a line is out of range");
            }
        }
    }

    void run() {
        piece_ = std::max<int64_t>(1, kPiece / (width_ * 4 + 1));
        int64_t pieces = (count_ + piece_ - 1) / piece_;
        auto copy = [](void* put, int64_t piece, int) { static_cast<Put*>(put)->copy(piece); };
        if (pieces > 1) {
            pool().run(pieces, copy, this);
        } else if (pieces == 1) {
            this->copy(0);
        }
    }

   private:
    static constexpr int64_t kPiece = 1 << 16;  // minimum bytes for a task of their own

    void copy(int64_t piece) const {
        for (int64_t i = piece * piece_; i < std::min(count_, (piece + 1) * piece_); i++) {
            std::memcpy(out_ + lines_[i] * width_, rows_ + places_[i] * width_, size_t(width_) * 4);
        }
    }

    float* out_;
    const float* rows_;
    const int64_t* lines_;
    const int64_t* places_;
    int64_t count_, width_, piece_ = 1;
};

}  // namespace moesaic

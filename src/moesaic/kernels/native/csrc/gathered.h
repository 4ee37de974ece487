// Calls of several clients as one batch: rows are read and answers written where they lie.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

#include "table.h"

namespace moesaic {

namespace nb = nanobind;

template <class U>
using Vector = nb::ndarray<U, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class U>
using Matrix = nb::ndarray<U, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class Gathered {
   public:
    // part: hidden [m, h], of each pair its row and its expert [p], answers [q, h], and of each pair its line there.
    // They must live, and stay where they are, until the batch is computed; so none is converted.
    void add(nb::handle part, int64_t h) {
        auto hidden = nb::cast<Matrix<const float>>(part[0], false);
        auto places = nb::cast<Vector<const int64_t>>(part[1], false);
        auto experts = nb::cast<Vector<const int64_t>>(part[2], false);
        auto answers = nb::cast<Matrix<float>>(part[3], false);
        auto lines = nb::cast<Vector<const int64_t>>(part[4], false);
        size_t pairs = experts.shape(0), first = rows.size();
        bool wide = int64_t(hidden.shape(1)) == h && int64_t(answers.shape(1)) == h;
        if (!wide || places.shape(0) != pairs || lines.shape(0) != pairs) {
            throw nb::value_error("rows, pairs and answers do not fit");
        }
        for (size_t row = 0; row < hidden.shape(0); row++) rows.push_back(uint64_t(hidden.data() + int64_t(row) * h));
        for (size_t i = 0; i < pairs; i++) {
            size_t place = size_t(places.data()[i]), line = size_t(lines.data()[i]);  // negative ones are huge
            if (place >= hidden.shape(0) || line >= answers.shape(0)) {
                throw nb::value_error("a pair names a row or a line that is none");
            }
            row_of.push_back(int64_t(first + place));
            ids.push_back(experts.data()[i]);
            out.push_back(uint64_t(answers.data() + int64_t(line) * h));
        }
    }

    Experts job(const Matrix<const uint64_t>& table, int64_t h, int64_t w, bool wide) const {
        const uint64_t* gate = table.data();
        int64_t experts = int64_t(table.shape(1));
        Experts made{nullptr,  ids.data(), gate, gate + experts, gate + 2 * experts, nullptr, int64_t(rows.size()),
                     /*top_k=*/0, h,       w,    experts,        wide};
        made.apart = {rows.data(), row_of.data(), out.data(), int64_t(ids.size())};
        return made;
    }

    std::vector<uint64_t> rows, out;
    std::vector<int64_t> row_of, ids;
};

}  // namespace moesaic

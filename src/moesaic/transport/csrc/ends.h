// The parts that both ends of a segment use: the mapping, views of it, and the published rows of a call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "segment.h"

namespace moesaic {

namespace nb = nanobind;
using Indices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A mapped, sealed memfd. Python sees it as a buffer, and views of that keep it mapped.
class Mapping {
   public:
    explicit Mapping(int descriptor);  // throws OSError, or ValueError if it cannot be trusted
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    Segment segment() const { return {base_, size_}; }

   private:
    unsigned char* base_;
    uint64_t size_;
};

// The published rows of one call. Each is published once.
class Out {
   public:
    Out() = default;
    explicit Out(uint64_t rows) : rows_(rows), seen_((rows + 63) / 64) {}

    // False for a row that does not exist or was published before.
    bool add(uint64_t row) {
        if (row >= rows_ || has(row)) return false;
        seen_[row / 64] |= bit(row);
        ++count_;
        return true;
    }
    void remove(uint64_t row) {
        seen_[row / 64] &= ~bit(row);
        --count_;
    }
    uint64_t count() const { return count_; }
    bool all() const { return count_ == rows_; }

   private:
    static uint64_t bit(uint64_t row) { return uint64_t{1} << row % 64; }
    bool has(uint64_t row) const { return (seen_[row / 64] & bit(row)) != 0; }
    uint64_t rows_ = 0, count_ = 0;
    std::vector<uint64_t> seen_;
};

// One end: the segment, and the socket, which closes when the peer dies and whose bytes wake this end.
class End {
   public:
    End(nb::object mapping, int descriptor);
    virtual ~End() = default;

    // The memory stays mapped while views of it exist.
    void close();

   protected:
    const Segment& segment() const {
        if (segment_.base == nullptr) throw Broken("this end is closed");
        return segment_;
    }
    bool closed() const { return segment_.base == nullptr; }
    // Keeps the memory mapped. To make Python objects may run any Python code, which may close this end.
    nb::object kept() const { return writable_; }
    nb::object view(uint64_t offset, uint64_t bytes, bool writable) const;
    void ring() const;

   private:
    Segment segment_;
    int descriptor_;
    nb::object writable_, read_only_;
};

}  // namespace moesaic

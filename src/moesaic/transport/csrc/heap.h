// First-fit allocator over one address range. It takes the lowest hole that is large enough, to touch few pages.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace moesaic {

class Heap {
   public:
    Heap(uint64_t begin, uint64_t end) : capacity_(end - begin) { holes_[begin] = end - begin; }

    static constexpr uint64_t kNone = 0;  // offset 0 belongs to the header
    uint64_t capacity() const { return capacity_; }

    uint64_t take(uint64_t bytes) {
        for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
            if (hole->second < bytes) continue;
            uint64_t at = hole->first, left = hole->second - bytes;
            holes_.erase(hole);
            if (left > 0) holes_[at + bytes] = left;
            return at;
        }
        return kNone;
    }

    void give_back(uint64_t at, uint64_t bytes) {
        auto after = holes_.lower_bound(at);
        if (after != holes_.end() && after->first == at + bytes) {
            bytes += after->second;
            after = holes_.erase(after);
        }
        if (after != holes_.begin()) {
            auto before = std::prev(after);
            if (before->first + before->second == at) {
                before->second += bytes;
                return;
            }
        }
        holes_[at] = bytes;
    }

   private:
    uint64_t capacity_;
    std::map<uint64_t, uint64_t> holes_;  // start -> bytes; no two touch
};

}  // namespace moesaic

// The client's end: it allocates, posts, and reads which rows the server has published.
#pragma once

#include <vector>

#include "ends.h"
#include "heap.h"

namespace moesaic {

struct Call {
    uint64_t number, rows, row_bytes, slot;
    nb::object request, answer;
};

class Client : public End {
   public:
    Client(nb::object mapping, int descriptor);

    uint64_t capacity() const { return heap_.capacity(); }
    nb::object open(uint64_t request_bytes, uint64_t rows, uint64_t row_bytes);  // a Call, or None
    void post(const Call& call);
    nb::list poll();  // of (Call, indices)
    void release(const Call& call);
    void close();
    bool ready() const { return segment().header().published.value.load(std::memory_order_relaxed) != seen_; }
    bool arm() {
        Header& header = segment().header();
        return going_to_sleep(header.client_sleeps.value, header.published.value, seen_);
    }
    void disarm() { segment().header().client_sleeps.value.store(0, std::memory_order_relaxed); }

   private:
    enum class State { kFree, kOpen, kPosted, kAbandoned };
    struct Slot {
        State state = State::kFree;
        Extent extent{};
        Out out;
        nb::object call;  // the Call, until it is released
    };

    Slot& slot_of(const Call& call);
    nb::object read(Slot& slot, uint64_t count);
    void free(uint64_t index);

    Heap heap_;
    std::vector<Slot> slots_;
    std::vector<uint64_t> free_, flying_;  // slots without a call; slots that lack rows, oldest first
    uint64_t number_ = 0, posted_ = 0, seen_ = 0;
};

}  // namespace moesaic

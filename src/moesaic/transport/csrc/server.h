// The server's end: it checks and takes posted calls, and publishes rows.
#pragma once

#include <vector>

#include "ends.h"

namespace moesaic {

class Server : public End {
   public:
    Server(nb::object mapping, int descriptor);

    nb::list poll(nb::handle self);  // of Incoming
    void publish(uint64_t slot, uint64_t turn, const Indices& indices);
    bool ready() const { return segment().header().posted.value.load(std::memory_order_relaxed) != taken_; }
    bool arm() {
        Header& header = segment().header();
        return going_to_sleep(header.server_sleeps.value, header.posted.value, taken_);
    }
    void disarm() { segment().header().server_sleeps.value.store(0, std::memory_order_relaxed); }

   private:
    struct Slot {
        bool busy = false;
        uint64_t turn = 0;  // number of the call within this slot
        Extent extent{};    // a checked copy; the client's memory is not read again
        Out out;
    };

    nb::object take(uint64_t index, nb::handle self);

    std::vector<Slot> slots_;
    uint64_t taken_ = 0, published_ = 0;
};

struct Incoming {
    uint64_t number, rows, row_bytes, slot, turn;
    nb::object request, answer, server;

    void publish(const Indices& indices) const { nb::cast<Server&>(server).publish(slot, turn, indices); }
};

}  // namespace moesaic

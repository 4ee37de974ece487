#include "server.h"

namespace moesaic {

Server::Server(nb::object mapping, int descriptor) : End(std::move(mapping), descriptor), slots_(kCalls) {
    if (segment().header().magic.load(std::memory_order_acquire) != kMagic) {
        throw Broken("the segment belongs to another version of moesaic");
    }
}

nb::list Server::poll(nb::handle self) {
    const nb::object kept = this->kept();
    const Header& header = segment().header();
    nb::list news;
    uint64_t posted = header.posted.value.load(std::memory_order_acquire);
    if (posted - taken_ > kCalls) throw Broken("the client posted more calls than there are slots");
    while (taken_ != posted) {
        uint32_t index = header.ring[taken_ % kCalls].load(std::memory_order_relaxed);
        ++taken_;
        news.append(take(index, self));
    }
    return news;
}

nb::object Server::take(uint64_t index, nb::handle self) {
    if (index >= kCalls) throw Broken("the client posted a slot that does not exist");
    Slot& slot = slots_[index];
    if (slot.busy) throw Broken("the client posted a slot again before all of its rows were published");
    const Segment& memory = segment();
    const Descriptor& descriptor = memory.slot(index);
    Extent extent{descriptor.offset.load(std::memory_order_relaxed),
                  descriptor.request_bytes.load(std::memory_order_relaxed),
                  descriptor.rows.load(std::memory_order_relaxed),
                  descriptor.row_bytes.load(std::memory_order_relaxed)};
    if (!extent.fits(memory.size)) throw Broken("the client posted a call outside the segment");
    slot = {true, slot.turn + 1, extent, Out(extent.rows)};
    return nb::cast(Incoming{descriptor.number.load(std::memory_order_relaxed), extent.rows, extent.row_bytes, index,
                             slot.turn, view(extent.offset, extent.request_bytes, false),
                             view(extent.answer(), extent.rows * extent.row_bytes, true),
                             nb::borrow(self)});
}

void Server::publish(uint64_t index, uint64_t turn, const Indices& indices) {
    if (closed()) return;  // the client is gone
    Slot& slot = slots_[index];
    uint64_t n = indices.shape(0), first = slot.out.count();
    if (n == 0) return;
    if (!slot.busy || slot.turn != turn) throw nb::value_error("all rows of the call are published already");
    std::atomic<uint32_t>* list = segment().list(slot.extent);
    for (uint64_t i = 0; i < n; ++i) {
        int64_t row = indices.data()[i];
        if (!slot.out.add(static_cast<uint64_t>(row))) {
            while (i > 0) slot.out.remove(static_cast<uint64_t>(indices.data()[--i]));
            throw nb::value_error("a row was published twice, or the call does not have it");
        }
        list[first + i].store(static_cast<uint32_t>(row), std::memory_order_relaxed);
    }
    slot.busy = !slot.out.all();
    segment().slot(index).published.store(slot.out.count(), std::memory_order_release);
    Header& header = segment().header();
    if (count_on(header.published.value, ++published_, header.client_sleeps.value)) ring();
}

}  // namespace moesaic

#include "client.h"

#include <algorithm>
#include <memory>

namespace moesaic {

Client::Client(nb::object mapping, int descriptor)
    : End(std::move(mapping), descriptor), heap_(kHeap, segment().size / kAlign * kAlign), slots_(kCalls) {
    for (uint64_t slot = kCalls; slot > 0; --slot) free_.push_back(slot - 1);
    segment().header().magic.store(kMagic, std::memory_order_release);
}

nb::object Client::open(uint64_t request_bytes, uint64_t rows, uint64_t row_bytes) {
    Extent extent{kHeap, request_bytes, rows, row_bytes};
    if (!extent.fits(segment().size) || extent.bytes() > heap_.capacity()) {
        throw nb::value_error("the call is larger than the memory for calls");
    }
    if (free_.empty() || (extent.offset = heap_.take(extent.bytes())) == Heap::kNone) return nb::none();
    uint64_t index = free_.back();
    free_.pop_back();
    nb::object call = nb::cast(Call{++number_, rows, row_bytes, index, view(extent.offset, request_bytes, true),
                                    view(extent.answer(), rows * row_bytes, true)});
    slots_[index] = {State::kOpen, extent, Out(rows), call};
    return call;
}

Client::Slot& Client::slot_of(const Call& call) {
    Slot& slot = slots_[call.slot];
    if (!slot.call.is_valid() || &nb::cast<Call&>(slot.call) != &call) {
        throw nb::value_error("the call was released");
    }
    return slot;
}

void Client::post(const Call& call) {
    const Segment& memory = segment();
    Slot& slot = slot_of(call);
    if (slot.state != State::kOpen) throw nb::value_error("the call was posted");
    Descriptor& descriptor = memory.slot(call.slot);
    descriptor.number.store(call.number, std::memory_order_relaxed);
    descriptor.offset.store(slot.extent.offset, std::memory_order_relaxed);
    descriptor.request_bytes.store(slot.extent.request_bytes, std::memory_order_relaxed);
    descriptor.rows.store(slot.extent.rows, std::memory_order_relaxed);
    descriptor.row_bytes.store(slot.extent.row_bytes, std::memory_order_relaxed);
    descriptor.published.store(0, std::memory_order_relaxed);
    Header& header = memory.header();
    header.ring[posted_ % kCalls].store(static_cast<uint32_t>(call.slot), std::memory_order_relaxed);
    slot.state = State::kPosted;
    flying_.push_back(call.slot);
    if (count_on(header.posted.value, ++posted_, header.server_sleeps.value)) ring();
}

nb::list Client::poll() {
    const nb::object kept = this->kept();
    const Segment memory = segment();
    nb::list news;
    uint64_t published = memory.header().published.value.load(std::memory_order_acquire);
    if (published == seen_) return news;
    seen_ = published;
    std::vector<uint64_t> still;
    for (uint64_t index : flying_) {
        Slot& slot = slots_[index];
        const Descriptor& descriptor = memory.slot(index);
        uint64_t count = descriptor.published.load(std::memory_order_acquire);
        if (count < slot.out.count() || count > slot.extent.rows) {
            throw Broken("the server published rows that do not exist");
        }
        if (count > slot.out.count()) {
            bool wanted = slot.state != State::kAbandoned;
            nb::object call = slot.call, indices = read(slot, count);
            if (wanted) news.append(nb::make_tuple(call, indices));
            if (closed()) return news;  // the slot is gone
        }
        if (!slot.out.all()) {
            still.push_back(index);
        } else if (slot.state == State::kAbandoned) {
            free(index);
        }
    }
    flying_.swap(still);
    return news;
}

// The rows that were published since the last poll, as int64[n].
nb::object Client::read(Slot& slot, uint64_t count) {
    const std::atomic<uint32_t>* list = segment().list(slot.extent);
    uint64_t first = slot.out.count(), n = count - first;
    auto rows = std::make_unique<int64_t[]>(n);
    for (uint64_t i = 0; i < n; ++i) {
        uint32_t row = list[first + i].load(std::memory_order_relaxed);
        if (!slot.out.add(row)) throw Broken("the server published a row twice, or one that does not exist");
        rows[i] = row;
    }
    nb::capsule owner(rows.get(), [](void* memory) noexcept { delete[] static_cast<int64_t*>(memory); });
    return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(rows.release(), {n}, owner));
}

void Client::close() {
    std::vector<Slot> calls(kCalls);
    slots_.swap(calls);  // their destructors run Python, which may call this again
    End::close();
}

void Client::release(const Call& call) {
    if (closed()) return;
    Slot& slot = slot_of(call);
    if (slot.state == State::kPosted && !slot.out.all()) {
        slot.state = State::kAbandoned;  // the server may still write into it
        slot.call.reset();
    } else {
        free(call.slot);
    }
}

void Client::free(uint64_t index) {
    heap_.give_back(slots_[index].extent.offset, slots_[index].extent.bytes());
    slots_[index] = Slot{};
    free_.push_back(index);
}

}  // namespace moesaic

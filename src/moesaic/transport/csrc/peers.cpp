#include "peers.h"

#include <sched.h>

#include <chrono>
#include <string>

namespace moesaic {
namespace {

constexpr int kLooks = 32;  // polls before the core is yielded

using Clock = std::chrono::steady_clock;

}  // namespace

Peers::Peers(nb::object mapping, uint64_t rank, uint64_t size) : rank_(rank), size_(size) {
    if (size < 1 || size > kPeers || rank >= size) {
        std::string got = std::to_string(rank) + " of " + std::to_string(size);
        std::string allowed = "a size of 1 to " + std::to_string(kPeers) + " and a rank below it";
        throw nb::value_error(("rank: got " + got + "; allowed: " + allowed).c_str());
    }
    Segment segment = nb::cast<Mapping&>(mapping).segment();
    base_ = segment.base;
    half_ = (segment.size - kHeap) / (2 * size) / kAlign * kAlign;
    if (rank == 0) {
        header().size.store(size, std::memory_order_relaxed);
        header().magic.store(kPeersMagic, std::memory_order_release);
    }
    if (header().magic.load(std::memory_order_acquire) != kPeersMagic ||
        header().size.load(std::memory_order_relaxed) != size) {
        throw Broken("the segment belongs to another version of moesaic or to another group");
    }
    writable_ = nb::steal(PyMemoryView_FromObject(mapping.ptr()));
    if (!writable_.is_valid()) throw nb::python_error();
    read_only_ = writable_.attr("toreadonly")();
}

nb::list Peers::open(const std::vector<uint64_t>& sizes) {
    if (sizes.size() != size_) {
        std::string got = std::to_string(sizes.size()), allowed = std::to_string(size_);
        throw nb::value_error(("sizes: got " + got + "; allowed: " + allowed + ", one for each peer").c_str());
    }
    uint64_t total = 0;
    for (uint64_t bytes : sizes) {
        if (bytes > half_ || aligned(bytes) > half_ - total) {
            throw nb::value_error("sizes: the parts are larger than a rank's memory for one round");
        }
        total += aligned(bytes);
    }
    begin();
    nb::list views;
    uint64_t offset = 0;
    for (uint64_t peer = 0; peer < size_; ++peer) {
        place(peer, offset, sizes[peer]);
        uint64_t at = half_of(rank_) + offset;
        views.append(writable_[nb::slice(nb::int_(at), nb::int_(at + sizes[peer]), nb::none())]);
        offset += aligned(sizes[peer]);
    }
    return views;
}

nb::object Peers::open_for_all(uint64_t bytes) {
    if (bytes > half_) throw nb::value_error("bytes: the part is larger than a rank's memory for one round");
    begin();
    for (uint64_t peer = 0; peer < size_; ++peer) place(peer, 0, bytes);
    uint64_t at = half_of(rank_);
    return writable_[nb::slice(nb::int_(at), nb::int_(at + bytes), nb::none())];
}

void Peers::begin() {
    header();
    if (state_ == State::kPosted) throw Broken("the last round has not ended");
    if (state_ == State::kIdle) ++round_;  // parts that were opened and not posted are dropped
    state_ = State::kOpen;
}

void Peers::place(uint64_t peer, uint64_t offset, uint64_t bytes) {
    Part& part = header().parts[round_ % 2][rank_][peer];
    part.offset.store(offset, std::memory_order_relaxed);
    part.bytes.store(bytes, std::memory_order_relaxed);
}

std::vector<uint64_t> Peers::post() {
    expect(State::kOpen);
    PeersHeader& shared = header();
    shared.posted[rank_].value.store(round_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    state_ = State::kPosted;
    std::vector<uint64_t> sleepers;
    for (uint64_t peer = 0; peer < size_; ++peer) {
        uint64_t round = shared.sleeps_for[peer].value.load(std::memory_order_relaxed);
        if (peer == rank_ || round == 0 || count_behind(shared, round) > 0) continue;
        if (shared.sleeps_for[peer].value.exchange(0) != 0) sleepers.push_back(peer);
    }
    return sleepers;
}

uint64_t Peers::count_behind(const PeersHeader& shared, uint64_t round) const {
    uint64_t count = 0;
    for (uint64_t peer = 0; peer < size_; ++peer) {
        count += shared.posted[peer].value.load(std::memory_order_acquire) < round;
    }
    return count;
}

bool Peers::wait(double seconds) const {
    expect(State::kPosted);
    const PeersHeader& shared = header();
    const uint64_t round = round_;
    auto complete = [&] { return count_behind(shared, round) == 0; };
    if (complete()) return true;
    const nb::object kept = writable_;  // another thread may close this end meanwhile: the memory stays until the return
    nb::gil_scoped_release released;
    auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
        for (int look = 0; look < kLooks; ++look) {
            if (complete()) return true;
        }
        sched_yield();
    }
    return complete();
}

bool Peers::arm() {
    header().sleeps_for[rank_].value.store(round_, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return complete();
}

void Peers::disarm() { header().sleeps_for[rank_].value.store(0, std::memory_order_relaxed); }

std::vector<uint64_t> Peers::missing() const {
    std::vector<uint64_t> behind;
    for (uint64_t peer = 0; peer < size_; ++peer) {
        if (header().posted[peer].value.load(std::memory_order_acquire) < round_) behind.push_back(peer);
    }
    return behind;
}

nb::list Peers::take() {
    expect(State::kPosted);
    if (!complete()) throw nb::value_error("the round is not complete: not every peer has posted");
    nb::list views;
    for (uint64_t peer = 0; peer < size_; ++peer) {
        const Part& part = header().parts[round_ % 2][peer][rank_];
        uint64_t offset = part.offset.load(std::memory_order_relaxed);
        uint64_t bytes = part.bytes.load(std::memory_order_relaxed);
        if (offset > half_ || offset % kAlign != 0 || bytes > half_ - offset) {
            throw Broken("a peer posted a part that lies outside its memory");
        }
        uint64_t at = half_of(peer) + offset;
        views.append(read_only_[nb::slice(nb::int_(at), nb::int_(at + bytes), nb::none())]);
    }
    state_ = State::kIdle;
    return views;
}

void Peers::expect(State state) const {
    header();
    if (state_ != state) throw nb::value_error("open, post and take follow one another");
}

void Peers::close() {
    base_ = nullptr;
    writable_.reset();
    read_only_.reset();
}

}  // namespace moesaic

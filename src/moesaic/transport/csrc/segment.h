// The memory that one client and one server share: its layout, which end writes what, and in which order.
//
//   header       counters, sleep flags and the ring of posted slots, one writer per cache line
//   descriptors  one per slot: the offset of a call (client), how many of its rows are published (server)
//   heap         the client allocates calls in it; a call is [request | answer | list of published rows]
//
// Client: request, descriptor, ring entry, then `posted` + 1 with release. Server: `posted` with acquire.
// Server: rows, their indices in the list, then `published` of the slot and of the header with release.
// To sleep: set the flag, fence, look at the counter once more. To wake: count, fence, look at the flag.
// Either the sleeper sees the new count or the other end sees the flag, so no wakeup is lost.
//
// The peer may write anything at any time. So every word is read once, as an atomic, and the copy is checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace moesaic {

constexpr uint64_t kMagic = 0x31304D4853454F4DULL;  // "MOESHM01"
constexpr uint64_t kCalls = 256;                     // slots: calls between open and release
constexpr uint64_t kMaxRows = 1 << 20;
constexpr uint64_t kAlign = 64;

template <class U>
struct alignas(kAlign) Line {  // alone in its cache line
    std::atomic<U> value;
};

struct Header {
    std::atomic<uint64_t> magic;
    Line<uint64_t> posted;          // client: number of calls put into the ring so far
    Line<uint32_t> server_sleeps;   // set by the server, cleared by the end that wakes it
    Line<uint64_t> published;       // server: number of publications so far
    Line<uint32_t> client_sleeps;   // set by the client, cleared by the end that wakes it
    alignas(kAlign) std::atomic<uint32_t> ring[kCalls];  // client: slots in the order of posting
};

struct Descriptor {
    alignas(kAlign) std::atomic<uint64_t> number;  // client, before posting
    std::atomic<uint64_t> offset;                  // of the request, from the start of the segment
    std::atomic<uint64_t> request_bytes;
    std::atomic<uint64_t> rows;
    std::atomic<uint64_t> row_bytes;
    alignas(kAlign) std::atomic<uint64_t> published;  // server: rows published so far
};

constexpr uint64_t kTable = 4096;
constexpr uint64_t kHeap = kTable + 9 * 4096;
static_assert(sizeof(Header) <= kTable && kTable + kCalls * sizeof(Descriptor) <= kHeap, "layout");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free, "atomics");

// The peer broke the rules above, or this end is closed.
struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr uint64_t aligned(uint64_t bytes) {
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

struct Extent {  // a call inside the heap
    uint64_t offset, request_bytes, rows, row_bytes;

    uint64_t answer() const { return offset + aligned(request_bytes); }
    uint64_t list() const { return answer() + aligned(rows * row_bytes); }
    uint64_t bytes() const { return list() - offset + aligned(rows * sizeof(uint32_t)); }

    // Whether the call is inside a segment of `size` bytes. Nothing overflows while size < 2^40.
    bool fits(uint64_t size) const {
        return rows >= 1 && rows <= kMaxRows && request_bytes <= size && row_bytes <= size && offset >= kHeap &&
               offset <= size && offset % kAlign == 0 && bytes() <= size - offset;
    }
};

struct Segment {
    unsigned char* base;
    uint64_t size;

    Header& header() const { return *reinterpret_cast<Header*>(base); }
    Descriptor& slot(uint64_t index) const {
        return reinterpret_cast<Descriptor*>(base + kTable)[index];
    }
    std::atomic<uint32_t>* list(const Extent& extent) const {
        return reinterpret_cast<std::atomic<uint32_t>*>(base + extent.list());
    }
};

// Sets the sleep flag. Returns true if the counter has changed, so that the caller should not sleep.
inline bool going_to_sleep(std::atomic<uint32_t>& flag, const std::atomic<uint64_t>& counter, uint64_t seen) {
    flag.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return counter.load(std::memory_order_acquire) != seen;
}

// Sets the counter and returns whether the other end must be woken. Only one of several wakers gets true.
inline bool count_on(std::atomic<uint64_t>& counter, uint64_t value, std::atomic<uint32_t>& flag) {
    counter.store(value, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return flag.load(std::memory_order_relaxed) != 0 && flag.exchange(0) != 0;
}

}  // namespace moesaic

// The memory that a group of peers shares, and one peer's end of it: rounds in which each peer sends to each.
//
//   header   per peer: rounds it has posted, and the round it sleeps for; per round's parity, sender and
//            receiver: the offset of the part
//   halves   two per peer, one for each parity of the round, written by that peer only
//
// A round: write the parts and their offsets, then `posted` + 1 with release. Wait until every peer's count is as
// high (acquire), then read. A peer writes into a half again two rounds later. By then it has seen every peer post
// the round between, which each does only after it has read this one. So no part is overwritten before it is read,
// without any further waiting.
//
// To sleep: store the round to wait for, fence, look at the counts once more. To post: count, fence, and wake each
// sleeper whose round is complete now. If several peers complete it at once, the last fence sees all counts.
//
// All peers are processes of one user and one program. Still, what another peer wrote is copied and checked before
// it is used.
#pragma once

#include <vector>

#include "ends.h"

namespace moesaic {

constexpr uint64_t kPeersMagic = 0x31305352454550ULL;  // "PEERS01"
constexpr uint64_t kPeers = 32;

struct Part {
    std::atomic<uint64_t> offset;  // from the start of the sender's half
    std::atomic<uint64_t> bytes;
};

struct PeersHeader {
    std::atomic<uint64_t> magic, size;
    Line<uint64_t> posted[kPeers];
    Line<uint64_t> sleeps_for[kPeers];  // 0: awake. Set by the sleeper, cleared by the peer that wakes it.
    Part parts[2][kPeers][kPeers];
};
static_assert(sizeof(PeersHeader) <= kHeap, "layout");

class Peers {
   public:
    Peers(nb::object mapping, uint64_t rank, uint64_t size);  // rank 0 must be the first

    uint64_t capacity() const { return half_; }
    nb::list open(const std::vector<uint64_t>& sizes);  // memory for the part of each peer
    nb::object open_for_all(uint64_t bytes);            // memory for one part that all peers read
    std::vector<uint64_t> post();                       // the peers to wake
    bool wait(double seconds) const;                    // whether the posted round is complete by then
    bool arm();                                         // sets the sleep flag; true if it should not sleep
    void disarm();
    std::vector<uint64_t> missing() const;              // peers that have not posted this round
    nb::list take();                                    // the part of each peer
    void close();

   private:
    enum class State { kIdle, kOpen, kPosted };

    PeersHeader& header() const {
        if (base_ == nullptr) throw Broken("this end is closed");
        return *reinterpret_cast<PeersHeader*>(base_);
    }
    uint64_t half_of(uint64_t peer) const { return kHeap + (peer * 2 + round_ % 2) * half_; }
    bool complete() const { return count_behind(header(), round_) == 0; }
    uint64_t count_behind(const PeersHeader& shared, uint64_t round) const;  // peers that have not posted it
    void expect(State state) const;
    void begin();
    void place(uint64_t peer, uint64_t offset, uint64_t bytes);

    unsigned char* base_;
    uint64_t rank_, size_, half_, round_ = 0;
    State state_ = State::kIdle;
    nb::object writable_, read_only_;
};

}  // namespace moesaic

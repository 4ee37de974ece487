// Threads that compute, and the memory that their operations keep: one such workshop for the process, and one
// for each thread that asks for its own. Threads that nobody needs sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moesaic {

class Workshop;

// A job is `count` tasks, claimed one at a time by whoever is free: the caller, and every worker that
// arrives before the job is done. Nobody waits for a worker that has not arrived, so a worker without
// a core costs its help and nothing else. Which thread runs a task never changes what it computes.
class Pool {
   public:
    using Task = void (*)(void* context, int64_t task, int worker);

    // cpus: where each thread is pinned, the caller (0) among them; empty: nowhere. owner: whose memory workers use.
    Pool(int threads, const std::vector<int>& cpus, Workshop* owner);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }
    void run(int64_t count, Task task, void* context);
    // The task that whoever is free next will claim, if the job has it: most likely what the caller does next.
    int64_t unclaimed() const { return next_.load(std::memory_order_relaxed); }

   private:
    void stop();
    void work(int worker);
    void take_tasks(int worker);
    bool arrive();
    void leave();
    bool spin_until(bool (Pool::*ready)(uint32_t) const, uint32_t seen);
    bool published(uint32_t seen) const { return epoch_.load() != seen; }
    bool deserted(uint32_t) const { return gate_.load() == 0; }

    static constexpr uint32_t kOpen = 1u << 31;

    Task task_ = nullptr;
    void* context_ = nullptr;
    int64_t count_ = 0;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> gate_{0};  // kOpen while workers may arrive, plus workers inside
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::vector<std::thread> workers_;
};

// Memory that is kept from call to call, 64-byte aligned. A slot has one user at a time.
enum Slot { kRows, kInner, kWork, kSlots };

class Memory {
   public:
    Memory() = default;
    Memory(Memory&& other) noexcept;
    ~Memory();
    float* room(int64_t floats);

   private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

// A pool and the memory of its operations. They compute one at a time: whoever starts one holds `busy`.
class Workshop {
   public:
    Workshop() = default;
    ~Workshop();
    Workshop(const Workshop&) = delete;
    Workshop& operator=(const Workshop&) = delete;

    // Replaces the pool, or fails and changes nothing. threads < 1: one per core that this process may use.
    // cpus: where to pin; empty with `pin`: to all that this thread may use.
    void configure(int threads, bool pin, std::vector<int> cpus = {});
    // Made when first used.
    Pool& pool();
    // CPUs that this thread might use before it was pinned.
    std::vector<int> cpus() const;
    float* scratch(Slot slot, int64_t floats);
    float* worker_scratch(int worker, int64_t floats);
    // In a forked child: threads do not survive, and their records leak.
    void forget_threads();

    std::mutex busy;

   private:
    void dismiss();

    std::unique_ptr<Pool> pool_;
    int threads_ = 0;
    bool pin_ = false;
    std::vector<int> cpus_;
    std::vector<int> given_;  // of the thread that was pinned, before it was
    Memory memories_[kSlots];
    std::vector<Memory> worker_memories_;
};

// The process's, for every thread that did not ask for its own.
Workshop& shared_workshop();
// Where the calling thread computes: its own, the one whose worker it is, or the shared one.
Workshop& workshop();
// Gives the calling thread its own until it returns to the shared one, or ends.
void own_workshop(int threads, std::vector<int> cpus);
void return_to_shared();
bool has_own_workshop();

// Bytes of a core's first data cache; of a small one where the system does not say.
int64_t nearest_cache();

// Of the calling thread's workshop. Not inline: each instruction set would compile them for itself.
Pool& pool();
float* scratch(Slot slot, int64_t floats);
float* worker_scratch(int worker, int64_t floats);

}  // namespace moesaic

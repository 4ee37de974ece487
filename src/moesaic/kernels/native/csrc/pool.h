// One pool of threads per process. Threads that nobody needs sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace moesaic {

// A job is `count` tasks, claimed one at a time by whoever is free: the caller, and every worker that
// arrives before the job is done. Nobody waits for a worker that has not arrived, so a worker without
// a core costs its help and nothing else. Which thread runs a task never changes what it computes.
class Pool {
   public:
    using Task = void (*)(void* context, int64_t task, int worker);

    // cpus: where each thread is pinned, the caller (0) among them; empty: nowhere.
    Pool(int threads, const std::vector<int>& cpus);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }
    void run(int64_t count, Task task, void* context);

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
    std::atomic<int64_t> quiet_until_{0};  // nanoseconds; before it nobody spins
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::vector<std::thread> workers_;
};

// The process's pool, made when first used with one thread per core unless `configure` came before.
Pool& pool();
// Replaces the pool. threads < 1: one per core that this process may use.
void configure(int threads, bool pin);

// Memory that is kept from call to call, 64-byte aligned. A slot has one user at a time.
enum Slot { kRows, kInner, kWork, kSlots };
float* scratch(Slot slot, int64_t floats);
float* worker_scratch(int worker, int64_t floats);

}  // namespace moesaic

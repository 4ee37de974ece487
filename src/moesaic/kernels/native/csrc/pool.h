// Threads that compute, and the memory of their operations. The process has one such Workshop, and each thread that
// asks for one has its own. Idle threads sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moesaic {

class Workshop;

// A job consists of `count` tasks. Free threads claim one task at a time: the caller, and every worker that arrives
// before the job is done. Nobody waits for a worker that has not arrived, so a worker without a core only costs its
// help. Which thread runs a task never affects its result.
class Pool {
   public:
    using Task = void (*)(void* context, int64_t task, int worker);

    // cpus: CPUs that threads are pinned to, the caller (0) first; empty: not pinned. owner: whose memory workers use.
    Pool(int threads, const std::vector<int>& cpus, Workshop* owner);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }
    // Raises the first exception of a task, such as std::bad_alloc. Then some tasks may not have run.
    void run(int64_t count, Task task, void* context);
    // The next task that a thread will claim, if the job has it: most likely the caller's next task.
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
    alignas(64) std::atomic<uint32_t> gate_{0};  // kOpen while workers may arrive, plus the number of workers inside
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::exception_ptr error_;  // the first one of this job
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::vector<std::thread> workers_;
};

// Memory that is reused from call to call, 64-byte aligned. A slot has one user at a time.
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

// A pool and the memory of its operations. An operation holds `busy`, so one runs at a time.
class Workshop {
   public:
    Workshop() = default;
    ~Workshop();
    Workshop(const Workshop&) = delete;
    Workshop& operator=(const Workshop&) = delete;

    // Replaces the pool, or fails and changes nothing. threads < 1: one per core that this process may use.
    // cpus: CPUs to pin threads to. If it is empty and `pin` is true: all CPUs that this thread may use.
    void configure(int threads, bool pin, std::vector<int> cpus = {});
    // The pool is created when it is first used.
    Pool& pool();
    // CPUs that this thread could use before it was pinned.
    std::vector<int> cpus() const;
    float* scratch(Slot slot, int64_t floats);
    float* worker_scratch(int worker, int64_t floats);
    // For a forked child: threads do not survive a fork, and the memory of their objects leaks.
    void forget_threads();

    std::mutex busy;

   private:
    void dismiss();

    std::unique_ptr<Pool> pool_;
    int threads_ = 0;
    bool pin_ = false;
    std::vector<int> cpus_;
    std::vector<int> given_;  // CPUs of the thread before it was pinned
    Memory memories_[kSlots];
    std::vector<Memory> worker_memories_;
};

// The workshop of the process, for every thread without its own.
Workshop& shared_workshop();
// The workshop of the calling thread: its own, that of which it is a worker, or the shared one.
Workshop& workshop();
// Gives the calling thread its own workshop, until it returns to the shared one or ends.
void own_workshop(int threads, std::vector<int> cpus);
void return_to_shared();
bool has_own_workshop();

// Bytes of a core's L1 data cache; the size of a small one if the system does not report it.
int64_t nearest_cache();

// These use the calling thread's workshop. They are not inline: each instruction set would compile its own copy.
Pool& pool();
float* scratch(Slot slot, int64_t floats);
float* worker_scratch(int worker, int64_t floats);

}  // namespace moesaic

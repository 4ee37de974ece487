#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moesaic {
namespace {

constexpr int64_t kMoment = 10'000;        // nanoseconds that a thread spins without yielding its core
constexpr int64_t kPatience = 2'000'000;   // nanoseconds that it spins at all before it sleeps
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kHugePage = SIZE_MAX;     // AddressSanitizer only checks memory from malloc
#else
constexpr size_t kHugePage = 1 << 21;      // bytes; larger scratch memory is mapped from the system
#endif

int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
        }
    }
#endif
    return cpus;
}

void place_this_thread(const std::vector<int>& cpus) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cpus;
#endif
}

thread_local Workshop* current = nullptr;  // null means the shared one

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cpus, Workshop* owner) {
    if (!cpus.empty()) place_this_thread({cpus[0]});
    try {
        for (int worker = 1; worker < threads; worker++) {
            int cpu = cpus.empty() ? -1 : cpus[size_t(worker) % cpus.size()];
            workers_.emplace_back([this, worker, cpu, owner] {
                current = owner;
                if (cpu >= 0) place_this_thread({cpu});
                work(worker);
            });
        }
    } catch (...) {  // the system cannot start more threads
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        epoch_++;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

void Pool::run(int64_t count, Task task, void* context) {
    if (workers_.empty() || count <= 1) {
        for (int64_t i = 0; i < count; i++) {
            next_.store(i + 1, std::memory_order_relaxed);
            task(context, i, 0);
        }
        return;
    }
    task_ = task, context_ = context, count_ = count;
    next_ = 0;
    gate_ = kOpen;
    epoch_++;
    if (sleepers_ > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }  // waits for workers that are between their check and their sleep
        wake_.notify_all();
    }
    take_tasks(0);
    gate_ &= ~kOpen;
    if (!spin_until(&Pool::deserted, 0)) {
        std::unique_lock<std::mutex> lock(mutex_);
        caller_sleeps_ = true;
        done_.wait(lock, [this] { return deserted(0); });
        caller_sleeps_ = false;
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::work(int worker) {
    uint32_t seen = 0;
    for (;;) {
        if (!spin_until(&Pool::published, seen)) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_++;
            wake_.wait(lock, [&] { return published(seen); });
            sleepers_--;
        }
        seen = epoch_;  // must be read before stop_: stop() sets stop_ before it increments epoch_
        if (stop_) return;
        if (!arrive()) continue;
        take_tasks(worker);
        leave();
    }
}

void Pool::take_tasks(int worker) {
    try {
        for (;;) {
            int64_t mine = next_.fetch_add(1);
            if (mine >= count_) return;
            task_(context_, mine, worker);
        }
    } catch (...) {
        next_ = count_;
        std::lock_guard<std::mutex> lock(mutex_);
        if (!error_) error_ = std::current_exception();
    }
}

bool Pool::arrive() {
    uint32_t gate = gate_;
    while (gate & kOpen) {
        if (gate_.compare_exchange_weak(gate, gate + 1)) return true;
    }
    return false;
}

void Pool::leave() {
    if (gate_.fetch_sub(1) != 1) return;  // other workers are inside, or the caller is still working
    if (caller_sleeps_) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        done_.notify_one();
    }
}

// Returns whether `ready` became true within kPatience. After kMoment the thread yields its core between checks. If no
// other thread wants the core it continues at once; otherwise the other loses no more than a thread switch.
bool Pool::spin_until(bool (Pool::*ready)(uint32_t) const, uint32_t seen) {
    int64_t start = now();
    while (!(this->*ready)(seen)) {
        for (int i = 0; i < 16; i++) pause();
        int64_t spent = now() - start;
        if (spent > kPatience) return (this->*ready)(seen);
        if (spent > kMoment) std::this_thread::yield();
    }
    return true;
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

namespace {

// Mapped memory that is never written uses no RAM, and freeing it leaves no hole among other allocations.
float* take(size_t bytes) {
    if (bytes < kHugePage) return static_cast<float*>(std::aligned_alloc(64, bytes));
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
    madvise(found, bytes, MADV_HUGEPAGE);  // an error means that the kernel has no huge pages, and is ignored
#endif
    return static_cast<float*>(found);
}

void give_back(float* data, size_t bytes) {
    if (bytes < kHugePage) {
        std::free(data);
    } else {
        munmap(data, bytes);
    }
}

}  // namespace

Memory::~Memory() { give_back(data_, size_t(size_) * 4); }

float* Memory::room(int64_t floats) {
    if (floats > size_) {
        give_back(data_, size_t(size_) * 4);
        size_ = (floats + floats / 4 + 1023) / 1024 * 1024;
        data_ = take(size_t(size_) * 4);
        if (data_ == nullptr) {
            size_ = 0;
            throw std::bad_alloc();
        }
    }
    return data_;
}

namespace {

thread_local std::unique_ptr<Workshop> owned;  // is destroyed at the end of its thread

void after_fork() {  // in the child, which has one thread
    shared_workshop().forget_threads();
    if (owned) owned->forget_threads();
}

}  // namespace

Workshop::~Workshop() { dismiss(); }

void Workshop::dismiss() {
    pool_.reset();
    if (!given_.empty()) place_this_thread(given_);  // since new threads inherit its CPUs
    given_.clear();
}

void Workshop::forget_threads() { (void)pool_.release(); }

std::vector<int> Workshop::cpus() const { return given_.empty() ? allowed_cpus() : given_; }

Pool& Workshop::pool() {
    if (!pool_) {
        static bool registered = pthread_atfork(nullptr, nullptr, after_fork) == 0;
        (void)registered;
        std::vector<int> cpus = allowed_cpus();
        int cores = cpus.empty() ? int(std::thread::hardware_concurrency()) : int(cpus.size());
        int threads = threads_ > 0 ? threads_ : (cores > 0 ? cores : 1);
        if (worker_memories_.size() < size_t(threads)) worker_memories_.resize(size_t(threads));
        if (pin_ && given_.empty()) given_ = cpus;
        if (!pin_) cpus.clear();
        pool_ = std::make_unique<Pool>(threads, cpus_.empty() ? cpus : cpus_, this);
    }
    return *pool_;
}

void Workshop::configure(int threads, bool pin, std::vector<int> cpus) {
    int before = threads_;
    bool pinned = pin_;
    dismiss();
    threads_ = threads, pin_ = pin;
    std::swap(cpus_, cpus);
    try {
        pool();
    } catch (...) {
        dismiss();
        threads_ = before, pin_ = pinned;
        std::swap(cpus_, cpus);
        throw;
    }
}

float* Workshop::scratch(Slot slot, int64_t floats) { return memories_[slot].room(floats); }

float* Workshop::worker_scratch(int worker, int64_t floats) {
    if (worker_memories_.empty()) pool();  // small operations run without creating the pool
    return worker_memories_[size_t(worker)].room(floats);
}

Workshop& shared_workshop() {
    static Workshop* one = new Workshop;  // never destroyed: threads may compute while the process exits
    return *one;
}

Workshop& workshop() { return current != nullptr ? *current : shared_workshop(); }

void own_workshop(int threads, std::vector<int> cpus) {
    return_to_shared();
    auto made = std::make_unique<Workshop>();
    bool pin = !cpus.empty();
    made->configure(threads, pin, std::move(cpus));
    owned = std::move(made);
    current = owned.get();
}

void return_to_shared() {
    current = nullptr;
    owned.reset();
}

bool has_own_workshop() { return current != nullptr; }

int64_t nearest_cache() {
    long bytes = 0;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#endif
    return bytes > 0 ? bytes : 1 << 15;
}

Pool& pool() { return workshop().pool(); }
float* scratch(Slot slot, int64_t floats) { return workshop().scratch(slot, floats); }
float* worker_scratch(int worker, int64_t floats) { return workshop().worker_scratch(worker, floats); }

}  // namespace moesaic

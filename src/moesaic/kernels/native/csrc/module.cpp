// The Python module: plain functions on addresses and sizes. ops.py checks shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <pthread.h>

#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "gathered.h"
#include "isa.h"
#include "pool.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using Address = uintptr_t;

namespace moesaic {
namespace {

const Table* active = available().front();

template <class U>
U* at(Address address) {
    return reinterpret_cast<U*>(address);
}

// Runs `call` without the GIL, so that other Python threads continue.
template <class Call>
auto outside_python(const Call& call) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(workshop().busy);
    return call();
}

// The operations of one step in order, to be run again in one call on the workshop of the calling thread. The addresses
// that they read and write stay the same; the content may change.
class Tape {
   public:
    Tape() = default;
    Tape(const Tape&) = delete;  // its jobs refer to it
    Tape& operator=(const Tape&) = delete;

    // Returns kAllHeld, or a (token, slot) pair whose expert is missing.
    int64_t run(Address rows) {
        if ((given == 0) != (rows == 0)) {
            throw nb::value_error("rows: got them at some runs only; allowed: at every run or never");
        }
        now = rows;
        return outside_python([this] {
            for (const auto& job : jobs) {
                int64_t absent = job();
                if (absent != kAllHeld) return absent;
            }
            return kAllHeld;
        });
    }
    std::vector<std::function<int64_t()>> jobs;
    // Experts' rows that a recorded merge reads: their address when recorded, and in the current run. 0 means none.
    Address given = 0, now = 0;
};

thread_local Tape* recorded = nullptr;  // receives this thread's operations while they run

template <class Job>
void perform(void (*operation)(const Job&), const Job& job) {
    if (recorded != nullptr) {
        recorded->jobs.push_back([operation, job] {
            operation(job);
            return kAllHeld;
        });
    }
    outside_python([&] { operation(job); });
}

int64_t perform(int64_t (*operation)(const Experts&), const Experts& job) {
    if (recorded != nullptr) recorded->jobs.push_back([operation, job] { return operation(job); });
    return outside_python([&] { return operation(job); });
}

// Converts a number to Stored. Raises ValueError if it is invalid, or if these kernels do not support it.
Stored stored_as(int number) {
    int most = int(active->packed ? moesaic::kLastStored : Stored::kWide);
    if (number < 0 || number > most) {
        std::string allowed = "0 to " + std::to_string(most) + " with these kernels";
        throw nb::value_error(("stored: got " + std::to_string(number) + "; allowed: " + allowed).c_str());
    }
    return Stored(number);
}

// The types that a number stands for: see stored.expert_code in Python.
Types types_of(int number) {
    Stored inner = stored_as(number < 0 ? number : number % 256);
    Stored down = number < 256 ? inner : stored_as(number / 256 - 1);
    if (down != inner && !(is_quantized(inner) && is_quantized(down))) {
        throw nb::value_error("stored: two types; allowed: only quantised ones");
    }
    return {inner, down};
}

// The same for a type of weights outside of experts, which are not compressed.
Stored dense_stored(int number) {
    Stored stored = stored_as(number);
    if (stored == Stored::kCompressed) throw nb::value_error("stored: got compressed; allowed: only for experts");
    return stored;
}

void linear1(Address rows, int64_t n, int64_t k, Address weight, Address bias, Address out, int64_t columns,
             int stored) {
    Part part{at<void>(weight), at<float>(bias), at<float>(out), columns, dense_stored(stored)};
    perform(active->linear, Linear{at<float>(rows), n, k, {part}, 1});
}

void linear3(Address rows, int64_t n, int64_t k, Address weight0, Address weight1, Address weight2, Address bias0,
             Address bias1, Address bias2, Address out0, Address out1, Address out2, int64_t columns0,
             int64_t columns1, int64_t columns2, int stored0, int stored1, int stored2) {
    Part parts[3] = {{at<void>(weight0), at<float>(bias0), at<float>(out0), columns0, dense_stored(stored0)},
                     {at<void>(weight1), at<float>(bias1), at<float>(out1), columns1, dense_stored(stored1)},
                     {at<void>(weight2), at<float>(bias2), at<float>(out2), columns2, dense_stored(stored2)}};
    int narrow = 0;
    for (const Part& part : parts) narrow += part.stored == Stored::kNarrow;
    if (narrow % 3 != 0) throw nb::value_error("stored: bf16 beside other types; allowed: only bf16, or none");
    perform(active->linear, Linear{at<float>(rows), n, k, {parts[0], parts[1], parts[2]}, 3});
}

void head_linear(Address rows, int64_t row_stride, int64_t head_stride, Address weight, int64_t weight_head,
                 int64_t weight_k, int64_t weight_column, Address out, int64_t n, int64_t heads, int64_t k,
                 int64_t columns, bool wide) {
    perform(active->head_linear,
            HeadLinear{at<float>(rows), row_stride, head_stride, at<void>(weight), weight_head, weight_k,
                       weight_column, at<float>(out), n, heads, k, columns, wide});
}

int64_t experts(Address hidden, Address ids, Address gate, Address up, Address down, Address gate_bias,
                Address up_bias, Address down_bias, Address out, int64_t n, int64_t top_k, int64_t h, int64_t w,
                int64_t experts, int stored, float alpha, float added, float limit) {
    Types types = types_of(stored);
    Biases biases{at<uint64_t>(gate_bias), at<uint64_t>(up_bias), at<uint64_t>(down_bias)};
    return perform(active->experts, Experts{at<float>(hidden), at<int64_t>(ids), at<uint64_t>(gate), at<uint64_t>(up),
                                            at<uint64_t>(down), at<float>(out), n, top_k, h, w, experts,
                                            types.inner, types.down, biases, {alpha, added, limit}});
}

// It is not recorded, because it reads other memory at each call.
void gathered_experts(const Matrix<const uint64_t>& table, int64_t h, int64_t w, int stored, nb::list parts,
                      float alpha, float added, float limit) {
    Gathered batch;
    Types as = types_of(stored);
    if (table.shape(0) != 3 && table.shape(0) != 6) {
        std::string got = std::to_string(table.shape(0)) + " rows";
        throw nb::value_error(
            ("table: got " + got + "; allowed: 3, the addresses of gate, up and down, or 6 with biases").c_str());
    }
    try {
        for (nb::handle part : parts) batch.add(part, h);
    } catch (const nb::cast_error&) {
        throw nb::value_error(
            "parts: got another type of array; allowed: dense rows and answers of float32, and places, experts and "
            "lines of int64");
    }
    if (batch.ids.empty()) return;
    int64_t absent = outside_python([&] { return active->experts(batch.job(table, h, w, as, {alpha, added, limit})); });
    if (absent != kAllHeld) {
        std::string which = std::to_string(batch.ids[size_t(absent)]);
        throw nb::key_error(("expert " + which + " is not held here").c_str());
    }
}

void put(const Matrix<float>& out, const Vector<const int64_t>& lines, const Matrix<const float>& rows,
         const Vector<const int64_t>& places) {
    Put job(out, lines, rows, places);
    outside_python([&] { job.run(); });
}

void gated_mlp(Address rows, Address gate, Address up, Address down, Address out, int64_t n, int64_t h, int64_t w,
               int stored) {
    Types types = types_of(stored);
    perform(active->gated_mlp, GatedMlp{at<float>(rows), at<void>(gate), at<void>(up), at<void>(down), at<float>(out),
                                        n, h, w, types.inner, types.down});
}

void attention(Address query, Address keys, Address values, Address sinks, Address query_starts, Address context_lens,
               Address block_tables, Address out, int64_t n, int64_t sequences, int64_t table_width,
               int64_t block_size, int64_t heads, int64_t kv_heads, int64_t key_width, int64_t value_width,
               int64_t window, float scale, int64_t item) {
    perform(active->attention,
            Attention{at<float>(query), at<void>(keys), at<void>(values), at<int64_t>(query_starts),
                      at<int64_t>(context_lens), at<int64_t>(block_tables), at<float>(out), n, sequences,
                      table_width, block_size, heads, kv_heads, key_width, value_width, window, scale, item,
                      at<float>(sinks)});
}

void store(Address rows, Address slots, Address cache, int64_t n, int64_t heads, int64_t width, int64_t item) {
    perform(active->store, Store{at<float>(rows), at<int64_t>(slots), at<void>(cache), n, heads, width, item});
}

void norm(Address rows, Address added, Address weight, Address sum, Address out, int64_t n, int64_t h,
          int64_t row_stride, float epsilon) {
    perform(active->norm, Norm{at<float>(rows), at<float>(added), at<float>(weight), at<float>(sum), at<float>(out),
                               n, h, row_stride, epsilon});
}

void rope(Address rows, int64_t row_stride, int64_t head_stride, Address weight, float epsilon, Address cosine,
          Address sine, Address positions, Address out, int64_t n, int64_t heads, int64_t width, int64_t rotated,
          bool interleaved) {
    perform(active->rope,
            Rope{at<float>(rows), row_stride, head_stride, at<float>(weight), epsilon, at<float>(cosine),
                 at<float>(sine), at<int64_t>(positions), at<float>(out), n, heads, width, rotated, interleaved});
}

void gate(Address rows, Address weight, Address bias, Address added_to_products, Address ids, Address weights, int64_t n, int64_t h,
          int64_t experts, int64_t top_k, int64_t groups, int64_t groups_kept, float scale, float added, bool normalise,
          bool sigmoid, bool two_best) {
    perform(active->gate, Gate{at<float>(rows), at<float>(weight), at<float>(bias),
                               at<float>(added_to_products), at<int64_t>(ids), at<float>(weights), n, h, experts, top_k, groups, groups_kept, scale, added, normalise,
                               sigmoid, two_best});
}

void merge(Address residual, Address dense, Address rows, Address weights, Address out, int64_t n, int64_t top_k,
           int64_t h) {
    Merge job{at<float>(residual), at<float>(dense), at<float>(rows), at<float>(weights), at<float>(out), n, top_k, h};
    if (recorded == nullptr || rows == 0 || rows != recorded->given) return perform(active->merge, job);
    recorded->jobs.push_back([merge = active->merge, job, tape = recorded]() mutable {
        job.rows = at<float>(tape->now);
        merge(job);
        return kAllHeld;
    });
    outside_python([&] { active->merge(job); });
}

void embed(Address table, Address ids, Address out, int64_t n, int64_t width, int stored) {
    perform(active->embed,
            Embed{at<void>(table), at<int64_t>(ids), at<float>(out), n, width, dense_stored(stored)});
}

void join(Address left, Address right, Address out, int64_t n, int64_t heads, int64_t left_width,
          int64_t right_width, int64_t left_row, int64_t left_head, int64_t right_row, int64_t right_head) {
    perform(active->join, Join{at<float>(left), at<float>(right), at<float>(out), n, heads, left_width, right_width,
                               left_row, left_head, right_row, right_head});
}

void sigmoid_gate(Address rows, Address weight, Address values, Address out, int64_t n, int64_t h, int64_t width) {
    perform(active->sigmoid_gate,
            SigmoidGate{at<float>(rows), at<float>(weight), at<float>(values), at<float>(out), n, h, width});
}

void clip(Address rows, Address out, int64_t n, int64_t width, float limit) {
    perform(active->clip, Clip{at<float>(rows), at<float>(out), n, width, limit});
}

void mask_tokens(Address logits, Address lines, Address masks, int64_t n, int64_t width) {
    perform(active->mask_tokens, MaskTokens{at<float>(logits), at<int64_t>(lines), at<uint32_t>(masks), n, width});
}

void convolve(Address rows, int64_t row_stride, Address weight, int64_t weight_channel, int64_t weight_tap,
              Address page_tails, Address tails, Address out, int64_t n, int64_t channels, int64_t taps, int64_t ring,
              bool activate, Address query_starts, Address context_lens, Address states, int64_t sequences) {
    perform(active->convolve,
            Convolve{at<float>(rows), row_stride, at<float>(weight), weight_channel, weight_tap, at<float>(page_tails),
                     at<float>(tails), at<float>(out), n, channels, taps, ring, activate,
                     {at<int64_t>(query_starts), at<int64_t>(context_lens), at<int64_t>(states), sequences}});
}

void delta(Address mixed, Address gates, int64_t mixed_stride, int64_t gates_stride, Address decay, Address bias,
           Address pages, Address keys, Address updates, Address decays, Address out, int64_t n, int64_t key_heads,
           int64_t value_heads, int64_t key_width, int64_t value_width, Address query_starts, Address context_lens,
           Address states, int64_t sequences) {
    perform(active->delta,
            Delta{at<float>(mixed), at<float>(gates), mixed_stride, gates_stride, at<float>(decay), at<float>(bias),
                  at<float>(pages), at<float>(keys), at<float>(updates), at<float>(decays), at<float>(out), n,
                  key_heads, value_heads, key_width, value_width,
                  {at<int64_t>(query_starts), at<int64_t>(context_lens), at<int64_t>(states), sequences}});
}

void gated_norm(Address rows, Address weight, Address gate, Address out, int64_t n, int64_t heads, int64_t width,
                int64_t gate_stride, float epsilon) {
    perform(active->gated_norm, GatedNorm{at<float>(rows), at<float>(weight), at<float>(gate), at<float>(out), n,
                                          heads, width, gate_stride, epsilon});
}

void sigmoid_times(Address rows, Address gate, Address out, int64_t n, int64_t heads, int64_t width, int64_t gate_row,
                   int64_t gate_head, bool activate) {
    perform(active->sigmoid_times, SigmoidTimes{at<float>(rows), at<float>(gate), at<float>(out), n, heads, width,
                                                gate_row, gate_head, activate});
}

std::vector<std::string> names() {
    std::vector<std::string> all;
    for (const Table* table : available()) all.push_back(table->name);
    return all;
}

void use(const std::string& name) {
    const Table* table = find(name);
    if (table == nullptr) throw nb::value_error(("no kernels for " + name + " on this CPU").c_str());
    if (!permitted(table)) throw nb::value_error(("Linux refuses this process the registers of " + name).c_str());
    std::lock_guard<std::mutex> lock(shared_workshop().busy);
    active = table;
}

void set_threads(int threads, bool pin) {
    if (has_own_workshop()) throw std::runtime_error("this thread has a pool of its own: call shared_pool() first");
    try {
        outside_python([&] { shared_workshop().configure(threads, pin); });
    } catch (const std::system_error& error) {  // the system cannot start more threads
        PyErr_SetString(PyExc_OSError, error.what());
        throw nb::python_error();
    }
}

int threads() {
    return outside_python([] { return pool().threads(); });
}

void own_pool(int threads, std::vector<int> cpus) {
    nb::gil_scoped_release release;
    own_workshop(threads, std::move(cpus));
}

void shared_pool() {
    nb::gil_scoped_release release;
    return_to_shared();
}

}  // namespace
}  // namespace moesaic

NB_MODULE(_native, m) {
    using namespace moesaic;
    // In a child that is forked during another thread's operation, the mutex would otherwise stay locked forever.
    pthread_atfork([] { shared_workshop().busy.lock(); }, [] { shared_workshop().busy.unlock(); },
                   [] { shared_workshop().busy.unlock(); });
    nb::set_leak_warnings(false);  // a recording may outlive the interpreter's leak check
    m.doc() = "CPU kernels over addresses and sizes; see ops.py for shapes";
    m.attr("ALL_HELD") = kAllHeld;
    m.def("instruction_sets", names, "sets that this CPU supports, fastest first; those after portable only by name");
    m.def("use", use, "name"_a);
    m.def("active", [] { return std::string(active->name); });
    m.def("set_threads", set_threads, "threads"_a, "pin"_a);
    m.def("threads", threads);
    m.def("own_pool", own_pool, "threads"_a, "cpus"_a);
    m.def("shared_pool", shared_pool);
    m.def("peak", [](int64_t rounds, bool floats) {
        return outside_python([=] { return (floats ? active->float_peak : active->peak)(rounds); });
    }, "rounds"_a, "floats"_a);
    m.def("cpus", [] { return outside_python([] { return workshop().cpus(); }); });
    m.def("linear1", linear1);
    m.def("linear3", linear3);
    m.def("head_linear", head_linear);
    m.def("experts", experts);
    constexpr Activation silu{};
    m.def("gathered_experts", gathered_experts, "table"_a, "h"_a, "w"_a, "stored"_a, "parts"_a,
          "alpha"_a = silu.alpha, "added"_a = silu.added, "limit"_a = silu.limit);
    m.def("put", put, nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert());
    m.def("gated_mlp", gated_mlp);
    m.def("attention", attention);
    m.def("store", store);
    m.def("norm", norm);
    m.def("rope", rope);
    m.def("gate", gate);
    m.def("merge", merge);
    m.def("embed", embed);
    m.def("join", join);
    m.def("sigmoid_gate", sigmoid_gate);
    m.def("clip", clip);
    m.def("mask_tokens", mask_tokens);
    m.def("convolve", convolve);
    m.def("delta", delta);
    m.def("gated_norm", gated_norm);
    m.def("sigmoid_times", sigmoid_times);
    nb::class_<Tape>(m, "Tape", "the operations that ran between record() and stop()")
        .def(nb::init<>())
        .def("run", &Tape::run)
        .def("__len__", [](const Tape& tape) { return tape.jobs.size(); });
    m.def("record", [](Tape& tape, Address given) {
        tape.given = given;
        recorded = &tape;
    });
    m.def("stop", [] { recorded = nullptr; });
}

// The operations of one instruction set. Arrays are row-major, and dense unless a stride is given. `wide` means that
// stored numbers are float32, otherwise they are bf16. Rows of a KV cache are stored as in cache.h.
#pragma once

#include <cstdint>
#include <limits>

namespace moesaic {

// bf16, float32, bf16 in 12 bits (compressed.h), and the types of quantized.h and blocks.h. core/weight_types.py has the
// same order.
enum class Stored {
    kNarrow, kWide, kCompressed,
    kFp8, kInt8, kInt8Offset, kInt4, kInt4Offset, kMxfp4, kInt8Of16, kInt8Of16Offset,
    kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs,
    kIq1S, kIq1M, kIq2Xxs, kIq2Xs, kIq2S, kIq3Xxs, kIq3S, kTq1_0, kTq2_0, kMxfp4Blocks,
    kInt4By128, kInt4By64, kInt4By32, kInt8By128, kInt8OffsetBy128, kNvfp4By128, kNvfp4By64,
};
constexpr Stored kLastStored = Stored::kNvfp4By64;

inline bool is_quantized(Stored stored) { return stored >= Stored::kFp8; }
// Whether a number is an integer times a scale, plus an offset perhaps: core/weight_types.py says so too.
inline bool is_integer(Stored stored) { return is_quantized(stored) && stored != Stored::kFp8 && stored != Stored::kMxfp4; }

// One matrix of a projection: out[n, columns] = rows[n, k] times weight[columns, k] transposed, plus bias.
struct Part {
    const void* weight;
    const float* bias;  // [columns] or null
    float* out;
    int64_t columns;
    Stored stored;  // of the weight: any type but kCompressed
};

struct Linear {
    const float* rows;  // [n, k]
    int64_t n, k;
    Part parts[3];  // all are bf16, or none is
    int64_t num_parts;
};

// A matrix per head: out[n, heads, columns] = rows[n, heads, k] times weight[heads, k, columns].
struct HeadLinear {
    const float* rows;
    int64_t row_stride;  // numbers from one row to the next
    int64_t head_stride;
    const void* weight;
    int64_t weight_head, weight_k, weight_column;  // strides in numbers; one of the last two is 1
    float* out;
    int64_t n, heads, k, columns;
    bool wide;
};

struct Scattered {  // rows and results at arbitrary addresses: those of a server's clients
    const uint64_t* rows;   // [n] addresses of [h]; null: the rows are not scattered
    const int64_t* row_of;  // [pairs]
    const uint64_t* out;    // [pairs] addresses of [h]
    int64_t pairs;
};

// What an expert computes from its gate and up products: see core/experts.py. The defaults give silu(gate) * up.
struct Activation {
    float alpha = 1, added = 0;
    float limit = std::numeric_limits<float>::infinity();

    bool is_silu() const { return alpha == 1 && added == 0 && limit == std::numeric_limits<float>::infinity(); }
};

struct Biases {  // [experts] addresses of float32, or null: the experts have none
    const uint64_t* gate;  // [w]
    const uint64_t* up;    // [w]
    const uint64_t* down;  // [h]
};

struct Experts {
    const float* hidden;  // [n, h]
    const int64_t* ids;   // [n, top_k]
    const uint64_t* gate;  // [experts] addresses of [w, h], 0 for an expert that is not in this process
    const uint64_t* up;
    const uint64_t* down;  // [h, w]
    float* out;            // [n, top_k, h]
    int64_t n, top_k, h, w, experts;
    Stored stored;       // of gate and up
    Stored down_stored;  // another one only if both are quantised
    Biases biases = {};
    Activation activation = {};
    Scattered apart = {};  // replaces hidden, top_k and out

    int64_t pairs() const { return apart.rows ? apart.pairs : n * top_k; }
    int64_t row_of(int64_t pair) const { return apart.rows ? apart.row_of[pair] : pair / top_k; }
    float* out_of(int64_t pair) const {
        return apart.rows ? reinterpret_cast<float*>(apart.out[pair]) : out + pair * h;
    }
};

struct GatedMlp {
    const float* rows;  // [n, h]
    const void* gate;   // [w, h]
    const void* up;
    const void* down;  // [h, w]
    float* out;        // [n, h]
    int64_t n, h, w;
    Stored stored, down_stored;  // as in Experts
};

// Attention of each row over its own sequence, up to its own position.
struct Attention {
    const float* query;  // [n, heads, key_width]
    const void* keys;    // [blocks, block_size, kv_heads, key_width]
    const void* values;  // the same with value_width, or null: the first value_width numbers of the key
    const int64_t* query_starts;   // [sequences + 1] rows of each sequence
    const int64_t* context_lens;   // [sequences] tokens in the cache, including this step's
    const int64_t* block_tables;   // [sequences, table_width]
    float* out;                    // [n, heads, value_width]
    int64_t n, sequences, table_width, block_size, heads, kv_heads, key_width, value_width;
    int64_t window;  // tokens that a row attends to, including itself; 0: all
    float scale;
    int64_t item;  // bytes of a cached number: 4 float32, 2 bf16, 1 int8 (see cache.h)
    const float* sinks;  // [heads] a score of each head beside those of the tokens, without a value; or null
};

struct Store {
    const float* rows;     // [n, heads, width]
    const int64_t* slots;  // [n]
    void* cache;           // [slots, heads, width]
    int64_t n, heads, width;
    int64_t item;  // as in Attention
};

// out = rows (+ added) divided by their root mean square, times weight. rows + added is written to `sum`.
struct Norm {
    const float* rows;   // [n] rows of h numbers, row_stride apart
    const float* added;  // [n, h] or null
    const float* weight;
    float* sum;  // [n, h], used with `added`
    float* out;  // [n, h]
    int64_t n, h, row_stride;
    float epsilon;
};

// Rotates the pairs of each head's first `rotated` numbers by the angles of its row's position, after an optional norm
// of the whole head.
struct Rope {
    const float* rows;  // [n, heads, width] with strides
    int64_t row_stride, head_stride;
    const float* weight;  // [width] of the norm, or null
    float epsilon;
    const float* cosine;  // [positions, rotated / 2]
    const float* sine;
    const int64_t* positions;  // [n]
    float* out;                // [n, heads, width]
    int64_t n, heads, width, rotated;
    bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotated / 2)
};

// Chooses the top_k experts with the highest score (plus bias), as gating.py describes.
struct Gate {
    const float* rows;    // [n, h]
    const float* weight;  // [experts, h]
    const float* bias;    // [experts] or null; it only chooses
    const float* added_to_products;  // [experts] or null: a bias of the products
    int64_t* ids;         // [n, top_k]
    float* weights;       // [n, top_k]
    int64_t n, h, experts, top_k, groups, groups_kept;
    float scale;
    float added;  // to the sum that divides the weights
    bool normalise;
    bool sigmoid;   // scores are sigmoids instead of a softmax
    bool two_best;  // a group's score is the sum of its two best scores instead of its best one
};

// out = residual (+ dense) + sum over k of weights[k] * rows[k], in that order.
struct Merge {
    const float* residual;  // [n, h]
    const float* dense;     // [n, h] or null
    const float* rows;      // [n, top_k, h]; top_k may be 0
    const float* weights;   // [n, top_k]
    float* out;             // [n, h]
    int64_t n, top_k, h;
};

// out[n, width] = table[ids], converted to float.
struct Embed {
    const void* table;  // [vocabulary, width]
    const int64_t* ids;  // [n]
    float* out;
    int64_t n, width;
    Stored stored;  // of the table: any type but kCompressed
};

// out[n, heads, left_width + right_width]: `left` and `right` concatenated.
struct Join {
    const float* left;
    const float* right;
    float* out;
    int64_t n, heads, left_width, right_width;
    int64_t left_row, left_head, right_row, right_head;  // strides in numbers
};

// out = values, each row multiplied by the sigmoid of its own row of `rows` times `weight`.
struct SigmoidGate {
    const float* rows;    // [n, h]
    const float* weight;  // [h]
    const float* values;  // [n, width]
    float* out;           // [n, width]
    int64_t n, h, width;
};

// out = rows, with every number limited to -limit .. limit. NaN stays NaN.
struct Clip {
    const float* rows;  // [n, width]
    float* out;
    int64_t n, width;
    float limit;
};

constexpr int64_t kPeriod = 64;  // a state is stored at each position that this divides: CHUNK of kernels/states.py

// The rows of each sequence in a step, and where its states are, as in kernels/states.py.
struct Sequences {
    const int64_t* query_starts;  // [count + 1] rows of each sequence
    const int64_t* context_lens;  // [count] tokens of the sequence, including this step's
    const int64_t* states;        // [count, 4] page to read, position at which it stands, page to write, seat
    int64_t count;
};

// Mixes each channel with those of the taps - 1 rows before it, then applies silu.
struct Convolve {
    const float* rows;  // [n] rows of `channels` numbers, row_stride apart
    int64_t row_stride;
    const float* weight;  // [channels, taps], one of the strides is 1; the last tap is for the row itself
    int64_t weight_channel, weight_tap;
    float* page_tails;  // [pages, taps - 1, channels]
    float* tails;       // [seats, ring, channels] the row of position p is in place p % ring
    float* out;         // [n, channels]
    int64_t n, channels, taps, ring;  // ring: at least taps - 1
    bool activate;                    // whether silu is applied to the sums
    Sequences sequences;
};

// The gated delta rule. Changes the states of its sequences.
struct Delta {
    const float* mixed;  // [n] rows of query, key and value of all heads, mixed_stride apart
    const float* gates;  // [n] rows of beta, then alpha of each value head before their activations, gates_stride apart
    int64_t mixed_stride, gates_stride;
    const float* decay;  // [value_heads] factors of alpha's softplus
    const float* bias;   // [value_heads] added to alpha's gate
    float* pages;        // [pages, value_heads, key_width, value_width]
    float* keys;         // [seats, key_heads, kPeriod, key_width]
    float* updates;      // [seats, value_heads, kPeriod, value_width]
    float* decays;       // [seats, value_heads, kPeriod]
    float* out;          // [n, value_heads, value_width]
    int64_t n, key_heads, value_heads, key_width, value_width;
    Sequences sequences;
};

// out = rows, each head divided by its root mean square, times weight, times silu(gate).
struct GatedNorm {
    const float* rows;    // [n, heads, width]
    const float* weight;  // [width]
    const float* gate;    // [n] rows of heads * width numbers, gate_stride apart
    float* out;           // [n, heads, width]
    int64_t n, heads, width, gate_stride;
    float epsilon;
};

// out = rows times sigmoid(gate), or times the gate itself.
struct SigmoidTimes {
    const float* rows;  // [n, heads, width]
    const float* gate;  // [n, heads, width] with strides
    float* out;         // [n, heads, width]
    int64_t n, heads, width, gate_row, gate_head;
    bool activate;  // whether sigmoid is applied to the gate
};

// logits[lines[i]][t] = -infinity for each token t whose bit in masks[i] is clear. Bit t is bit t % 32 of word t / 32.
struct MaskTokens {
    float* logits;  // [*, width]
    const int64_t* lines;  // [n]
    const uint32_t* masks;  // [n, (width + 31) / 32]
    int64_t n, width;
};

constexpr int64_t kAllHeld = -1;

// Operations that multiply by what is stored: all that depends on whether rows are rounded.
struct Products {
    const char* name;
    bool packed;  // whether they support compressed and quantised weights
    void (*linear)(const Linear&);
    void (*head_linear)(const HeadLinear&);
    int64_t (*experts)(const Experts&);  // kAllHeld, or the (token, slot) pair whose expert is missing
    void (*gated_mlp)(const GatedMlp&);
    void (*attention)(const Attention&);  // of sets that round: over a bf16 cache, or null
    // `rounds` rounds of products in registers on each thread -> the multiply-adds: of numbers as `linear` takes them
    int64_t (*peak)(int64_t rounds);
};

// The same with rows that are rounded to int8, for weights that `is_integer` names.
struct IntegerProducts {
    void (*linear)(const Linear&);
    int64_t (*experts)(const Experts&);
    void (*gated_mlp)(const GatedMlp&);
    int64_t (*peak)(int64_t rounds);
};

struct Table : Products {
    int64_t (*float_peak)(int64_t rounds);  // as `peak`, of float32
    void (*store)(const Store&);
    void (*norm)(const Norm&);
    void (*rope)(const Rope&);
    void (*gate)(const Gate&);
    void (*merge)(const Merge&);
    void (*embed)(const Embed&);
    void (*join)(const Join&);
    void (*sigmoid_gate)(const SigmoidGate&);
    void (*clip)(const Clip&);
    void (*mask_tokens)(const MaskTokens&);
    void (*convolve)(const Convolve&);
    void (*delta)(const Delta&);
    void (*gated_norm)(const GatedNorm&);
    void (*sigmoid_times)(const SigmoidTimes&);
};

}  // namespace moesaic

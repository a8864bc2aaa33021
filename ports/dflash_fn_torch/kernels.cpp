// The kernels of `load_pair(..., compile=True)`: products and attention layers on a CPU, compiled on the machine that
// runs them. `dflash_fn_torch.native` builds and calls this file; it needs neither torch's headers nor Python's.
//
// The contract (docs/explanation/contract.md) decides the order of every sum. A sum goes over its terms from the first
// to the last, with one accumulator, whatever the number of tokens is; what a lane of a vector holds is another output,
// never a part of a sum, but in norms, where every token is cut alike. Keys that a query does not see add an exact zero.
// So a token has the same bits in every slot, at every width, beside any rows, and however long the cache is.
//
// What is fused into one rounding is part of that, and so it is written out (`fma`). A compiler that may fuse by itself
// does so in one copy of a loop and not in another: gcc tuned for AMD's Zen leaves sums alone that a loop carries.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, TILE = 8;
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4, TILE = 4;
#else
constexpr int LANES = 8, VECTORS = 2, TILE = 4;
#endif
constexpr int PANEL = LANES * VECTORS;

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

inline vf load(const float *p) { return *reinterpret_cast<const vf *>(p); }
inline vf load(const uint16_t *p) { return (vf)(__builtin_convertvector(*reinterpret_cast<const vh *>(p), vu) << 16); }
#ifdef __FLT16_MAX__
typedef _Float16 half;
typedef half vq __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
inline vf load(const half *p) { return __builtin_convertvector(*reinterpret_cast<const vq *>(p), vf); }
inline float widened(half x) { return (float)x; }
inline void narrow(float x, half *to) { *to = (half)x; }
#endif
inline void store(float *p, vf v) { *reinterpret_cast<vf *>(p) = v; }
inline vf all(float x) { return x - vf{}; }

// a * b + c, rounded once where the processor has such an instruction.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline float widened(float x) { return x; }
inline float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline void narrow(float x, float *to) { *to = x; }
inline void narrow(float x, uint16_t *to) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// exp in all lanes: 2^n times a polynomial of what is left; exactly 0 below -87, where float32 has nothing to say.
inline vf exponential(vf x) {
    const vf magic = all(12582912.0f);
    vf clamped = x > 88.0f ? all(88.0f) : x;
    clamped = clamped < -87.0f ? all(-87.0f) : clamped;
    vf shifted = fma(clamped, all(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), clamped));
    vf y = fma(r, all(1.9875691500e-4f), all(1.3981999507e-3f));
    y = fma(y, r, all(8.3334519073e-3f));
    y = fma(y, r, all(4.1665795894e-2f));
    y = fma(y, r, all(1.6666665459e-1f));
    y = fma(y, r, all(5.0000001201e-1f));
    y = fma(y, r * r, r) + 1.0f;
    vi power = __builtin_convertvector(n, vi) + 127;
    y = y * (vf)(power << 23);
    y = x < -87.0f ? vf{} : y;
    return x == x ? y : x;
}

// acc[r][v] = sum over k of x[r * row + k * step] * w[k * stride + lanes of v], k in order.
template <int R, int V, class W, class X>
inline void tile(const W *w, long stride, const X *x, long row, long step, long count, vf acc[R][V]) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = vf{};
    for (long k = 0; k < count; k++) {
        vf a[V];
        for (int v = 0; v < V; v++) a[v] = load(w + k * stride + v * LANES);
        for (int r = 0; r < R; r++) {
            vf b = all(widened(x[r * row + k * step]));
            for (int v = 0; v < V; v++) acc[r][v] = fma(a[v], b, acc[r][v]);
        }
    }
}

template <int R, class W>
inline void panel_rows(const W *w, const float *x, long k, long width, float *y, long n, bool add) {
    vf acc[R][VECTORS];
    tile<R, VECTORS>(w, PANEL, x, k, 1, k, acc);
    for (int r = 0; r < R; r++) {
        float *to = y + r * n;
        if (width == PANEL)
            for (int v = 0; v < VECTORS; v++)
                store(to + v * LANES, add ? load(to + v * LANES) + acc[r][v] : acc[r][v]);
        else
            for (long i = 0; i < width; i++) to[i] = (add ? to[i] : 0.0f) + acc[r][i / LANES][i % LANES];
    }
}

// y[t][n] (+)= sum over k of x[t][k] w[n][k], for the outputs of one panel: w is [n / PANEL][k][PANEL], zeros at its end.
template <class W>
void panel(const W *w, long p, const float *x, long tokens, long k, float *y, long n, bool add) {
    const W *from = w + p * k * PANEL;
    long width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL, t = 0;
    y += p * PANEL;
    for (; t + TILE <= tokens; t += TILE) panel_rows<TILE>(from, x + t * k, k, width, y + t * n, n, add);
    for (; TILE > 4 && t + 4 <= tokens; t += 4) panel_rows<4>(from, x + t * k, k, width, y + t * n, n, add);
    for (; t + 2 <= tokens; t += 2) panel_rows<2>(from, x + t * k, k, width, y + t * n, n, add);
    for (; t < tokens; t++) panel_rows<1>(from, x + t * k, k, width, y + t * n, n, add);
}

inline float total(vf v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

// y = x / sqrt(mean(x^2) + eps) * weight
void rms_norm(const float *x, const float *weight, float eps, long size, float *y) {
    vf squares = vf{};
    long i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float sum = total(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    float scale = 1.0f / std::sqrt(sum / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < size; i++) y[i] = x[i] * scale * weight[i];
}

// y = x cos + (x turned by half) sin, where sin is negated in its first half
void rotate(float *x, const float *cos, const float *sin, long turned) {
    for (long i = 0, half = turned / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

}  // namespace

extern "C" {

struct Layer {
    const void *qkv, *out, *gate_up, *down;  // panels
    const float *input_norm, *qk_norm, *post_norm;
    int64_t hidden, inner, heads, kv_heads, dim;
    float eps;
    int32_t kind;  // of numbers in panels and caches: 0 float32, 1 bfloat16, 2 float16
};

struct Pass {
    int64_t rows, slots, capacity, turned;
    const int64_t *starts, *positions;  // slot and position of a row's first token
    const float *cos, *sin;             // tables, [positions, turned]
    float *work;                        // as many floats as `dflash_work` says
    int32_t threads;
};

struct Reach {
    int32_t causal;
    int64_t window;  // 0 for none
};

struct Stage {  // a layer of a pass
    const Layer *layer;
    const Pass *pass;
    const Reach *reach;
    void *keys, *values;
    void *tap;  // where its output goes too, `stride` numbers a token; or nowhere
    int64_t stride;
};

}  // extern "C"

namespace {

// R outputs of a head, from d on, for the queries in the lanes.
template <int R, class W>
inline void mix(const float *weights, const W *values, long dim, long count, vf share, float **y, long lanes, long d) {
    vf acc[R][1];
    tile<R, 1>(weights, LANES, values, 1, dim, count, acc);
    for (int r = 0; r < R; r++) {
        vf out = acc[r][0] * share;
        for (long l = 0; l < lanes; l++) y[l][d + r] = out[l];
    }
}

// One vector of queries of one K/V head: lane l is query `first + l`, of slot (first + l) / group.
template <class W>
void attend(const Layer &layer, const Pass &pass, const Reach &reach, long row, long head, long first, const float *qkv,
            const W *keys, const W *values, float *scores, float *y) {
    const long dim = layer.dim, group = layer.heads / layer.kv_heads, start = pass.starts[row];
    const long queries = group * pass.slots, outputs = (layer.heads + 2 * layer.kv_heads) * dim;
    const long lanes = queries - first < LANES ? queries - first : LANES;
    const float scale = 1.0f / std::sqrt((float)dim);
    float *turned = scores;  // [dim][LANES], the queries
    scores += dim * LANES;
    vi place{};
    for (long l = 0; l < LANES; l++) {
        long query = first + (l < lanes ? l : lanes - 1), slot = query / group;
        const float *q = qkv + (row * pass.slots + slot) * outputs + (head * group + query % group) * dim;
        for (long d = 0; d < dim; d++) turned[d * LANES + l] = q[d] * scale;
        place[l] = start + slot;
    }
    long seen = reach.causal ? start + (first + lanes - 1) / group + 1 : start + pass.slots;
    long begin = reach.window ? start + first / group - reach.window + 1 : 0;
    if (begin < 0) begin = 0;
    const W *k = keys + (row * layer.kv_heads + head) * pass.capacity * dim;
    const W *v = values + (row * layer.kv_heads + head) * pass.capacity * dim;
    vf most = all(-INFINITY);
    for (long j = begin; j < seen;) {
        vf acc[TILE][1];
        int count = seen - j >= TILE ? TILE : 1;
        if (count == TILE)
            tile<TILE, 1>(turned, LANES, k + j * dim, dim, 1, dim, acc);
        else
            tile<1, 1>(turned, LANES, k + j * dim, dim, 1, dim, acc);
        for (int r = 0; r < count; r++, j++) {
            vi away = place - (int32_t)j;
            vf score = acc[r][0];
            if (reach.causal) score = away >= 0 ? score : all(-INFINITY);
            if (reach.window) score = (away < (int32_t)reach.window) & (-away < (int32_t)reach.window) ? score : all(-INFINITY);
            most = most > score ? most : score;
            store(scores + (j - begin) * LANES, score);
        }
    }
    vf sum{};
    for (long j = 0; j < seen - begin; j++) {
        vf weight = exponential(load(scores + j * LANES) - most);
        sum += weight;
        store(scores + j * LANES, weight);
    }
    v += begin * dim;
    const vf share = 1.0f / sum;
    float *mixed[LANES];
    for (long l = 0; l < lanes; l++) {
        long query = first + l, slot = query / group;
        mixed[l] = y + ((row * pass.slots + slot) * layer.heads + head * group + query % group) * dim;
    }
    long d = 0;
    for (; d + 2 * TILE <= dim; d += 2 * TILE) mix<2 * TILE>(scores, v + d, dim, seen - begin, share, mixed, lanes, d);
    for (; d < dim; d += 4) mix<4>(scores, v + d, dim, seen - begin, share, mixed, lanes, d);  // dim: a multiple of 4
}

// Normalise and turn a token's queries and keys, and write its keys and values into the cache.
template <class W>
void place(const Layer &layer, const Pass &pass, long token, float *heads, W *keys, W *values) {
    const long dim = layer.dim, row = token / pass.slots, slot = pass.starts[row] + token % pass.slots;
    const long angles = (pass.positions[row] + token % pass.slots) * pass.turned;
    for (long h = 0; h < layer.heads + layer.kv_heads; h++) {
        float *x = heads + h * dim;
        if (layer.qk_norm) rms_norm(x, layer.qk_norm + h * dim, layer.eps, dim, x);
        rotate(x, pass.cos + angles, pass.sin + angles, pass.turned);
    }
    for (long h = 0; h < layer.kv_heads; h++) {
        long to = ((row * layer.kv_heads + h) * pass.capacity + slot) * dim;
        const float *k = heads + (layer.heads + h) * dim, *v = k + layer.kv_heads * dim;
        for (long d = 0; d < dim; d++) narrow(k[d], keys + to + d), narrow(v[d], values + to + d);
    }
}

long panels(long n) { return (n + PANEL - 1) / PANEL; }

long longest(const Pass &pass) {
    long most = 0;
    for (long row = 0; row < pass.rows; row++) most = pass.starts[row] > most ? pass.starts[row] : most;
    return most + pass.slots;
}

// One thread's part of a layer; all threads of a team call it together.
template <class W>
void layer_pass(const Stage &stage, float *x) {
    const Layer &layer = *stage.layer;
    const Pass &pass = *stage.pass;
    const Reach &reach = *stage.reach;
    W *keys = (W *)stage.keys, *values = (W *)stage.values, *tap = (W *)stage.tap;
    const long tokens = pass.rows * pass.slots, hidden = layer.hidden, inner = layer.inner, dim = layer.dim;
    const long width = layer.heads * dim, outputs = width + 2 * layer.kv_heads * dim;
    const long parts = (layer.heads / layer.kv_heads * pass.slots + LANES - 1) / LANES;
    const long room = (longest(pass) + dim) * LANES;
    const W *qkv = (const W *)layer.qkv, *out = (const W *)layer.out;
    const W *gate_up = (const W *)layer.gate_up, *down = (const W *)layer.down;
    float *h = pass.work, *y = h + tokens * hidden, *wide = y + tokens * width;
    float *scores = wide + tokens * (outputs > 2 * inner ? outputs : 2 * inner);
    float *mixed = scores + room * pass.threads;
#pragma omp for
    for (long t = 0; t < tokens; t++) rms_norm(x + t * hidden, layer.input_norm, layer.eps, hidden, h + t * hidden);
#pragma omp for
    for (long p = 0; p < panels(outputs); p++) panel(qkv, p, h, tokens, hidden, wide, outputs, false);
#pragma omp for
    for (long t = 0; t < tokens; t++) place(layer, pass, t, wide + t * outputs, keys, values);
#pragma omp for
    for (long unit = 0; unit < pass.rows * layer.kv_heads * parts; unit++)
        attend(layer, pass, reach, unit / (layer.kv_heads * parts), unit / parts % layer.kv_heads,
               unit % parts * LANES, wide, keys, values, scores + room * omp_get_thread_num(), y);
#pragma omp for
    for (long p = 0; p < panels(hidden); p++) panel(out, p, y, tokens, width, x, hidden, true);
#pragma omp for
    for (long t = 0; t < tokens; t++) rms_norm(x + t * hidden, layer.post_norm, layer.eps, hidden, h + t * hidden);
#pragma omp for
    for (long p = 0; p < panels(2 * inner); p++) panel(gate_up, p, h, tokens, hidden, wide, 2 * inner, false);
#pragma omp for
    for (long t = 0; t < tokens; t++)
        for (long i = 0; i < inner; i += LANES) {
            vf gate{}, up{};
            long size = (inner - i < LANES ? inner - i : LANES) * 4;
            memcpy(&gate, wide + t * 2 * inner + i, size);
            memcpy(&up, wide + t * 2 * inner + inner + i, size);
            gate = gate / (1.0f + exponential(-gate)) * up;
            memcpy(mixed + t * inner + i, &gate, size);
        }
#pragma omp for
    for (long p = 0; p < panels(hidden); p++) panel(down, p, mixed, tokens, inner, x, hidden, true);
    if (tap) {
#pragma omp for
        for (long t = 0; t < tokens; t++)
            for (long i = 0; i < hidden; i++) narrow(x[t * hidden + i], tap + t * stage.stride + i);
    }
}

// With a norm, of the tokens in `h`, where they are put normalised.
template <class W>
void product(const W *w, long n, long k, const float *x, long tokens, float *y, const float *norm, float eps, float *h,
             int threads) {
#pragma omp parallel num_threads(threads)
    {
        if (norm) {
#pragma omp for
            for (long t = 0; t < tokens; t++) rms_norm(x + t * k, norm, eps, k, h + t * k);
        }
#pragma omp for
        for (long p = 0; p < panels(n); p++) panel(w, p, norm ? h : x, tokens, k, y, n, false);
    }
}

}  // namespace

extern "C" {

int64_t dflash_panel() { return PANEL; }

#ifdef __FLT16_MAX__
int32_t dflash_kinds() { return 3; }
#else
int32_t dflash_kinds() { return 2; }
#endif

int64_t dflash_work(const Layer *layer, const Pass *pass) {
    const long outputs = (layer->heads + 2 * layer->kv_heads) * layer->dim, wide = 2 * layer->inner;
    return pass->rows * pass->slots *
               (layer->hidden + layer->heads * layer->dim + (outputs > wide ? outputs : wide) + layer->inner) +
           (longest(*pass) + layer->dim) * LANES * pass->threads;
}

// Run layers one after another over x [tokens, hidden], in place.
void dflash_layers(const Stage *stages, int64_t count, float *x) {
#pragma omp parallel num_threads(stages->pass->threads)
    for (const Stage *stage = stages; stage < stages + count; stage++) {
        if (stage->layer->kind == 0) layer_pass<float>(*stage, x);
        if (stage->layer->kind == 1) layer_pass<uint16_t>(*stage, x);
#ifdef __FLT16_MAX__
        if (stage->layer->kind == 2) layer_pass<half>(*stage, x);
#endif
    }
}

// What layers do with queries, keys and values, for the keys and values of other tokens: `stride` floats a token, those
// of all layers side by side. There are no queries.
void dflash_place(const Stage *stages, int64_t count, float *heads, int64_t stride) {
    for (const Stage *stage = stages; stage < stages + count; stage++) {
        const Layer &layer = *stage->layer;
        const Pass &pass = *stage->pass;
        for (long t = 0; t < pass.rows * pass.slots; t++) {
            float *from = heads + t * stride;
            if (layer.kind == 0) place(layer, pass, t, from, (float *)stage->keys, (float *)stage->values);
            if (layer.kind == 1) place(layer, pass, t, from, (uint16_t *)stage->keys, (uint16_t *)stage->values);
#ifdef __FLT16_MAX__
            if (layer.kind == 2) place(layer, pass, t, from, (half *)stage->keys, (half *)stage->values);
#endif
        }
        heads += 2 * layer.kv_heads * layer.dim;
    }
}

void dflash_product(const void *w, int32_t kind, int64_t n, int64_t k, const float *x, int64_t tokens, float *y,
                    const float *norm, float eps, float *h, int32_t threads) {
    if (kind == 0) product((const float *)w, n, k, x, tokens, y, norm, eps, h, threads);
    if (kind == 1) product((const uint16_t *)w, n, k, x, tokens, y, norm, eps, h, threads);
#ifdef __FLT16_MAX__
    if (kind == 2) product((const half *)w, n, k, x, tokens, y, norm, eps, h, threads);
#endif
}

}  // extern "C"

// The expert half: routing and the look-up of slots, the experts' matrices where they lie, waits for those that are
// still on their way. See ARCHITECTURE.md for the slot protocol.

namespace icebox {

// The control block lies in memory of the host, mapped; all but the slot table is written by the worker alone:
//   table   int [layers, experts]   the slot, or -1
//   clock   u64                     finished look-ups
//   abort   int                     not 0: the host gives up on this step
//   tickets u64                     how many tickets were written, ever
//   ring    int [kTickets, kTicketWords]
//   uses    u64 [layers, experts]
constexpr int kTickets = 64, kTicketWords = 64;

// The device's own copies of what it writes to the control block, and the microseconds that it waited for experts.
struct Own {
  u64 clock, tickets, waited;
};

// What the router decides, for the kernels behind it. Positions are the step's distinct experts, ascending; places are the
// same in the order of computing, resident ones first.
template <int POSITIONS, int S>
struct Routing {
  int count;
  int experts[POSITIONS];
  int position_of[POSITIONS];  // by place; -1 beyond the count
  int slot_of[POSITIONS];      // by place; -1 until the expert is there, -2 if it is not waited for any more
  float weights[POSITIONS][S];
  int is_used[POSITIONS][S];
};

__device__ __forceinline__ float router_score(float x) { return sqrtf(x > 20.0f ? x : log1pf(expf(x))); }

// By which experts are ranked; the maximum turns NaN into a number, so that every choice is of K experts.
__device__ __forceinline__ float router_key(float score, float bias) { return fmaxf(score + bias, -3e38f); }

// How many keys come before this one: larger ones, and of equals those of lower places.
template <int E>
__device__ __forceinline__ int rank_of(const float (&keys)[E], int e) {
  static_assert(E % 4 == 0, "four keys are compared at a time");
  const float own = keys[e];
  int rank = 0;
#pragma unroll 8
  for (int i = 0; i < E; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(keys + i);
    const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) rank += four[n] > own || (four[n] == own && i + n < e);
  }
  return rank;
}

// What the next layer may want, by its router on this layer's input: a thread an expert. y: float [S, stride], its gate's
// products at `offset`. Those that are missing are a hint, and remembered: guessed[layer % 2][expert] becomes the layer.
template <int E, int K, int S>
__device__ __forceinline__ void guess(const float* y, int stride, int offset, const float* bias, int layer,
                                      const int* table, const void* clock, const int* is_wanted, int* hints, int* hinted,
                                      int* guessed) {
  static_assert(S * K <= kHintWords - kHintHead, "a hint has no room for a guess");
  __shared__ __align__(16) float keys[S][E];
  __shared__ int ids[S * K], first[32];
  const int e = threadIdx.x, warp = e >> 5, lane = e & 31;
  const int slot = e < E ? peek_system(table + layer * E + e) : 0;
  const bool is_on = __syncthreads_or(e == 0 && peek_system(is_wanted) != 0);
  await_previous();
  bool is_missing = false;
  if (is_on) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (e < E) keys[s][e] = router_key(router_score(y[s * stride + offset + e]), bias[e]);
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S; ++s) is_missing |= e < E && slot < 0 && rank_of(keys[s], e) < K;
  }
  if (e < E) guessed[(layer & 1) * E + e] = is_missing ? layer : -1;
  const unsigned missing = __ballot_sync(0xFFFFFFFFu, is_missing);
  if (lane == 0) first[warp] = __popc(missing);
  __syncthreads();
  int place = __popc(missing & ((1u << lane) - 1)), count = 0;
  for (int i = 0; i < int(blockDim.x >> 5); ++i) {
    place += i < warp ? first[i] : 0;
    count += first[i];
  }
  if (is_missing) ids[place] = e;
  __syncthreads();
  if (warp == 0) {
    const bool has_id = lane < count;
    write_hint(hints, hinted, true, layer, *static_cast<const u64*>(clock) + 1, has_id, has_id ? ids[lane] : 0);
  }
}

// One block, a thread an expert. y: float [S, stride], the gate's products at `offset`. counts: the device's own copy of
// uses; own: an `Own`. If the step guesses, y has the products of the gate of layer `following` as well, as many columns
// behind the others, and another block guesses by them, unless there is no such layer (-1). hinted: how many hints there
// were, how many missing experts that were guessed have had their look-up, and how many of these it wanted. The latter two
// go to `judged` as well, which like is_wanted and hints is the host's memory.
template <int E, int K, int S, bool HASH, bool GUESSES>
__device__ __forceinline__ void route(const float* y, int stride, int offset, const float* bias, const void* tid2eid,
                                      const int* tokens, float scaling, int layer, const int* table, void* tickets,
                                      int* ring, void* uses, void* counts, void* own, unsigned* waited, int* routing,
                                      int following, const float* following_bias, const int* is_wanted, int* hints,
                                      int* hinted, int* guessed, int* judged) {
  if constexpr (GUESSES) {
    if (blockIdx.x == 1) {
      if (following >= 0) {
        guess<E, K, S>(y, stride, (stride + offset) / 2, following_bias, following, table, own, is_wanted, hints, hinted,
                       guessed);
      }
      return;
    }
  }
  auto* mine = static_cast<Own*>(own);
  auto* out = reinterpret_cast<Routing<S * K, S>*>(routing);
  __shared__ __align__(16) float keys[S][E];
  __shared__ float ranked[S][K], weights[S][E];
  __shared__ int ranks[S][E], first[32], resident_first[32];
  const int e = threadIdx.x, warp = e >> 5, lane = e & 31;
  // Early, for it may be the bus's other side: the look-up before has ended, and its clock has been written.
  const int slot = e < E ? load_system(table + layer * E + e) : 0;
  await_previous();
  float score[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    if (e >= E) continue;
    score[s] = router_score(y[s * stride + offset + e]);
    keys[s][e] = HASH ? 0.0f : router_key(score[s], bias[e]);
  }
  __syncthreads();
  bool is_chosen = false;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    if (e >= E) continue;
    int rank = HASH ? K : 0;
    if constexpr (HASH) {
      for (int i = 0; i < K; ++i) rank = static_cast<const int64_t*>(tid2eid)[int64_t(tokens[s]) * K + i] == e ? i : rank;
    } else {
      rank = rank_of(keys[s], e);
    }
    ranks[s][e] = rank;
    if (rank < K) ranked[s][rank] = score[s];
    is_chosen |= rank < K;
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S; ++s) {
    if (e >= E || ranks[s][e] >= K) continue;
    float sum = 0;
    for (int i = 0; i < K; ++i) sum += ranked[s][i];
    weights[s][e] = score[s] / sum * scaling;
  }
  // Places in ascending order of ids, and in order of residency.
  const bool is_resident = is_chosen && slot >= 0;
  const unsigned chosen = __ballot_sync(0xFFFFFFFFu, is_chosen), resident = __ballot_sync(0xFFFFFFFFu, is_resident);
  if (lane == 0) {
    first[warp] = __popc(chosen);
    resident_first[warp] = __popc(resident);
  }
  __syncthreads();
  const unsigned below = (1u << lane) - 1;
  int place = __popc(chosen & below), resident_place = __popc(resident & below), count = 0, residents = 0;
  for (int i = 0; i < int(blockDim.x >> 5); ++i) {
    place += i < warp ? first[i] : 0;
    resident_place += i < warp ? resident_first[i] : 0;
    count += first[i];
    residents += resident_first[i];
  }
  const int missing_place = place - resident_place;
  if (is_chosen) {
    const int turn = is_resident ? resident_place : residents + missing_place;
    out->experts[place] = e;
    out->position_of[turn] = place;
    out->slot_of[turn] = slot;
    for (int s = 0; s < S; ++s) {
      out->is_used[place][s] = ranks[s][e] < K;
      out->weights[place][s] = ranks[s][e] < K ? weights[s][e] : 0.0f;
    }
    static_cast<u64*>(uses)[layer * E + e] = ++static_cast<u64*>(counts)[layer * E + e];
  }
  for (int i = count + e; i < S * K; i += blockDim.x) out->position_of[i] = out->slot_of[i] = -1;
  if (e == 0) {
    out->count = count;
    mine->waited += *waited;  // of the layer before
    *waited = 0;
  }
  if constexpr (GUESSES) {
    const bool was_guessed = e < E && guessed[(layer & 1) * E + e] == layer;
    const int were_guessed = __syncthreads_count(was_guessed), were_right = __syncthreads_count(was_guessed && is_chosen);
    if (e == 0 && were_guessed > 0) {
      judged[0] = hinted[1] += were_guessed;
      judged[1] = hinted[2] += were_right;
    }
  }
  if (count == residents) return;
  // A ticket: layer, clock, how many ids and held slots, the ids, the slots.
  int* ticket = ring + (mine->tickets % kTickets) * kTicketWords;
  if (is_chosen) {
    if (is_resident) ticket[5 + (count - residents) + resident_place] = slot;
    else ticket[5 + missing_place] = e;
  }
  if (e == 0) {
    ticket[0] = layer;
    ticket[1] = int(mine->clock);
    ticket[2] = int(mine->clock >> 32);
    ticket[3] = count - residents;
    ticket[4] = residents;
  }
  __threadfence_system();
  __syncthreads();
  if (e == 0) store_system(static_cast<u64*>(tickets), ++mine->tickets);
}

// The slot of a place, waited for if need be; negative after an abort. One thread of the block waits. That of the place's
// first block asks the host's memory; those of the others wait for its answer, for hundreds of questions crowd the bus on
// which the expert is to come: its copy then takes many times as long. Every ten milliseconds they ask all the same, and so
// depend on no other block.
template <int POSITIONS, int S>
__device__ __forceinline__ int find_slot(Routing<POSITIONS, S>* routing, int place, bool is_first, int position,
                                         const int* row, const int* abort, unsigned* waited) {
  constexpr int kTurns = 1024, kAwaited = -1, kGivenUp = -2;
  __shared__ int found;
  int* answer = routing->slot_of + place;
  int slot = *answer;
  if (__syncthreads_and(slot >= 0)) return slot;  // another block may be writing the answer
  if (threadIdx.x == 0) {
    const u64 since = nanoseconds();
    const int* entry = row + routing->experts[position];
    for (int turn = 1; peek_system(answer) == kAwaited; ++turn) {  // without order, which would empty L1 at every turn
      if (is_first || turn % kTurns == 0) {
        if (peek_system(entry) >= 0 && (slot = load_system(entry)) >= 0) store_device(answer, slot);
        else if (peek_system(abort)) store_device(answer, kGivenUp);
      }
      __nanosleep(is_first ? 2000 : 10000);
    }
    slot = load_device(answer);
    atomicMax(waited, unsigned((nanoseconds() - since) / 1000));
    found = slot;
  }
  __syncthreads();
  return found;
}

// The gated activation of four inputs, weighted and rounded to bf16.
__device__ __forceinline__ float gated(float gate, float up, float limit, float weight) {
  gate = fminf(gate, limit);
  return bf16_round(gate / (1.0f + expf(-gate)) * fminf(fmaxf(up, -limit), limit) * weight);
}

__device__ __forceinline__ float4 gated(float4 gate, float4 up, float limit, float weight) {
  return make_float4(gated(gate.x, up.x, limit, weight), gated(gate.y, up.y, limit, weight),
                     gated(gate.z, up.z, limit, weight), gated(gate.w, up.w, limit, weight));
}

// Gate and up rows of every routed expert and what they activate, with the routing weight; and the shared expert's down
// rows, which come first and wait for nobody. Blocks: D / 16 of the shared expert, then W / 16 a place, each with 16 rows of
// both matrices. y: float [S, stride], the shared expert's gate and up products first; shared: bf16 [S, D]; hidden: bf16
// [POSITIONS, S, W].
template <int D, int W, int S, int POSITIONS, int WARPS, int AHEAD, int ROWS_PER_SCALE>
__device__ __forceinline__ void experts_up(const float* y, int stride, const uint8_t* shared_w2,
                                           const uint8_t* shared_scale, float limit, const void* halves,
                                           const float* scales, const uint8_t* pool, int64_t slot_bytes, int w1,
                                           int w1_scale, int w3, int w3_scale, int* decisions,
                                           const int* row, const int* abort, unsigned* waited, void* shared, void* hidden) {
  constexpr int SHARED = D / 16;
  auto* routing = reinterpret_cast<Routing<POSITIONS, S>*>(decisions);
  __shared__ Partials<S, WARPS> partials[2];
  if (blockIdx.x < SHARED) {
    quantised_rows<D, W, S, WARPS, ROWS_PER_SCALE>(partials[0], shared_w2, shared_scale, blockIdx.x * 16,
                                                   [&](int token, int i) {
      const float4* at = reinterpret_cast<const float4*>(y + token * stride + i);
      return gated(at[0], at[W / 4], limit, 1.0f);
    }, shared);
    return;
  }
  await_previous();
  constexpr int KW = D / WARPS;
  const int warp = threadIdx.x >> 5, k = warp * KW;
  const int place = (blockIdx.x - SHARED) / (W / 16), first = (blockIdx.x - SHARED) % (W / 16) * 16;
  const int position = routing->position_of[place];
  if (position < 0) return;
  const int slot = find_slot(routing, place, first == 0, position, row, abort, waited);
  if (slot < 0) return;
  const uint8_t* record = pool + slot * slot_bytes;
  const Tiles weights{record + w1 + int64_t(first) * (D / 2) + k / 2, D / 2, w3 - w1};
  const Tiles weight_scales{record + w1_scale + first * (D / 32) + k / 32, D / 32, w3_scale - w1_scale};
  float acc[2][2 * ((S + 1) / 2)] = {};
  fp4_rows<KW, S, 2, at_once(KW / kActBlock, AHEAD)>(weights, weight_scales, static_cast<const uint16_t*>(halves) + k, D,
                                                    scales + k / kActBlock, D / kActBlock, acc, [] {});
  keep_fp4<S>(partials[0][warp], acc[0]);
  keep_fp4<S>(partials[1][warp], acc[1]);
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * S; i += 32 * WARPS) {
    const int token = i / 16, own = i % 16;
    const float gate = bf16_round(total<S, WARPS>(partials[0], token, own));
    const float up = bf16_round(total<S, WARPS>(partials[1], token, own));
    static_cast<__nv_bfloat16*>(hidden)[(int64_t(position) * S + token) * W + first + own] =
        __float2bfloat16_rn(gated(gate, up, limit, routing->weights[position][token]));
  }
}

// Down rows of every routed expert. Block (D / 16 / TILES, place); what a block quantises serves TILES times 16 rows.
// hidden: bf16 [POSITIONS, S, W]; out: bf16 [POSITIONS, S, D].
template <int D, int W, int S, int POSITIONS, int TILES, int WARPS, int AHEAD>
__device__ __forceinline__ void experts_down(const void* hidden, const uint8_t* pool, int64_t slot_bytes, int w2,
                                             int w2_scale, const int* decisions, void* out) {
  constexpr int KW = W / WARPS;
  const auto* routing = reinterpret_cast<const Routing<POSITIONS, S>*>(decisions);
  __shared__ Partials<S, WARPS> partials[TILES];
  __shared__ Quantised<KW, S, uint16_t> inputs[WARPS];
  const int warp = threadIdx.x >> 5, k = warp * KW, first = blockIdx.x * 16 * TILES;
  // The router's own kernel ended before this one started, so weights of experts that were there can come at once. Not
  // by way of L1, where another layer's decisions may be, and what another expert had in this slot.
  const int position = peek_system(routing->position_of + blockIdx.y);
  if (position < 0) return;
  int slot = peek_system(routing->slot_of + blockIdx.y);
  if (!__all_sync(0xFFFFFFFFu, slot >= 0)) {
    await_previous();
    slot = load_device(routing->slot_of + blockIdx.y);
  }
  if (slot < 0) return;
  const uint8_t* record = pool + slot * slot_bytes;
  const Tiles weights{record + w2 + int64_t(first) * (W / 2) + k / 2, W / 2, 16 * (W / 2)};
  const Tiles weight_scales{record + w2_scale + first * (W / 32) + k / 32, W / 32, 16 * (W / 32)};
  float acc[TILES][2 * ((S + 1) / 2)] = {};
  fp4_rows<KW, S, TILES, at_once(KW / kActBlock, AHEAD)>(
      weights, weight_scales, inputs[warp].codes[0], KW, inputs[warp].scales[0], KW / kActBlock, acc, [&] {
        await_previous();
        const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(hidden) + int64_t(position) * S * W + k;
        quantise(inputs[warp], [&](int token, int i) { return load_bf16x4(from + token * W + i); });
      });
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) keep_fp4<S>(partials[tile][warp], acc[tile]);
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * S * TILES; i += 32 * WARPS) {
    const int tile = i / (16 * S), token = i / 16 % S, row = i % 16;
    static_cast<__nv_bfloat16*>(out)[(int64_t(position) * S + token) * D + first + tile * 16 + row] =
        __float2bfloat16_rn(total<S, WARPS>(partials[tile], token, row));
  }
}

// The experts' sum, ascending by id, then the shared expert, into the streams. Every expert of the layer has been read,
// so the clock goes up.
template <int D, int S, int J, int POSITIONS>
__device__ __forceinline__ void experts_write(const int* decisions, const void* outputs, const void* shared,
                                              void* clock, void* own, void* streams, const float* post,
                                              const float* comb, const float* fn, float* parts) {
  static_assert(POSITIONS <= 32);
  const auto* routing = reinterpret_cast<const Routing<POSITIONS, S>*>(decisions);
  const int count = peek_system(&routing->count);
  unsigned used[S] = {};
#pragma unroll
  for (int i = 0; i < POSITIONS; ++i) {
#pragma unroll
    for (int s = 0; s < S; ++s) used[s] |= unsigned(i < count && peek_system(&routing->is_used[i][s])) << i;
  }
  streams_write<D, S, J>(
      [&](int s, int column) {
        float sum = 0;
#pragma unroll 6
        for (int i = 0; i < POSITIONS; ++i) {  // loaded whether they count or not, so that none waits for another
          const __nv_bfloat16 output = static_cast<const __nv_bfloat16*>(outputs)[int64_t(i * S + s) * D + column];
          sum += used[s] >> i & 1 ? __bfloat162float(output) : 0.0f;
        }
        return bf16_round(sum + __bfloat162float(static_cast<const __nv_bfloat16*>(shared)[s * D + column]));
      },
      streams, post, comb, fn, parts);
  if (blockIdx.x == 0 && threadIdx.x == 0) store_system(static_cast<u64*>(clock), ++static_cast<Own*>(own)->clock);
}

}  // namespace icebox

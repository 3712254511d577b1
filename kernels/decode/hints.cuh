// Hints: experts that a later look-up will want, or may want, named while they can still be read ahead. They reach the host
// through a ring in its memory. Nobody waits for one, so one that is overwritten before it is read is merely lost.

namespace icebox {

constexpr int kHints = 64, kHintWords = 32, kHintHead = 6;

// By one warp, of whose lanes some have an id; nothing if none has. An entry of the ring: its number, from 1 and written
// last, is it a guess, the layer, the clock of the look-up that it is for (2 words), how many ids, the ids.
// written: how many there were, on the device; several warps of a grid may write.
__device__ __forceinline__ void write_hint(int* ring, int* written, bool is_guess, int layer, u64 clock, bool has_id, int id) {
  const int lane = threadIdx.x & 31;
  const unsigned ids = __ballot_sync(0xFFFFFFFFu, has_id);
  if (ids == 0) return;
  int number = 0;
  if (lane == 0) number = atomicAdd(written, 1);
  number = __shfl_sync(0xFFFFFFFFu, number, 0);
  int* hint = ring + (number % kHints) * kHintWords;
  if (has_id) hint[kHintHead + __popc(ids & ((1u << lane) - 1))] = id;
  if (lane == 0) {
    hint[1] = is_guess;
    hint[2] = layer;
    hint[3] = int(clock);
    hint[4] = int(clock >> 32);
    hint[5] = __popc(ids);
  }
  __threadfence_system();
  __syncwarp();
  if (lane == 0) store_system(hint, number + 1);
}

// What a token wants of the first layers, whose experts follow from its id, before the step that takes it in; by one warp.
// hashed: int16 [LAYERS, vocab, K]; clock: finished look-ups.
template <int LAYERS, int K>
__device__ __forceinline__ void hint_hashed(const void* hashed, int vocab, int token, const int* table, int experts,
                                            u64 clock, int* ring, int* written) {
  static_assert(K <= kHintWords - kHintHead, "a hint has no room for a token's experts");
  const int lane = threadIdx.x & 31;
  int ids[LAYERS];
  bool is_missing[LAYERS];
#pragma unroll
  for (int layer = 0; layer < LAYERS; ++layer) {
    ids[layer] = lane < K ? static_cast<const int16_t*>(hashed)[(int64_t(layer) * vocab + token) * K + lane] : 0;
  }
#pragma unroll
  for (int layer = 0; layer < LAYERS; ++layer) {
    is_missing[layer] = lane < K && peek_system(table + layer * experts + ids[layer]) < 0;
  }
#pragma unroll
  for (int layer = 0; layer < LAYERS; ++layer) {
    write_hint(ring, written, false, layer, clock + layer, is_missing[layer], ids[layer]);
  }
}

}  // namespace icebox

// Listening to the server's feed of the cache, and what follows from its cumulative counters.

import { ApiError, events, keyGiven, request } from "./api.js";

const AGAIN_MS = 1000;
const SILENCE_MS = 3000;
const WINDOW_S = 2; // rates are those of the last seconds

/** Calls `onSnapshot(snapshot)` and `onState("live" | "waiting" | "lost" | "refused")` for as long as the page lives. */
export async function watch(onSnapshot, onState) {
  for (;;) {
    try {
      await listen(onSnapshot, onState);
      onState("lost");
    } catch (error) {
      const isRefused = error instanceof ApiError && error.status === 401;
      onState(isRefused ? "refused" : "lost");
      if (isRefused) await keyGiven(); // asking again is up to who asks the model something
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function listen(onSnapshot, onState) {
  const stream = events(await request("/cache"));
  let silence = setTimeout(onState, SILENCE_MS, "waiting");
  try {
    for await (const { data } of stream) {
      if (data === undefined) continue;
      clearTimeout(silence);
      silence = setTimeout(onState, SILENCE_MS, "waiting");
      onState("live");
      onSnapshot(JSON.parse(data));
    }
  } finally {
    clearTimeout(silence);
  }
}

/** Rates out of snapshots. */
export class Rates {
  constructor() {
    this.heard = [];
  }

  add(snapshot) {
    // Another boot counts from zero again.
    if (this.heard.length && this.heard[0].boot_id !== snapshot.boot_id) this.heard = [];
    this.heard.push(snapshot);
    while (this.heard[0].time_s < snapshot.time_s - WINDOW_S) this.heard.shift();
  }

  get last() {
    return this.heard.at(-1);
  }

  /** Gain a second; null before there is one. */
  perSecond(key) {
    const seconds = this.last.time_s - this.heard[0].time_s;
    return seconds > 0 ? gained(this.heard[0], this.last, key) / seconds : null;
  }

  /** Share of expert uses that were hits; null while nothing was used. */
  get hitRate() {
    return hitRate(this.heard[0], this.last);
  }
}

/** The same between any two snapshots of one boot. */
export function hitRate(before, after) {
  if (!before || !after || before.boot_id !== after.boot_id) return null;
  return share((key) => gained(before, after, key));
}

/** The same since the service started. */
export function totalHitRate(snapshot) {
  return share((key) => snapshot.values[key]);
}

function share(count) {
  const uses = count("uses");
  return uses ? Math.max(0, 1 - (count("misses") + count("late_hits")) / uses) : null;
}

const gained = (before, after, key) => after.values[key] - before.values[key];

// Requests to this server: the key, errors in words, and streams of server-sent events.

const KEY = "icebox-key"; // in sessionStorage, and the event when there is one

let askForKey = async () => null;
let asking = null;

/** Who is asked when the server wants a key: `ask()` resolves to the key, or null if there is none. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** Resolves when the user has given a key, perhaps a better one. */
export function keyGiven() {
  return new Promise((resolve) => addEventListener(KEY, resolve, { once: true }));
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response with a good status. Throws ApiError with the server's own words, or what fetch throws. */
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401 && (await hasNewKey(key))) return request(path, options);
  if (!response.ok) throw new ApiError(response.status, await complaint(response));
  return response;
}

/** Asks once, however many requests were refused meanwhile. */
async function hasNewKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true;
  asking ??= askForKey().finally(() => (asking = null));
  const key = await asking;
  if (!key) return false;
  sessionStorage.setItem(KEY, key);
  dispatchEvent(new Event(KEY));
  return true;
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status} ${response.statusText}`;
  }
}

/** The events of a stream, as `{ data }` or, for what only keeps it alive or tells a place in the queue, `{ comment }`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield parse(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(part) {
  if (part.startsWith(":")) return { comment: part.slice(1).trim() };
  const lines = part.split("\n").filter((line) => line.startsWith("data:"));
  return { data: lines.map((line) => line.slice(5).trimStart()).join("\n") };
}

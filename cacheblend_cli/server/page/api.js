// The server's API: requests with the key, errors, server-sent events.

const KEY = "cacheblend.key";
let key = sessionStorage.getItem(KEY) ?? "";
let onUnauthorized = () => {};

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** What tells the conversations of one key from those of another: a digest, "" where the browser computes none. */
export async function keySpace() {
  if (!key) return "open";
  if (!globalThis.crypto?.subtle) return "";
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(`cacheblend conversations ${key}`));
  return [...new Uint8Array(digest).slice(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function whenUnauthorized(handler) {
  onUnauthorized = handler;
}

/** The response of a request. Throws ApiError for one that is refused or cannot be sent, AbortError when it is aborted. */
export async function request(method, path, { json, bytes, accept, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (accept) headers.Accept = accept;
  if (json !== undefined) headers["Content-Type"] = "application/json";
  if (bytes !== undefined) headers["Content-Type"] = "application/octet-stream";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: json === undefined ? bytes : JSON.stringify(json) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The server cannot be reached: ${error.message}`, 0, "unreachable");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: { message: response.statusText } }));
  if (response.status === 401) onUnauthorized(error.message);
  throw new ApiError(error.message, response.status, error.code);
}

export const get = async (path) => (await request("GET", path)).json();

/** The records of an event stream. Throws ApiError for an error in it, and for a stream that ends too soon. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The connection was closed before the end.", 0, "cut_off");
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const record = JSON.parse(data);
      if (record.error) throw new ApiError(record.error.message, 200, record.error.code);
      yield record;
    }
  }
}

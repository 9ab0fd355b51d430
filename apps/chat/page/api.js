// Requests to the app's server. Every request carries the key from the address that opened the page.

import { frames } from "./sse.js";

const ROOT = "/app/api/";

/** A request that failed. status 0: the server cannot be reached or went away. */
export class ApiError extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }

  get unreachable() {
    return this.status === 0;
  }
}

/** Takes the key out of the address, where it came with `#token=`, and keeps it in this browser. Returns whether there was one. */
export function takeKey() {
  const match = /^#token=([\w-]+)/.exec(location.hash);
  if (!match) return false;
  localStorage.setItem("key", match[1]);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

/** Returns the key, or null if this browser has none. */
export function key() {
  return localStorage.getItem("key");
}

async function request(method, path, body, signal) {
  const headers = { Authorization: `Bearer ${key() ?? ""}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) };
  let response;
  try {
    response = await fetch(ROOT + path, options);
  } catch (error) {
    throw lost(error);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

function lost(error) {
  return error.name === "AbortError" ? error : new ApiError("The server does not answer.", 0, "unreachable");
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch (problem) {
    if (!(problem instanceof SyntaxError) && !(problem instanceof TypeError)) throw problem;
  }
  return new ApiError(error.message ?? `The server answered ${response.status}.`, response.status, error.code ?? "");
}

/** Returns the JSON answer of a request. Raises ApiError. */
export async function call(method, path, body) {
  const response = await request(method, path, body);
  try {
    return response.status === 204 ? null : await response.json();
  } catch (error) {
    if (error instanceof SyntaxError) throw new ApiError("The server's answer is not JSON.", response.status, "not_json");
    throw lost(error);
  }
}

/** Yields the frames of an event stream. Raises ApiError if the request is refused or the connection breaks. */
export async function* stream(path, body, signal) {
  const response = await request("POST", path, body, signal);
  if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) return;
  try {
    yield* frames(chunksOf(response.body));
  } catch (error) {
    throw error instanceof ApiError ? error : lost(error);
  }
}

// Not `for await` over the body itself: Safari has no such iterator.
async function* chunksOf(body) {
  const reader = body.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    await reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

/** Returns a file that the server writes, and its name. */
export async function download(path) {
  const response = await request("GET", path);
  const name = /filename="?([^";]+)"?/.exec(response.headers.get("Content-Disposition") ?? "")?.[1];
  return { blob: await response.blob(), name };
}

/** Returns whether the server answers at all. */
export async function alive() {
  try {
    return (await fetch("/health", { cache: "no-store" })).ok;
  } catch {
    return false; // a refused connection says just that
  }
}

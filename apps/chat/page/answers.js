// An answer as it streams: what each frame changes in the conversation. No DOM.

import * as api from "./api.js";
import { emit } from "./bus.js";
import { ensure, withdraw } from "./model.js";

const PATIENCE_MS = 4000; // after "stop", until the page hangs up

/**
 * Asks for an answer and follows its frames until the end. request: the body of POST …/answer.
 * Whatever happens, what has arrived stays. Tells "message" for each message that changed, "path" for new ones.
 * Returns whether the server has taken the request: false if it was refused, and then no conversation was begun for it.
 */
export async function answer(conversation, request) {
  if (conversation.running) return false;
  const fresh = conversation.id === null;
  Object.assign(conversation, { answering: new AbortController(), current: null, taken: false });
  emit("answering", conversation);
  try {
    await ensure(conversation);
    const path = `conversations/${encodeURIComponent(conversation.id)}/answer`;
    for await (const frame of api.stream(path, request, conversation.answering.signal)) take(conversation, frame);
    ended(conversation);
  } catch (error) {
    failed(conversation, error);
  } finally {
    if (fresh && !conversation.taken) await withdraw(conversation);
    conversation.answering = null;
    emit("answered", conversation);
  }
  return conversation.taken;
}

/** Ends the answer that streams, at the server; if that takes too long, by hanging up. */
export async function stop(conversation) {
  const streaming = conversation.answering;
  if (!streaming) return;
  setTimeout(() => streaming.abort(), PATIENCE_MS);
  if (conversation.id === null) return streaming.abort();
  try {
    await api.call("POST", `conversations/${encodeURIComponent(conversation.id)}/stop`);
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    streaming.abort();
  }
}

const TAKE = {
  message(conversation, { message }) {
    if (!conversation.taken) emit("taken", conversation);
    conversation.taken = true;
    conversation.messages.set(message.id, message);
    conversation.leaf = message.id;
    if (message.role === "user" && !conversation.title) emit("saved", conversation.id); // the server has named it after its first message
    if (message.role === "assistant") {
      conversation.current = message;
      if (message.tokens === undefined) message.tokens = null;
    }
    emit("path", conversation);
  },
  waiting(conversation, { read, total, cached_tokens, waits_for }) {
    conversation.current.waiting = { read, total, cached_tokens, waits_for };
  },
  text(conversation, { text, tokens }) {
    const message = conversation.current;
    if (tokens?.length && (message.tokens || !message.text)) (message.tokens ??= []).push(...tokens);
    else if (message.tokens?.length) message.tokens.push({ t: text });
    message.waiting = null;
    message.text += text;
    emit("tokens", { conversation, tokens });
  },
  reasoning(conversation, { text }) {
    conversation.current.waiting = null;
    conversation.current.reasoning = (conversation.current.reasoning ?? "") + text;
  },
  learned(conversation, { entries }) {
    (conversation.current.learned ??= []).push(...entries);
    emit("learned", { conversation, entries });
  },
  figures(conversation, { type: _, ...figures }) {
    conversation.current.figures = figures;
    emit("figures", { conversation, figures });
  },
  done(conversation, { message, leaf }) {
    Object.assign(conversation.current ?? {}, message, { waiting: null });
    conversation.leaf = leaf ?? message.id;
    conversation.current = null;
    emit("path", conversation);
    if (message.figures) emit("figures", { conversation, figures: message.figures });
  },
  error(conversation, { message, state }) {
    finish(conversation, state ?? "failed", message);
    emit("problem", { conversation, message });
  },
};

/** Applies one frame to a conversation; frames of unknown types change nothing. */
export function take(conversation, frame) {
  if (!Object.hasOwn(TAKE, frame.type)) return;
  if (!conversation.current && !["message", "done", "error"].includes(frame.type)) return;
  TAKE[frame.type](conversation, frame);
  const changed = conversation.current ?? conversation.messages.get(frame.message?.id);
  if (changed) emit("message", { conversation, message: changed });
}

/** Marks the answer that was streaming, if there is one, as ended without being whole. */
function finish(conversation, state, reason) {
  const message = conversation.current;
  conversation.current = null;
  if (!message) return;
  Object.assign(message, { state, reason, waiting: null });
  emit("message", { conversation, message });
}

/** The stream is over: if it did not say so itself, the server went away in between. */
function ended(conversation) {
  if (conversation.current === null) return;
  finish(conversation, "cut", "The server went away while it was answering.");
  emit("lost", { midway: true });
}

function failed(conversation, error) {
  const midway = conversation.current !== null;
  if (error.name === "AbortError") return finish(conversation, "stopped", "stopped");
  if (!(error instanceof api.ApiError)) {
    finish(conversation, "failed", error.message);
    throw error;
  }
  finish(conversation, error.unreachable ? "cut" : "failed", error.message);
  if (error.unreachable || error.status === 401) emit("lost", { midway, status: error.status });
  else emit("problem", { conversation, message: error.message });
}

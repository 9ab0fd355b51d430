// What the page knows: the server's state, and the conversations that are open. No DOM.

import * as api from "./api.js";
import { emit } from "./bus.js";
import { path, tip } from "./tree.js";

/** What GET /app/api/state said last, and the conversation on the screen. */
export const app = { state: null, conversation: null };

const open = new Map(); // id -> Conversation: those seen since the page was loaded, for answers that go on in the background

/** A conversation and its tree of messages. `id` null: not on the server yet. `system` null: the app's default; "": none. */
export class Conversation {
  constructor(json = {}) {
    this.id = json.id ?? null;
    this.answering = null; // AbortController while an answer streams
    this.take({ title: "", model: null, system: null, packs: [], sampling: {}, draft: "", leaf: null, pinned: false, folder: "", messages: [], ...json });
  }

  /** Takes over what the server says of the conversation. Without `messages` the messages stay. */
  take(json) {
    const { messages, ...rest } = json;
    Object.assign(this, rest);
    if (messages) this.messages = new Map(messages.map((message) => [message.id, message]));
    if (this.leaf === null && this.messages?.size) this.leaf = [...this.messages.keys()].at(-1);
  }

  /** The messages on the screen, from the first to the leaf. */
  get path() {
    return path(this.messages, this.leaf);
  }

  /** The model that answers: the conversation's own or the server's. */
  get modelName() {
    return this.model ?? app.state?.model ?? "";
  }

  get running() {
    return this.answering !== null;
  }
}

/** Fetches the server's state. */
export async function refreshState() {
  const first = app.state === null;
  app.state = await api.call("GET", "state");
  emit("state");
  const note = app.state.storage?.note;
  if (first && note) emit("note", note);
}

/** Returns a conversation as the server holds it; one whose answer is streaming, as the page holds it. */
export async function fetchConversation(id) {
  const known = open.get(id);
  if (known?.running) return known;
  const json = await api.call("GET", `conversations/${encodeURIComponent(id)}`);
  if (open.get(id)?.running) return open.get(id); // an answer began meanwhile
  const conversation = known ?? new Conversation(json);
  if (known) known.take(json);
  open.set(id, conversation);
  return conversation;
}

/** Puts a conversation on the screen; null: a new one. */
export function show(conversation) {
  app.conversation = conversation ?? new Conversation({ draft: localStorage.getItem("draft:new") ?? "" });
  emit("shown");
}

/** Returns the ids of the conversations whose answers are streaming to this page, as texts. */
export function streaming() {
  return new Set([...open.values()].filter((conversation) => conversation.running).map(({ id }) => String(id)));
}

/** Creates a conversation on the server, unless it is there already. */
export async function ensure(conversation) {
  if (conversation.id !== null) return;
  const { model, system, packs, sampling } = conversation;
  const chosen = { model: model ?? undefined, system: system ?? undefined, packs, sampling };
  const draft = conversation.draft;
  conversation.take(await api.call("POST", "conversations", chosen));
  conversation.draft = draft;
  open.set(conversation.id, conversation);
  localStorage.removeItem("draft:new");
  emit("created", conversation);
}

/** Takes back the creation of a conversation whose first message was refused: it is a new one again. */
export async function withdraw(conversation) {
  const { id } = conversation;
  if (id === null) return;
  try {
    await api.call("DELETE", `conversations/${encodeURIComponent(id)}`);
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    return; // the server is gone: the conversation stays as it is, and the message can be sent again in it
  }
  open.delete(id);
  conversation.id = null;
  emit("withdrawn", conversation);
}

/** Changes fields of a conversation, here at once and on the server if it is there. */
export async function patch(conversation, fields) {
  const before = Object.fromEntries(Object.keys(fields).map((name) => [name, conversation[name]]));
  Object.assign(conversation, fields);
  emit("changed", { conversation, fields });
  if (conversation.id === null) return;
  try {
    await api.call("PATCH", `conversations/${encodeURIComponent(conversation.id)}`, fields);
  } catch (error) {
    if (error.status && !("draft" in fields)) { // a draft is kept for the next try
      Object.assign(conversation, before);
      emit("changed", { conversation, fields: before });
    }
    throw error;
  }
  if (!("draft" in fields)) emit("saved", conversation.id);
}

/** Shows the branch that goes through a message, as far as it was continued. */
export async function switchTo(conversation, message) {
  const leaf = tip(conversation.messages, message).id;
  conversation.leaf = leaf;
  emit("path", conversation);
  await patch(conversation, { leaf });
}

/** Deletes conversations: one, or all of them. */
export async function remove(id = null) {
  try {
    await api.call("DELETE", id === null ? "conversations" : `conversations/${encodeURIComponent(id)}`);
  } catch (error) {
    emit("saved", id); // some may be deleted all the same: the list shows which are left
    throw error;
  }
  for (const conversation of id === null ? [...open.values()] : [open.get(id)]) conversation?.answering?.abort();
  if (id === null) open.clear();
  else open.delete(id);
  emit("saved", id);
}

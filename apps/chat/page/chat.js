// The conversation on the screen: its messages, their order, and scrolling.

import { answer } from "./answers.js";
import { on } from "./bus.js";
import { button, byId, h, perFrame } from "./dom.js";
import { edit } from "./editing.js";
import { emptyState } from "./empty.js";
import { MessageView } from "./messages.js";
import { app, switchTo } from "./model.js";
import { inspect } from "./popover.js";
import { openRace } from "./race.js";
import { copyCode } from "./safe.js";
import { guarded, say, toast } from "./tell.js";

const EVERY_MS = 28; // between two drawings: as smooth to the eye as every frame, for half the work
const NEAR = 120; // pixels from the end within which the page follows the answer

const views = new Map(); // id of a message -> MessageView, of the conversation on the screen
const changed = new Set(); // messages that changed since the last frame
let relaid = true; // whether messages came, went or moved
let following = true;
let jump = null;

const near = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) viewOf(entry.target)?.enrich();
  },
  { root: byId("scroller"), rootMargin: "500px 0px" }, // a margin around the window would not reach into what scrolls
);

function viewOf(element) {
  return [...views.values()].find((view) => view.element === element);
}

/** Starts to show conversations. */
export function startChat() {
  const scroller = byId("scroller");
  jump = button("Go to the end", { icon: "down", class: "jump", hidden: true, "data-testid": "jump-down", onclick: toEnd });
  byId("live").parentElement.append(jump);
  scroller.addEventListener("scroll", () => {
    following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    jump.hidden = following;
  }, { passive: true });
  byId("messages").addEventListener("click", (event) => {
    const pressed = event.target.closest(".copy-code");
    if (pressed) guarded(() => copyCode(pressed));
  });
  on("shown", shown);
  on("path", ifCurrent(() => relay()));
  on("message", ({ conversation, message }) => conversation === app.conversation && redraw(message));
  on("answering answered", ifCurrent(relay));
  on("answered", ifCurrent(announce));
}

function ifCurrent(run) {
  return (conversation) => conversation === app.conversation && run(conversation);
}

function shown() {
  for (const view of views.values()) near.unobserve(view.element);
  views.clear();
  byId("messages").replaceChildren();
  following = true;
  relay();
}

function relay() {
  relaid = true;
  frame();
}

function redraw(message) {
  changed.add(message.id);
  frame();
}

const frame = perFrame(() => {
  const conversation = app.conversation;
  const path = conversation.path;
  if (relaid) layOut(conversation, path);
  const last = path.at(-1)?.id;
  for (const { id } of path) if (relaid || changed.has(id)) views.get(id)?.update(conversation, id === last);
  relaid = false;
  changed.clear();
  if (following && path.length) toEnd();
}, EVERY_MS);

/** Brings the elements into the order of the path; those that stay keep their place. */
function layOut(conversation, path) {
  const holder = byId("messages");
  const wanted = new Set(path.map((message) => message.id));
  for (const [id, view] of views) if (!wanted.has(id) || view.message !== conversation.messages.get(id)) drop(id, view);
  if (!path.length) return holder.replaceChildren(emptyState());
  holder.querySelector(".empty")?.remove();
  let at = holder.firstElementChild;
  for (const message of path) {
    const view = views.get(message.id) ?? made(message);
    if (view.element !== at) holder.insertBefore(view.element, at);
    else at = at.nextElementSibling;
  }
}

function drop(id, view) {
  near.unobserve(view.element);
  view.element.remove();
  views.delete(id);
}

function made(message) {
  const view = new MessageView(message, (name, of, event) => guarded(() => ACTIONS[name](of, event)));
  views.set(message.id, view);
  near.observe(view.element);
  return view;
}

/** Scrolls to the end. */
export function toEnd() {
  const scroller = byId("scroller");
  scroller.scrollTop = scroller.scrollHeight;
}

/** Follows the answer from now on, wherever the reader was. */
export function follow() {
  following = true;
  jump.hidden = true;
  toEnd();
}

function announce(conversation) {
  const message = conversation.path.at(-1);
  if (message?.role === "assistant") say(`Answer: ${message.text.slice(0, 2000)}`);
}

const ACTIONS = {
  switch: (message) => switchTo(app.conversation, message),
  async copy(message) {
    await navigator.clipboard.writeText(message.text);
    toast("Copied");
  },
  regenerate(message) {
    follow();
    const why = repeats(app.conversation);
    if (why) toast(`${why}: with the same settings the answer is the same`);
    return answer(app.conversation, { parent: message.parent });
  },
  continue(message) {
    follow();
    return answer(app.conversation, { parent: message.id, continue: true });
  },
  edit: (message) => edit(views.get(message.id), (text) => {
    follow();
    return answer(app.conversation, { parent: message.parent, text });
  }),
  inspect: (message) => inspect(views.get(message.id).element),
  "race-this": (message) => openRace(message),
};

/** Returns why another answer has the same text if no setting was changed; "" if it is drawn. */
function repeats({ sampling }) {
  const { temp, seed } = { ...app.state?.defaults?.sampling, ...sampling };
  if (!temp) return "The temperature is 0";
  return seed === null || seed === undefined ? "" : `The seed is ${seed}`;
}

/** Does what the button of that name does, on the newest message that has it. */
export function act(name) {
  const buttons = byId("messages").querySelectorAll(`[data-testid="${name}"]:not([disabled])`);
  buttons[buttons.length - 1]?.click();
}

/** Returns the message that an element of the conversation belongs to. */
export function messageOf(element) {
  const id = element.closest("article.message")?.dataset.id;
  return [...views.values()].find((view) => String(view.message.id) === id)?.message ?? null;
}
